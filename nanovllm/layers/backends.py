"""The attention backends by name. A new backend is registered here and nowhere else.

config.py takes the valid values of `attention_backend` from this table. kernels/select.py imports
the backend that an engine uses. tests/kernels/test_attention.py checks every backend that runs
here. This module imports none of them, because options must be checked without Triton and
flash-attn.
"""

from typing import NamedTuple


class Registration(NamedTuple):
    module: str  # has the names that layers/attention.py begins with
    device_types: tuple[str, ...]  # on which "auto" tries it


# The fastest backend comes first, because "auto" takes the first one that works. "torch" always
# works, so a backend after it is used only if it is requested by name.
BACKENDS = {
    "flash_attn": Registration("nanovllm.kernels.cuda.flash_attn", ("cuda",)),
    "triton": Registration("nanovllm.kernels.cuda.triton_attention", ("cuda",)),
    "cpp": Registration("nanovllm.kernels.cpu.attention", ("cpu",)),
    "torch": Registration("nanovllm.layers.attention", ("cpu", "cuda")),
}
