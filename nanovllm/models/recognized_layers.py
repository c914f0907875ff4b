"""Replaces modules of a family by layers of this engine that compute the same.

Linear layers and embeddings are exact classes of torch. A norm is recognized by calling both, with
the same random weights and inputs. What is replaced can be quantized, and has optimized versions.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from nanovllm.layers.embedding import Embedding
from nanovllm.layers.linear import ColumnParallelLinear
from nanovllm.layers.norm import OnceRoundedRMSNorm, RMSNorm, ZeroCenteredRMSNorm
from nanovllm.layers.tensor_parallel import TensorParallel


class LookUp(nn.Module):
    """The embedding of a family, which takes ids of any shape and can have a scale."""

    def __init__(self, matrix: Embedding, scale: float) -> None:
        super().__init__()
        self.matrix = matrix
        self.scale = scale

    @property
    def weight(self) -> Any:  # transformers reads it
        return self.matrix.weight

    def forward(self, ids: Tensor) -> Tensor:
        found = self.matrix(ids.flatten()).unflatten(0, ids.shape)
        return found if self.scale == 1.0 else found * self.scale


class Logits(nn.Module):
    """The output head of a family. A tied one has the matrix of the embedding."""

    def __init__(self, matrix: Embedding, is_tied: bool) -> None:
        super().__init__()
        if is_tied:  # not a second submodule
            object.__setattr__(self, "matrix", matrix)
        else:
            self.matrix = matrix

    def forward(self, hidden: Tensor) -> Tensor:
        return self.matrix.logits(hidden[0])[None]


@torch.no_grad()
def replace_layers(
    model: PreTrainedModel, called: set[nn.Module], dtype: torch.dtype, tp: TensorParallel
) -> None:
    """Replace what can be replaced in a model on `meta`.

    A Linear that was not `called` stays, because the family's code may read its weight.
    """
    norms: dict[object, type[RMSNorm] | None] = {}  # by what distinguishes them
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and child in called and child.weight.dtype == dtype:
                has_bias = child.bias is not None
                with torch.device("meta"):
                    parts = [(name, child.out_features)]
                    ours = ColumnParallelLinear(child.in_features, parts, has_bias, dtype)
                setattr(module, name, ours)
            elif list(dict(child.named_parameters())) == ["weight"] and child in called:
                norm = recognize_norm(child, dtype, norms)
                if norm is not None:
                    setattr(module, name, norm)
    is_tied = head is not None and head.weight is embedding.weight
    is_plain = type(head) is nn.Linear and head.bias is None
    scale = find_scale(embedding, dtype)
    with torch.device("meta"):
        if scale is not None and (is_plain or not is_tied):
            num_rows, size = embedding.weight.shape
            matrix = Embedding(num_rows, size, dtype, tp)
            model.set_input_embeddings(LookUp(matrix, scale))
            if is_tied:
                model.set_output_embeddings(Logits(matrix, is_tied))
        if is_plain and not is_tied:
            matrix = Embedding(head.out_features, head.in_features, dtype, tp)
            model.set_output_embeddings(Logits(matrix, is_tied))


def list_kept(model: nn.Module) -> list[nn.Module]:
    """List the modules of a family that have parameters of their own, and were not replaced."""
    return [
        module
        for module in model.modules()
        if any(True for _ in module.parameters(recurse=False))
        and not type(module).__module__.startswith("nanovllm.")
    ]


def recognize_norm(
    module: nn.Module, dtype: torch.dtype, known: dict[object, type[RMSNorm] | None]
) -> nn.Module | None:
    """Return the norm of layers/ that gives the same bits, on `meta`."""
    weight: Any = dict(module.named_parameters())["weight"]
    if weight.dim() != 1 or list(module.buffers()):
        return None
    numbers = {name: each for name, each in vars(module).items() if isinstance(each, float)}
    for eps in numbers.values():
        key = (type(module), tuple(numbers.items()), eps, len(weight))
        if key not in known:
            known[key] = find_norm_class(module, eps, len(weight), dtype)
        norm_class = known[key]
        if norm_class is not None:
            with torch.device("meta"):
                return norm_class(len(weight), eps, dtype)
    return None


def find_norm_class(
    module: nn.Module, eps: float, size: int, dtype: torch.dtype
) -> type[RMSNorm] | None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(size, generator=generator, device="cpu").to(dtype)
    rows = torch.randn(4, size, generator=generator, device="cpu")
    rows *= torch.tensor([[1e-3], [0.1], [1.0], [30.0]], device="cpu")  # eps matters in the first
    x = rows.to(dtype)
    theirs = torch.func.functional_call(module, {"weight": weight}, x)
    for norm_class in (RMSNorm, OnceRoundedRMSNorm, ZeroCenteredRMSNorm):
        ours = torch.func.functional_call(norm_class(size, eps, dtype), {"weight": weight}, x)
        if ours.dtype == theirs.dtype and is_equal(ours, theirs):
            return norm_class
    return None


def is_equal(ours: Tensor, theirs: Tensor) -> bool:
    """Compare results. Sums in float32 can differ in their order, 16-bit roundings are equal."""
    if ours.dtype == torch.float32:
        return torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    return torch.equal(ours, theirs)


def find_scale(embedding: nn.Module, dtype: torch.dtype) -> float | None:
    """Return the factor on what is looked up, or None if this is another kind of embedding."""
    if not isinstance(embedding, nn.Embedding):
        return None
    ids = torch.arange(4, device="cpu")[None]
    weight = torch.randn(4, 8, device="cpu").to(dtype)
    tensors = {"weight": weight} | {name: each.cpu() for name, each in embedding.named_buffers()}
    found = torch.func.functional_call(embedding, tensors, ids)
    numbers = [each for each in vars(embedding).values() if isinstance(each, float)]
    for number in (1.0, *numbers):
        scale = torch.tensor(number, dtype=dtype, device="cpu").item()
        if torch.equal(found, weight[ids] * scale):
            return scale
    return None
