"""The optimized layers for CPUs, in C++. Each replaces several passes of torch over the data."""

from nanovllm.kernels.cpu import decoder, gated_delta, linear, loading, moe, norm, sampler
from nanovllm.kernels.cpu.library import reason_unavailable as reason_unavailable
from nanovllm.kernels.optimized_layer import OptimizedLayer

OPTIMIZED_LAYERS: list[type[OptimizedLayer]] = [
    norm.FastRMSNorm,
    norm.FastZeroCenteredRMSNorm,
    norm.FastOnceRoundedRMSNorm,
    decoder.FastAttention,
    decoder.FastMLP,
    decoder.FastGeluMLP,
    decoder.FastDecoderLayers,
    linear.FastColumnParallelLinear,
    linear.FastRowParallelLinear,
    linear.FastEmbedding,
    moe.FastExperts,
    moe.FastSharedExpertMoE,
    gated_delta.FastGatedDeltaRule,
    gated_delta.FastDeltaLayer,
    sampler.FastSampler,
    loading.FastQuantizedWeight,
]
