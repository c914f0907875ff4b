"""The command line of bench.py, and what it asks for."""

import argparse
import math
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from nanovllm import SamplingParams
from nanovllm.benchmark.engines import ENGINES, Setting
from nanovllm.benchmark.shapes import ON_CPU, ON_GPU, SHAPES
from nanovllm.checkpoints.checkpoint import choose_dtype, find_checkpoint, read_config
from nanovllm.config import DTYPES, QUANTIZATIONS, Config
from nanovllm.utils.checks import parse_value

# Of mixed steps under --request-rate: one that keeps steps short, and the default of LLM.
TOKEN_BUDGETS = (128, Config.max_num_batched_tokens)


def number(kind: type, low: float, high: float = 10**6) -> Callable[[str], Any]:
    """Make a parser of numbers of type `kind`. argparse shows its name in messages."""

    def number(text: str) -> Any:
        if not low <= kind(text) <= high:
            raise argparse.ArgumentTypeError(f"{text} is out of range: use {low} to {high}")
        return kind(text)

    return number


integer = partial(number, int)


def option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    return name, parse_value(value)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Measure the throughput of nanovllm, transformers and vLLM on random prompts.",
        epilog=(
            "Default on a GPU: nano-vLLM's workload (qwen3-0.6b, 256 requests, 100 to 1024 prompt"
            " tokens, 100 to 1024 output tokens). Default on a CPU: less than a minute (small, 32"
            " requests, 32 to 256 prompt tokens, 32 to 256 output tokens)."
        ),
    )
    add = parser.add_argument
    shapes = ", ".join(SHAPES)
    bounds: dict[str, Any] = {"type": integer(1), "nargs": 2, "metavar": ("LO", "HI")}
    add(
        "--model",
        help=f"checkpoint directory, Hub id, or a shape with random weights: {shapes}",
    )
    add("--num-seqs", type=integer(1), metavar="N", help="number of requests")
    add("--input-len", help="prompt tokens per request, without the shared prefix", **bounds)
    add("--output-len", help="output tokens per request", **bounds)
    add(
        "--shared-prefix",
        type=integer(0),
        default=0,
        metavar="N",
        help="tokens that all prompts begin with",
    )
    add("--repeat", type=integer(1), default=1, metavar="N", help="runs per engine (default: 1)")
    add("--temperature", type=float, default=0.6, help="0 is greedy (default: 0.6)")
    add(
        "--seed",
        type=integer(0, math.inf),
        default=0,
        help="seed of lengths, ids and samples (default: 0)",
    )
    add(
        "--dtype", default="auto", choices=("auto", *DTYPES), help="default: auto, the checkpoint's"
    )
    add(
        "--quantization",
        choices=QUANTIZATIONS,
        help="quantize nanovllm's weights while loading (default: keep what is stored)",
    )
    add(
        "--engine",
        nargs="+",
        default=["nanovllm"],
        choices=list(ENGINES),
        help="engines to compare, which divide the GPU's memory equally (default: nanovllm)",
    )
    add(
        "--batch-size",
        type=integer(1),
        metavar="N",
        help="batch size of transformers: lower it if memory runs out (default: all requests)",
    )
    add(
        "--set",
        type=option,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="option of nanovllm's LLM, can be repeated",
    )
    add(
        "--request-rate",
        type=number(float, 0.001),
        nargs="+",
        metavar="R",
        help="requests per second that arrive; reports latencies for each scheduling policy",
    )
    add(
        "--token-budget",
        type=integer(1),
        nargs="+",
        metavar="N",
        help="with --request-rate: max_num_batched_tokens of mixed steps (default: 128 8192)",
    )
    add("-o", "--output", metavar="FILE", help="with --request-rate: plot the latencies")
    add("--json", action="store_true", help="print one line of JSON, everything else on stderr")
    parser.set_defaults(**(ON_GPU if torch.cuda.is_available() else ON_CPU))
    return parser


def find_policies(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the scheduling policies that --request-rate compares, as options of nanovllm's LLM.

    Empty without --request-rate. Raises ValueError if other arguments contradict it.
    """
    if not args.request_rate:
        if args.token_budget or args.output:
            raise ValueError("--token-budget and --output need --request-rate")
        return {}
    if args.engine != ["nanovllm"]:
        raise ValueError("--request-rate compares policies of nanovllm: leave out --engine")
    if "enable_chunked_prefill" in dict(args.set):
        raise ValueError("--request-rate sets enable_chunked_prefill: leave it out of --set")
    policies: dict[str, dict[str, Any]] = {}
    for budget in args.token_budget or TOKEN_BUDGETS:
        policy = {"enable_chunked_prefill": True, "max_num_batched_tokens": budget}
        policies[f"mixed, budget {budget}"] = policy
    policies["prefill first"] = {"enable_chunked_prefill": False}
    return policies


def find_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of nanovllm's LLM.

    Raises ValueError or TypeError for invalid arguments.
    """
    for name, (low, high) in (("--input-len", args.input_len), ("--output-len", args.output_len)):
        if low > high:
            raise ValueError(f"{name} {low} {high}: LO exceeds HI")
    if args.batch_size and "transformers" not in args.engine:
        raise ValueError("--batch-size needs --engine transformers")
    if "vllm" in args.engine and find_spec("vllm") is None:
        raise ValueError("--engine vllm: the package vllm is missing, install it")
    policies = find_policies(args)
    longest_prompt = args.shared_prefix + args.input_len[1]
    longest = longest_prompt + args.output_len[1]
    options = {
        "dtype": args.dtype,
        "quantization": args.quantization,
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "seed": args.seed,
        "load_format": "dummy" if args.model in SHAPES else "auto",
        "max_model_len": longest,
        "gpu_memory_utilization": 0.9 / len(policies or set(args.engine)),
        **{name: value for name, value in args.set if value != "auto"},
    }
    SamplingParams(temperature=args.temperature)  # raises an error for an invalid value
    for policy in policies.values() or [{}]:
        config = Config.from_options(args.model, **{**options, **policy})
        _check_lengths(config, longest_prompt, longest)
    return options


def _check_lengths(config: Config, longest_prompt: int, longest: int) -> None:
    if (config.max_model_len or 0) < longest:
        raise ValueError(
            f"--set max_model_len={config.max_model_len}: the longest request has {longest}"
            " tokens, raise it"
        )
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < longest_prompt:
        raise ValueError(
            f"the longest prompt has {longest_prompt} tokens, and prefill first does not split it:"
            f" add --set max_num_batched_tokens={longest_prompt}"
        )


def make_setting(args: argparse.Namespace, scratch: str) -> Setting:
    """Find the checkpoint, or write the config of a built-in shape to `scratch`.

    Raises ValueError, TypeError or OSError for invalid arguments.
    """
    options = find_options(args)
    model = scratch
    if args.model in SHAPES:
        SHAPES[args.model].save_pretrained(scratch)
    else:
        model = str(find_checkpoint(args.model))
    hf_config = read_config(Path(model))
    config = Config.from_options(model, **options)
    dtype = choose_dtype(config, hf_config, Path(model))
    options["dtype"] = str(dtype).removeprefix("torch.")  # other engines would choose otherwise
    batch_size = args.batch_size or args.num_seqs
    return Setting(model, hf_config, options, args.temperature, batch_size)
