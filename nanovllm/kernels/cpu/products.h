// Matrix products in bfloat16 with prepacked weights, for processors with instructions that multiply pairs of them.
//
// A weight [out_features, in_features] is kept in panels of WIDTH outputs: [depth / 2, WIDTH, 2], the next pair of inputs
// for all of them side by side, as the instructions want them. Depth is in_features, rounded up: the rest is zeros. A
// panel stays in a core's cache while all rows of x pass by, a few at a time; meanwhile the next panel is fetched.
#pragma once
#include "common.h"

#ifdef MULTIPLIES
constexpr int64_t WIDTH = 32, LINE = 32;  // LINE numbers fill a register, and a line of the cache

static __m512 widen(__m256i narrow) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16)); }

// The epilogue of a panel's sums: `bias` and `residual`, of the output's shape, are added. If the panel is `gated`, its first
// half holds gates and its second half what they let pass: silu(gate) * up.
struct Epilogue {
    int64_t size;  // numbers of the output in this panel
    const bfloat16 *bias = nullptr, *residual = nullptr;
    bool gated = false;

    // Of one row, `offset` behind the first row's in the output.
    void store(const float* sums, bfloat16* output, int64_t offset) const {
        if (gated) {
            float numbers[WIDTH / 2];
#pragma omp simd
            for (int i = 0; i < WIDTH / 2; i++) numbers[i] = silu(sums[i]) * sums[WIDTH / 2 + i];
            __m256i narrow = (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(numbers));
            return _mm256_mask_storeu_epi16(output + offset, (1u << size) - 1, narrow);
        }
        __mmask32 mask = size < WIDTH ? (1u << size) - 1 : -1;
        __m512 first = _mm512_loadu_ps(sums), second = _mm512_loadu_ps(sums + WIDTH / 2);
        for (const bfloat16* addend : {bias, residual ? residual + offset : nullptr})
            if (addend) {
                __m512i narrow = _mm512_maskz_loadu_epi16(mask, addend);
                first = _mm512_add_ps(first, widen(_mm512_castsi512_si256(narrow)));
                second = _mm512_add_ps(second, widen(_mm512_extracti64x4_epi64(narrow, 1)));
            }
        _mm512_mask_storeu_epi16(output + offset, mask, (__m512i)_mm512_cvtne2ps_pbh(second, first));
    }

    void store(const float* sums, float* output, int64_t offset) const { std::copy_n(sums, size, output + offset); }
};

// Rows: up to MAX_ROWS rows of x, ROWS of them multiplied at a time, of which CACHED_BYTES stay in a core's cache while all
// panels pass by. Tiles: what a thread needs while it multiplies.
#ifdef __AMX_BF16__
#include "amx.h"
#else
#include "avx512.h"
#endif

extern "C" int can_multiply() { return Tiles::allowed; }

// For a `gated` weight, out_features counts the gates: there are as many outputs, and twice as many rows in the weight.
extern "C" void linear(const bfloat16* x, const bfloat16* panels, const bfloat16* bias, const bfloat16* residual,
                       bfloat16* output, int64_t num_rows, int64_t in_features, int64_t out_features, int64_t gated) {
    int64_t depth = round_up(in_features, LINE), outputs_per_panel = gated ? WIDTH / 2 : WIDTH;
    int64_t rows_at_once = std::clamp(CACHED_BYTES / (2 * depth) / ROWS * ROWS, ROWS, MAX_ROWS);
#pragma omp parallel
    {
        Tiles tiles;
        static thread_local Rows rows;
        for (int64_t row = 0; row < num_rows; row += rows_at_once) {
            rows.pack(x + row * in_features, in_features, std::min(rows_at_once, num_rows - row), in_features);
#pragma omp for nowait
            for (int64_t first = 0; first < out_features; first += outputs_per_panel) {
                int64_t offset = row * out_features + first;
                Epilogue epilogue{std::min(outputs_per_panel, out_features - first), bias ? bias + first : nullptr,
                                residual ? residual + offset : nullptr, bool(gated)};
                rows.multiply(panels + first / outputs_per_panel * WIDTH * depth, epilogue, output + offset, out_features);
            }
        }
    }
}

// The rows of a weight that `ids` names.
extern "C" void gather_rows(const bfloat16* panels, const int64_t* ids, bfloat16* output, int64_t num_rows,
                            int64_t in_features) {
    int64_t depth = round_up(in_features, LINE);
#pragma omp parallel for if (num_rows * in_features > SERIAL)
    for (int64_t row = 0; row < num_rows; row++) {
        const bfloat16* from = panels + ids[row] / WIDTH * WIDTH * depth + ids[row] % WIDTH * 2;
        for (int64_t i = 0; i < in_features; i += 2)
            memcpy(output + row * in_features + i, from + i * WIDTH, 2 * sizeof(bfloat16));
    }
}
#endif
