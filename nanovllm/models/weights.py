"""Makes a model and fills its parameters from a checkpoint, or with random numbers.

Loading is strict. Every parameter is written exactly once, and every tensor of the checkpoint is
used. A missing, unexpected or repeated tensor is an error that names up to five. RoPE buffers of
old checkpoints and the shapes of packed weights are skipped, because config.json has both. Vision
towers are skipped, because they are not run, and so is an MTP head if nothing drafts with it. A
tied output head can be stored in place of the embedding. If both are stored, they are compared.
"""

import re
from collections import defaultdict
from typing import Any, cast

import torch
from torch import Tensor, nn

from nanovllm.checkpoints.quantization import Format, quantize_layers
from nanovllm.checkpoints.tensor_files import HEAD, MTP, TensorFiles, summarize
from nanovllm.layers.attention import Backend
from nanovllm.layers.linear import Target
from nanovllm.layers.quantized import QuantizedWeight
from nanovllm.layers.tensor_parallel import TensorParallel
from nanovllm.models.decoder import CausalLM, DecoderSpec
from nanovllm.models.moe import Experts
from nanovllm.models.mtp import DraftingLM
from nanovllm.models.spec import ModelSpec

_SKIPPED_PARTS = ("model.visual.", "model.vision_tower.", "model.multi_modal_projector.")
_SKIPPED_ENDS = ("rotary_emb.inv_freq", "weight_shape")


def make_model(
    spec: ModelSpec,
    backend: Backend,
    files: TensorFiles | None,
    tp: TensorParallel,
    has_mtp_head: bool = False,
) -> CausalLM:
    """Make a model whose parameters take no memory yet, because they are on `meta`.

    With `has_mtp_head` it can draft.

    Its layers are quantized before they are allocated, because the float weights of all layers may
    not fit into memory.
    """
    with torch.device("meta"):
        model = spec.make_model(backend, tp)
        if has_mtp_head:
            model = DraftingLM(model, cast(DecoderSpec, spec), backend)
    if not spec.has_head:
        model.head_name = ""
        model.skipped_names = [*model.skipped_names, re.escape(HEAD)]
    for name, layer in model.named_modules():
        if isinstance(layer, Experts) and files is not None:
            layer.is_stacked = f"{name}.down_proj.weight" in files
    quantize_layers(model, spec.quantization, files, tp)
    return model


def allocate(model: nn.Module, device: torch.device) -> None:
    """Allocate the parameters on `device`, but do not fill them."""

    # Module.to_empty would also drop the tensors that have values, such as RoPE's frequencies.
    # For meta tensors, torch.empty_like would import sympy, which takes half a second.
    def allocate_tensor(x: Tensor) -> Tensor:
        return torch.empty(x.shape, dtype=x.dtype, device=device) if x.is_meta else x.to(device)

    model._apply(allocate_tensor)


def count_bytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


@torch.no_grad()
def load_checkpoint(model: CausalLM, files: TensorFiles, format: Format | None = None) -> None:
    """Copy the tensors of a checkpoint into `model`. `format` is that of its quantized weights.

    Raises ValueError if the two do not match or a file is damaged.
    """
    targets = _find_targets(model)
    if not any(name.startswith(model.prefix) for name in files.list_names()):
        # The decoder was saved without its head, so `normalize` has added "model.".
        targets = {name.replace(model.prefix, "model.", 1): each for name, each in targets.items()}
    if model.head_name in files and model.head_name not in targets:
        targets = _resolve_tied_head(model, files, targets)
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
        is_quantized = isinstance(parts[0].destination, QuantizedWeight)
        if isinstance(weight, QuantizedWeight) and not is_quantized:
            weight = weight.dequantize()  # `quantize_layers` has another name of its layer
        for target in parts:
            target.destination.copy_(weight[target.shard])
    problems = {
        "unexpected tensors": _find_unexpected(model, files, format),
        "missing tensors": missing,
    }
    found = [summarize(title, names) for title, names in problems.items() if names]
    if found:
        raise ValueError(
            f"the checkpoint in {files.directory} does not match the model: {'; '.join(found)}"
        )


def _resolve_tied_head(
    model: CausalLM, files: TensorFiles, targets: dict[str, list[Target]]
) -> dict[str, list[Target]]:
    """Let a stored output head fill the embedding, or require that both are the same matrix.

    The model has no head of its own, because config.json has tie_word_embeddings=true.
    """
    embedding, head = model.embedding_name, model.head_name
    if embedding not in files:
        return {head if name == embedding else name: parts for name, parts in targets.items()}
    stored = files.read(head)
    if not torch.equal(stored, files.read(embedding).to(stored)):  # their dtypes can differ
        raise ValueError(
            f"{head} differs from {embedding}, but config.json has tie_word_embeddings=true:"
            " set it to false"
        )
    return targets


def _find_unexpected(model: CausalLM, files: TensorFiles, format: Format | None) -> list[str]:
    """Return the tensors that nothing has read, except those that are skipped on purpose."""
    unexpected: list[str] = []
    for name in files.list_unread():
        if name.endswith(_SKIPPED_ENDS) or name.startswith(_SKIPPED_PARTS):
            continue
        if any(re.search(pattern, name) for pattern in model.skipped_names):
            continue
        if name.startswith(MTP) and not isinstance(model, DraftingLM):
            continue
        # AutoGPTQ adds biases of zeros where there are none.
        is_zero_bias = format is not None and name.endswith(".bias") and not files.read(name).any()
        if not is_zero_bias:
            unexpected.append(files.locate(name))
    return unexpected


@torch.no_grad()
def init_dummy_weights(model: CausalLM, seed: int) -> None:
    """Fill matrices with normal numbers of standard deviation 0.02, norms with 1, the rest with 0.

    The weights are identical on any number of ranks.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed % 2**64)
    for name, parts in _find_targets(model).items():
        full = parts[0].destination.new_empty(parts[0].full_shape)
        if full.dim() > 1:
            full.normal_(0.0, 0.02, generator=generator)
        else:
            full.fill_(1.0 if "norm" in name.split(".")[-2] else 0.0)
        for target in parts:
            target.destination.copy_(full[target.shard])


def _find_targets(model: CausalLM) -> dict[str, list[Target]]:
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
    return dict(model.name_targets(targets))
