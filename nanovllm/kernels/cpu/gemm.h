// Matrix products with prepacked weights, with AMX's instructions or with any processor's vectors.
//
// A weight [out_features, in_features] is kept in panels of WIDTH outputs: [depth / PAIR, WIDTH,
// PAIR]. In 16 bits the next pair of inputs lies side by side for all outputs, as AMX wants them;
// in float32 the next input does. Depth is in_features, rounded up, and the rest is zeros. A panel
// stays in a core's cache while all rows of x pass by, a few at a time; meanwhile the next panel is
// fetched.
#pragma once
#include "team.h"

constexpr int64_t PAIR = sizeof(T) == 2 ? 2 : 1;
constexpr int64_t WIDTH = 32, LINE = 64 / sizeof(T);  // LINE numbers fill a line of the cache
constexpr int64_t TASKS_PER_THREAD = 4;

// The epilogue of a panel's sums: `bias` and `residual`, of the output's shape, are added. If the
// panel is `gated`, its first half holds gates and its second half what they let pass: silu(gate) *
// up.
struct Epilogue {
    int64_t size;  // numbers of the output in this panel
    const T *bias = nullptr, *residual = nullptr;
    bool gated = false;

    // Of one row, `offset` behind the first row's in the output.
    void store(const float* sums, T* output, int64_t offset) const {
        auto finish = [&](int64_t i) {
            Vector sum = load(sums + i);
            if (gated) sum = silu(sum) * load(sums + WIDTH / 2 + i);
            if (bias) sum += widen(bias + i, size - i);
            if (residual) sum += widen(residual + offset + i, size - i);
            return sum;
        };
        __builtin_prefetch(output + offset + size, 1);  // where this row of the next panel goes
        if (size == WIDTH)
            for (int64_t i = 0; i < WIDTH; i += 2 * LANES)
                narrow(finish(i), finish(i + LANES), output + offset + i);
        else
            for (int64_t i = 0; i < size; i += LANES)
                narrow(finish(i), output + offset + i, size - i);
    }
};

// Rows: up to MAX_ROWS rows of x, ROWS of them multiplied at a time, of which CACHED_BYTES stay in
// a core's cache while all panels pass by, or MIN_ROWS, however deep: to read the weights once more
// would take longer. Tiles: what a thread needs while it multiplies.
#if defined(T_IS_BFLOAT16) && defined(__AMX_BF16__)
#include "amx.h"
#else
#include "plain.h"
#endif

extern "C" int has_gemm() { return Tiles::allowed; }

// For a `gated` weight, out_features counts the gates: there are as many outputs, and twice as many
// rows in the weight.
extern "C" void linear(const T* x, const T* panels, const T* bias, const T* residual, T* output,
                       int64_t num_rows, int64_t in_features, int64_t x_stride,
                       int64_t out_features, int64_t output_stride, int64_t gated) {
    int64_t depth = round_up(in_features, LINE), outputs_per_panel = gated ? WIDTH / 2 : WIDTH;
    int64_t at_most =
        std::clamp(CACHED_BYTES / int64_t(sizeof(T) * depth) / ROWS * ROWS, MIN_ROWS, MAX_ROWS);
    int64_t num_passes = (num_rows - 1) / at_most + 1,
            rows_at_once = round_up((num_rows - 1) / num_passes + 1, ROWS);
    int64_t num_panels = round_up(out_features, outputs_per_panel) / outputs_per_panel;
    Team::form(true, [&] {
        [[maybe_unused]] Tiles tiles;
        static thread_local Rows rows;
        int64_t num_tasks = std::min(num_panels, TASKS_PER_THREAD * Team::num_threads);
        for (int64_t row = 0; row < num_rows; row += rows_at_once) {
            bool is_packed = false;
            Team::get().share(num_tasks, [&](int64_t task) {
                int64_t size = std::min(rows_at_once, num_rows - row);
                if (!is_packed)
                    rows.pack([=](int64_t i) { return x + (row + i) * x_stride; }, size,
                              in_features);
                is_packed = true;
                for (int64_t panel = num_panels * task / num_tasks;
                     panel < num_panels * (task + 1) / num_tasks; panel++) {
                    int64_t first = panel * outputs_per_panel, offset = row * output_stride + first;
                    Epilogue epilogue{std::min(outputs_per_panel, out_features - first),
                                      bias ? bias + first : nullptr,
                                      residual ? residual + offset : nullptr, bool(gated)};
                    rows.multiply(panels + panel * WIDTH * depth, epilogue, output + offset,
                                  output_stride);
                }
                rows.finish(ROWS);
            });
        }
    });
}

// The rows of a weight that `ids` names.
extern "C" void gather_rows(const T* panels, const int32_t* ids, T* output, int64_t num_rows,
                            int64_t in_features) {
    int64_t depth = round_up(in_features, LINE);
    parallel_for(num_rows, in_features, [=](int64_t row) {
        const T* from = panels + ids[row] / WIDTH * WIDTH * depth + ids[row] % WIDTH * PAIR;
        for (int64_t i = 0; i < in_features; i += PAIR)
            memcpy(output + row * in_features + i, from + i * WIDTH, PAIR * sizeof(T));
    });
}
