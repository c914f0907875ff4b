// Matrix products in bfloat16, for processors with instructions that multiply pairs of them.
//
// A weight [out_features, in_features] is kept in panels of 16 outputs: [in_features / 2, 16, 2], the next pair of inputs for
// all 16 side by side, as the instruction wants them. A tile of the product is a few rows of x times PANELS panels, summed
// up in registers; PANELS panels make a column, which stays in a core's cache while all rows pass by.
#pragma once
#include "common.h"

#ifdef TILED
constexpr int PANELS = 4, ROWS = 6;  // of a tile: 24 sums and 4 weights, of 32 registers
constexpr int64_t WIDTH = 16 * PANELS;
constexpr int64_t BYTES_OF_X = 1 << 19;  // that stay in a core's second-level cache while all weights go by

static void store(bfloat16* to, __mmask16 mask, __m512 values) {
    _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(values));
}

static void store(float* to, __mmask16 mask, __m512 values) { _mm512_mask_storeu_ps(to, mask, values); }

// [M, in_features] x [in_features, 16 * PANELS]. Meanwhile the panels that come next are fetched into the cache, by each of
// the column's tiles a share.
template <int M, class Output>
static void multiply_tile(const bfloat16* x, int64_t x_stride, const bfloat16* panels, int64_t panel_size,
                          const bfloat16* bias, Output* output, int64_t output_stride, int64_t in_features,
                          int64_t columns_left, int64_t tile, int64_t num_tiles) {
    __m512 sums[M][PANELS];
    __mmask16 masks[PANELS];
    for (int panel = 0; panel < PANELS; panel++) {
        masks[panel] = (1 << std::clamp<int64_t>(columns_left - 16 * panel, 0, 16)) - 1;
        __m256i narrow = _mm256_maskz_loadu_epi16(bias ? masks[panel] : 0, bias + 16 * panel);
        for (int row = 0; row < M; row++)
            sums[row][panel] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
    }
    int64_t until_fetch = tile;
    for (int64_t i = 0; i < in_features; i += 2) {
        __m512bh pairs[PANELS];
        for (int panel = 0; panel < PANELS; panel++)
            pairs[panel] = (__m512bh)_mm512_loadu_si512(panels + panel * panel_size + i * 16);
        if (until_fetch-- == 0) {
            until_fetch = num_tiles - 1;
            for (int panel = PANELS; panel < 2 * PANELS; panel++)
                _mm_prefetch(panels + panel * panel_size + i * 16, _MM_HINT_T1);
        }
        for (int row = 0; row < M; row++) {
            int32_t pair;
            memcpy(&pair, x + row * x_stride + i, sizeof pair);
            for (int panel = 0; panel < PANELS; panel++)
                sums[row][panel] = _mm512_dpbf16_ps(sums[row][panel], (__m512bh)_mm512_set1_epi32(pair), pairs[panel]);
        }
    }
    for (int row = 0; row < M; row++)
        for (int panel = 0; panel < PANELS; panel++)
            store(output + row * output_stride + 16 * panel, masks[panel], sums[row][panel]);
}

// All rows of x with one column of PANELS panels.
template <class Output>
static void multiply_column(const bfloat16* x, int64_t x_stride, int64_t num_rows, const bfloat16* panels,
                            int64_t panel_size, const bfloat16* bias, Output* output, int64_t output_stride,
                            int64_t in_features, int64_t columns_left) {
    static constexpr decltype(&multiply_tile<1, Output>) of_rows[ROWS + 1] = {
        nullptr,                  multiply_tile<1, Output>, multiply_tile<2, Output>, multiply_tile<3, Output>,
        multiply_tile<4, Output>, multiply_tile<5, Output>, multiply_tile<6, Output>};
    int64_t num_tiles = (num_rows + ROWS - 1) / ROWS;
    for (int64_t tile = 0; tile < num_tiles; tile++) {
        int64_t row = num_rows * tile / num_tiles, end = num_rows * (tile + 1) / num_tiles;
        of_rows[end - row](x + row * x_stride, x_stride, panels, panel_size, bias, output + row * output_stride,
                           output_stride, in_features, columns_left, tile, num_tiles);
    }
}

extern "C" void linear(const bfloat16* x, const bfloat16* panels, const bfloat16* bias, bfloat16* output,
                       int64_t num_rows, int64_t in_features, int64_t out_features) {
    int64_t rows_at_once = std::max<int64_t>(ROWS, BYTES_OF_X / (2 * in_features) / ROWS * ROWS);
    for (int64_t row = 0; row < num_rows; row += rows_at_once) {
#pragma omp parallel for
        for (int64_t column = 0; column < out_features; column += WIDTH)
            multiply_column(x + row * in_features, in_features, std::min(rows_at_once, num_rows - row),
                            panels + column * in_features, 16 * in_features, bias ? bias + column : nullptr,
                            output + row * out_features + column, out_features, in_features, out_features - column);
    }
}
#endif
