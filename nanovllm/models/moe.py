"""Qwen3-MoE: instead of one MLP, a layer has many small ones (experts), and a router sends each
token to a few of them. Qwen3-Next and Qwen3.5-MoE add a shared expert, which receives every token.

    token             t0      t1      t2          experts per token: 2 of 4
    routed to         e3 e0   e0 e1   e3 e0
    sorted by expert  e0: t0 t1 t2 | e1: t1 | e3: t0 t2     e2 is neither computed nor read

Every rank holds a shard of each expert's width, so the work is the same on all ranks whatever the
routing. With whole experts per rank, some ranks could be idle. All ranks route identically, because
they have the same x.

References: Shazeer et al. 2017 (sparsely gated mixture of experts); Qwen3 Technical Report, 2025.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.layers.linear import ColumnParallelLinear, Target
from nanovllm.layers.quantized import QuantizableLayer, multiply
from nanovllm.layers.tensor_parallel import ALONE, TensorParallel
from nanovllm.models.decoder import MLP, DecoderSpec
from nanovllm.utils.checks import check_int


@dataclass(frozen=True, kw_only=True)
class MoESpec(DecoderSpec):
    """A decoder with experts in place of MLPs. The fields are named as in config.json."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int  # of an expert
    shared_expert_intermediate_size: int = 0  # 0: there is no shared expert
    norm_topk_prob: bool = True  # so that the weights of a token's experts sum to 1
    # Each decoder_sparse_step-th layer has experts, except those in mlp_only_layers. All others
    # have an ordinary MLP.
    decoder_sparse_step: int = 1
    mlp_only_layers: Sequence[int] = ()

    def __post_init__(self) -> None:
        check_int("num_experts_per_tok", self.num_experts_per_tok, 1, self.num_experts)

    def make_mlp(self, layer: int, tp: TensorParallel) -> nn.Module:
        if (layer + 1) % self.decoder_sparse_step != 0 or layer in self.mlp_only_layers:
            return super().make_mlp(layer, tp)
        return SharedExpertMoE(self, tp) if self.shared_expert_intermediate_size else MoE(self, tp)


class Experts(QuantizableLayer):
    """SwiGLU of every expert. The weights of all experts are stacked into one tensor per matrix."""

    # The numbers of tokens per expert are needed on the host, which a CUDA graph does not allow.
    SUPPORTS_CUDA_GRAPHS = False

    gate_up_proj: Any  # Parameters, or QuantizedWeights in their place
    down_proj: Any

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        width: int,
        dtype: torch.dtype,
        tp: TensorParallel = ALONE,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.is_stacked = False  # in the checkpoint, too, where gate_proj comes before up_proj
        size = width // tp.size
        gate_up = torch.empty(num_experts, 2 * size, hidden_size, dtype=dtype)
        down = torch.empty(num_experts, hidden_size, size, dtype=dtype)
        self.gate_up_proj = nn.Parameter(gate_up)
        self.down_proj = nn.Parameter(down)

    def targets(self, name: str) -> Iterator[tuple[str, Target]]:
        size = self.down_proj.shape[2]
        start, full_size = self.tp.rank * size, self.tp.size * size
        for expert, (gate_up, down) in enumerate(zip(self.gate_up_proj, self.down_proj)):
            gate, up = gate_up[:size], gate_up[size:]
            if self.is_stacked:
                key = f"{name}.gate_up_proj.weight"
                stack = (expert, self.down_proj.shape[0])
                yield key, Target(gate, 0, start, 2 * full_size, *stack)
                yield key, Target(up, 0, full_size + start, 2 * full_size, *stack)
                yield f"{name}.down_proj.weight", Target(down, 1, start, full_size, *stack)
            else:
                prefix = f"{name}.{expert}"
                yield f"{prefix}.gate_proj.weight", Target(gate, 0, start, full_size)
                yield f"{prefix}.up_proj.weight", Target(up, 0, start, full_size)
                yield f"{prefix}.down_proj.weight", Target(down, 1, start, full_size)

    def compute(self, expert: int, x: Tensor) -> Tensor:
        """Compute this rank's share of an expert's output for x [num_rows, hidden_size]."""
        gate, up = multiply(x, self.gate_up_proj[expert]).chunk(2, dim=-1)
        return multiply(F.silu(gate) * up, self.down_proj[expert])

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Apply to each token of x [num_tokens, hidden_size] its `experts` [num_tokens, k].

        Return the sum of their outputs, weighted by `weights` [num_tokens, k].
        """
        num_chosen = experts.shape[1]
        sorted_experts, order = experts.flatten().sort(stable=True)  # [num_tokens * k]
        present, counts = sorted_experts.unique_consecutive(return_counts=True)
        rows = x[order // num_chosen].split(counts.tolist())  # one part for each present expert
        parts = [self.compute(expert, part) for expert, part in zip(present.tolist(), rows)]
        outputs = x.new_empty(len(order), x.shape[1])
        outputs[order] = torch.cat(parts)
        # The sum is in float32, in an order that does not depend on the other tokens of the batch.
        weighted = outputs.unflatten(0, experts.shape) * weights.float()[..., None]
        return weighted.sum(1).to(x.dtype)


class MoE(nn.Module):
    """The sum of the chosen experts' outputs, weighted by their probabilities."""

    def __init__(self, spec: MoESpec, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.num_experts_per_tok = spec.num_experts_per_tok
        self.normalize_weights = spec.norm_topk_prob
        # The router. Without `tp` it is replicated on every rank.
        parts = [("gate", spec.num_experts)]
        self.gate = ColumnParallelLinear(spec.hidden_size, parts, False, spec.dtype)
        sizes = (spec.num_experts, spec.hidden_size, spec.moe_intermediate_size)
        self.experts = Experts(*sizes, spec.dtype, tp)

    def forward(self, x: Tensor) -> Tensor:
        return self.tp.all_reduce(self.compute(x))

    def compute(self, x: Tensor) -> Tensor:
        """Compute this rank's share of the output."""
        probabilities = self.gate(x).softmax(-1, dtype=torch.float32)
        weights, experts = probabilities.topk(self.num_experts_per_tok)  # [num_tokens, k]
        if self.normalize_weights:
            weights = weights / weights.sum(-1, keepdim=True)
        return self.experts(x, experts, weights)


class SharedExpertMoE(MoE):
    """Adds the output of a shared expert, times a sigmoid gate, to that of the chosen experts."""

    def __init__(self, spec: MoESpec, tp: TensorParallel) -> None:
        super().__init__(spec, tp)
        # Without a group it does not add up the ranks' shares, because `forward` does.
        tp = replace(tp, group=None, host_group=None)
        size = spec.shared_expert_intermediate_size
        self.shared_expert = MLP(spec.hidden_size, size, spec.mlp_bias, spec.dtype, tp)
        parts = [("shared_expert_gate", 1)]  # replicated, like the router
        self.shared_expert_gate = ColumnParallelLinear(spec.hidden_size, parts, False, spec.dtype)

    def compute(self, x: Tensor) -> Tensor:
        routed = super().compute(x)
        return self.add_shared(routed, self.shared_expert(x), self.shared_expert_gate(x))

    def add_shared(self, routed: Tensor, shared: Tensor, gate: Tensor) -> Tensor:
        """Add sigmoid(gate) * shared, where `gate` is [num_tokens, 1], to the other outputs."""
        return (routed + gate.float().sigmoid() * shared).to(routed.dtype)
