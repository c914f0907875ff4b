// Multiplies rows of x by a panel with vectors, on any processor. The order of a sum does not
// depend on the number of rows. Every BLOCK inputs are summed separately, because one long sum
// would round more.
//
// In float32 one instruction multiplies a vector of weights by one input. If the processor can
// multiply pairs of bfloat16, one instruction adds the products of two inputs and two weights to
// each sum of a vector. Otherwise 16-bit numbers are widened to float, and a vector of weights is
// multiplied by a pair of inputs. The sums of even and odd inputs are then adjacent, and are added
// at the end. For few rows, weights are widened as they are read. For many rows, BLOCK inputs of
// the panel are widened once into the L1 cache, in the order in which they are read: [2 * WIDTH /
// TILE, BLOCK / 2, TILE], where TILE elements fill VECTORS vectors.
#pragma once
#include "panels.h"

#ifdef IN_PAIRS
using Pair = int32_t;
// Of 32 registers, 24 hold sums, 2 weights and 1 a pair.
constexpr int64_t ROWS = 12;
constexpr int64_t VECTORS = 2;

static Vector load_factors(const bfloat16* from) { return (Vector)_mm512_loadu_si512(from); }

static Vector add_products(Vector sum, Pair pair, Vector weights) {
    return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair),
                                    (__m512bh)weights);
}
#else
using Pair = std::conditional_t<PAIR == 2, int64_t, int32_t>;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int64_t VECTORS = std::min<int64_t>(4, PAIR* WIDTH / LANES);
constexpr int64_t ROWS = 24 / VECTORS;  // 24 of 32 registers hold sums
#else
constexpr int64_t VECTORS = 2;
constexpr int64_t ROWS = 6;  // 15 of 16 registers are used
#endif

template <class Number>
static Vector load_factors(const Number* from) {
    return widen(from);
}

static Vector add_products(Vector sum, Pair pair, Vector weights) {
    typedef Pair Pairs __attribute__((vector_size(sizeof(Vector))));
    return sum + (Vector)(Pairs{} + pair) * weights;
}
#endif
constexpr int64_t MIN_ROWS = round_up(64, ROWS);
constexpr int64_t MAX_ROWS = 42 * ROWS;
constexpr int64_t CACHED_BYTES = 1 << 19;
constexpr int64_t BLOCK = 256;
constexpr int64_t FEW_TILES = 4;  // with more, a block of the panel is widened once
constexpr int64_t PER_VECTOR = sizeof(Vector) / sizeof(Factor);
constexpr int64_t ALL_VECTORS = PAIR * WIDTH / PER_VECTOR;
constexpr int64_t TILE = VECTORS * PER_VECTOR;
// Of a row: WIDTH, or twice that with separate sums of even and odd inputs.
constexpr int64_t NUM_SUMS = ALL_VECTORS * LANES;

struct Tiles {};

class Rows {
    template <class Number>
    using MultiplyTile = void(const Factor*, const Number*, int64_t, float*, int64_t, bool,
                              const T*, int64_t);
    Buffer<Factor> memory;
    Factor* numbers;
    int64_t num_rows;
    int64_t depth;
    alignas(64) float sums[MAX_ROWS * NUM_SUMS];
    alignas(64) Factor widened[BLOCK * WIDTH];

public:
    // Distance between adjacent lines of a row within a block.
    static constexpr int64_t NEXT_LINE = LINE;

    void shape(int64_t num_rows_, int64_t in_features) {
        num_rows = num_rows_;
        depth = in_features;
        numbers = memory.get(num_rows * round_up(depth, BLOCK));
    }

    // Return a row's inputs from `start`, the first input of a BLOCK.
    Factor* find(int64_t row, int64_t start) { return numbers + start * num_rows + row * BLOCK; }

    // Copy the rows. find_row(i) returns a pointer to row i.
    template <class FindRow>
    void pack(const FindRow& find_row, int64_t num_rows_, int64_t in_features) {
        shape(num_rows_, in_features);
        for (int64_t start = 0; start < depth; start += BLOCK)
            for (int64_t row = 0; row < num_rows; row++)
                std::copy_n(find_row(row) + start, std::min(BLOCK, depth - start),
                            find(row, start));
    }

    void multiply(const T* panel, const Epilogue& epilogue, T* output, int64_t output_stride) {
        sum_up(panel, 0, num_rows, sums, NUM_SUMS, false);
        for (int64_t row = 0; row < num_rows; row++) {
            float joined[WIDTH];
            if (NUM_SUMS > WIDTH) join(row, joined, false);
            epilogue.store(NUM_SUMS > WIDTH ? joined : &sums[row * WIDTH], output,
                           row * output_stride);
        }
    }

    void finish(int64_t) {}  // multiply() has no deferred epilogue

    // Store the sums of the rows from `first`, a multiple of ROWS, to `end`. With `is_added`, add
    // them to `output`.
    void multiply(const T* panel, int64_t first, int64_t end, float* output, int64_t stride,
                  bool is_added) {
        if (NUM_SUMS == WIDTH) return sum_up(panel, first, end - first, output, stride, is_added);
        sum_up(panel, first, end - first, sums, NUM_SUMS, false);
        for (int64_t row = 0; row < end - first; row++) join(row, output + row * stride, is_added);
    }

private:
    // While a block of the panel is multiplied, the next one is prefetched.
    void sum_up(const T* panel, int64_t first, int64_t num, float* output, int64_t stride,
                bool is_added) {
        int64_t num_tiles = round_up(num, ROWS) / ROWS;
        bool is_widened = !std::is_same_v<T, Factor> && num_tiles > FEW_TILES;
        for (int64_t start = 0; start < depth; start += BLOCK) {
            const T* block = panel + start * WIDTH;
            int64_t size = std::min(BLOCK, depth - start);
            if (is_widened) widen_block(block, size);
            for (int64_t tile = 0; tile < num_tiles; tile++) {
                int64_t row = num * tile / num_tiles;
                int64_t past = num * (tile + 1) / num_tiles;
                const T* next = block + (size + size * tile / num_tiles) * WIDTH;
                auto multiply = [&](const auto* weights) {
                    find_tile<ROWS>(past - row, weights)(find(first + row, start), weights, size,
                                                         output + row * stride, stride,
                                                         is_added || start > 0, next, num_tiles);
                };
                if (is_widened)
                    multiply(widened);
                else
                    multiply(block);
            }
        }
    }

    void join(int64_t row, float* output, bool is_added) const {
        const float* from = &sums[row * NUM_SUMS];
#pragma omp simd
        for (int64_t i = 0; i < WIDTH; i++) {
            float sum = NUM_SUMS == WIDTH ? from[i] : from[2 * i] + from[2 * i + 1];
            output[i] = is_added ? output[i] + sum : sum;
        }
    }

    void widen_block(const T* panel, int64_t size) {
        Factor* to = widened;
        for (int64_t first = 0; first < PAIR * WIDTH; first += TILE)
            for (int64_t pair = 0; pair < size / PAIR; pair++)
                for (int64_t i = 0; i < TILE; i += PER_VECTOR) {
                    *(Vector*)to = load_factors(panel + pair * PAIR * WIDTH + first + i);
                    to += PER_VECTOR;
                }
    }

    // Multiply M rows of x by `size` inputs of a panel or of a widened block. Meanwhile each of
    // num_tiles tiles prefetches its share of as many inputs of the panel, from `next`, a few lines
    // at a time, because a core can have few cache lines in flight.
    template <int M, class Number>
    static void multiply_tile(const Factor* x, const Number* weights, int64_t size, float* sums,
                              int64_t stride, bool is_added, const T* next, int64_t num_tiles) {
        constexpr bool IS_PANEL = std::is_same_v<Number, T>;
        // Few rows leave registers for more vectors.
        constexpr int V = M == 1   ? ALL_VECTORS
                          : M == 2 ? std::min(2 * VECTORS, ALL_VECTORS)
                                   : VECTORS;
        // One or two rows wait for memory, and bursts of prefetches would wait for each other.
        constexpr int64_t STEP = M <= 2 ? PAIR : LINE;
        // Prefetches that are due, in units of 1 / (ALL_VECTORS * num_tiles) lines.
        int64_t due = 0;
        for (int64_t first = 0; first < ALL_VECTORS; first += V) {
            const Number* from = weights + first * PER_VECTOR * (IS_PANEL ? 1 : size / PAIR);
            Vector tile[M][V] = {};
            for (int64_t start = 0; start < size; start += STEP) {
                due += WIDTH * V * STEP / LINE;
                while (due > 0) {
                    __builtin_prefetch(next, 0, IS_PANEL ? 3 : 2);
                    due -= ALL_VECTORS * num_tiles;
                    next += LINE;
                }
                for (int64_t i = start; i < std::min(start + STEP, size); i += PAIR) {
                    Vector columns[V];
                    for (int column = 0; column < V; column++)
                        columns[column] = load_factors(from + column * PER_VECTOR);
                    for (int row = 0; row < M; row++) {
                        Pair pair;
                        memcpy(&pair, x + row * BLOCK + i, sizeof pair);
                        for (int column = 0; column < V; column++)
                            tile[row][column] =
                                add_products(tile[row][column], pair, columns[column]);
                    }
                    from += IS_PANEL ? PAIR * WIDTH : TILE;
                }
            }
            for (int row = 0; row < M; row++)
                for (int column = 0; column < V; column++) {
                    float* sum = sums + row * stride + (first + column) * LANES;
                    if (is_added) tile[row][column] += load(sum);
                    memcpy(sum, &tile[row][column], sizeof(Vector));
                }
        }
    }

    // Return multiply_tile for 1 to M rows.
    template <int M, class Number>
    static MultiplyTile<Number>* find_tile(int64_t num_rows, const Number* weights) {
        if constexpr (M > 1)
            if (num_rows < M) return find_tile<M - 1>(num_rows, weights);
        return multiply_tile<M>;
    }
};
