"""What the arguments of bench.py ask for, checked before anything is loaded."""

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from nanovllm.benchmark.shapes import SHAPES
from nanovllm.benchmark.workloads import Workload
from nanovllm.checkpoints.checkpoint import choose_dtype, find_checkpoint, read_config
from nanovllm.config import Config
from nanovllm.engine.scheduler import POLICIES
from nanovllm.models.architectures import read_spec
from nanovllm.models.spec import ModelSpec
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_int, check_number

# Budgets of policies that split prompts: one that keeps steps short, and the default of LLM.
TOKEN_BUDGETS = (128, Config.max_num_batched_tokens)


@dataclass(frozen=True)
class Setting:
    """What an engine is made from."""

    model: str  # a checkpoint directory
    hf_config: PretrainedConfig
    spec: ModelSpec
    options: dict[str, Any]  # options of nanovllm's LLM
    temperature: float
    nano_vllm: str  # the checkout

    @property
    def device(self) -> torch.device:
        return torch.device(self.options["device"])


def make_settings(args: argparse.Namespace, workload: Workload, scratch: str) -> dict[str, Setting]:
    """Return the setting of each engine, by its name in the table.

    Raises ValueError, TypeError or OSError for invalid arguments.
    """
    check_arguments(args, workload)
    variants = workload.variants
    if args.request_rate:
        variants = list_policies(args.token_budget or TOKEN_BUDGETS)
    parts = list(product(args.models, variants.items(), dict.fromkeys(args.engine)))
    # The engines divide the GPU's memory equally.
    shared = {"gpu_memory_utilization": 0.9 / len(parts)}
    settings: dict[str, Setting] = {}
    for model, (variant, options), engine in parts:
        name = variant or (model if len(workload.models) > 1 else engine)
        settings[name] = make_setting(args, model, shared | options, scratch)
    return settings


def make_setting(
    args: argparse.Namespace, model: str, chosen: dict[str, Any], scratch: str
) -> Setting:
    """Find the checkpoint, or write the config of a built-in shape to a folder of `scratch`."""
    cases = args.cases
    longest = max(case.shared_prefix + case.input_len[1] + case.output_len[1] for case in cases)
    num_seqs = max(case.num_seqs for case in cases)
    if args.workload:
        chosen = {"max_num_seqs": num_seqs, **chosen}  # bounds the KV cache
    options = {
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "seed": cases[0].seed,
        "load_format": "dummy" if model in SHAPES else "auto",
        "max_model_len": longest,
        **chosen,
        **{name: value for name, value in args.set if value != "auto"},
    }
    config = Config.from_options(model, **options)
    max_model_len = config.max_model_len
    if (max_model_len or 0) < longest:
        raise ValueError(
            f"--set max_model_len={max_model_len}: the longest request has {longest} tokens,"
            " raise it"
        )
    directory = Path(scratch, model)
    if model in SHAPES:
        SHAPES[model].save_pretrained(directory)
    else:
        directory = find_checkpoint(model)
    hf_config = read_config(directory)
    dtype = choose_dtype(Config.from_options(str(directory), **options), hf_config, directory)
    options["dtype"] = str(dtype).removeprefix("torch.")  # other engines would choose otherwise
    return Setting(
        model=str(directory),
        hf_config=hf_config,
        spec=read_spec(hf_config, dtype, 1, config.quantization, max_model_len),
        options=options,
        temperature=cases[0].temperature,
        nano_vllm=args.nano_vllm,
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


def check_arguments(args: argparse.Namespace, workload: Workload) -> None:
    """Raise ValueError for arguments that contradict each other."""
    for case in args.cases:
        SamplingParams(temperature=case.temperature)  # raises an error for an invalid value
        check_int("--num-seqs", case.num_seqs, 1, 10**6)
        check_int("--repeat", case.repeat, 1)
        check_int("--shared-prefix", case.shared_prefix, 0)
        for name in ("input_len", "output_len"):
            low, high = getattr(case, name)
            check_int(f"LO of --{name.replace('_', '-')}", low, 1, high)
    for rate in args.request_rate or ():
        check_number("--request-rate", rate, 0.0, open_low=True)
    checkout = Path(args.nano_vllm, "nanovllm", "llm.py")
    if "nano-vllm" in args.engine and not checkout.is_file():
        raise ValueError(
            f"--nano-vllm {args.nano_vllm}: no checkout of nano-vLLM is there, get one with"
            " git clone https://github.com/GeeeekExplorer/nano-vllm"
        )
    if args.token_budget and not args.request_rate:
        raise ValueError("--token-budget needs --request-rate")
    cause = f"--workload {args.workload}"
    chosen = {name for options in workload.variants.values() for name in options}
    if args.request_rate:
        cause = "--request-rate"
        chosen = {"policy", "enable_chunked_prefill"}
    if args.engine != ["nanovllm"] and (chosen or len(workload.models) > 1):
        raise ValueError(f"{cause} measures only nanovllm: leave out --engine")
    for name in chosen & dict(args.set).keys():
        raise ValueError(f"{cause} sets {name}: leave it out of --set")
