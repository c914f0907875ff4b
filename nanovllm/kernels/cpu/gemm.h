// GEMM with prepacked weights.
//
// A panel stays in a core's cache while all rows of x are multiplied by it, a few at a time.
// Meanwhile the next panel is prefetched.
#pragma once
#include "rows.h"
#include "team.h"

#if defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__)) || \
    (defined(__SSE2__) && !defined(__AVX__))
#define MULTIPLIES_PAIRS  // of 16-bit integers, in whole vectors
#endif
#if defined(USE_AMX)
#include "dequantized.h"
#elif defined(IN_PAIRS)
#include "centered.h"
#elif defined(T_IS_16_BITS) && defined(MULTIPLIES_PAIRS)
#include "planes.h"
#else
#include "dequantized.h"
#endif

constexpr int64_t TASKS_PER_THREAD = 4;

// AnyRows is Rows or QuantizedRows.
template <class AnyRows>
static void multiply(const T* x, const Weight& weight, const T* bias, const T* residual, T* output,
                     int64_t num_rows, int64_t x_stride, int64_t output_stride) {
    int64_t depth = round_up(weight.in_features, LINE);
    int64_t out_features = weight.out_features;
    int64_t outputs_per_panel = weight.gate ? WIDTH / 2 : WIDTH;
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
                if (!is_packed) rows.pack(find_row, size, weight.in_features);
                is_packed = true;
                int64_t end = num_panels * (task + 1) / num_tasks;
                for (int64_t panel = num_panels * task / num_tasks; panel < end; panel++) {
                    int64_t first = panel * outputs_per_panel;
                    int64_t offset = row * output_stride + first;
                    Epilogue epilogue{std::min(outputs_per_panel, out_features - first),
                                      bias ? bias + first : nullptr,
                                      residual ? residual + offset : nullptr, weight.gate};
                    rows.multiply(weight.find_panel(panel), epilogue, output + offset,
                                  output_stride);
                }
                rows.finish(ROWS);
            });
        }
    });
}

// The strides are the distances of rows in x, and in the output and `residual`.
static void linear(const T* x, const Weight& weight, const T* bias, const T* residual, T* output,
                   int64_t num_rows, int64_t x_stride, int64_t output_stride) {
    auto multiply_rows = weight.bits ? multiply<QuantizedRows> : multiply<Rows>;
    multiply_rows(x, weight, bias, residual, output, num_rows, x_stride, output_stride);
}

extern "C" void linear(const T* x, const Weight* weight, const T* bias, T* output,
                       int64_t num_rows) {
    linear(x, *weight, bias, nullptr, output, num_rows, weight->in_features,
           weight->out_features);
}

// Copy the rows of a weight at `ids`.
extern "C" void gather_rows(const Weight* weight, const int32_t* ids, T* output,
                            int64_t num_rows) {
    int64_t in_features = weight->in_features;
    parallel_for(num_rows, in_features, [=](int64_t i) {
        const T* panel = weight->find_panel(ids[i] / WIDTH);
        int64_t column = ids[i] % WIDTH;
        T* row = output + i * in_features;
        if (weight->bits) return dequantize_row(*weight, panel, column, row, in_features);
        for (int64_t j = 0; j < in_features; j += PAIR)
            memcpy(row + j, panel + j * WIDTH + column * PAIR, PAIR * sizeof(T));
    });
}
