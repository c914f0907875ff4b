"""Replaces what layers/ and models/ compute: attention backends, optimized layers, CUDA graphs.

layers/ and models/ specify what is computed, and import nothing of this package. An engine imports
it when it starts, unless enable_kernels=False, and calls the four functions below.

select.py             chooses the attention backend: how K/V are stored and read
replacement.py        replaces the layers of a model by optimized subclasses
optimized_layer.py    the rules for replacing the class of a live layer, and what prevents it
sampler_fields.py     the fields of a step that the sampling kernels know
self_tests.py         compares backends and layers with plain torch, and finds which ones fail
cpu/                  C++, compiled when an engine starts
cuda/                 Triton, flash-attn and CUDA graphs (cuda/graphs.py)
bench.py              a program that checks and times the attention kernels

An optimized layer is a subclass named Fast and the name of the class that it replaces, in cpu/ and
in cuda/. In cuda/, the Triton kernels that X.py launches are in X_kernels.py.

Nothing in here knows sequences, requests or the scheduler. A kernel gets tensors and a Batch.
"""

from nanovllm.kernels.cuda.graphs import make_cuda_graphs
from nanovllm.kernels.replacement import kernelize, speed_up_loading
from nanovllm.kernels.select import select_backend

__all__ = ["kernelize", "make_cuda_graphs", "select_backend", "speed_up_loading"]
