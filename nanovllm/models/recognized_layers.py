"""Replaces modules of a family by layers of this engine that compute the same.

Linear layers and embeddings are exact classes of torch. Norms, gated MLPs and experts are
recognized by calling both, with the same random weights and inputs. What is replaced can be
quantized, has optimized versions, and can be divided among ranks.
"""

import copy
import re
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from nanovllm.layers.embedding import Embedding
from nanovllm.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanovllm.layers.norm import OnceRoundedRMSNorm, RMSNorm, ZeroCenteredRMSNorm
from nanovllm.layers.tensor_parallel import ALONE, TensorParallel
from nanovllm.models.decoder import MLP
from nanovllm.models.gemma3 import GeluMLP
from nanovllm.models.moe import Experts
from nanovllm.models.observation import Observed

# A comparison has several tokens, so that layers which mix tokens differ.
_NUM_TOKENS = 61
_SIZE = 8  # of a token
_PROJECTIONS = {"gate_proj", "up_proj", "gate_up_proj", "down_proj"}  # of a gated MLP


class LookUp(nn.Module):
    """The embedding of a family, which takes ids of any shape and can have a scale."""

    def __init__(self, ours: Embedding, scale: float) -> None:
        super().__init__()
        self.ours = ours
        self.scale = scale

    @property
    def weight(self) -> Any:  # transformers reads it
        return self.ours.weight

    def forward(self, ids: Tensor) -> Tensor:
        found = self.ours(ids.flatten()).unflatten(0, ids.shape)
        return found if self.scale == 1.0 else found * self.scale


class Logits(nn.Module):
    """The output head of a family. A tied one has the matrix of the embedding."""

    def __init__(self, ours: Embedding, is_tied: bool, bias: nn.Parameter | None) -> None:
        super().__init__()
        if is_tied:  # not a second submodule
            object.__setattr__(self, "ours", ours)
        else:
            self.ours = ours
        self.bias = bias

    def forward(self, hidden: Tensor) -> Tensor:
        logits = self.ours.logits(hidden[0])[None]
        if self.bias is None or self.ours.tp.rank != 0:  # other ranks have shards
            return logits
        return logits + self.bias


class Factors(nn.Module):
    """Takes the place of a projection where MLPs are compared."""

    def __init__(self, *factors: Tensor) -> None:
        super().__init__()
        self.factors = factors

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x * each for each in self.factors], dim=-1)


class Replacement:
    """Replaces layers of a model on `meta`.

    Only modules that were called are replaced, because the family's code may read the weights of
    others. A model that is divided among ranks has passed `check_ranks`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        called_modules: frozenset[str],
        dtype: torch.dtype,
        tp: TensorParallel,
    ) -> None:
        self.model = model
        self.called_modules = called_modules
        self.dtype = dtype
        self.tp = tp
        self.generator = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def replace_layers(self) -> None:
        self.replace_children(self.model)
        self.replace_embeddings()

    def replace_children(self, parent: nn.Module, prefix: str = "") -> None:
        for name, child in list(parent.named_children()):
            path = prefix + name
            layer = self.find_layer(child, path) if path in self.called_modules else None
            if layer is None:
                self.replace_children(child, f"{path}.")
            else:
                setattr(parent, name, layer)

    def find_layer(self, module: Any, path: str) -> nn.Module | None:
        """Return the layer of this engine that computes the same, on `meta`."""
        if type(module) is nn.Linear:
            return self.make_linear(module, path) if module.weight.dtype == self.dtype else None
        names = {name for name, _ in module.named_parameters()}
        if names == {"weight"}:
            return self.find_norm(module)
        if names == {"gate_up_proj", "down_proj"}:
            return self.find_experts(module)
        parts = {name.rpartition(".")[0] for name in names}
        if "down_proj" in parts and parts <= _PROJECTIONS:
            return self.find_mlp(module, path)
        return None

    def make_linear(self, linear: nn.Linear, path: str) -> nn.Module:
        sizes = (linear.in_features, linear.out_features)
        has_bias = linear.bias is not None
        style = find_style(self.model, path)
        with torch.device("meta"):
            if style == "rowwise":
                return RowParallelLinear(*sizes, has_bias, self.dtype, self.tp)
            tp = self.tp if style == "colwise" else ALONE
            parts = [(path.rpartition(".")[2], linear.out_features)]
            return ColumnParallelLinear(linear.in_features, parts, has_bias, self.dtype, tp)

    def find_norm(self, module: nn.Module) -> nn.Module | None:
        weight: Any = dict(module.named_parameters())["weight"]
        if weight.dim() != 1:
            return None
        small = {"weight": self.draw(_SIZE).to(self.dtype)}
        x = self.draw_tokens()[None].to(self.dtype)
        for eps in list_numbers(module):
            for norm_class in (RMSNorm, OnceRoundedRMSNorm, ZeroCenteredRMSNorm):
                ours = norm_class(_SIZE, eps, self.dtype)
                if computes_same(module, small, ours, small, x):
                    with torch.device("meta"):
                        return norm_class(len(weight), eps, self.dtype)
        return None

    def find_mlp(self, module: nn.Module, path: str) -> nn.Module | None:
        """Compare MLPs whose projections multiply each number of x by a factor."""
        linears = {name: each for name, each in module.named_children() if type(each) is nn.Linear}
        gate_up_names = [name for name in linears if name != "down_proj"]
        biases = {each.bias is not None for each in linears.values()}
        if len(biases) != 1 or not {f"{path}.{name}" for name in linears} <= self.called_modules:
            return None
        (has_bias,) = biases
        gate, up, down = self.draw(3, _SIZE)
        theirs = copy.deepcopy(module)
        factors = {"gate_proj": [gate], "up_proj": [up], "gate_up_proj": [gate, up]}
        for name in gate_up_names:
            setattr(theirs, name, Factors(*factors[name]))
        theirs.down_proj = Factors(down)
        for mlp_class in (MLP, GeluMLP):
            ours: Any = mlp_class(_SIZE, _SIZE, False, torch.float32, ALONE)
            ours.gate_up_proj = Factors(gate, up)
            ours.down_proj = Factors(down)
            if computes_same(theirs, {}, ours, {}, self.draw_tokens()[None]):
                down_proj = linears["down_proj"]
                sizes = (down_proj.out_features, down_proj.in_features)
                is_divided = find_style(self.model, f"{path}.down_proj") == "rowwise"
                tp = self.tp if is_divided else ALONE
                names = gate_up_names * (2 // len(gate_up_names))
                with torch.device("meta"):
                    return mlp_class(*sizes, has_bias, self.dtype, tp, names)
        return None

    def find_experts(self, module: Any) -> nn.Module | None:
        num_experts, hidden_size, width = module.down_proj.shape
        small = {
            "gate_up_proj": self.draw(num_experts, 2 * _SIZE, _SIZE),
            "down_proj": self.draw(num_experts, _SIZE, _SIZE),
        }
        x, weights = self.draw_tokens(), self.draw(_NUM_TOKENS, 2)
        chosen = torch.randint(num_experts, weights.shape, generator=self.generator, device="cpu")
        ours = Experts(num_experts, _SIZE, _SIZE, torch.float32)
        if not computes_same(module, small, ours, small, x, chosen, weights):
            return None
        with torch.device("meta"):
            return Experts(num_experts, hidden_size, width, self.dtype)

    def replace_embeddings(self) -> None:
        embedding: Any = self.model.get_input_embeddings()
        head: Any = self.model.get_output_embeddings()
        is_tied = head is not None and head.weight is embedding.weight
        scale = self.find_scale(embedding)
        with torch.device("meta"):
            if scale is not None:
                ours = self.make_embedding(embedding)
                self.model.set_input_embeddings(LookUp(ours, scale))
            elif is_tied:
                raise ValueError("the matrix of its embedding cannot be replaced, and has two uses")
            if type(head) is nn.Linear:
                if not is_tied:
                    ours = self.make_embedding(head)
                self.model.set_output_embeddings(Logits(ours, is_tied, head.bias))

    def find_scale(self, embedding: nn.Module) -> float | None:
        """Return the factor on what is looked up, or None if this is another kind of embedding."""
        if not isinstance(embedding, nn.Embedding):
            return None
        num_rows = embedding.num_embeddings  # all, because padding_idx is one of them
        weight = self.draw(num_rows, _SIZE).to(self.dtype)
        for number in (1.0, *list_numbers(embedding)):
            scale = torch.tensor(number, dtype=self.dtype, device="cpu").item()
            ours = LookUp(Embedding(num_rows, _SIZE, self.dtype), scale)
            ids = torch.arange(num_rows, device="cpu")[None]
            if computes_same(embedding, {"weight": weight}, ours, {"ours.weight": weight}, ids):
                return scale
        return None

    def make_embedding(self, module: Any) -> Embedding:
        num_rows, size = module.weight.shape
        return Embedding(num_rows, size, self.dtype, self.tp)

    def draw(self, *shape: int) -> Tensor:
        """Draw normal numbers."""
        return torch.randn(shape, generator=self.generator, device="cpu")

    def draw_tokens(self) -> Tensor:
        """Draw small tokens, in which eps shows, to large ones, in which a limit shows."""
        exponents = torch.arange(_NUM_TOKENS, device="cpu") % 7 - 3
        return self.draw(_NUM_TOKENS, _SIZE) * 10.0 ** exponents[:, None]


def computes_same(
    theirs: nn.Module,
    their_tensors: dict[str, Tensor],
    ours: nn.Module,
    our_tensors: dict[str, Tensor],
    *inputs: Tensor,
) -> bool:
    """Compare results. 16-bit ones must be equal. Sums in float32 can differ in their order."""
    try:
        expected = torch.func.functional_call(theirs, their_tensors, inputs)
    except RuntimeError:  # their code takes other shapes
        return False
    found = torch.func.functional_call(ours, our_tensors, inputs)
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    if found.dtype == torch.float32:
        errors = (found - expected).norm(dim=-1)
        return bool((errors <= 1e-5 * expected.norm(dim=-1)).all())
    return torch.equal(found, expected)


def list_numbers(module: nn.Module) -> list[float]:
    """List the attributes that are numbers."""
    return [float(each) for each in vars(module).values() if isinstance(each, int | float)]


def list_kept(model: nn.Module) -> list[nn.Module]:
    """List the modules of a family that have parameters of their own, and were not replaced."""
    return [
        module
        for module in model.modules()
        if any(True for _ in module.parameters(recurse=False))
        and not type(module).__module__.startswith("nanovllm.")
    ]


def find_style(model: PreTrainedModel, path: str) -> str | None:
    """Return how transformers divides a module or a parameter among ranks, by its `tp_plan`."""
    return model.tp_plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", path))


def check_ranks(model: PreTrainedModel, observed: Observed, num_ranks: int) -> None:
    """Raise ValueError if layers cannot be divided among ranks as transformers divides them."""
    if num_ranks == 1:
        return
    for shape in observed.shapes.values():
        if shape.num_kv_heads % num_ranks != 0:
            raise ValueError(
                f"tensor_parallel_size={num_ranks} does not divide {shape.num_kv_heads} K/V heads:"
                " use a divisor of it"
            )
    ends = {model.get_input_embeddings(), model.get_output_embeddings()}  # always divided
    num_divided = 0
    for path, module in (*model.named_modules(), *model.named_parameters()):
        style = find_style(model, path) or "replicated"
        if module in ends or style.startswith("replicated"):
            continue
        sizes = {"colwise": "out_features", "rowwise": "in_features"}
        size = getattr(module, sizes.get(style, ""), 1)
        if module not in observed.called or size % num_ranks != 0:
            raise ValueError(
                f"tensor_parallel_size={num_ranks} cannot divide {path} (tp_plan: {style}): use 1"
            )
        num_divided += 1
    if num_divided == 0:
        raise ValueError(f"tensor_parallel_size={num_ranks} needs a tp_plan of its class: use 1")
