"""The Triton kernels compile well for GPUs that need not be here. compiled.py compiles them."""

import json
from pathlib import Path

import pytest
from project_helpers import start

pytest.importorskip("triton", reason="triton is not installed")
# The matrix instructions of A100, L4 (or RTX 4090), H100 and B200. Triton has none for T4.
MATRIX = {75: None, 80: "mma.sync", 89: "mma.sync", 90: "wgmma", 100: "tcgen05.mma"}


def run(*arguments):
    script = Path(__file__).with_name("compiled.py")
    done = start(script, *map(str, arguments))
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def events():
    return run(90)


def check(arch, events):
    kernels = [event for event in events if event.get("arch") == arch]
    names = "attend combine_splits add_rms_norm rotate_and_store filter multiply lay_out"
    names += " prepare_chunks advance_states" + " multiply_experts" * (arch != 75)
    names = {f"{name}_kernel" for name in names.split()}
    assert {kernel["kernel"] for kernel in kernels} >= names
    prefill_windows = set()
    for kernel in kernels:
        is_16_bit = kernel["dtype"] != "torch.float32"
        # On sm_89, Triton 3.9 spills eight registers of the gated delta rule, and on sm_75 four of
        # attention with a soft-cap.
        assert kernel["spilled"] <= (0 if is_16_bit and arch not in (75, 89) else 32), kernel
        assert kernel["fuses"], kernel
        if kernel["kernel"] == "rotate_and_store_kernel" and not kernel["is_partial"]:
            # Stores are as wide as loads, so nothing goes through shared memory. With partial RoPE,
            # those of cos and sin are wider than those of heads.
            assert not kernel["shared"], kernel
        has_matrix = is_16_bit and arch != 75
        if kernel["kernel"].startswith("multiply") and has_matrix:
            assert kernel["matrix"] == ([MATRIX[arch]] if kernel["rows"] >= 16 else []), kernel
        if kernel["kernel"] == "attend_kernel" and kernel["is_decode"] is False and is_16_bit:
            assert kernel["matrix"] == [MATRIX[arch]] * has_matrix, kernel
            prefill_windows.add(kernel["window"])
    assert prefill_windows == {None, 100}


def test_kernels_fit_a_gpu_and_use_its_matrix_instructions(events):
    check(90, events)


@pytest.mark.sweep
@pytest.mark.parametrize("arch", [75, 80, 89, 100])
def test_kernels_fit_other_gpus(arch):
    check(arch, run(arch))


def test_nothing_is_compiled_while_serving():
    """With CUDA graphs and without. The warm-up runs at start use every variant of a kernel."""
    compiled = run(90, "--serving")
    kernels = {"attend_kernel", "combine_splits_kernel", "sample_kernel"}
    assert {event["kernel"] for event in compiled} >= kernels
    assert not [event for event in compiled if event["part"] != "start"]
