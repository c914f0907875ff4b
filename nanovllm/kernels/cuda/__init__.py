"""Kernels for GPUs, in Triton. A file x_kernels.py has the kernels that x.py launches.

layers.py       the list of optimized layers: norms, RoPE with the K/V store, SwiGLU
launch.py       caches compiled kernels
attention.py    the attention backend "triton"
flash_attn.py   the attention backend "flash_attn"
sampler.py      the sampler
quantized.py    linear layers with quantized weights
gated_delta.py  the gated delta rule
graphs.py       decode steps as CUDA graphs
"""
