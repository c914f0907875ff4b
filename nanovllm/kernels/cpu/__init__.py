"""Kernels for CPUs in C++. The Python files of this folder fill their arguments.

layers.py        the list of optimized layers
library.py       compiles and loads kernels.cpp
declarations.py  reads functions and structs from the headers
attention.py     the attention backend "cpp"
norm.py          norms
decoder.py       RoPE and MLPs, and all decoder layers in one call
linear.py        linear layers and embeddings, with prepacked weights
panels.py        how weights are prepacked
moe.py           experts
gated_delta.py   the gated delta rule, and a layer with it in one call
sampler.py       the sampler
loading.py       quantizes weights while they are loaded
kernels.cpp      names the headers in reading order
"""
