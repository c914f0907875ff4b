// Multiplies rows of x by a panel with AMX.
//
// A tile register holds 16 rows of 64 bytes. One instruction adds the products of 16 rows of x and
// 16 outputs, over 32 inputs, to a tile of 16 x 16 sums. Four tiles accumulate ROWS rows x WIDTH
// outputs:
//
//                         panel: 6 | 7
//     x: 4                sums:   0 | 1
//        5                        2 | 3
//
// Tiles load whole cache lines, one after the other. Rows are therefore copied first, to [depth /
// BLOCK, num_rows / ROWS, BLOCK / LINE, ROWS, LINE]: a BLOCK of inputs of all rows, then the next
// block. BLOCK inputs of a panel fit into the L1 cache, which the rows bypass.
#pragma once
#include "panels.h"

constexpr int64_t ROWS = 32;
constexpr int64_t MIN_ROWS = ROWS;
constexpr int64_t MAX_ROWS = 512;
constexpr int64_t BLOCK = 512;
constexpr int64_t CACHED_BYTES = 1 << 20;

struct Tiles {
    Tiles() {
        struct {
            uint8_t palette = 1;
            uint8_t start_row = 0;
            uint8_t reserved[14] = {};
            uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } config;
        _tile_loadconfig(&config);
    }

    ~Tiles() { _tile_release(); }
};

class Rows {
    Buffer<bfloat16> memory;
    bfloat16* numbers;
    int64_t num_rows;
    int64_t depth;
    int64_t block;  // inputs of a block
    alignas(64) float sums[MAX_ROWS * WIDTH];
    struct {
        Epilogue epilogue;
        bfloat16* output;
        int64_t output_stride;
        int64_t row;  // the first one that is pending
        int64_t end;
    } summed_up = {};  // summed rows whose epilogue is pending

public:
    // Distance between adjacent lines of a row within a block.
    static constexpr int64_t NEXT_LINE = ROWS * LINE;

    void shape(int64_t num_rows_, int64_t in_features) {
        num_rows = num_rows_;
        depth = round_up(in_features, LINE);
        block = num_rows > ROWS ? BLOCK : depth;
        numbers = memory.get(round_up(num_rows, ROWS) * depth);
    }

    // Return a row's inputs from `start`, the first input of a block.
    bfloat16* find(int64_t row, int64_t start) const {
        int64_t size = std::min(block, depth - start);
        return numbers + start * round_up(num_rows, ROWS) + row / ROWS * ROWS * size +
               row % ROWS * LINE;
    }

    // Copy the rows. find_row(i) returns a pointer to row i.
    template <class FindRow>
    void pack(const FindRow& find_row, int64_t num_rows_, int64_t in_features) {
        constexpr int64_t AHEAD = 8;  // rows
        shape(num_rows_, in_features);
        for (int64_t start = 0; start < depth; start += block)
            for (int64_t row = 0; row < num_rows; row++) {
                const bfloat16* x = find_row(row);
                const bfloat16* next = find_row(std::min(row + AHEAD, num_rows - 1));
                bfloat16* to = find(row, start);
                for (int64_t i = start; i < std::min(start + block, depth); i += LINE) {
                    __mmask32 mask = in_features - i < LINE ? (1u << (in_features - i)) - 1 : -1;
                    _mm_prefetch(next + i, _MM_HINT_T0);
                    _mm512_store_si512(to, _mm512_maskz_loadu_epi16(mask, x + i));
                    to += NEXT_LINE;
                }
            }
    }

    // Multiply all rows by a panel. The epilogue of the last rows is deferred: it runs while the
    // next panel is multiplied, or in finish(ROWS).
    void multiply(const bfloat16* panel, const Epilogue& epilogue, bfloat16* output,
                  int64_t output_stride) {
        // Prefetch the next panel, or with few rows, which leave no time for that, the next lines
        // of this panel. A core can have few cache lines in flight, and tiles that read from the L2
        // cache need them. With several tiles per LINE, software prefetching is therefore slower
        // than the processor's own.
        int64_t num_tiles = round_up(num_rows, ROWS) / ROWS;
        int64_t fetches =
            num_tiles > 1 && num_tiles < 8 ? 0 : round_up(WIDTH, num_tiles) / num_tiles;
        const bfloat16* next = panel + WIDTH * (num_tiles == 1 ? 2 * LINE : depth);
        for (int64_t start = 0; start < depth; start += block) {
            int64_t size = std::min(block, depth - start);
            // Deferred epilogues for each line, so that all ROWS are stored within the block.
            int64_t rows_per_line = (ROWS * LINE - 1) / size + 1;
            auto meanwhile = [&] {
                for (int64_t fetch = 0; fetch < fetches; fetch++) {
                    _mm_prefetch(next, _MM_HINT_T1);
                    next += LINE;
                }
                finish(rows_per_line);
            };
            for (int64_t row = 0; row < num_rows; row += ROWS) {
                multiply_rows(start, row, panel, start > 0, &sums[row * WIDTH], WIDTH, meanwhile);
                if (start + size == depth)
                    summed_up = {epilogue, output, output_stride, row,
                                 std::min(row + ROWS, num_rows)};
            }
        }
    }

    // Store up to `num` of the pending rows.
    void finish(int64_t num) {
        auto& [epilogue, output, stride, row, end] = summed_up;
        int64_t until = std::min(row + num, end);
        for (; row < until; row++) epilogue.store(&sums[row * WIDTH], output, row * stride);
    }

    // Store the sums of the rows from `first`, a multiple of ROWS, to `end`, rounded up to whole
    // ROWS. With `is_added`, add them to `output`.
    void multiply(const bfloat16* panel, int64_t first, int64_t end, float* output, int64_t stride,
                  bool is_added) const {
        for (int64_t start = 0; start < depth; start += block)
            for (int64_t row = first; row < end; row += ROWS)
                multiply_rows(start, row, panel, is_added || start > 0,
                              output + (row - first) * stride, stride, [] {});
    }

private:
    template <class Meanwhile>
    void multiply_rows(int64_t start, int64_t row, const bfloat16* panel, bool is_continued,
                       float* sums, int64_t sums_stride, const Meanwhile& meanwhile) const {
        auto multiply = num_rows - row > ROWS / 2 ? multiply_tiles<true, Meanwhile>
                                                  : multiply_tiles<false, Meanwhile>;
        multiply(find(row, start), panel + start * WIDTH, std::min(block, depth - start),
                 is_continued, sums, sums_stride * sizeof(float), meanwhile);
    }

    // The compiler does not know that tiles are loaded from memory and stored to it.
    static void wait_for_memory() { asm volatile("" ::: "memory"); }

    // Multiply ROWS rows, or half of them, by `size` inputs of a panel. Call meanwhile() for every
    // LINE.
    template <bool BOTH, class Meanwhile>
    static void multiply_tiles(const bfloat16* x, const bfloat16* panel, int64_t size,
                               bool is_continued, float* sums, int64_t sums_stride,
                               const Meanwhile& meanwhile) {
        float* upper = sums;
        float* lower = sums + ROWS / 2 * sums_stride / sizeof(float);
        constexpr int64_t X_STRIDE = 64;  // bytes
        constexpr int64_t PANEL_STRIDE = 2 * X_STRIDE;
        wait_for_memory();
        if (is_continued) {
            _tile_loadd(0, upper, sums_stride);
            _tile_loadd(1, upper + 16, sums_stride);
            if (BOTH) _tile_loadd(2, lower, sums_stride);
            if (BOTH) _tile_loadd(3, lower + 16, sums_stride);
        } else {
            _tile_zero(0);
            _tile_zero(1);
            if (BOTH) _tile_zero(2);
            if (BOTH) _tile_zero(3);
        }
        for (int64_t i = 0; i < size; i += LINE) {
            _tile_stream_loadd(4, x, X_STRIDE);
            _tile_loadd(6, panel, PANEL_STRIDE);
            _tile_loadd(7, panel + LINE, PANEL_STRIDE);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (BOTH) {
                _tile_stream_loadd(5, x + ROWS / 2 * LINE, X_STRIDE);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            meanwhile();
            x += NEXT_LINE;
            panel += LINE * WIDTH;
        }
        _tile_stored(0, upper, sums_stride);
        _tile_stored(1, upper + 16, sums_stride);
        if (BOTH) _tile_stored(2, lower, sums_stride);
        if (BOTH) _tile_stored(3, lower + 16, sums_stride);
        wait_for_memory();
    }
};
