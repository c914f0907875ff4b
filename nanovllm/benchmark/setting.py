"""What the arguments of bench.py ask for, checked before anything is loaded."""

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from nanovllm.benchmark.shapes import SHAPES
from nanovllm.checkpoints.checkpoint import choose_dtype, find_checkpoint, read_config
from nanovllm.config import Config
from nanovllm.engine.scheduler import POLICIES
from nanovllm.models.architectures import read_spec
from nanovllm.models.spec import ModelSpec
from nanovllm.sampling_params import SamplingParams

# Budgets of policies that split prompts: one that keeps steps short, and the default of LLM.
TOKEN_BUDGETS = (128, Config.max_num_batched_tokens)


@dataclass(frozen=True)
class Setting:
    """What the engines are made from."""

    model: str  # a checkpoint directory
    hf_config: PretrainedConfig
    spec: ModelSpec
    options: dict[str, Any]  # options of nanovllm's LLM
    policies: dict[str, dict[str, Any]]  # more options for each policy, with --request-rate
    temperature: float
    batch_size: int  # for transformers

    @property
    def device(self) -> torch.device:
        return torch.device(self.options["device"])


def make_setting(args: argparse.Namespace, scratch: str) -> Setting:
    """Find the checkpoint, or write the config of a built-in shape to `scratch`.

    Raises ValueError, TypeError or OSError for invalid arguments.
    """
    check_arguments(args)
    longest_prompt = args.shared_prefix + args.input_len[1]
    longest = longest_prompt + args.output_len[1]
    policies = list_policies(args.token_budget or TOKEN_BUDGETS) if args.request_rate else {}
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
    for policy in policies.values() or [{}]:
        check_lengths(
            Config.from_options(args.model, **{**options, **policy}), longest_prompt, longest
        )
    model = scratch
    if args.model in SHAPES:
        SHAPES[args.model].save_pretrained(scratch)
    else:
        model = str(find_checkpoint(args.model))
    hf_config = read_config(Path(model))
    dtype = choose_dtype(Config.from_options(model, **options), hf_config, Path(model))
    options["dtype"] = str(dtype).removeprefix("torch.")  # other engines would choose otherwise
    return Setting(
        model=model,
        hf_config=hf_config,
        spec=read_spec(hf_config, dtype, 1, options["quantization"], options["max_model_len"]),
        options=options,
        policies=policies,
        temperature=args.temperature,
        batch_size=args.batch_size or args.num_seqs,
    )


def list_policies(token_budgets: Iterable[int]) -> dict[str, dict[str, Any]]:
    """Return for each policy its name and the options of LLM that choose it."""
    policies: dict[str, dict[str, Any]] = {}
    for name, policy in POLICIES.items():
        if not policy.splits_prompts:
            policies[policy.title] = {"policy": name}
            continue
        for budget in token_budgets:
            options = {"policy": name, "max_num_batched_tokens": budget}
            policies[f"{policy.title}, budget {budget}"] = options
    return policies


def check_arguments(args: argparse.Namespace) -> None:
    """Raise ValueError for arguments that contradict each other."""
    SamplingParams(temperature=args.temperature)  # raises an error for an invalid value
    for name, (low, high) in (("--input-len", args.input_len), ("--output-len", args.output_len)):
        if low > high:
            raise ValueError(f"{name} {low} {high}: LO exceeds HI")
    if args.batch_size and "transformers" not in args.engine:
        raise ValueError("--batch-size needs --engine transformers")
    if "vllm" in args.engine and find_spec("vllm") is None:
        raise ValueError("--engine vllm: the package vllm is missing, install it")
    if not args.request_rate:
        if args.token_budget or args.output:
            raise ValueError("--token-budget and --output need --request-rate")
        return
    if args.engine != ["nanovllm"]:
        raise ValueError("--request-rate compares policies of nanovllm: leave out --engine")
    for name in ("policy", "enable_chunked_prefill"):
        if name in dict(args.set):
            raise ValueError(f"--request-rate sets {name}: leave it out of --set")


def check_lengths(config: Config, longest_prompt: int, longest: int) -> None:
    """Raise ValueError if the longest request does not fit."""
    if (config.max_model_len or 0) < longest:
        raise ValueError(
            f"--set max_model_len={config.max_model_len}: the longest request has {longest}"
            " tokens, raise it"
        )
    policy = POLICIES[config.policy_name]
    if not policy.splits_prompts and config.max_num_batched_tokens < longest_prompt:
        raise ValueError(
            f"the longest prompt has {longest_prompt} tokens, and {policy.title} does not split it:"
            f" add --set max_num_batched_tokens={longest_prompt}"
        )
