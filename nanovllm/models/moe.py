"""Qwen3-MoE: in place of an MLP a layer has many small ones, the experts, of which a router gives each token a few.

    token             t0      t1      t2          experts per token: 2 of 4
    chosen            e3 e0   e0 e1   e3 e0
    sorted by expert  e0: t0 t1 t2 | e1: t1 | e3: t0 t2       e2 is not computed, its weights are not read

Every rank has a part of every expert's width. Whole experts per rank would save nothing, and leave ranks idle whose experts
are not chosen; so the work is the same on all, whatever the routing. They choose the same experts, for they have the same x.
Reference: Shazeer et al. 2017 (sparsely gated mixture of experts); Qwen3 Technical Report, 2025.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.layers.linear import ColumnParallelLinear, Target
from nanovllm.layers.tensor_parallel import TensorParallel
from nanovllm.models.decoder import MLP, DecoderSpec


@dataclass(frozen=True, kw_only=True)
class MoESpec(DecoderSpec):
    """A decoder with experts in all layers but `dense_layers`, which have an MLP of intermediate_size."""

    num_experts: int
    num_experts_per_tok: int
    expert_size: int  # an expert's intermediate size
    normalize_weights: bool  # of the chosen experts: their sum is 1
    dense_layers: frozenset[int]

    @property
    def divided_sizes(self) -> dict[str, int]:
        sizes = super().divided_sizes
        if not self.dense_layers:
            del sizes["intermediate_size"]
        return {**sizes, "moe_intermediate_size": self.expert_size}

    def make_mlp(self, layer: int, tp: TensorParallel) -> nn.Module:
        return MLP(self, tp) if layer in self.dense_layers else MoE(self, tp)


class Experts(nn.Module):
    """SwiGLU with every expert's own weights, one tensor per matrix."""

    # How many tokens an expert gets is known on the host only after a synchronisation: a step runs eager.
    SUPPORTS_CUDA_GRAPHS = False

    def __init__(self, spec: MoESpec, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        size = spec.expert_size // tp.size
        self.gate_up_proj = nn.Parameter(
            torch.empty(spec.num_experts, 2 * size, spec.hidden_size, dtype=spec.dtype)
        )
        self.down_proj = nn.Parameter(
            torch.empty(spec.num_experts, spec.hidden_size, size, dtype=spec.dtype)
        )

    def targets(self, name: str) -> Iterator[tuple[str, Target]]:
        size = self.down_proj.shape[2]
        for expert, (gate_up, down) in enumerate(zip(self.gate_up_proj, self.down_proj)):
            for part, rows in zip(("gate_proj", "up_proj"), gate_up.chunk(2)):
                yield (
                    f"{name}.{expert}.{part}.weight",
                    Target(rows, 0, self.tp.rank * size, self.tp.size * size),
                )
            yield (
                f"{name}.{expert}.down_proj.weight",
                Target(down, 1, self.tp.rank * size, self.tp.size * size),
            )

    def compute(self, expert: int, x: Tensor) -> Tensor:
        """This rank's share of an expert's output for x [num_rows, hidden_size]."""
        gate, up = F.linear(x, self.gate_up_proj[expert]).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down_proj[expert])

    def forward(self, x: Tensor, experts: Tensor) -> Tensor:
        """What each of `experts` [num_tokens, k] makes of its token of x: [num_tokens, k, hidden_size]."""
        chosen, order = experts.flatten().sort(stable=True)  # [num_tokens * k]
        hit, counts = chosen.unique_consecutive(return_counts=True)
        rows = x[order // experts.shape[1]].split(counts.tolist())
        outputs = x.new_empty(len(order), x.shape[1])
        outputs[order] = torch.cat([self.compute(*each) for each in zip(hit.tolist(), rows)])
        return outputs.unflatten(0, experts.shape)


class MoE(nn.Module):
    """The sum of the chosen experts' outputs, weighted by their probabilities."""

    def __init__(self, spec: MoESpec, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.num_experts_per_tok, self.normalize_weights = (
            spec.num_experts_per_tok,
            spec.normalize_weights,
        )
        self.gate = ColumnParallelLinear(
            spec.hidden_size, {"gate": spec.num_experts}, False, spec.dtype
        )  # whole on every rank
        self.experts = Experts(spec, tp)

    def forward(self, x: Tensor) -> Tensor:
        weights, experts = (
            self.gate(x).softmax(-1, dtype=torch.float32).topk(self.num_experts_per_tok)
        )  # [num_tokens, k]
        if self.normalize_weights:
            weights = weights / weights.sum(-1, keepdim=True)
        # In float32, and in the order of the probabilities: a token's sum does not depend on the others in the batch.
        output = (
            (self.experts(x, experts) * weights[..., None]).sum(1).to(x.dtype)
        )  # [num_tokens, hidden_size]
        return self.tp.all_reduce(output)
