"""The command line of bench.py, and what it compares."""

import argparse
from collections.abc import Iterable

import torch

from nanovllm.benchmark.engines import ENGINES, Options
from nanovllm.benchmark.workloads import SHAPES, WORKLOADS
from nanovllm.checkpoints.checkpoint import Checkpoint
from nanovllm.config import Config
from nanovllm.engine.scheduler import POLICIES
from nanovllm.models.architectures import read_spec
from nanovllm.models.spec import ModelSpec
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_int, check_number
from nanovllm.utils.helpers import parse_value

# Budgets of policies that split prompts: one that keeps steps short, and the default of LLM.
TOKEN_BUDGETS = (128, Config.max_num_batched_tokens)


def positive_int(text: str) -> int:
    return check_int("number", int(text), 1, 10**6)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Measure the throughput of nanovllm and other engines on random prompts.",
    )
    add = parser.add_argument
    add(
        "--model",
        help="checkpoint directory, Hub id, or a shape with random weights: " + ", ".join(SHAPES),
    )
    add(
        "--workload",
        choices=WORKLOADS,
        default="nano-vllm" if torch.cuda.is_available() else "quick",
        help=(
            "options that measure what other projects publish, which other options replace"
            " (default: nano-vllm on a GPU, and on a CPU quick, which takes less than a minute)"
        ),
    )
    add("--num-seqs", type=positive_int, default=1, help="number of requests")
    add(
        "--input-len",
        type=positive_int,
        nargs=2,
        metavar=("LO", "HI"),
        help="prompt tokens per request, without the shared prefix",
    )
    add(
        "--output-len",
        type=positive_int,
        nargs=2,
        metavar=("LO", "HI"),
        help="output tokens per request",
    )
    add("--shared-prefix", type=int, default=0, help="tokens that all prompts begin with")
    add(
        "--cached-prefix",
        type=int,
        default=0,
        help="the same, but these are in the prefix cache before the requests arrive",
    )
    add("--repeat", type=positive_int, default=1, help="runs per engine (default: 1)")
    add("--temperature", type=float, default=0.6, help="0 is greedy (default: 0.6)")
    add(
        "--engine",
        nargs="+",
        default=["nanovllm"],
        choices=ENGINES,
        help="engines to compare, which divide the GPU's memory equally (default: nanovllm)",
    )
    add("--nano-vllm", default="", metavar="PATH", help="checkout, for --engine nano-vllm")
    add(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="option of nanovllm's LLM, can be repeated",
    )
    for name in ("dtype", "quantization"):
        setting = f"{name}={{}}".format
        shown = setting(name.upper())
        add(f"--{name}", type=setting, dest="set", action="append", help=f"short for --set {shown}")
    add(
        "--request-rate",
        type=float,
        nargs="+",
        metavar="R",
        help="requests per second that arrive; reports latencies for each scheduling policy",
    )
    add(
        "--token-budget",
        type=positive_int,
        nargs="+",
        metavar="N",
        help=(
            "with --request-rate: max_num_batched_tokens of mixed steps (default:"
            f" {TOKEN_BUDGETS[0]} and {TOKEN_BUDGETS[1]})"
        ),
    )
    add("--json", action="store_true", help="print one line of JSON, everything else on stderr")
    return parser


def list_variants(args: argparse.Namespace) -> dict[str, Options]:
    """Return the options of each engine that a command line compares, or of each policy.

    Raises ValueError for arguments that contradict each other.
    """
    variants: dict[str, Options] = {engine: {} for engine in args.engine}
    if args.request_rate:
        if args.engine != ["nanovllm"]:
            raise ValueError("--request-rate compares policies of nanovllm: leave out --engine")
        for rate in args.request_rate:
            check_number("--request-rate", rate, 0.0, open_low=True)
        variants = list_policies(args.token_budget or TOKEN_BUDGETS)
    elif args.token_budget:
        raise ValueError("--token-budget needs --request-rate")
    for low, high in (args.input_len, args.output_len):
        check_int("LO of --input-len or --output-len", low, 1, high)
    SamplingParams(temperature=args.temperature)  # raises an error for an invalid value
    given: Options = {}
    for assignment in args.set:
        name, _, value = assignment.partition("=")
        if value != "auto":
            given[name] = parse_value(value)
    longest = args.cached_prefix + args.shared_prefix + args.input_len[1] + args.output_len[1]
    for title, chosen in variants.items():
        chosen["max_model_len"] = longest
        for option in chosen.keys() & given.keys():
            raise ValueError(f"--set {option}: bench.py chooses this option, leave it out of --set")
        variants[title] = {
            "device": "cuda" if torch.cuda.is_available() else "cpu",
            "load_format": "dummy" if args.model in SHAPES else "auto",
            # The engines divide the GPU's memory equally.
            "gpu_memory_utilization": 0.9 / len(variants),
            **chosen,
            **given,
        }
    return variants


def list_policies(token_budgets: Iterable[int]) -> dict[str, Options]:
    """Return the options that choose each policy, by its name in the table."""
    policies: dict[str, Options] = {}
    for name, policy in POLICIES.items():
        # Either of two options can choose a policy.
        options = {"policy": name, "enable_chunked_prefill": policy.splits_prompts}
        if policy.splits_prompts:
            for budget in token_budgets:
                title = f"{policy.title}, budget {budget}"
                policies[title] = options | {"max_num_batched_tokens": budget}
        else:
            policies[policy.title] = options
    return policies


def open_model(model: str, variants: dict[str, Options]) -> tuple[Checkpoint, ModelSpec]:
    """Open a checkpoint, or a built-in shape.

    Sets the dtype of all variants, because other engines would choose another one.
    """
    options, *_ = variants.values()
    config = Config.from_options(SHAPES.get(model, model), **options)
    checkpoint = Checkpoint.open(config)
    for options in variants.values():
        options["dtype"] = str(checkpoint.dtype).removeprefix("torch.")
    spec = read_spec(
        checkpoint.hf_config, checkpoint.dtype, 1, config.quantization, config.max_model_len
    )
    return checkpoint, spec
