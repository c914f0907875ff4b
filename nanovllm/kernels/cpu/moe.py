"""The experts of an MoE in C++ (experts.h)."""

from typing import Any

import torch
from torch import Tensor

from nanovllm.kernels.cpu.declarations import Weight
from nanovllm.kernels.cpu.library import load
from nanovllm.kernels.cpu.linear import Gate, PrepackedWeight
from nanovllm.kernels.cpu.panels import can_prepack
from nanovllm.kernels.optimized_layer import OptimizedLayer
from nanovllm.models.moe import Experts, SharedExpertMoE


class FastExperts(OptimizedLayer, Experts):
    gate_up: list[PrepackedWeight]
    down: list[PrepackedWeight]
    structs: tuple[Any, Any]  # arrays of both, which C++ takes

    def convert(self) -> bool:
        if not (can_prepack(self.gate_up_proj) and can_prepack(self.down_proj)):
            return False
        # One after the other, so that only one of the originals is in memory beside its copy.
        self.gate_up = [PrepackedWeight(each, Gate.SILU) for each in self.gate_up_proj]
        del self.gate_up_proj
        self.down = [PrepackedWeight(each) for each in self.down_proj]
        del self.down_proj
        self.structs = (_make_array(self.gate_up), _make_array(self.down))
        return True

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        x = x.contiguous()
        experts = experts.contiguous()
        weights = weights.float().contiguous()
        output = torch.empty_like(x)
        sizes = (*experts.shape, len(self.gate_up))
        load(x.dtype).experts(x, experts, weights, *self.structs, output, *sizes)
        return output


class FastSharedExpertMoE(OptimizedLayer, SharedExpertMoE):
    def add_shared(self, routed: Tensor, shared: Tensor, gate: Tensor) -> Tensor:
        output = torch.empty_like(routed)  # a hook may have kept `routed`
        inputs = (routed, shared.contiguous(), gate.contiguous())
        load(routed.dtype).add_shared(*inputs, output, *routed.shape)
        return output


def _make_array(weights: list[PrepackedWeight]) -> Any:
    return (Weight * len(weights))(*[each.struct for each in weights])
