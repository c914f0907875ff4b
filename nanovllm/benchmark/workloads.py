"""The workloads of bench.py, by the names that users of other projects know.

A workload has one or more cases, which are sets of requests. Some have the names of llama-bench:

    pp512           prompt processing: 512 tokens, up to the first token of the answer
    tg128           text generation: 128 tokens of one request, from an empty context
    tg128 @ d8192   the same after 8,192 tokens of context (llama-bench -d 8192)
"""

import random
from argparse import Namespace
from typing import Any, NamedTuple

import torch


class Request(NamedTuple):
    prompt: list[int]
    num_tokens: int  # to generate


class Case(NamedTuple):
    """Options of bench.py, which a workload fixes.

    `shared_prefix` is in the prefix cache before the requests arrive.
    """

    title: str
    input_len: tuple[int, int]
    output_len: tuple[int, int]
    num_seqs: int = 1
    shared_prefix: int = 0
    temperature: float = 0.0
    seed: int = 0


class Workload(NamedTuple):
    models: tuple[str, ...]
    cases: tuple[Case, ...]
    reading: str  # which figure to look at
    repeat: int = 1
    variants: dict[str, dict[str, Any]] = {"": {}}  # noqa: RUF012  options of LLM


CACHED = {"enable_prefix_caching": True}
LLAMA_BENCH = (Case("pp512", (512, 512), (1, 1)), Case("tg128", (1, 1), (128, 128)))
THROUGHPUT = (
    "Look at output tok/s: the tokens generated per second, over a whole run with prefills."
)
WORKLOADS = {
    "quick": Workload(
        ("small",), (Case("", (32, 256), (32, 256), 32, temperature=0.6),), THROUGHPUT
    ),
    "nano-vllm": Workload(
        ("qwen3-0.6b",),
        (Case("", (100, 1024), (100, 1024), 256, temperature=0.6),),
        f"{THROUGHPUT}\nThe README of nano-vLLM has 1,434 for an RTX 4070 Laptop GPU.",
    ),
    "llama-bench": Workload(
        ("qwen3-0.6b",),
        LLAMA_BENCH,
        "Look at prompt tok/s of pp512 and output tok/s of tg128, which llama-bench calls t/s.",
        repeat=5,
    ),
    "llama-bench-depth": Workload(
        ("qwen3-0.6b", "gemma-3-270m"),
        tuple(
            Case(f"tg128 @ d{depth}", (1, 1), (128, 128), 1, depth) for depth in (1024, 8192, 32000)
        ),
        "Look at output tok/s, and how it falls with the context. A layer with a window reads no\n"
        "more than the window.",
        variants={"": CACHED},
    ),
    "moe": Workload(
        ("qwen3-moe", "qwen3-0.2b"),
        (*LLAMA_BENCH, Case("tg128, 16 requests", (1, 1), (128, 128), 16)),
        "Look at prompt tok/s of pp512 and output tok/s of tg128. A token uses as many weights of\n"
        "the mixture as of the dense model, but the tokens of a step use different experts.",
        repeat=3,
    ),
    "multi-turn": Workload(
        ("qwen3-0.6b",),
        tuple(Case(f"turn {n + 1}", (256, 256), (1, 1), 1, 384 * n) for n in range(5)),
        "Look at seconds: the time to first token. Each turn adds a message of 256 tokens to the\n"
        "conversation, and then an answer of 128. The prefix cache has the earlier turns.",
        variants={"prefix cache": CACHED, "no prefix cache": {"enable_prefix_caching": False}},
    ),
}


def choose_workload(args: Namespace) -> Workload:
    """Return the workload of `args`. Set `args.models`, and `args.cases` with all other options.

    Raises ValueError if an option was given that --workload fixes.
    """
    default = "nano-vllm" if torch.cuda.is_available() else "quick"
    workload = WORKLOADS[args.workload or default]
    args.models = [args.model] if args.model else workload.models
    if args.repeat is None:
        args.repeat = workload.repeat
    given = {name: value for name, value in vars(args).items() if value is not None}
    for name in (*Case._fields, "request_rate"):
        if args.workload and name in given:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"--workload {args.workload} fixes {option}: leave out one of them")
    args.cases = []
    for case in workload.cases:
        options = {**vars(args), **case._asdict(), **given}
        cached_prefix = case.shared_prefix if args.workload else 0
        args.cases.append(Namespace(**options, cached_prefix=cached_prefix))
    return workload


def make_requests(case: Namespace, vocab_size: int, run: int) -> list[Request]:
    """Make the requests of one run. Runs have the same lengths and different token ids."""
    highest = min(10000, vocab_size - 1)
    # Drawn in the order of nano-vLLM's bench.py, so that lengths equal those of its results.
    rng = random.Random(case.seed)
    prompt_lens: list[int] = []
    for _ in range(case.num_seqs):
        prompt_lens.append(rng.randint(*case.input_len))
        for _ in range(prompt_lens[-1]):
            rng.randint(0, highest)
    output_lens = [rng.randint(*case.output_len) for _ in prompt_lens]
    rng = random.Random(f"seed {case.seed}, run {run}")
    prefix = [rng.randint(0, highest) for _ in range(case.shared_prefix)]
    requests: list[Request] = []
    for prompt_len, output_len in zip(prompt_lens, output_lens):
        prompt = [rng.randint(0, highest) for _ in range(prompt_len)]
        requests.append(Request(prefix + prompt, output_len))
    return requests
