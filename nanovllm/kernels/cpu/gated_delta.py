"""The gated delta rule (gated_delta.h), and a layer with it (delta_layer.h), in one C++ call."""

import ctypes
from functools import cached_property
from typing import Any, cast

from torch import Tensor

from nanovllm.batch import Batch
from nanovllm.kernels import OptimizedLayer
from nanovllm.kernels.cpu.library import load, structure
from nanovllm.kernels.cpu.prepacked import PrepackedWeight, Weight, can_fuse, prepack_gated
from nanovllm.layers.gated_delta import GatedDeltaRule
from nanovllm.models.decoder import CosSin
from nanovllm.models.qwen3_5 import DeltaLayer


@structure
class _DeltaRule(ctypes.Structure):
    """Mirrors struct DeltaRule of gated_delta.h."""

    conv_weight: ctypes.c_void_p
    A_log: ctypes.c_void_p
    dt_bias: ctypes.c_void_p
    norm_weight: ctypes.c_void_p
    num_key_heads: ctypes.c_int64
    num_value_heads: ctypes.c_int64
    key_dim: ctypes.c_int64
    value_dim: ctypes.c_int64
    conv_size: ctypes.c_int64
    norm_eps: ctypes.c_float


class FastGatedDeltaRule(OptimizedLayer, GatedDeltaRule):
    replaces = GatedDeltaRule

    taps: Tensor  # conv_weight as float32 [conv_size, sum(qkv_sizes)]
    struct: _DeltaRule  # points to `taps` and to parameters

    def convert(self) -> bool:
        if self.key_dim % 2 != 0:
            return False
        self.taps = self.conv_weight.detach()[:, 0].T.float().contiguous()
        self.struct = _DeltaRule(
            conv_weight=self.taps.data_ptr(),
            A_log=self.A_log.data_ptr(),
            dt_bias=self.dt_bias.data_ptr(),
            norm_weight=self.norm_weight.data_ptr(),
            num_key_heads=self.num_key_heads,
            num_value_heads=self.num_value_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            conv_size=len(self.taps),
            norm_eps=self.norm_eps,
        )
        return True

    def forward(
        self,
        qkv: Tensor,
        gate: Tensor,
        beta: Tensor,
        decay: Tensor,
        states: Tensor,
        batch: Batch,
    ) -> Tensor:
        output = gate.new_empty(gate.shape)
        inputs = (qkv, gate, beta, decay)
        assert all([each[:1].is_contiguous() for each in inputs])  # tokens need not be adjacent
        load(gate.dtype).gated_delta_rule(
            ctypes.byref(self.struct),
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


@structure
class _DeltaLayer(ctypes.Structure):
    """Mirrors struct DeltaLayer of delta_layer.h."""

    input_norm: ctypes.c_void_p
    post_attention_norm: ctypes.c_void_p
    rule: ctypes.c_void_p
    qkvz: Weight
    ba: Weight
    out: Weight
    gate_up: Weight
    down: Weight
    hidden_size: ctypes.c_int64
    intermediate_size: ctypes.c_int64
    eps: ctypes.c_float


class FastDeltaLayer(OptimizedLayer, DeltaLayer):
    """Calls no part. The parts are optimized as well, and have what the C++ code reads."""

    replaces = DeltaLayer

    gate_up: PrepackedWeight

    def convert(self) -> bool:
        if not can_fuse(self) or self.linear_attn.delta_rule.key_dim % 2 != 0:
            return False
        prepack_gated(self)
        return True

    @cached_property
    def struct(self) -> _DeltaLayer:
        net, down_proj = cast(Any, self.linear_attn), cast(Any, self.mlp).down_proj
        return _DeltaLayer(
            input_norm=self.input_layernorm.weight.data_ptr(),
            post_attention_norm=self.post_attention_layernorm.weight.data_ptr(),
            rule=ctypes.addressof(net.delta_rule.struct),
            qkvz=net.in_proj_qkvz.prepacked.struct,
            ba=net.in_proj_ba.prepacked.struct,
            out=net.out_proj.prepacked.struct,
            gate_up=self.gate_up.struct,
            down=down_proj.prepacked.struct,
            hidden_size=self.gate_up.in_features,
            intermediate_size=self.gate_up.out_features,
            eps=self.input_layernorm.eps,
        )

    def forward(self, x: Tensor, cos_sin: CosSin, states: Tensor, batch: Batch) -> Tensor:
        """Run the layer on x [num_tokens, hidden_size], in place."""
        load(x.dtype).delta_layer(
            ctypes.byref(self.struct),
            x,
            states,
            batch.read_slots,
            batch.write_slots,
            batch.cu_seqlens_q,
            len(x),
            len(batch.read_slots),
        )
        return x
