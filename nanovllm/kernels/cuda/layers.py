"""The optimized layers for GPUs, in Triton. Each replaces several passes of torch over the data."""

import torch

from nanovllm.kernels.cuda import decoder, gated_delta, linear, moe, sampler
from nanovllm.kernels.optimized_layer import OptimizedLayer
from nanovllm.kernels.self_tests import catch_failure

OPTIMIZED_LAYERS: list[type[OptimizedLayer]] = [
    decoder.FastDecoderLayers,
    decoder.FastAttention,
    decoder.FastMLP,
    decoder.FastRMSNorm,
    linear.FastColumnParallelLinear,
    linear.FastRowParallelLinear,
    linear.FastEmbedding,
    moe.FastExperts,
    gated_delta.FastGatedDeltaRule,
    sampler.FastSampler,
]


def reason_unavailable(dtype: torch.dtype) -> str | None:
    """Return why Triton does not work here, or None."""

    def run() -> None:
        x = torch.ones(2, 64, dtype=dtype, device="cuda")
        _, normed = decoder.add_rms_norm(x, None, x[0], eps=1e-6)
        normed.tolist()  # waits for the kernel

    return catch_failure(run)
