"""Kernels for GPUs, in Triton, and CUDA graphs.

layers.py            the list of optimized layers: norms, RoPE with the K/V store
launch.py            caches compiled kernels
triton_attention.py  the attention backend "triton"
flash_attn.py        the attention backend "flash_attn"
triton_sampler.py    the sampler
linear.py            linear layers, with quantized weights or few rows
mlp.py               SwiGLU, and the experts of an MoE
gated_delta.py       the gated delta rule
graphs.py            short steps as CUDA graphs

The kernels that these files launch are in layer_kernels.py, attention_kernels.py,
gated_delta_kernels.py and graph_kernels.py, or in the same file.
"""
