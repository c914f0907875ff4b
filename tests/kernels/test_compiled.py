"""What the Triton kernels become on GPUs that need not be here: compiled for each, and read (compiled.py)."""

import json
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

pytest.importorskip("triton", reason="triton is not installed")
SCRIPT = Path(__file__).with_name("compiled.py")
ARCHS = [80, 90, 100]  # A100, H100, B200
LARGEST_BLOCK = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # bytes of shared memory
MATRIX = {80: "mma", 90: "wgmma", 100: "tcgen05"}


def start(*arguments: object) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, SCRIPT, *map(str, arguments)], stdout=PIPE, stderr=PIPE, text=True
    )


def finish(process: subprocess.Popen) -> list[dict]:
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    return [json.loads(line) for line in output.splitlines()]


@pytest.fixture(scope="module")
def kernels() -> dict[int, list[dict]]:
    """By compute capability."""
    processes = {arch: start(arch) for arch in ARCHS}  # side by side
    return {arch: finish(process) for arch, process in processes.items()}


def check(arch: int, kernels: list[dict]) -> None:
    names = {kernel["kernel"] for kernel in kernels}
    assert names >= {
        "attend_kernel",
        "combine_splits_kernel",
        "_add_rms_norm_kernel",
        "_rotate_and_store_kernel",
        "_filter_kernel",
    }
    assert not [
        kernel
        for kernel in kernels
        if kernel["spilled"] > (16 if kernel["dtype"] == "float32" else 0)
    ]
    assert not [kernel for kernel in kernels if kernel["shared"] > LARGEST_BLOCK[arch]]
    # Its stores are as wide as its loads: rows that the compiler cannot see through make it go through shared memory.
    assert not [
        kernel
        for kernel in kernels
        if kernel["kernel"] == "_rotate_and_store_kernel" and kernel["shared"]
    ]
    assert all(kernel["fuses"] for kernel in kernels)
    prefill = [
        kernel
        for kernel in kernels
        if kernel["is_decode"] is False and kernel["dtype"] != "float32"
    ]
    assert prefill and all(kernel["matrix"] == [MATRIX[arch]] for kernel in prefill)


@pytest.mark.parametrize("arch", ARCHS)
def test_what_models_launch(kernels: dict[int, list[dict]], arch: int) -> None:
    check(arch, kernels[arch])


@pytest.mark.sweep
@pytest.mark.parametrize("arch", ARCHS)
def test_what_all_models_launch(arch: int) -> None:
    check(arch, finish(start(arch, "--all")))


def test_attention_loops(kernels: dict[int, list[dict]]) -> None:
    """The loops without a mask, in which most of the time is spent, in instructions of a warp; 526 and 500 with one loop."""
    found = {}
    for kernel in kernels[90]:
        if kernel["kernel"] == "attend_kernel" and (kernel["dtype"], kernel["head_dim"]) == (
            "bfloat16",
            128,
        ):
            found[kernel["is_decode"]] = kernel["loops"][
                -2
            ]  # of the two over pieces the shorter one
    assert found[False] <= 400 and found[True] <= 380


def test_what_is_known_is_launched_directly() -> None:
    """The same launches, argument for argument, without Triton's search for the compiled kernel; but for the sampler's two, which
    a step launches once."""
    first, second = finish(start(90, "--twice"))
    assert first["launched"] == second["launched"] and len(first["launched"]) > 12
    assert set(first["searched"]) >= {
        "attend_kernel",
        "combine_splits_kernel",
        "_rotate_and_store_kernel",
    }
    assert set(second["searched"]) == {"_sample_kernel", "_filter_kernel"}


def test_nothing_is_compiled_while_serving() -> None:
    """With graphs and without: the trial steps of an engine's start have met every kernel in every form."""
    compiled = finish(start(90, "--serving"))
    assert {event["kernel"] for event in compiled} >= {
        "attend_kernel",
        "combine_splits_kernel",
        "_sample_kernel",
    }
    assert not [event for event in compiled if event["part"] != "start"]
