"""Where the time of a step goes, in milliseconds, for the shape of Qwen3-0.6B.

    wall     the whole step, as a caller sees it
    wait     of it, how long the host waits for the tokens
    host     of it, the rest: schedule, batch, launches, commit
    floor    the bytes or FLOPs of the step, divided by measured peak rates
    busy     kernels on the GPU

Decodes of 1, 32 and 256 sequences of 1,000 tokens; 252 of them beside a prompt that arrives;
prefills. Steps with prompts are also run as if only decodes had CUDA graphs ("eager"). Without a
GPU, everything is tiny. All steps are timed before the first one is profiled, because torch's
profiler slows each launch of its process, also after its end. Each measurement is a line to read
and a line of JSON, which names the card and has the longest kernels.
"""

import json
import random
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from internals import (
    DEVICE,
    ON_GPU,
    SHAPES,
    Sampled,
    count_attention,
    describe_hardware,
    find_sizes,
    measure_peak_rates,
    only_decodes_replay_graphs,
    read_config,
    read_spec,
)
from torch.profiler import ProfilerActivity, profile

from nanovllm import LLM, SamplingParams


@dataclass(frozen=True)
class Workload:
    model: str
    num_seqs: list[int]
    context_len: int
    joining_lens: list[int]  # of prompts beside decodes
    prompt_lens: list[int]  # of prefills
    num_decodes: int


WORKLOAD = Workload("small", [1, 6], 40, [8], [16, 60], num_decodes=8)
if ON_GPU:
    prompt_lens = [16, 100, 500, 1024, 2000]
    WORKLOAD = Workload("qwen3-0.6b", [1, 32, 256], 1000, [64, 500, 1500], prompt_lens, 60)
NUM_MIXED = 12
NUM_PREFILLS = 10
NUM_PROFILED_STEPS = 8
NUM_ABORTED = 4  # decodes that make room for prompts
HARDWARE = describe_hardware(DEVICE)
SIZES = find_sizes(read_spec(read_config(Path(SHAPES[WORKLOAD.model])), torch.bfloat16, 1))
PEAK = measure_peak_rates(DEVICE, torch.bfloat16)
random_ids = random.Random(0)
Step = Callable[[], object]
# Receives the name of a kind of step, what runs one, how many to run, and the floor if it is known.
Measure = Callable[[str, Step, int, float | None], None]


def make_engine() -> LLM:
    return LLM(
        SHAPES[WORKLOAD.model],
        load_format="dummy",
        device=DEVICE.type,
        max_num_seqs=max(WORKLOAD.num_seqs),
        max_model_len=2048,
    )


def add(llm: LLM, prompt_len: int, max_tokens: int) -> int:
    prompt = [random_ids.randrange(10000) for _ in range(prompt_len)]
    return llm.add_request(prompt, SamplingParams(ignore_eos=True, max_tokens=max_tokens))


def add_and_step(llm: LLM, prompt_len: int) -> None:
    """Run a step that computes a whole prompt, which ends with it."""
    add(llm, prompt_len, 1)
    llm.step()


def run_prefills(llm: LLM) -> None:
    """Run steps until one has no tokens of prompts."""
    num_tokens = -1
    while llm.stats["num_prefill_tokens"] > num_tokens:
        num_tokens = llm.stats["num_prefill_tokens"]
        llm.step()


def time_steps(title: str, step: Step, number: int, floor_ms: float | None) -> None:
    """Print the median milliseconds of a step, and of the host's wait in it."""
    read = Sampled.read
    waits = []
    walls = []

    def wait(sampled):
        start = time.perf_counter()
        found = read(sampled)
        waits[-1] += time.perf_counter() - start
        return found

    with patch.object(Sampled, "read", wait):
        for _ in range(number):
            waits.append(0.0)
            start = time.perf_counter()
            step()
            walls.append(time.perf_counter() - start)
    wall = 1e3 * statistics.median(walls)
    wait = 1e3 * statistics.median(waits)
    figures = {"wall": wall, "wait": wait, "host": wall - wait}
    share = ""
    if floor_ms is not None:
        figures["floor"] = floor_ms
        share = f", {floor_ms / wall:.0%} of the roofline"
    shown = ", ".join([f"{name} {ms:.2f}" for name, ms in figures.items()])
    print(f"{title}: {shown} ms{share}", flush=True)
    print(json.dumps({"measured": title, "hardware": HARDWARE, **figures}), flush=True)


def profile_steps(title: str, step: Step, number: int, floor_ms: float | None) -> None:
    """Print the milliseconds of kernels in a step. They are 0 on a CPU.

    The longest kernels have their name, launches and milliseconds in the line of JSON.
    """
    number = min(number, NUM_PROFILED_STEPS)
    activity = ProfilerActivity.CUDA if ON_GPU else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        for _ in range(number):
            step()
        if ON_GPU:
            torch.cuda.synchronize()
    kernels = []
    for event in profiler.key_averages():
        ms = event.self_device_time_total / number / 1e3
        kernels.append((event.key[:70], event.count // number, ms))
    kernels.sort(key=lambda kernel: -kernel[2])
    busy = sum(kernel[2] for kernel in kernels)
    print(f"{title}: busy {busy:.2f} ms", flush=True)
    described = {"measured": title, "hardware": HARDWARE, "busy": busy, "kernels": kernels[:12]}
    print(json.dumps(described), flush=True)


def compare(
    llm: LLM, title: str, step: Step, number: int, floor_ms: float | None, measure: Measure
) -> None:
    """Measure a step with a prompt, with its CUDA graph and without."""
    ways = {"": nullcontext(), ", eager": only_decodes_replay_graphs(llm)}
    for name, way in ways.items():
        with way:
            step()
            step()
            measure(title + name, step, number, floor_ms)


def run_decodes(llm: LLM, num_seqs: int, measure: Measure) -> None:
    number = WORKLOAD.num_decodes
    max_tokens = 2 * number + 100
    ids = [add(llm, WORKLOAD.context_len, max_tokens) for _ in range(num_seqs)]
    run_prefills(llm)
    for _ in range(3):
        llm.step()
    context_len = WORKLOAD.context_len + number // 2
    _, elements = count_attention(SIZES, [(context_len - 1, context_len)] * num_seqs)
    numbers = SIZES.dense + SIZES.head + elements
    floor_ms = 1e3 * 2 * numbers / PEAK.bytes_per_second  # of 2 bytes each
    measure(f"decode {num_seqs} x {WORKLOAD.context_len}", llm.step, number, floor_ms)
    if num_seqs == max(WORKLOAD.num_seqs):
        for _ in range(NUM_ABORTED):
            llm.abort(ids.pop())
        for prompt_len in WORKLOAD.joining_lens:
            step = partial(add_and_step, llm, prompt_len)
            title = f"decode {len(ids)} + a prompt of {prompt_len}"
            compare(llm, title, step, NUM_MIXED, None, measure)
    for request_id in ids:
        llm.abort(request_id)
    while not llm.is_finished():
        llm.step()


def run_prefill(llm: LLM, prompt_len: int, measure: Measure) -> None:
    step = partial(add_and_step, llm, prompt_len)
    flops, _ = count_attention(SIZES, [(0, prompt_len)])
    flops += 2 * (SIZES.dense * prompt_len + SIZES.head)
    floor_ms = 1e3 * flops / PEAK.flops_per_second
    compare(llm, f"prefill 1 x {prompt_len}", step, NUM_PREFILLS, floor_ms, measure)


def main() -> None:
    print(f"ceilings: {PEAK}")
    measures: list[Measure] = [time_steps, profile_steps]
    with make_engine() as llm:
        for measure in measures:
            for num_seqs in WORKLOAD.num_seqs:
                run_decodes(llm, num_seqs, measure)
            for prompt_len in WORKLOAD.prompt_lens:
                run_prefill(llm, prompt_len, measure)


if __name__ == "__main__":
    main()
