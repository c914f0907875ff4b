// Kernels for a CPU: what torch has no single operation for. library.py compiles them, for T =
// float, bfloat16 or float16; twins.py and attention.py say what each computes.
//
// Plain loops, which the compiler turns into vector code, but for the matrix products. 16-bit
// numbers are widened to float where they are read and rounded where they are written. The threads
// are torch's own: both use the OpenMP library that torch has loaded. In the order of reading:
//
//     common.h  team.h  layers.h  decode.h  gemm.h (amx.h or plain.h)  prefill.h  collectives.h
//     fused_layers.h

#include "collectives.h"
#include "fused_layers.h"
