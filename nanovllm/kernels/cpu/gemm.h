// GEMM with prepacked weights, with AMX or with the vectors of any processor.
//
// A weight [out_features, in_features] is stored in panels of WIDTH outputs: [depth / PAIR, WIDTH,
// PAIR]. In 16-bit dtypes two adjacent inputs of an output are a pair, as AMX requires. In float32
// PAIR is 1. Depth is in_features rounded up, and the padding is zero. A panel stays in a core's
// cache while all rows of x are multiplied by it, a few at a time. Meanwhile the next panel is
// prefetched. quantized.h has the panels of quantized weights.
#pragma once
#include "team.h"

constexpr int64_t PAIR = sizeof(T) == 2 ? 2 : 1;
constexpr int64_t WIDTH = 32;
constexpr int64_t LINE = 64 / sizeof(T);  // numbers in a cache line
constexpr int64_t TASKS_PER_THREAD = 4;

// Rows are an odd number of cache lines apart. With a power of two, they would compete for few sets
// of the caches.
static int64_t find_stride(int64_t size) { return round_up(size, 2 * LINE) + LINE; }

struct Weight {  // mirrored by prepacked.py
    const void* panels;
    int64_t bits;        // of a code, or 0 if the panels have numbers of type T
    int64_t group_size;  // inputs that share a scale and a zero

    int64_t block_size() const {  // bytes of a group of a quantized panel
        return WIDTH * (sizeof(float) + sizeof(int16_t)) + WIDTH * group_size * bits / 8;
    }

    const T* find_panel(int64_t panel, int64_t in_features) const {
        int64_t size = bits ? round_up(in_features, group_size) / group_size * block_size()
                            : WIDTH * round_up(in_features, LINE) * sizeof(T);
        return (const T*)((const char*)panels + panel * size);
    }
};

// The epilogue of a panel's sums. It adds `bias` and `residual`, which has the shape of the output.
// If the panel is `gated`, its first half is gate and its second half up, and the result is
// silu(gate) * up.
struct Epilogue {
    int64_t size;  // outputs of this panel
    const T* bias = nullptr;
    const T* residual = nullptr;
    bool gated = false;

    // Store one row. `offset` is its distance from the first row in the output.
    void store(const float* sums, T* output, int64_t offset) const {
        auto finish = [&](int64_t i) {
            Vector sum = load(sums + i);
            if (gated) sum = silu(sum) * load(sums + WIDTH / 2 + i);
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

// Rows holds up to MAX_ROWS rows of x and multiplies ROWS of them at a time. As many rows as fit
// into CACHED_BYTES, but at least MIN_ROWS, are multiplied by all panels before the next ones,
// because reading the weights again would take longer. Tiles is the state of a thread while it
// multiplies. library.py defines MAY_USE_AMX if Linux permits the use of AMX.
#if defined(T_IS_BFLOAT16) && defined(__AMX_BF16__) && defined(MAY_USE_AMX)
#define USE_AMX
#include "amx.h"
#else
#include "plain.h"
#endif
#include "quantized.h"

// AnyRows is Rows or QuantizedRows.
template <class AnyRows>
static void multiply(const T* x, const Weight& weight, const T* bias, const T* residual, T* output,
                     int64_t num_rows, int64_t in_features, int64_t x_stride, int64_t out_features,
                     int64_t output_stride, int64_t gated) {
    int64_t depth = round_up(in_features, LINE);
    int64_t outputs_per_panel = gated ? WIDTH / 2 : WIDTH;
    int64_t at_most =
        std::clamp(CACHED_BYTES / int64_t(sizeof(T) * depth) / ROWS * ROWS, MIN_ROWS, MAX_ROWS);
    int64_t num_passes = (num_rows - 1) / at_most + 1;
    int64_t rows_at_once = round_up((num_rows - 1) / num_passes + 1, ROWS);
    int64_t num_panels = round_up(out_features, outputs_per_panel) / outputs_per_panel;
    Team::form(true, [&] {
        [[maybe_unused]] Tiles tiles;
        static thread_local AnyRows rows;
        if constexpr (std::is_same_v<AnyRows, QuantizedRows>) rows.weight = weight;
        int64_t num_tasks = std::min(num_panels, TASKS_PER_THREAD * Team::num_threads);
        for (int64_t row = 0; row < num_rows; row += rows_at_once) {
            bool is_packed = false;  // by this thread, which packs when it takes its first task
            Team::get().share(num_tasks, [&](int64_t task) {
                int64_t size = std::min(rows_at_once, num_rows - row);
                auto find_row = [=](int64_t i) { return x + (row + i) * x_stride; };
                if (!is_packed) rows.pack(find_row, size, in_features);
                is_packed = true;
                int64_t end = num_panels * (task + 1) / num_tasks;
                for (int64_t panel = num_panels * task / num_tasks; panel < end; panel++) {
                    int64_t first = panel * outputs_per_panel;
                    int64_t offset = row * output_stride + first;
                    Epilogue epilogue{std::min(outputs_per_panel, out_features - first),
                                      bias ? bias + first : nullptr,
                                      residual ? residual + offset : nullptr, bool(gated)};
                    rows.multiply(weight.find_panel(panel, in_features), epilogue,
                                  output + offset, output_stride);
                }
                rows.finish(ROWS);
            });
        }
    });
}

// If the weight is `gated`, out_features is the number of outputs, and the weight has twice as many
// rows.
extern "C" void linear(const T* x, const Weight* weight, const T* bias, const T* residual,
                       T* output, int64_t num_rows, int64_t in_features, int64_t x_stride,
                       int64_t out_features, int64_t output_stride, int64_t gated) {
    auto multiply_rows = weight->bits ? multiply<QuantizedRows> : multiply<Rows>;
    multiply_rows(x, *weight, bias, residual, output, num_rows, in_features, x_stride,
                  out_features, output_stride, gated);
}

// Copy the rows of a weight at `ids`.
extern "C" void gather_rows(const Weight* weight, const int32_t* ids, T* output, int64_t num_rows,
                            int64_t in_features) {
    parallel_for(num_rows, in_features, [=](int64_t i) {
        const T* panel = weight->find_panel(ids[i] / WIDTH, in_features);
        int64_t column = ids[i] % WIDTH;
        T* row = output + i * in_features;
        if (weight->bits) return dequantize_row(*weight, panel, column, row, in_features);
        for (int64_t j = 0; j < in_features; j += PAIR)
            memcpy(row + j, panel + j * WIDTH + column * PAIR, PAIR * sizeof(T));
    });
}
