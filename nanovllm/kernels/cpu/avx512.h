// Rows of x times a panel with AVX-512: an instruction takes a pair of inputs of a row and a register of the panel.
#pragma once
#include <array>
#include <utility>

constexpr int64_t ROWS = 12;  // 24 sums, 2 weights and a pair: 27 of 32 registers
constexpr int64_t MAX_ROWS = 64 * ROWS, CACHED_BYTES = 1 << 19;

struct Tiles {
    static constexpr bool allowed = true;
};

class Rows {
    const bfloat16* x;
    int64_t stride, num_rows, depth;

  public:
    void pack(const bfloat16* x_, int64_t stride_, int64_t num_rows_, int64_t in_features) {
        x = x_, stride = stride_, num_rows = num_rows_, depth = in_features;
    }

    // Into `output`, bfloat16 or float.
    template <class Output>
    void multiply(const bfloat16* panel, const Epilogue& epilogue, Output* output, int64_t output_stride) const {
        static constexpr auto of_rows = find_tiles<Output>(std::make_index_sequence<ROWS>());
        int64_t num_tiles = round_up(num_rows, ROWS) / ROWS;
        for (int64_t tile = 0; tile < num_tiles; tile++) {
            int64_t row = num_rows * tile / num_tiles, end = num_rows * (tile + 1) / num_tiles;
            (this->*of_rows[end - row - 1])(row, panel, epilogue, output, output_stride, tile, num_tiles);
        }
    }

  private:
    // multiply_tile of 1, 2, ... rows.
    template <class Output, size_t... M>
    static constexpr auto find_tiles(std::index_sequence<M...>) {
        return std::array{&Rows::multiply_tile<int(M + 1), Output>...};
    }

    // M rows of x. Of the next panel, each of num_tiles tiles fetches its share.
    template <int M, class Output>
    void multiply_tile(int64_t first_row, const bfloat16* panel, const Epilogue& epilogue, Output* output,
                       int64_t output_stride, int64_t tile, int64_t num_tiles) const {
        __m512 sums[M][2];
        for (auto& of_row : sums)
            for (__m512& sum : of_row) sum = _mm512_setzero_ps();
        const bfloat16* next = panel + round_up(depth, LINE) * WIDTH;
        int64_t until_fetch = tile;
        for (int64_t i = 0; i < depth; i += 2) {
            const bfloat16* pairs = panel + i * WIDTH;
            __m512bh halves[2];
            for (int half = 0; half < 2; half++) halves[half] = (__m512bh)_mm512_loadu_si512(pairs + half * LINE);
            if (until_fetch-- == 0) {
                until_fetch = num_tiles - 1;
                for (int half = 0; half < 2; half++) _mm_prefetch(next + i * WIDTH + half * LINE, _MM_HINT_T1);
            }
            for (int row = 0; row < M; row++) {
                int32_t pair;
                memcpy(&pair, x + (first_row + row) * stride + i, sizeof pair);
                for (int half = 0; half < 2; half++)
                    sums[row][half] = _mm512_dpbf16_ps(sums[row][half], (__m512bh)_mm512_set1_epi32(pair), halves[half]);
            }
        }
        for (int row = 0; row < M; row++)
            epilogue.store((const float*)sums[row], output, (first_row + row) * output_stride);
    }
};
