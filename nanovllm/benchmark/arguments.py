"""The command line of bench.py. setting.py checks what it asks for."""

import argparse
from functools import partial
from typing import Any

from nanovllm.benchmark.engines import ENGINES
from nanovllm.benchmark.setting import TOKEN_BUDGETS
from nanovllm.benchmark.shapes import SHAPES
from nanovllm.benchmark.workloads import WORKLOADS
from nanovllm.utils.helpers import parse_value


def option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    return make_option(name, value)


def make_option(name: str, value: str) -> tuple[str, Any]:
    return name, parse_value(value)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Measure the throughput of nanovllm and other engines on random prompts.",
        epilog=(
            "Default on a GPU: --workload nano-vllm (qwen3-0.6b, 256 requests, 100 to 1024 prompt"
            " tokens, 100 to 1024 output tokens). Default on a CPU: quick, which takes less than a"
            " minute (small, 32 requests, 32 to 256 prompt tokens, 32 to 256 output tokens)."
        ),
    )
    add = parser.add_argument
    shapes = ", ".join(SHAPES)
    budgets = " ".join(map(str, TOKEN_BUDGETS))
    bounds: dict[str, Any] = {"type": int, "nargs": 2, "metavar": ("LO", "HI")}
    add(
        "--model",
        help=f"checkpoint directory, Hub id, or a shape with random weights: {shapes}",
    )
    add(
        "--workload",
        choices=list(WORKLOADS),
        help="a workload that other projects publish, which fixes lengths, temperature and seed",
    )
    add("--num-seqs", type=int, help="number of requests")
    add("--input-len", help="prompt tokens per request, without the shared prefix", **bounds)
    add("--output-len", help="output tokens per request", **bounds)
    add(
        "--shared-prefix",
        type=int,
        help="tokens that all prompts begin with",
    )
    add("--repeat", type=int, help="runs per engine (default: the workload's)")
    add("--temperature", type=float, help="0 is greedy (default: 0.6)")
    add("--seed", type=int, help="seed of lengths, ids and samples (default: 0)")
    add(
        "--engine",
        nargs="+",
        default=["nanovllm"],
        choices=list(ENGINES),
        help="engines to compare, which divide the GPU's memory equally (default: nanovllm)",
    )
    add("--nano-vllm", default="", metavar="PATH", help="checkout, for --engine nano-vllm")
    add(
        "--set",
        type=option,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="option of nanovllm's LLM, can be repeated",
    )
    for name in ("dtype", "quantization"):
        add(
            f"--{name}",
            dest="set",
            type=partial(make_option, name),
            action="append",
            metavar="VALUE",
            help=f"the same as --set {name}=VALUE",
        )
    add(
        "--request-rate",
        type=float,
        nargs="+",
        metavar="R",
        help="requests per second that arrive; reports latencies for each scheduling policy",
    )
    add(
        "--token-budget",
        type=int,
        nargs="+",
        metavar="N",
        help=f"with --request-rate: max_num_batched_tokens of mixed steps (default: {budgets})",
    )
    add("--json", action="store_true", help="print one line of JSON, everything else on stderr")
    return parser
