// CPU kernels of layers, attention and sampling. library.py compiles them for T = float, bfloat16
// or float16. The Python files beside this one call them.
//
// Most are plain loops that the compiler vectorizes. Attention and GEMM use intrinsics. 16-bit
// numbers are widened to float when they are read and rounded when they are written. The threads
// are torch's own, because both use the OpenMP library that torch has loaded.
//
// GNU C++20 is assumed, which gcc and clang compile: C++20 with vectors of numbers (vector_size),
// and arrays whose length is known at run time. Reading order:
//
//     common.h  team.h  layers.h  kv_cache.h  decode.h
//     panels.h  rows.h (amx.h or plain.h)  quantized.h
//     tiled_rows.h with centered.h or planes.h, or dequantized.h
//     gemm.h  experts.h  prefill.h  fused_layers.h  gated_delta.h  delta_layer.h  sampler.h
//     loading.h
#include "delta_layer.h"
#include "experts.h"
#include "fused_layers.h"
#include "loading.h"
#include "sampler.h"
