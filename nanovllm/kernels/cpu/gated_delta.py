"""The gated delta rule in one C++ call per layer and step (gated_delta.h)."""

import ctypes

from torch import Tensor

from nanovllm.batch import Batch
from nanovllm.kernels import OptimizedLayer
from nanovllm.kernels.cpu.library import call, load
from nanovllm.layers.gated_delta import GatedDeltaRule


class _DeltaRule(ctypes.Structure):
    """Mirrors struct DeltaRule of gated_delta.h."""

    _fields_ = [
        ("conv_weight", ctypes.c_void_p),
        ("A_log", ctypes.c_void_p),
        ("dt_bias", ctypes.c_void_p),
        ("norm_weight", ctypes.c_void_p),
        ("num_key_heads", ctypes.c_int64),
        ("num_value_heads", ctypes.c_int64),
        ("key_dim", ctypes.c_int64),
        ("value_dim", ctypes.c_int64),
        ("conv_size", ctypes.c_int64),
        ("norm_eps", ctypes.c_float),
    ]


class FastGatedDeltaRule(OptimizedLayer, GatedDeltaRule):
    replaces = GatedDeltaRule

    taps: Tensor  # conv_weight as float32 [conv_size, sum(sizes)]
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
        call(
            load(gate.dtype).gated_delta_rule,
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
