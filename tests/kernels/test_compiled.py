"""The Triton kernels compile well for GPUs that need not be here, see compiled.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")
MATRIX = {80: "mma", 90: "wgmma", 100: "tcgen05"}  # of A100, H100, B200
SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # bytes


def start(*arguments):
    script = Path(__file__).with_name("compiled.py")
    command = [sys.executable, script, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process):
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    return [json.loads(line) for line in output.splitlines()]


@pytest.fixture(scope="module")
def compiled():
    """What compiled.py prints for each compute capability."""
    processes = {arch: start(arch) for arch in MATRIX}  # side by side
    return {arch: finish(process) for arch, process in processes.items()}


def check(arch, events):
    kernels = [event for event in events if "kernel" in event]
    names = {"attend_kernel", "combine_splits_kernel", "add_rms_norm_kernel"}
    names |= {"rotate_and_store_kernel", "_filter_kernel"}
    assert {kernel["kernel"] for kernel in kernels} >= names
    num_prefills = 0
    for kernel in kernels:
        is_16_bit = kernel["dtype"] != "float32"
        assert kernel["spilled"] <= (0 if is_16_bit else 16), kernel
        assert kernel["shared"] <= SHARED_MEMORY[arch], kernel
        assert kernel["fuses"], kernel
        if kernel["kernel"] == "rotate_and_store_kernel":
            # Stores are as wide as loads, so nothing goes through shared memory.
            assert not kernel["shared"], kernel
        if kernel["is_decode"] is False and is_16_bit:
            assert kernel["matrix"] == [MATRIX[arch]], kernel
            num_prefills += 1
    assert num_prefills


@pytest.mark.parametrize("arch", MATRIX)
def test_kernels_fit_a_gpu_and_use_its_matrix_instructions(compiled, arch):
    check(arch, compiled[arch])


@pytest.mark.sweep
@pytest.mark.parametrize("arch", MATRIX)
def test_kernels_of_all_models_fit(arch):
    check(arch, finish(start(arch, "--all")))


def test_the_loops_without_a_mask_stay_short(compiled):
    """In instructions. A single loop, with a mask, has about 500."""
    for event in compiled[90]:
        is_attention = event.get("kernel") == "attend_kernel"
        if is_attention and (event["dtype"], event["head_dim"]) == ("bfloat16", 128):
            without_mask = event["loops"][-2]  # the shorter of the two over the context
            assert without_mask <= (380 if event["is_decode"] else 400)


def test_a_known_kernel_is_launched_without_tritons_dispatch(compiled):
    """The second step has the same launches. Only the sampler, once a step, uses the dispatch."""
    first, second = [event for event in compiled[90] if "launched" in event]
    assert len(first["launched"]) > 12
    assert first["launched"] == second["launched"]
    kernels = {"attend_kernel", "combine_splits_kernel", "rotate_and_store_kernel"}
    assert set(first["dispatched"]) >= kernels
    assert set(second["dispatched"]) == {"_sample_kernel", "_filter_kernel"}


def test_nothing_is_compiled_while_serving():
    """With CUDA graphs and without. The warm-up runs at start use every variant of a kernel."""
    compiled = finish(start(90, "--serving"))
    kernels = {"attend_kernel", "combine_splits_kernel", "_sample_kernel"}
    assert {event["kernel"] for event in compiled} >= kernels
    assert not [event for event in compiled if event["part"] != "start"]
