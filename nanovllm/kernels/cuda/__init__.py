"""Kernels for GPUs, in Triton, and CUDA graphs.

layers.py       the list of optimized layers
launch.py       caches compiled kernels
attention.py    the attention backend "triton"
flash_attn.py   the attention backend "flash_attn"
decoder.py      norms, RoPE with the K/V store, SwiGLU, and the loop over decoder layers
linear.py       linear layers, with quantized weights or few rows
moe.py          experts
gated_delta.py  the gated delta rule
sampler.py      the sampler
graphs.py       short steps as CUDA graphs

The Triton kernels that X.py launches are in X_kernels.py.
"""
