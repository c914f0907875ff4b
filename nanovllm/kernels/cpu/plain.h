// Rows of x times a panel with vectors of floats, on any processor: a vector of the panel is widened and multiplied with a
// pair of inputs, over and over, which gives sums of even and of odd inputs side by side, added to each other in the end.
// AVX-512 has an instruction that takes pairs of bfloat16 as they are, and adds both products to one sum.
//
// Several rows share BLOCK inputs of the panel, which are widened once, into the first-level cache, and put in the order
// in which they are read: [2 * WIDTH / TILE, BLOCK / 2, TILE], for the TILE numbers that VECTORS vectors hold.
#pragma once
#include <array>
#include <type_traits>
#include <utility>

#if defined(T_IS_BFLOAT16) && defined(__AVX512BF16__)
using Number = bfloat16;
using Pair = int32_t;
constexpr int64_t ROWS = 12, VECTORS = 2;  // of 32 registers, 24 hold sums, 2 weights and one a pair
static void multiply_add(Vector& sum, Vector pairs, Vector weights) {
    sum = (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pairs, (__m512bh)weights);
}
#else
using Number = float;
using Pair = int64_t;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int64_t ROWS = 6, VECTORS = 4;  // of 32 registers, 29
#else
constexpr int64_t ROWS = 6, VECTORS = 2;  // of 16 registers, 15
#endif
static void multiply_add(Vector& sum, Vector pairs, Vector weights) { sum += pairs * weights; }
static Vector load(const T* from) { return widen(from); }
#endif
static Vector load(const Number* from) {
    Vector numbers;
    memcpy(&numbers, from, sizeof numbers);
    return numbers;
}

constexpr int64_t MAX_ROWS = 252, CACHED_BYTES = 1 << 19, BLOCK = 256;
constexpr int64_t LANES = sizeof(Vector) / sizeof(Number), ALL_VECTORS = 2 * WIDTH / LANES, TILE = VECTORS * LANES;

struct Tiles {
    static constexpr bool allowed = true;
};

class Rows {
    std::vector<Number> numbers;
    int64_t num_rows, depth;
    Vector sums[MAX_ROWS][ALL_VECTORS];
    alignas(64) Number block[BLOCK * WIDTH];

  public:
    void pack(const T* x, int64_t stride, int64_t num_rows_, int64_t in_features) {
        num_rows = num_rows_, depth = in_features;
        if ((int64_t)numbers.size() < num_rows * depth) numbers.resize(num_rows * depth);
        for (int64_t start = 0; start < depth; start += BLOCK) {
            int64_t size = std::min(BLOCK, depth - start);
            for (int64_t row = 0; row < num_rows; row++)
                std::copy_n(x + row * stride + start, size, &numbers[start * num_rows + row * size]);
        }
    }

    void multiply(const T* panel, const Epilogue& epilogue, T* output, int64_t output_stride) {
        sum_up(panel);
        for (int64_t row = 0; row < num_rows; row++) {
            float joined[WIDTH];
            epilogue.store(join(row, joined), output, row * output_stride);
        }
    }

    // The sums as they are, or, with `is_added`, added to what is there.
    void multiply(const T* panel, float* output, int64_t output_stride, bool is_added) {
        sum_up(panel);
        for (int64_t row = 0; row < num_rows; row++, output += output_stride) {
            float joined[WIDTH];
            const float* from = join(row, joined);
            for (int64_t i = 0; i < WIDTH; i++) output[i] = is_added ? output[i] + from[i] : from[i];
        }
    }

  private:
    const float* join(int64_t row, float* joined) const {
        const float* from = (const float*)sums[row];
        if (std::is_same_v<T, Number>) return from;
        for (int64_t i = 0; i < WIDTH; i++) joined[i] = from[2 * i] + from[2 * i + 1];
        return joined;
    }

    const Number* widen(const T* panel, int64_t size) {
        if (std::is_same_v<T, Number>) return reinterpret_cast<const Number*>(panel);
        Number* to = block;
        for (int64_t first = 0; first < 2 * WIDTH; first += TILE)
            for (int64_t pair = 0; pair < size / 2; pair++, to += TILE)
                for (int64_t i = 0; i < TILE; i += LANES) {
                    Vector wide = load(panel + pair * 2 * WIDTH + first + i);
                    memcpy(to + i, &wide, sizeof wide);
                }
        return block;
    }

    // multiply_tile of 1, 2, ... rows.
    template <size_t... M>
    static constexpr auto find_tiles(std::index_sequence<M...>) {
        return std::array{&multiply_tile<int(M + 1), VECTORS, Number>...};
    }

    // Adds M rows of x, times V vectors of each pair of inputs of the weights, to the sums.
    template <int M, int V, class Weight>
    static void multiply_tile(const Number* x, const Weight* weights, int64_t size, Vector* sums) {
        typedef Pair Pairs __attribute__((vector_size(sizeof(Vector))));
        Vector tile[M][V];
        for (int row = 0; row < M; row++)
            for (int column = 0; column < V; column++) tile[row][column] = sums[row * ALL_VECTORS + column];
        for (int64_t i = 0; i < size; i += 2, weights += V * LANES) {
            Vector columns[V];
            for (int column = 0; column < V; column++) columns[column] = load(weights + column * LANES);
            for (int row = 0; row < M; row++) {
                Pair pair;
                memcpy(&pair, x + row * size + i, sizeof pair);
                for (int column = 0; column < V; column++)
                    multiply_add(tile[row][column], (Vector)(Pairs{} + pair), columns[column]);
            }
        }
        for (int row = 0; row < M; row++)
            for (int column = 0; column < V; column++) sums[row * ALL_VECTORS + column] = tile[row][column];
    }

    void sum_up(const T* panel) {
        static constexpr auto of_rows = find_tiles(std::make_index_sequence<ROWS>());
        memset(sums, 0, num_rows * sizeof *sums);
        for (int64_t start = 0; start < depth; start += BLOCK, panel += BLOCK * WIDTH) {
            int64_t size = std::min(BLOCK, depth - start), num_tiles = round_up(num_rows, ROWS) / ROWS;
            if (num_rows == 1) {
                multiply_tile<1, ALL_VECTORS>(&numbers[start], panel, size, sums[0]);
                continue;
            }
            const Number* weights = widen(panel, size);
            for (int64_t tile = 0; tile < num_tiles; tile++) {
                int64_t row = num_rows * tile / num_tiles, end = num_rows * (tile + 1) / num_tiles;
                for (int64_t i = size * tile / num_tiles; i < size * (tile + 1) / num_tiles; i++)
                    __builtin_prefetch(panel + (size + i) * WIDTH, 0, 2);
                for (int64_t i = 0; i < ALL_VECTORS / VECTORS; i++)
                    of_rows[end - row - 1](&numbers[start * num_rows + row * size], weights + i * TILE * size / 2, size,
                                           &sums[row][i * VECTORS]);
            }
        }
    }
};
