// Rows of x times a panel with vectors of floats, on any processor: a vector of the panel is widened and multiplied with a
// pair of inputs, which gives sums of even and of odd inputs side by side; in the end they are added to each other. For a
// sum this order is the same whatever the number of rows is.
//
// Several rows share BLOCK inputs of the panel, which are widened once, into the first-level cache, and put in the order
// in which they are read: [2 * WIDTH / TILE, BLOCK / 2, TILE], for the TILE numbers that VECTORS vectors hold.
#pragma once
#include "common.h"

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int64_t ROWS = 6, VECTORS = 4;  // of 32 registers, 24 hold sums, 4 weights and one a pair
#else
constexpr int64_t ROWS = 6, VECTORS = 2;  // of 16 registers, 15
#endif
constexpr int64_t MAX_ROWS = 42 * ROWS, CACHED_BYTES = 1 << 19, BLOCK = 256;
constexpr int64_t ALL_VECTORS = 2 * WIDTH / LANES, TILE = VECTORS * LANES;

struct Tiles {
    static constexpr bool allowed = true;
};

class Rows {
    using MultiplyTile = void(const float*, const float*, int64_t, Vector*);
    Buffer<float> memory;
    float* numbers;
    int64_t num_rows, depth;
    Vector sums[MAX_ROWS][ALL_VECTORS];
    alignas(64) float block[BLOCK * WIDTH];

  public:
    static constexpr int64_t NEXT_LINE = LINE;  // from a LINE of a row to its next one, within a block

    void shape(int64_t num_rows_, int64_t in_features) {
        num_rows = num_rows_, depth = in_features, numbers = memory.get(num_rows * depth);
    }

    // A row's inputs from `start` on, the first of a BLOCK.
    float* find(int64_t row, int64_t start) { return numbers + start * num_rows + row * std::min(BLOCK, depth - start); }

    // find_row(i): where row i lies.
    template <class FindRow>
    void pack(const FindRow& find_row, int64_t num_rows_, int64_t in_features) {
        shape(num_rows_, in_features);
        for (int64_t start = 0; start < depth; start += BLOCK)
            for (int64_t row = 0; row < num_rows; row++)
                std::copy_n(find_row(row) + start, std::min(BLOCK, depth - start), find(row, start));
    }

    void multiply(const T* panel, const Epilogue& epilogue, T* output, int64_t output_stride) {
        sum_up(panel, 0, num_rows);
        for (int64_t row = 0; row < num_rows; row++) {
            float joined[WIDTH];
            join(row, joined);
            epilogue.store(joined, output, row * output_stride);
        }
    }

    void finish(int64_t) {}  // multiply() has done it

    // The sums of the rows from `first`, a multiple of ROWS, to `end`; with `is_added`, added to what is there.
    void multiply(const T* panel, int64_t first, int64_t end, float* output, int64_t output_stride, bool is_added) {
        sum_up(panel, first, end - first);
        for (int64_t row = 0; row < end - first; row++, output += output_stride) {
            float joined[WIDTH];
            join(row, joined);
            for (int64_t i = 0; i < WIDTH; i++) output[i] = is_added ? output[i] + joined[i] : joined[i];
        }
    }

  private:
    // While a block of the panel is multiplied, the next one is fetched.
    void sum_up(const T* panel, int64_t first, int64_t num) {
        memset(sums, 0, num * sizeof *sums);
        for (int64_t start = 0; start < depth; start += BLOCK, panel += BLOCK * WIDTH) {
            int64_t size = std::min(BLOCK, depth - start), num_tiles = round_up(num, ROWS) / ROWS;
            const float* x = find(first, start);
            if (num == 1) {
                multiply_tile<1, ALL_VECTORS>(x, panel, size, sums[0]);
                continue;
            }
            widen_block(panel, size);
            for (int64_t tile = 0; tile < num_tiles; tile++) {
                int64_t row = num * tile / num_tiles, end = num * (tile + 1) / num_tiles;
                for (int64_t i = size * tile / num_tiles; i < size * (tile + 1) / num_tiles; i++)
                    __builtin_prefetch(panel + (size + i) * WIDTH, 0, 2);
                for (int64_t i = 0; i < ALL_VECTORS / VECTORS; i++)
                    find_tile<ROWS>(end - row)(x + row * size, block + i * TILE * size / 2, size, &sums[row][i * VECTORS]);
            }
        }
    }

    void join(int64_t row, float* joined) const {
        const float* from = (const float*)sums[row];
#pragma omp simd
        for (int64_t i = 0; i < WIDTH; i++) joined[i] = from[2 * i] + from[2 * i + 1];
    }

    void widen_block(const T* panel, int64_t size) {
        float* to = block;
        for (int64_t first = 0; first < 2 * WIDTH; first += TILE)
            for (int64_t pair = 0; pair < size / 2; pair++)
                for (int64_t i = 0; i < TILE; i += LANES, to += LANES)
                    *(Vector*)to = widen(panel + pair * 2 * WIDTH + first + i);
    }

    // Adds M rows of x, times V vectors of each pair of inputs of the weights, to the sums.
    template <int M, int V, class Weight>
    static void multiply_tile(const float* x, const Weight* weights, int64_t size, Vector* sums) {
        typedef int64_t Pairs __attribute__((vector_size(sizeof(Vector))));
        Vector tile[M][V];
        for (int row = 0; row < M; row++)
            for (int column = 0; column < V; column++) tile[row][column] = sums[row * ALL_VECTORS + column];
        for (int64_t i = 0; i < size; i += 2, weights += V * LANES) {
            Vector columns[V];
            for (int column = 0; column < V; column++) columns[column] = widen(weights + column * LANES);
            for (int row = 0; row < M; row++) {
                int64_t pair;
                memcpy(&pair, x + row * size + i, sizeof pair);
                for (int column = 0; column < V; column++)
                    tile[row][column] += (Vector)(Pairs{} + pair) * columns[column];
            }
        }
        for (int row = 0; row < M; row++)
            for (int column = 0; column < V; column++) sums[row * ALL_VECTORS + column] = tile[row][column];
    }

    // multiply_tile of 1 to M rows.
    template <int M>
    static MultiplyTile* find_tile(int64_t num_rows) {
        if constexpr (M > 1)
            if (num_rows < M) return find_tile<M - 1>(num_rows);
        return multiply_tile<M, VECTORS, float>;
    }
};
