"""Chooses which layers of a model are quantized, before their weights are allocated.

Codes that the checkpoint stores keep their scheme. What it stores or reads as floats gets that of
the option `quantization`, except for the layers in _KEPT.
"""

from typing import Any

import torch
from torch import nn

from nanovllm.checkpoints.formats import Format
from nanovllm.checkpoints.quantization import Quantization
from nanovllm.checkpoints.tensor_files import TensorFiles, summarize
from nanovllm.layers.embedding import Embedding
from nanovllm.layers.linear import Linear
from nanovllm.layers.quantized import QuantizedWeight, Scheme
from nanovllm.layers.tensor_parallel import TensorParallel
from nanovllm.models.moe import Experts

QUANTIZABLE = (Linear, Embedding, Experts)  # layers whose matrices can be quantized
# A router is small, and its errors choose other experts. The gate of a shared expert has a single
# row. The decay of a recurrent state acts on all later tokens.
_KEPT = ("gate", "shared_expert_gate", "in_proj_ba")


def quantize_layers(
    model: nn.Module, quantization: Quantization, files: TensorFiles | None, tp: TensorParallel
) -> None:
    """Replace weights of a model on `meta` by quantized ones. `files` is None for dummy weights.

    Raises ValueError if ranks would share a group of inputs.
    """
    for name, layer in list(model.named_modules()):
        if isinstance(layer, QUANTIZABLE):
            scheme = _choose_scheme(quantization, name, layer, files)
            if scheme is not None:
                quantize_layer(layer, scheme)
                _check_shards(layer, name, scheme, tp)


def _choose_scheme(
    quantization: Quantization, name: str, layer: Any, files: TensorFiles | None
) -> Scheme | None:
    """Return the scheme of a layer's weights. None: they are floats."""
    is_kept = name.rpartition(".")[2] in _KEPT
    is_embedding = isinstance(layer, Embedding)
    format = quantization.format
    if format is not None and format.scheme is not None:
        # A checkpoint with dummy weights has codes for all projections that can have them.
        has_codes = not is_embedding and not is_kept
        if files is not None:
            has_codes = _has_codes(format, name, layer, files)
        if has_codes:
            return format.scheme
    if is_kept:
        return None
    return quantization.head if is_embedding else quantization.linear


def _has_codes(format: Format, name: str, layer: Any, files: TensorFiles) -> bool:
    """Return whether a checkpoint has codes for `layer`.

    Raises ValueError if only some parts of a merged projection have them.
    """
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
            quantized = QuantizedWeight.empty_like(parameter, scheme)
            if not parameter.is_meta:
                quantized.copy_(parameter)
            setattr(layer, name, quantized)


def _check_shards(layer: Any, name: str, scheme: Scheme, tp: TensorParallel) -> None:
    """Raise ValueError if ranks would share a group of inputs."""
    for key, target in layer.targets(name):
        num_inputs = target.full_shape[-1]
        if target.dim == 1 and tp.size > 1 and num_inputs % (scheme.group_size * tp.size) != 0:
            raise ValueError(
                f"tensor_parallel_size={tp.size} divides groups of {scheme.group_size} inputs"
                f" of {key}, which has {num_inputs}: use fewer ranks"
            )
