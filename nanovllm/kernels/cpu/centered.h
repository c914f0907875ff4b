// Multiplies rows of x by a panel of a quantized weight, with instructions for pairs of bfloat16.
// An output is
//
//     sum over groups of  sum(x * (code - zero)) * scale
//
// The differences are exact in bfloat16, which holds all integers up to 256. Inputs are multiplied
// as they are, so only sums are rounded, as in float32.
//
// Converting a line of codes takes as many instructions as multiplying several rows by it. The
// first tile of rows therefore keeps the converted codes of BLOCK inputs in the L1 cache for the
// other tiles. Codes are converted in the loop that multiplies them and not in a loop before it,
// because the processor has vector units that do not multiply and would otherwise be idle.
#pragma once
#include "tiled_rows.h"

// Loads the codes of a block as pairs of bfloat16, relative to their zeros.
template <int BITS>
struct Centered;

template <>
struct Centered<4> {
    Codes zeros[VECTORS_PER_LINE];
    Codes shifts[VECTORS_PER_LINE];

    explicit Centered(const Block& block) {
        __m512i all = _mm512_loadu_si512(block.zeros);
        for (int64_t vector = 0; vector < VECTORS_PER_LINE; vector++) {
            Codes twice;
            for (int64_t i = 0; i < 2 * LANES; i++) {
                twice[i] = vector * LANES + i / 2;
                shifts[vector][i] = 8 * vector + i / LANES * 4;
            }
            zeros[vector] = (Codes)_mm512_permutexvar_epi16((__m512i)twice, all);
        }
    }

    // Zeros are from 0 to 16 in all formats that checkpoints/ reads, so differences are from -16 to
    // 15. They are the indices of a table, modulo 32.
    Vector load(const uint8_t* line, int64_t vector) const {
        constexpr Integers TABLE = {
            // The upper halves of two floats in each number.
            0x3F800000, 0x40404000, 0x40A04080, 0x40E040C0,  //   0 ..   7
            0x41104100, 0x41304120, 0x41504140, 0x41704160,  //   8 ..  15
            int(0xC170C180), int(0xC150C160), int(0xC130C140), int(0xC110C120),  // -16 .. -9
            int(0xC0E0C100), int(0xC0A0C0C0), int(0xC040C080), int(0xBF80C000)};
        __m512i codes = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)line));
        Codes index = ((Codes)codes >> shifts[vector] & 15) - zeros[vector];
        return (Vector)_mm512_permutexvar_epi16((__m512i)index, (__m512i)TABLE);
    }
};

template <>
struct Centered<8> {
    static constexpr int32_t NO_FRACTION = 0x4B000000;  // 2^23: the lowest bits are an integer
    Vector zeros[VECTORS_PER_LINE];

    explicit Centered(const Block& block) {
        for (int64_t vector = 0; vector < VECTORS_PER_LINE; vector++)
            zeros[vector] = __builtin_convertvector(block.load_zeros(vector * LANES), Vector) +
                            (0x1p23f + 128);
    }

    // The even and the odd inputs become floats, whose upper halves are joined. Both use the same
    // constants, because otherwise the sums of a tile would not fit into the registers.
    Vector load(const uint8_t* line, int64_t vector) const {
        const __m256i* from = (const __m256i*)line + vector;
        Integers pairs = (Integers)_mm512_cvtepu16_epi32(_mm256_loadu_si256(from));
        // Inverting the sign adds 128.
        Vector even = (Vector)((pairs & 0xFF) ^ (NO_FRACTION | 0x80)) - zeros[vector];
        Vector odd = (Vector)((pairs >> 8) ^ (NO_FRACTION | 0x80)) - zeros[vector];
        Codes order;
        for (int64_t i = 0; i < 2 * LANES; i++) order[i] = i | 1 | (i % 2 * 2 * LANES);
        return (Vector)_mm512_permutex2var_epi16((__m512i)even, (__m512i)order, (__m512i)odd);
    }
};

template <>
struct Centered<16> {  // loads what the first tile has kept
    explicit Centered(const Block&) {}

    Vector load(const uint8_t* line, int64_t vector) const {
        return (Vector)_mm512_loadu_si512(line + vector * sizeof(Vector));
    }
};

// All tiles use the same numbers in the same order, so the result for a row does not depend on the
// other rows.
class QuantizedRows : public TiledRows<QuantizedRows> {
    friend TiledRows;
    Buffer<T> memory;
    T* numbers;  // [num_blocks, num_rows, BLOCK], where a block has whole groups
    int64_t num_rows;
    int64_t num_groups;
    int64_t groups_per_block;
    alignas(64) float sums[MAX_ROWS * WIDTH];
    alignas(64) T kept[BLOCK * WIDTH];  // codes of a block, line by line

public:
    Weight weight;

    void pack(const auto& find_row, int64_t num_rows_, int64_t in_features) {
        int64_t group_size = weight.group_size;
        num_rows = num_rows_;
        num_groups = round_up(in_features, group_size) / group_size;
        groups_per_block = BLOCK / group_size;
        int64_t step = groups_per_block * group_size;
        numbers = memory.get(round_up(in_features, step) / step * num_rows * BLOCK);
        T* to = numbers;
        for (int64_t start = 0; start < in_features; start += step)
            for (int64_t row = 0; row < num_rows; row++, to += BLOCK) {
                int64_t size = std::min(step, in_features - start);
                std::fill(std::copy_n(find_row(row) + start, size, to), to + step, T{});
            }
    }

private:
    template <int BITS>
    void sum_up(const uint8_t* panel) {
        Tiling tiling(num_rows);
        int64_t block_size = weight.block_size();
        int64_t group_size = weight.group_size;
        int64_t bytes_per_line = block_size / tiling.num_tiles / (group_size / 2);
        const T* x = numbers;
        for (int64_t start = 0; start < num_groups; start += groups_per_block) {
            int64_t num = std::min(groups_per_block, num_groups - start);
            const uint8_t* blocks = panel + start * block_size;
            const uint8_t* next = blocks + BYTES_AHEAD;
            float* sum = sums;
            for (int64_t tile = 0; tile < tiling.num_tiles; tile++) {
                auto multiply = choose<BITS>(tiling, tile);
                for (int64_t group = 0; group < num; group++) {
                    multiply(Block(blocks + group * block_size), group_size, x + group * group_size,
                             sum, kept + group * group_size * WIDTH, next, bytes_per_line);
                    next += bytes_per_line * (group_size / 2);
                }
                x += tiling.size(tile) * BLOCK;
                sum += tiling.size(tile) * WIDTH;
            }
        }
    }

    // Multiply M rows by a block, and add the products to `sums`. Read the codes from `kept` if
    // they have 16 bits, and otherwise write them there if the tile KEEPS them. Meanwhile prefetch
    // from `next`, a few bytes for every line of the block, because a core can have few cache lines
    // in flight.
    template <int BITS, bool KEEPS, int M>
    static void multiply_tile(const Block& block, int64_t group_size, const T* x, float* sums,
                              T* kept, const uint8_t* next, int64_t bytes_per_line) {
        constexpr int64_t V = VECTORS_PER_LINE;
        const uint8_t* line = BITS == 16 ? (const uint8_t*)kept : block.codes;
        Centered<BITS> codes(block);
        Vector tile[M][V] = {};
        // Inlined and unrolled, because gcc would otherwise keep the tile in memory.
        auto multiply_line = [&](auto is_last) __attribute__((always_inline)) {
            __builtin_prefetch(next);
            next += bytes_per_line;
            Vector columns[V];
            Vector scales[V];
            for (int64_t column = 0; column < V; column++) {
                columns[column] = codes.load(line, column);
                if (is_last) scales[column] = load(block.scales + column * LANES);
                if (KEEPS) memcpy(kept + 2 * LANES * column, &columns[column], sizeof(Vector));
            }
            line += 2 * WIDTH * BITS / 8;
            if (KEEPS) kept += 2 * WIDTH;
#pragma GCC unroll 12
            for (int64_t m = 0; m < M; m++) {
                Pair pair;
                memcpy(&pair, x + m * BLOCK, sizeof pair);
                for (int64_t column = 0; column < V; column++)
                    tile[m][column] = add_products(tile[m][column], pair, columns[column]);
                if (is_last) add(tile[m], scales, sums + m * WIDTH);
            }
            x += 2;
        };
        for (int64_t i = 2; i < group_size; i += 2) multiply_line(std::false_type());
        multiply_line(std::true_type());
    }

    // Add the products of a group to the sums of a row.
    static void add(const Vector* products, const Vector* scales, float* sums) {
        for (int64_t i = 0; i < VECTORS_PER_LINE; i++) {
            float* sum = sums + i * LANES;
            // An intrinsic, so that all tiles round alike.
            __m512 total = _mm512_fmadd_ps((__m512)products[i], (__m512)scales[i],
                                           _mm512_loadu_ps(sum));
            _mm512_storeu_ps(sum, total);
        }
        // Stores take two cycles each. gcc must not collect them behind the products of all rows.
        asm volatile("" ::: "memory");
    }
};
