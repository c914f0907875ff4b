"""Fills a model's parameters from *.safetensors, or with random numbers.

Loading is strict. Every tensor of the checkpoint is used, and every parameter is written exactly
once. A missing, unexpected or repeated tensor is an error that names up to five. If there is an
index, the checkpoint has only the tensors that it lists. RoPE buffers of old checkpoints are
skipped, because the model computes them from config.json. A tied output head can be stored in place
of the embedding. If both are stored, they are compared. A rank reads only its shard of a tensor.
"""

import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
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
from nanovllm.models.checkpoint import read_json
from nanovllm.models.spec import ModelSpec

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_INDEX = "model.safetensors.index.json"
_HEAD = "lm_head.weight"
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
    parameters = _find_targets(model)
    embedding = next(name for name in parameters if name.endswith("embed_tokens.weight"))
    # A tied head and the embedding are one parameter, which either of them fills.
    tied = {} if _HEAD in parameters else {_HEAD: embedding, embedding: _HEAD}
    targets = {_HEAD: parameters[embedding], **parameters}
    sources: dict[str, str] = {}  # where each tensor was read
    unexpected: list[str] = []
    repeated: list[str] = []
    for path, listed in _find_weight_files(directory).items():
        with _open_weights(path, listed) as (file, names):
            for name in names:
                source = f"{name} in {path.name}"
                # A model that was saved without its head has no prefix.
                full_name = name if name in targets else f"model.{name}"
                if full_name in sources:
                    repeated.append(f"{sources[full_name]} and {source}")
                elif full_name in targets:
                    destination = targets[full_name].destination
                    shard = _read_shard(file, name, targets[full_name])
                    if tied.get(full_name) not in sources:
                        destination.copy_(shard)
                    elif not torch.equal(shard.to(destination), destination):
                        raise ValueError(
                            f"{_HEAD} differs from {embedding}, but config.json has"
                            " tie_word_embeddings set: set it to false"
                        )
                    sources[full_name] = source
                elif not name.endswith(_ROPE_BUFFERS):
                    unexpected.append(source)
    missing = [name for name in parameters if name not in sources and tied.get(name) not in sources]
    problems = _list_problems("unexpected tensors", unexpected)
    problems += _list_problems("repeated tensors", repeated)
    problems += _list_problems("missing tensors", missing)
    if problems:
        raise ValueError(
            f"the checkpoint in {directory} does not match the model: {'; '.join(problems)}"
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
    path, listed = next(iter(_find_weight_files(directory).items()))
    with _open_weights(path, listed) as (file, names):
        for name in names:
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


def _find_weight_files(directory: Path) -> dict[Path, set[str] | None]:
    """Map each file to the tensors that the index lists for it. None: there is no index.

    When save_pretrained writes a single file, it removes the shards of an earlier save, but not
    their index. Such an index does not count.
    """
    index = directory / _INDEX
    if index.exists():
        files = _read_index(index)
        missing = [file.name for file in files if not file.is_file()]
        if not missing:
            return files
        if not (directory / "model.safetensors").is_file():
            raise ValueError(f"{index} lists {missing[0]!r}, but there is no such file: add it")
    for pattern in ("model.safetensors", "model-*.safetensors", "*.safetensors"):
        paths = sorted(directory.glob(pattern))
        if paths:
            return dict.fromkeys(paths)
    raise ValueError(
        f"{directory} contains no *.safetensors files: add them, or set load_format='dummy'"
        " for random weights"
    )


def _read_index(path: Path) -> dict[Path, set[str] | None]:
    """Read which tensors the index lists for each file.

    Raises ValueError, naming the index, if it is damaged.
    """
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{path}: weight_map must be an object that maps tensors to files")
    files: defaultdict[Path, set[str]] = defaultdict(set)
    for tensor, name in weight_map.items():
        # A path could lead out of the checkpoint.
        if not isinstance(name, str) or os.path.basename(name) != name:
            raise ValueError(f"{path}: the file of {tensor} must be a file's name, not {name!r}")
        files[path.parent / name].add(tensor)
    return {file: files[file] for file in sorted(files)}


@contextmanager
def _open_weights(path: Path, listed: set[str] | None) -> Iterator[tuple[safe_open, list[str]]]:
    """Open a file for the tensors that are listed for it, or else for all that it has."""
    with naming(path, *_DAMAGED, ValueError), safe_open(path, framework="pt") as file:
        names = file.keys()
        if listed is not None:
            missing = sorted(listed.difference(names))
            if missing:
                (problem,) = _list_problems(f"missing tensors, which {_INDEX} lists", missing)
                raise ValueError(problem)
            names = [name for name in names if name in listed]
        yield file, names


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
