// Chooses the instructions that multiply rows of x by panels: AMX, or the vectors of any processor.
//
// Rows holds up to MAX_ROWS rows of x and multiplies ROWS of them at a time. As many rows as fit
// into CACHED_BYTES, but at least MIN_ROWS, are multiplied by all panels before the next ones,
// because reading the weights again would take longer. Tiles is the state of a thread while it
// multiplies. library.py defines MAY_USE_AMX if Linux permits the use of AMX.
#pragma once
#if defined(T_IS_BFLOAT16) && defined(__AMX_BF16__) && defined(MAY_USE_AMX)
#define USE_AMX
#include "amx.h"
#else
#include "plain.h"
#endif
