"""Kernels for GPUs, in Triton, and CUDA graphs.

layers.py                                the list of optimized layers
attention.py, attention_kernels.py       the attention backend "triton"
flash_attn.py                            the attention backend "flash_attn"
decoder.py, decoder_kernels.py           norms, RoPE and K/V store, SwiGLU, the loop over layers
linear.py, linear_kernels.py             linear layers, with quantized weights or few rows
moe.py, moe_kernels.py                   experts
gated_delta.py, gated_delta_kernels.py   the gated delta rule
sampler.py, sampler_kernels.py           the sampler
graphs.py, graphs_kernels.py             short steps as CUDA graphs

The Triton kernels that X.py launches are in X_kernels.py.
"""
