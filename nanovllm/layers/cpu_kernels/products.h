// Matrix products in bfloat16, for processors with instructions that multiply pairs of them.
//
// A weight [out_features, in_features] is kept in columns of WIDTH outputs: [depth / 2, WIDTH, 2], the next pair of inputs
// for all of them side by side, as the instructions want them. Depth is in_features, rounded up: the rest is zeros. A
// column stays in a core's cache while all rows of x pass by, a few at a time; meanwhile the next column is fetched.
#pragma once
#include "common.h"

#ifdef __AVX512BF16__
constexpr int64_t WIDTH = 32, LINE = 32;  // LINE numbers fill a register, and a line of the cache

static int64_t round_up(int64_t size, int64_t multiple) { return (size + multiple - 1) / multiple * multiple; }

// What happens to the sums of a row and a column: a bias is added, and the outputs that there are are stored.
struct Outputs {
    __mmask32 mask;
    __m512 biases[2];

    explicit Outputs(int64_t columns_left, const bfloat16* bias = nullptr) {
        mask = columns_left < WIDTH ? (1u << columns_left) - 1 : -1;
        __m512i narrow = _mm512_maskz_loadu_epi16(bias ? mask : 0, bias);
        biases[0] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(narrow)), 16));
        biases[1] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(narrow, 1)), 16));
    }

    void store(bfloat16* to, __m512 first, __m512 second) const {
        __m512bh sums = _mm512_cvtne2ps_pbh(_mm512_add_ps(second, biases[1]), _mm512_add_ps(first, biases[0]));
        _mm512_mask_storeu_epi16(to, mask, (__m512i)sums);
    }

    void store(float* to, __m512 first, __m512 second) const {
        _mm512_mask_storeu_ps(to, mask, _mm512_add_ps(first, biases[0]));
        _mm512_mask_storeu_ps(to + 16, mask >> 16, _mm512_add_ps(second, biases[1]));
    }
};

// Rows: up to MAX_ROWS rows of x, ROWS of them multiplied at a time, of which CACHED_BYTES stay in a core's cache while all
// columns pass by. Tiles: what a thread needs while it multiplies.
#ifdef __AMX_BF16__
#include "amx.h"
#else
#include "avx512.h"
#endif

extern "C" int can_multiply() { return Tiles::allowed; }

extern "C" void linear(const bfloat16* x, const bfloat16* columns, const bfloat16* bias, bfloat16* output,
                       int64_t num_rows, int64_t in_features, int64_t out_features) {
    int64_t depth = round_up(in_features, LINE);
    int64_t rows_at_once = std::clamp(CACHED_BYTES / (2 * depth) / ROWS * ROWS, ROWS, MAX_ROWS);
#pragma omp parallel
    {
        Tiles tiles;
        static thread_local Rows rows;
        for (int64_t row = 0; row < num_rows; row += rows_at_once) {
            rows.pack(x + row * in_features, in_features, std::min(rows_at_once, num_rows - row), in_features);
#pragma omp for nowait
            for (int64_t column = 0; column < out_features; column += WIDTH)
                rows.multiply(columns + column * depth, Outputs(out_features - column, bias ? bias + column : nullptr),
                              output + row * out_features + column, out_features);
        }
    }
}
#endif
