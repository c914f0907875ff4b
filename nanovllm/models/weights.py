"""Fills a model's parameters: from *.safetensors, strictly, or with random numbers.

Every tensor of the checkpoint is used and every parameter is written exactly once; anything else is an error that names
the tensors. Only buffers of RoPE are passed over: old checkpoints hold them, and the model computes them from config.json.
Only this rank's share of a tensor is read from the file.
"""

import re
from dataclasses import replace
from pathlib import Path

import psutil
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig

from nanovllm.checks import naming
from nanovllm.config import Config
from nanovllm.layers import attention
from nanovllm.layers.linear import Target
from nanovllm.models.decoder import ModelSpec

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ROPE_BUFFERS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
_DAMAGED = (SafetensorError, OSError)  # what safe_open raises


def check_sizes(
    spec: ModelSpec, directory: Path, device: torch.device, num_ranks: int, has_weights: bool
) -> None:
    """Reject sizes in config.json that cannot be right, before anything of that size is made.

    Raises ValueError for more layers than the checkpoint has, and for weights that exceed all memory
    of the device. A layer counts as the smallest of the first four, because layers can differ.
    """
    sizes = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
    }
    given = ", ".join(f"{name}={size}" for name, size in sizes.items())
    what = f"{directory / 'config.json'} has {given}"
    if has_weights:
        num_layers = _count_layers(directory)
        if spec.num_layers > num_layers:
            raise ValueError(f"{what}, but the checkpoint has tensors of {num_layers} layers")
    memory = psutil.virtual_memory().total + psutil.swap_memory().total
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    # torch raises RuntimeError where a tensor's size overflows.
    with torch.device("meta"), naming(f"{what}: the weights exceed all memory", RuntimeError):
        model = replace(spec, num_layers=min(spec.num_layers, 4)).make_model(attention)
    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    smallest = min(_count_bytes(layer) for layer in layers)
    num_bytes = _count_bytes(model) + (spec.num_layers - len(layers)) * smallest
    if num_bytes > memory * num_ranks:
        needed, present = (f"{number / 1e9:.0f} GB" for number in (num_bytes, memory))
        raise ValueError(
            f"{what}: the weights need at least {needed}, but {device} has {present} in all"
        )


def _count_bytes(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.itemsize for parameter in module.parameters())


def _count_layers(directory: Path) -> int:
    """The number of layers that the checkpoint's tensors belong to, by their names."""
    numbers: set[int] = set()
    for path in _weight_files(directory):
        with naming(path, *_DAMAGED), safe_open(path, framework="pt") as file:
            for name in file.keys():
                numbers.update(int(number) for number in re.findall(r"layers\.(\d+)\.", name))
    return max(numbers, default=-1) + 1


@torch.no_grad()
def load_checkpoint(model: nn.Module, directory: Path) -> None:
    """Copy the checkpoint in `directory` into `model`. Raises ValueError if the two do not match or a file is damaged."""
    missing = _targets(model)
    surplus: list[str] = []
    embedding = next(
        target for name, target in missing.items() if name.endswith("embed_tokens.weight")
    )
    tied = "lm_head.weight" not in missing
    tied_copies: list[Tensor] = []
    for path in _weight_files(directory):
        with naming(path, *_DAMAGED, ValueError), safe_open(path, framework="pt") as file:
            for name in file.keys():
                full_name = (
                    name if name in missing else f"model.{name}"
                )  # a model saved without its head has no prefix
                if full_name in missing:
                    target = missing.pop(full_name)
                    target.destination.copy_(_read_share(file, name, target))
                elif (
                    tied and name == "lm_head.weight"
                ):  # many tied checkpoints hold the one matrix under two names
                    tied_copies.append(_read_share(file, name, embedding))
                elif not name.endswith(_ROPE_BUFFERS):
                    surplus.append(name)
    if surplus or missing:
        problems = {
            "tensors without a parameter or repeated: ": surplus,
            "parameters without a tensor: ": list(missing),
        }
        shown = [
            what + ", ".join(names[:5]) + " ..." * (len(names) > 5)
            for what, names in problems.items()
            if names
        ]
        raise ValueError(
            f"the checkpoint in {directory} does not fit the model; {'; '.join(shown)}"
        )
    if not all(
        torch.equal(copy.to(embedding.destination), embedding.destination) for copy in tied_copies
    ):
        raise ValueError(
            "tie_word_embeddings is set, but lm_head.weight differs from embed_tokens.weight"
        )


def find_dtype(config: Config, hf_config: PretrainedConfig, directory: Path) -> torch.dtype:
    """What `config` asks for, or else config.json, or else the first weight is stored in. float32 if none says it."""
    given = hf_config.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
    if isinstance(given, torch.dtype):
        return given
    for path in [] if config.load_format == "dummy" else _weight_files(directory)[:1]:
        with naming(path, *_DAMAGED), safe_open(path, framework="pt") as file:
            for name in file.keys():
                return _DTYPES.get(file.get_slice(name).get_dtype(), torch.float32)
    return torch.float32


@torch.no_grad()
def init_dummy_weights(model: nn.Module, seed: int) -> None:
    """Weights as at the start of training (load_format "dummy"): normal with deviation 0.02, norms 1, biases 0.

    They are the same ones on any number of ranks.
    """
    for name, target in _targets(model).items():
        full = target.destination.new_empty(target.full_shape)
        if full.dim() > 1:
            full.normal_(
                0.0, 0.02, generator=torch.Generator(full.device).manual_seed(seed % 2**64)
            )
            seed += 1
        else:
            full.fill_(float(name.endswith("norm.weight")))
        target.destination.copy_(full[target.share])


def _targets(model: nn.Module) -> dict[str, Target]:
    """Name in the checkpoint -> where it goes. A layer without `targets` takes its parameters whole, by their own names."""
    targets: dict[str, Target] = {}
    for name, module in model.named_modules():
        if hasattr(module, "targets"):
            targets.update(module.targets(name))
        else:
            targets.update(
                (key, Target(parameter))
                for key, parameter in module.named_parameters(name, recurse=False)
            )
    return targets


def _weight_files(directory: Path) -> list[Path]:
    """The first of these that there are. An index would tell nothing more: every tensor must be there once, in whatever file."""
    for pattern in ("model.safetensors", "model-*.safetensors", "*.safetensors"):
        if paths := sorted(directory.glob(pattern)):
            return paths
    raise ValueError(f"{directory} holds no *.safetensors (load_format='dummy' needs none)")


def _read_share(file: safe_open, name: str, target: Target) -> Tensor:
    stored = file.get_slice(name)
    if stored.get_shape() != target.full_shape:
        raise ValueError(
            f"tensor {name} has shape {stored.get_shape()}, the model needs {target.full_shape}"
        )
    if stored.get_dtype() not in _DTYPES:
        raise ValueError(
            f"tensor {name} is stored as {stored.get_dtype()}; supported are {', '.join(_DTYPES)}"
        )
    return stored[target.share]
