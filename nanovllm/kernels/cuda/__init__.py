"""Kernels for GPUs in Triton, flash-attn's, and CUDA graphs."""
