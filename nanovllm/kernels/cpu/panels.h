// Panels: how a prepacked weight lies in memory, and the epilogue of a GEMM with one panel.
//
// A weight [out_features, in_features] is stored in panels of WIDTH outputs: [depth / PAIR, WIDTH,
// PAIR]. In 16-bit dtypes two adjacent inputs of an output are a pair, as AMX requires. In float32
// PAIR is 1. Depth is in_features rounded up, and the padding is zero. quantized.h describes the
// panels of quantized weights. loading.h makes both kinds, and panels.py draws them.
#pragma once
#include "common.h"

constexpr int64_t PAIR = sizeof(T) == 2 ? 2 : 1;
constexpr int64_t WIDTH = 32;
constexpr int64_t LINE = 64 / sizeof(T);  // numbers in a cache line

// Rows are an odd number of cache lines apart. With a power of two, they would compete for few sets
// of the caches.
static int64_t find_stride(int64_t size) { return round_up(size, 2 * LINE) + LINE; }

struct Weight {  // filled by Python: see declarations.py
    const void* panels;
    int64_t bits;        // of a code, or 0 if the panels have numbers of type T
    int64_t group_size;  // inputs that share a scale and a zero
    int64_t in_features;
    int64_t out_features;  // without the rows of a gate
    int64_t gate;

    int64_t block_size() const {  // bytes of a group of a quantized panel
        return WIDTH * (sizeof(float) + sizeof(int16_t)) + WIDTH * group_size * bits / 8;
    }

    const T* find_panel(int64_t panel) const {
        int64_t size = bits ? round_up(in_features, group_size) / group_size * block_size()
                            : WIDTH * round_up(in_features, LINE) * sizeof(T);
        return (const T*)((const char*)panels + panel * size);
    }
};

// The epilogue of a panel's sums. It adds `bias` and `residual`, which has the shape of the output.
// If the panel is gated, its first half is gate and its second half up, and the result is
// silu(gate) * up or gelu(gate) * up.
struct Epilogue {
    int64_t size;  // outputs of this panel
    const T* bias = nullptr;
    const T* residual = nullptr;
    int64_t gate = NO_GATE;

    // Store one row. `offset` is its distance from the first row in the output.
    void store(const float* sums, T* output, int64_t offset) const {
        auto finish = [&](int64_t i) {
            Vector sum = load(sums + i);
            if (gate) sum = activate(sum, gate) * load(sums + WIDTH / 2 + i);
            if (bias) sum += widen(bias + i, size - i);
            if (residual) sum += widen(residual + offset + i, size - i);
            return sum;
        };
        __builtin_prefetch(output + offset + size, 1);  // this row of the next panel
        if (size == WIDTH)
            for (int64_t i = 0; i < WIDTH; i += 2 * LANES)
                narrow(finish(i), finish(i + LANES), output + offset + i);
        else
            for (int64_t i = 0; i < size; i += LANES)
                narrow(finish(i), output + offset + i, size - i);
    }
};
