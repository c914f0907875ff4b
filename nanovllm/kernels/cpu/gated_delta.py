"""The gated delta rule (gated_delta.h), and a layer with it (delta_layer.h), in one C++ call."""

from functools import cached_property
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from nanovllm.batch.batch import Batch
from nanovllm.kernels.cpu import declarations
from nanovllm.kernels.cpu.decoder import FastMLP, run_on_one_rank
from nanovllm.kernels.cpu.library import load
from nanovllm.kernels.cpu.linear import (
    FastColumnParallelLinear,
    FastRowParallelLinear,
    PrepackedWeight,
)
from nanovllm.kernels.cpu.norm import FastZeroCenteredRMSNorm, describe_norm
from nanovllm.kernels.optimized_layer import OptimizedLayer, has_parts
from nanovllm.layers.gated_delta import DeltaInputs, GatedDeltaRule
from nanovllm.models.decoder import CosSins
from nanovllm.models.qwen3_5 import DeltaLayer, GatedDeltaNet


class FastGatedDeltaRule(OptimizedLayer, GatedDeltaRule):
    struct: declarations.Struct

    def convert(self) -> bool:
        read = (self.A_log, self.dt_bias, self.norm_weight)
        if self.key_dim % 2 != 0 or {each.dtype for each in read} != {torch.float32}:
            return False
        # float32 [conv_size, sum(qkv_sizes)]
        taps = self.conv_weight.detach()[:, 0].T.float().contiguous()
        self.struct = declarations.DeltaRule(self, conv_weight=taps, conv_size=len(taps))
        return True

    def forward(self, inputs: DeltaInputs, states: Tensor, batch: Batch) -> Tensor:
        _, gate, _, _ = inputs
        output = gate.new_empty(gate.shape)
        assert all([each[:1].is_contiguous() for each in inputs])  # tokens need not be adjacent
        load(gate.dtype).gated_delta_rule(
            self.struct,
            *[each.data_ptr() for each in inputs],
            *[each.stride(0) for each in inputs],
            states,
            batch.read_slots,
            batch.write_slots,
            batch.cu_seqlens_q,
            len(batch.read_slots),
            output,
        )
        return output


class FastDeltaLayer(OptimizedLayer, DeltaLayer):
    """Calls no part. The parts are optimized as well, and have what the C++ code reads.

    Experts, or an MLP that the C++ code does not support, are called.
    """

    parts: ClassVar = {
        "input_layernorm": FastZeroCenteredRMSNorm,
        "linear_attn": GatedDeltaNet,
        "linear_attn.in_proj_qkvz": FastColumnParallelLinear,
        "linear_attn.in_proj_ba": FastColumnParallelLinear,
        "linear_attn.delta_rule": FastGatedDeltaRule,
        "linear_attn.out_proj": FastRowParallelLinear,
    }
    mlp_parts: ClassVar = {
        "post_attention_layernorm": FastZeroCenteredRMSNorm,
        "mlp": FastMLP,
        "mlp.gate_up": PrepackedWeight,
        "mlp.down_proj": FastRowParallelLinear,
    }

    def convert(self) -> bool:
        """The C++ code supports one rank and no biases."""
        if not super().convert():
            return False
        net = self.linear_attn
        linears = (net.in_proj_qkvz, net.in_proj_ba, net.out_proj)
        has_bias = any([each.bias is not None for each in linears])
        return not has_bias and run_on_one_rank(net.out_proj)

    def describe_mlp(self) -> dict[str, object]:
        """Return the fields of the MLP, or none if the C++ code does not support it."""
        mlp = cast(Any, self.mlp)
        is_supported = has_parts(self, self.mlp_parts) and mlp.down_proj.bias is None
        if not is_supported or not run_on_one_rank(mlp.down_proj):
            return {}
        return dict(
            post_attention_norm=describe_norm(self.post_attention_layernorm),
            gate_up=mlp.gate_up.struct,
            down=mlp.down_proj.prepacked.struct,
        )

    @cached_property
    def struct(self) -> declarations.Struct | None:
        """Made by the first step. None if a part was replaced after `convert`."""
        if not self.convert():
            return None
        net = cast(Any, self.linear_attn)
        return declarations.DeltaLayer(
            input_norm=describe_norm(self.input_layernorm),
            rule=net.delta_rule.struct,
            qkvz=net.in_proj_qkvz.prepacked.struct,
            ba=net.in_proj_ba.prepacked.struct,
            out=net.out_proj.prepacked.struct,
            **self.describe_mlp(),
        )

    def forward(self, x: Tensor, cos_sins: CosSins, states: Tensor, batch: Batch) -> Tensor:
        if self.struct is None or any(self.hooks):
            return super().forward(x, cos_sins, states, batch)
        x = x.clone()  # the C++ code works in place, and a hook may have kept x
        load(x.dtype).delta_layer(
            self.struct,
            x,
            states,
            batch.read_slots,
            batch.write_slots,
            batch.cu_seqlens_q,
            len(x),
            len(batch.read_slots),
        )
        if self.struct.down.panels is not None:
            return x
        return x + self.mlp(self.post_attention_layernorm(x))
