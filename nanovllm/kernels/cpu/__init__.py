"""Kernels for CPUs in C++. The Python files of this folder fill their arguments.

layers.py        the list of optimized layers, and the sampler
library.py       compiles and loads kernels.cpp
declarations.py  reads functions and structs from the headers
attention.py     the attention backend "cpp"
elementwise.py   norms, RoPE and MLPs
loading.py       quantizes weights while they are loaded
panels.py        how weights are prepacked
prepacked.py     layers with prepacked weights
fused_layers.py  all decoder layers in one call
gated_delta.py   the gated delta rule, and a layer with it in one call
kernels.cpp      names the headers in reading order
"""
