"""Makes a model and fills its parameters from a checkpoint, or with random numbers.

Loading is strict. Every parameter is written exactly once, and every tensor of the checkpoint is
used. A missing, unexpected or repeated tensor is an error that names up to five. RoPE buffers of
old checkpoints are skipped, because the model computes them from config.json. Vision towers and
draft heads (MTP) are skipped, because they are not run. A tied output head can be stored in place
of the embedding. If both are stored, they are compared.
"""

from collections import defaultdict
from typing import Any

import psutil
import torch
from torch import nn

from nanovllm.checkpoints.formats import Format
from nanovllm.checkpoints.quantization import Quantization
from nanovllm.checkpoints.tensor_files import TensorFiles, summarize
from nanovllm.layers.attention import Backend
from nanovllm.layers.embedding import Embedding
from nanovllm.layers.linear import Linear, Target
from nanovllm.layers.quantized import QuantizedWeight, Scheme
from nanovllm.layers.tensor_parallel import ALONE, TensorParallel
from nanovllm.models.moe import Experts
from nanovllm.models.spec import CausalLM, ModelSpec
from nanovllm.utils.checks import naming

_HEAD = "lm_head.weight"
QUANTIZABLE = (Linear, Embedding, Experts)  # layers whose matrices can be quantized
# What `quantization` keeps. A router is small, and its errors choose other experts. The decay of a
# recurrent state acts on all later tokens.
_KEPT = ("gate", "in_proj_ba")
_SKIPPED_PARTS = ("model.visual.", "mtp.")
_ROPE_BUFFERS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


def allocate_model(
    spec: ModelSpec,
    backend: Backend,
    device: torch.device,
    files: TensorFiles | None,
    tp: TensorParallel = ALONE,
) -> CausalLM:
    """Make a model whose parameters are allocated on `device`, but not filled.

    Its layers are quantized before they are allocated, because the float weights of all layers may
    not fit into memory. Raises ValueError, and allocates nothing, if the weights of one rank exceed
    all memory of the device.
    """
    sizes = (
        f"config.json has vocab_size={spec.vocab_size}, hidden_size={spec.hidden_size},"
        f" intermediate_size={spec.intermediate_size}, num_hidden_layers={spec.num_layers}"
    )
    # torch raises RuntimeError where a tensor's size overflows.
    with torch.device("meta"), naming(sizes, RuntimeError):
        model = spec.make_model(backend, tp)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, QUANTIZABLE):
            scheme = _find_scheme(spec.quantization, name, layer, files)
            if scheme is not None:
                quantize_layer(layer, scheme)
                _check_shards(layer, name, scheme, tp)
    _check_size(model, sizes, device)
    # Module.to_empty would also drop the tensors that have values, such as RoPE's frequencies.
    return model._apply(lambda x: torch.empty_like(x, device=device) if x.is_meta else x.to(device))


def _find_scheme(
    quantization: Quantization, name: str, layer: Any, files: TensorFiles | None
) -> Scheme | None:
    """Return the scheme of a layer's weights. None: they are floats.

    Codes that the checkpoint stores keep their scheme. What it stores or reads as floats gets that
    of the option `quantization`, except for the layers in _KEPT.
    """
    format = quantization.format
    if format is not None and format.scheme is not None and _has_codes(format, name, layer, files):
        return format.scheme
    if _is_kept(name):
        return None
    return quantization.head if isinstance(layer, Embedding) else quantization.linear


def _is_kept(name: str) -> bool:
    return name.rpartition(".")[2] in _KEPT


def _has_codes(format: Format, name: str, layer: Any, files: TensorFiles | None) -> bool:
    """Return whether a checkpoint has codes for `layer`.

    For dummy weights, all projections have codes, except those that no checkpoint quantizes.
    Raises ValueError if only some parts of a merged projection have them.
    """
    if files is None:
        return not isinstance(layer, Embedding) and not _is_kept(name)
    parts = dict.fromkeys(key.rpartition(".")[0] for key, _ in layer.targets(name))
    others = [part for part in parts if not format.is_stored(files, part)]
    if 0 < len(others) < len(parts):
        problem = f"{name} is only partly quantized, since {format.marker} is missing of these"
        raise ValueError(summarize(problem, others))
    return not others


@torch.no_grad()
def quantize_layer(layer: nn.Module, scheme: Scheme) -> None:
    """Quantize the matrices of a layer. On `meta` this allocates nothing."""
    for name, parameter in list(layer.named_parameters(recurse=False)):
        if parameter.dim() > 1:
            delattr(layer, name)
            setattr(layer, name, QuantizedWeight.quantize(parameter, scheme))


def _check_shards(layer: Any, name: str, scheme: Scheme, tp: TensorParallel) -> None:
    """Raise ValueError if ranks would share a group of inputs."""
    for key, target in layer.targets(name):
        if target.dim == 1 and tp.size > 1:
            num_groups, rest = divmod(target.full_shape[1], scheme.group_size)
            if rest or num_groups % tp.size:
                raise ValueError(
                    f"tensor_parallel_size={tp.size} divides groups of {scheme.group_size} inputs"
                    f" of {key}, which has {target.full_shape[1]}: use a divisor of"
                    f" {1 if rest else num_groups}"
                )


def _check_size(model: nn.Module, sizes: str, device: torch.device) -> None:
    memory = psutil.virtual_memory().total + psutil.swap_memory().total
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    num_bytes = count_bytes(model)
    if num_bytes > memory:
        needed, present = (f"{number / 1e9:.0f} GB" for number in (num_bytes, memory))
        raise ValueError(
            f"{sizes}: a rank's weights need {needed}, but {device} has {present}:"
            " use quantization, or raise tensor_parallel_size"
        )


def count_bytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


@torch.no_grad()
def load_checkpoint(model: nn.Module, files: TensorFiles, format: Format | None = None) -> None:
    """Copy the tensors of a checkpoint into `model`. `format` is that of its quantized weights.

    Raises ValueError if the two do not match or a file is damaged.
    """
    targets = _find_targets(model)
    if _HEAD in files and _HEAD not in targets:
        _resolve_tied_head(files, targets)
    missing: list[str] = []
    for name, parts in targets.items():
        layer = name.removesuffix(".weight")
        shape = parts[0].full_shape
        weight: Any  # can be indexed as a tensor
        if format is not None and format.is_stored(files, layer):
            weight = format.read(files, layer, shape)
        elif name in files:
            weight = files.open(name, shape)
        else:
            missing.append(name)
            continue
        for target in parts:
            target.destination.copy_(weight[target.shard])
    problems = {"unexpected tensors": _find_unexpected(files, format), "missing tensors": missing}
    found = [summarize(title, names) for title, names in problems.items() if names]
    if found:
        raise ValueError(
            f"the checkpoint in {files.directory} does not match the model: {'; '.join(found)}"
        )


def _resolve_tied_head(files: TensorFiles, targets: dict[str, list[Target]]) -> None:
    """Let a stored output head fill the embedding, or require that both are the same matrix.

    The model has no head of its own, because config.json has tie_word_embeddings=true.
    """
    embedding = next(name for name in targets if name.endswith("embed_tokens.weight"))
    if embedding not in files:
        files.rename(_HEAD, embedding)
        return
    (target,) = targets[embedding]
    head, other = (files.open(name, target.full_shape) for name in (_HEAD, embedding))
    ours = head[target.shard]
    if not torch.equal(ours, other[target.shard].to(ours)):  # their dtypes can differ
        raise ValueError(
            f"{_HEAD} differs from {embedding}, but config.json has tie_word_embeddings=true:"
            " set it to false"
        )


def _find_unexpected(files: TensorFiles, format: Format | None) -> list[str]:
    """Return the tensors that nothing has read, except those that are skipped on purpose."""
    unexpected: list[str] = []
    for name in files.list_unread():
        if name.endswith(_ROPE_BUFFERS) or name.startswith(_SKIPPED_PARTS):
            continue
        # AutoGPTQ adds biases of zeros where there are none.
        is_zero_bias = format is not None and name.endswith(".bias") and not files.read(name).any()
        if not is_zero_bias:
            unexpected.append(files.locate(name))
    return unexpected


@torch.no_grad()
def init_dummy_weights(model: nn.Module, seed: int) -> None:
    """Fill matrices with normal numbers of standard deviation 0.02, norms with 1, the rest with 0.

    The weights are identical on any number of ranks.
    """
    for name, parts in _find_targets(model).items():
        full = parts[0].destination.new_empty(parts[0].full_shape)
        if full.dim() > 1:
            generator = torch.Generator(full.device).manual_seed(seed % 2**64)
            full.normal_(0.0, 0.02, generator=generator)
            seed += 1
        else:
            full.fill_(1.0 if name.endswith("norm.weight") else 0.0)
        for target in parts:
            target.destination.copy_(full[target.shard])


def _find_targets(model: nn.Module) -> dict[str, list[Target]]:
    """Map the names of checkpoint tensors to where they go, or where their parts go.

    A layer without `targets` receives its parameters whole, by their own names.
    """
    targets: defaultdict[str, list[Target]] = defaultdict(list)
    for name, module in model.named_modules():
        if hasattr(module, "targets"):
            for key, target in module.targets(name):
                targets[key].append(target)
        else:
            for key, parameter in module.named_parameters(name, recurse=False):
                targets[key].append(Target(parameter))
    return targets
