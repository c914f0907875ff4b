"""Where the time of a step goes, in milliseconds, for the shape of Qwen3-0.6B.

    wall     the whole step, as a caller sees it
    wait     of it, how long the host waits for the tokens
    host     of it, the rest: schedule, batch, launches, commit
    busy     kernels on the GPU, in other steps, because torch's profiler slows the host
    floor    the bytes or FLOPs of the step, divided by measured peak rates

Decodes of 1, 32 and 256 sequences of 1,000 tokens; mixed steps, in which a short prompt arrives and
all kernels are launched one by one; prefills. Without a GPU, everything is tiny. Each measurement
is a line to read and a line of JSON, which names the card and has the longest kernels.
"""

import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
from internals import (
    DEVICE,
    ON_GPU,
    SHAPES,
    count_decode,
    count_prefill,
    describe_hardware,
    find_sizes,
    measure_peak_rates,
    read_spec,
)
from torch.profiler import ProfilerActivity, profile

from nanovllm import LLM, SamplingParams


@dataclass(frozen=True)
class Workload:
    model: str
    num_seqs: list[int]
    context_len: int
    short_prompt_len: int  # of mixed steps
    prompt_lens: list[int]  # of prefills
    num_steps: int


WORKLOAD = Workload("small", [1, 2], 40, 8, [64], num_steps=8)
if ON_GPU:
    WORKLOAD = Workload("qwen3-0.6b", [1, 32, 256], 1000, 64, [1024, 8000], num_steps=60)
NUM_PROFILED_STEPS = 8
HARDWARE = describe_hardware(DEVICE)
SIZES = find_sizes(read_spec(SHAPES[WORKLOAD.model], torch.bfloat16, 1))
PEAK = measure_peak_rates(DEVICE, torch.bfloat16)
random_ids = random.Random(0)


def make_engine(**options) -> LLM:
    with TemporaryDirectory() as folder:
        SHAPES[WORKLOAD.model].save_pretrained(folder)
        return LLM(folder, load_format="dummy", device=DEVICE.type, **options)


def add(llm: LLM, prompt_len: int, max_tokens: int) -> int:
    prompt = [random_ids.randrange(10000) for _ in range(prompt_len)]
    return llm.add_request(prompt, SamplingParams(ignore_eos=True, max_tokens=max_tokens))


def run_prefills(llm: LLM) -> None:
    """Run steps until one has no tokens of prompts."""
    num_tokens = -1
    while llm.stats["num_prefill_tokens"] > num_tokens:
        num_tokens = llm.stats["num_prefill_tokens"]
        llm.step()


def time_steps(step: Callable[[], object], number: int) -> tuple[float, float]:
    """Return the median milliseconds of a step, and of the host's wait in it."""
    tolist = torch.Tensor.tolist
    waits = []
    walls = []

    def wait(tensor):
        # Of tensors on the device, only token ids are read.
        start = time.perf_counter()
        values = tolist(tensor)
        if tensor.device.type == DEVICE.type:
            waits[-1] += time.perf_counter() - start
        return values

    with patch.object(torch.Tensor, "tolist", wait):
        for _ in range(number):
            waits.append(0.0)
            start = time.perf_counter()
            step()
            walls.append(time.perf_counter() - start)
    return 1e3 * statistics.median(walls), 1e3 * statistics.median(waits)


def profile_steps(step: Callable[[], object], number: int) -> tuple[float, list]:
    """Return the milliseconds of kernels in a step, and the name, launches and ms of the longest.

    All are 0 on a CPU.
    """
    with profile(
        activities=[ProfilerActivity.CUDA if ON_GPU else ProfilerActivity.CPU]
    ) as profiler:
        for _ in range(number):
            step()
        if ON_GPU:
            torch.cuda.synchronize()
    kernels = []
    for event in profiler.key_averages():
        ms = event.self_device_time_total / number / 1e3
        kernels.append((event.key[:70], event.count // number, ms))
    kernels.sort(key=lambda kernel: -kernel[2])
    return sum(kernel[2] for kernel in kernels), kernels[:12]


def measure(title: str, step: Callable[[], object], number: int, floor_ms: float = 0.0) -> None:
    wall, wait = time_steps(step, number)
    busy, kernels = profile_steps(step, min(number, NUM_PROFILED_STEPS))
    figures = {"wall": wall, "wait": wait, "host": wall - wait, "busy": busy, "floor": floor_ms}
    shown = ", ".join([f"{name} {ms:.2f}" for name, ms in figures.items()])
    share = f", {floor_ms / wall:.0%} of the roofline" if floor_ms else ""
    print(f"{title}: {shown} ms{share}", flush=True)
    described = {"measured": title, "hardware": HARDWARE, **figures, "kernels": kernels}
    print(json.dumps(described), flush=True)


def measure_decodes(llm: LLM, num_seqs: int) -> None:
    number = WORKLOAD.num_steps
    max_tokens = 2 * number + 100
    ids = [add(llm, WORKLOAD.context_len, max_tokens) for _ in range(num_seqs)]
    run_prefills(llm)
    for _ in range(3):
        llm.step()
    context_len = WORKLOAD.context_len + number // 2
    numbers = SIZES.matrices + SIZES.head + count_decode(SIZES, [context_len] * num_seqs).elements
    floor_ms = 1e3 * 2 * numbers / PEAK.bytes_per_second  # of 2 bytes each
    measure(f"decode {num_seqs} x {WORKLOAD.context_len}", llm.step, number, floor_ms)
    if num_seqs == max(WORKLOAD.num_seqs):
        llm.abort(ids.pop())  # makes room for the prompts

        def step_with_prompt() -> None:
            add(llm, WORKLOAD.short_prompt_len, 1)
            llm.step()

        step_with_prompt()
        title = f"decode {num_seqs - 1} + a prompt of {WORKLOAD.short_prompt_len}"
        measure(title, step_with_prompt, 12)
    for request_id in ids:
        llm.abort(request_id)
    while not llm.is_finished():
        llm.step()


def measure_prefill(llm: LLM, prompt_len: int) -> None:
    def run() -> None:
        add(llm, prompt_len, 1)
        while not llm.is_finished():
            llm.step()

    run()
    flops = 2 * (SIZES.matrices * prompt_len + SIZES.head) + count_prefill(SIZES, prompt_len)
    floor_ms = 1e3 * flops / PEAK.flops_per_second
    measure(f"prefill 1 x {prompt_len}", run, 5, floor_ms)


def main() -> None:
    print(f"ceilings: {PEAK}")
    with make_engine(max_num_seqs=max(WORKLOAD.num_seqs), max_model_len=2048) as llm:
        for num_seqs in WORKLOAD.num_seqs:
            measure_decodes(llm, num_seqs)
    longest = max(WORKLOAD.prompt_lens)
    with make_engine(
        max_num_seqs=8,
        max_model_len=longest + 64,
        max_num_batched_tokens=max(8192, longest),
        enforce_eager=True,
    ) as llm:
        for prompt_len in WORKLOAD.prompt_lens:
            measure_prefill(llm, prompt_len)


if __name__ == "__main__":
    main()
