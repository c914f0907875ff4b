"""Fills a model's parameters from *.safetensors, or with random numbers.

Loading is strict. Every tensor of the checkpoint is used, and every parameter is written exactly
once. A missing, unexpected or repeated tensor is an error that names it. RoPE buffers of old
checkpoints are skipped, because the model computes them from config.json. The copy of a tied output
head is compared with the embedding. A rank reads only its shard of a tensor.
"""

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


def check_sizes(spec: ModelSpec, directory: Path, device: torch.device, num_ranks: int) -> None:
    """Reject impossible sizes in config.json before anything of that size is allocated.

    Raises ValueError for weights that exceed the memory of all ranks. Layers can differ, so each
    one after the fourth counts as the smallest of the first four.
    """
    sizes = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
    }
    given = ", ".join(f"{name}={size}" for name, size in sizes.items())
    what = f"{directory / 'config.json'} has {given}"
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
            f"{what}: the weights need at least {needed}, but {num_ranks} x {device} has"
            f" {present} each"
        )


def _count_bytes(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.itemsize for parameter in module.parameters())


@torch.no_grad()
def load_checkpoint(model: nn.Module, directory: Path) -> None:
    """Copy the checkpoint in `directory` into `model`.

    Raises ValueError if the two do not match or a file is damaged.
    """
    missing = _find_targets(model)
    is_tied = "lm_head.weight" not in missing
    embedding = next(
        target for name, target in missing.items() if name.endswith("embed_tokens.weight")
    )
    tied_head: Tensor | None = None
    unexpected: list[str] = []
    for path in _find_weight_files(directory):
        with naming(path, *_DAMAGED, ValueError), safe_open(path, framework="pt") as file:
            for name in file.keys():
                # A model that was saved without its head has no prefix.
                full_name = name if name in missing else f"model.{name}"
                if full_name in missing:
                    target = missing.pop(full_name)
                    target.destination.copy_(_read_shard(file, name, target))
                elif is_tied and name == "lm_head.weight":
                    tied_head = _read_shard(file, name, embedding)
                elif not name.endswith(_ROPE_BUFFERS):
                    unexpected.append(name)
    problems = _list_problems("unexpected or repeated tensors", unexpected)
    problems += _list_problems("missing tensors", list(missing))
    if problems:
        raise ValueError(
            f"the checkpoint in {directory} does not match the model: {'; '.join(problems)}"
        )
    weight = embedding.destination
    if tied_head is not None and not torch.equal(tied_head.to(weight), weight):
        raise ValueError(
            f"the checkpoint in {directory} has tie_word_embeddings set, but lm_head.weight"
            " differs from embed_tokens.weight"
        )


def _list_problems(title: str, names: list[str]) -> list[str]:
    if not names:
        return []
    shown = ", ".join(names[:5])
    return [f"{title}: {shown}, ..." if len(names) > 5 else f"{title}: {shown}"]


def find_dtype(config: Config, hf_config: PretrainedConfig, directory: Path) -> torch.dtype:
    """Return the dtype of `config`, or else of config.json, or else of the first stored tensor."""
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    if isinstance(hf_config.dtype, torch.dtype):
        return hf_config.dtype
    if config.load_format == "dummy":
        return torch.float32
    path = _find_weight_files(directory)[0]
    with naming(path, *_DAMAGED), safe_open(path, framework="pt") as file:
        for name in file.keys():
            return _DTYPES.get(file.get_slice(name).get_dtype(), torch.float32)
    return torch.float32


@torch.no_grad()
def init_dummy_weights(model: nn.Module, seed: int) -> None:
    """Initialize as for training: normal with standard deviation 0.02, norms 1, biases 0.

    The weights are identical on any number of ranks.
    """
    for name, target in _find_targets(model).items():
        full = target.destination.new_empty(target.full_shape)
        if full.dim() > 1:
            generator = torch.Generator(full.device).manual_seed(seed % 2**64)
            full.normal_(0.0, 0.02, generator=generator)
            seed += 1
        else:
            full.fill_(1.0 if name.endswith("norm.weight") else 0.0)
        target.destination.copy_(full[target.shard])


def _find_targets(model: nn.Module) -> dict[str, Target]:
    """Map the names of checkpoint tensors to where they go.

    A layer without `targets` receives its parameters whole, by their own names.
    """
    targets: dict[str, Target] = {}
    for name, module in model.named_modules():
        if hasattr(module, "targets"):
            targets.update(module.targets(name))
        else:
            for key, parameter in module.named_parameters(name, recurse=False):
                targets[key] = Target(parameter)
    return targets


def _find_weight_files(directory: Path) -> list[Path]:
    """Return the files of the first pattern that matches any.

    An index file is not needed, because every tensor must be there once, in whatever file.
    """
    for pattern in ("model.safetensors", "model-*.safetensors", "*.safetensors"):
        paths = sorted(directory.glob(pattern))
        if paths:
            return paths
    raise ValueError(
        f"{directory} contains no *.safetensors files: add them, or set load_format='dummy'"
        " for random weights"
    )


def _read_shard(file: safe_open, name: str, target: Target) -> Tensor:
    stored = file.get_slice(name)
    if stored.get_shape() != target.full_shape:
        raise ValueError(
            f"tensor {name} has shape {stored.get_shape()}, the model needs {target.full_shape}"
        )
    if stored.get_dtype() not in _DTYPES:
        raise ValueError(
            f"tensor {name} is stored as {stored.get_dtype()}: supported dtypes are"
            f" {', '.join(_DTYPES)}"
        )
    return stored[target.shard]
