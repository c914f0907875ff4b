// Multiplies rows of x by a panel of a quantized weight, in integers, because converting codes to
// floats would take longer than multiplying them. This is for 16-bit dtypes, except for bfloat16 on
// processors that multiply pairs of it. One instruction multiplies two inputs by two codes for each
// sum of a vector. Each group of inputs of a row becomes planes of integers of 16 bits, with a
// scale that is a power of two:
//
//     x = scale * (plane 0 + plane 1 / 2^15 + plane 2 / 2^30)
//
// Plane 0 has the 15 leading bits relative to the largest number of the group, and each further one
// the next 15. Together they hold every float16, and every bfloat16 that is not below 2^-37 of the
// largest, so a large number does not round its neighbors. An output is
//
//     sum over groups and planes of  (sum(code * x_code) - zero * sum(x_code)) * x_scale * scale
//
// The difference is an exact integer. Most numbers are exact in plane 0, so of the further planes
// often only the pairs that are not zero are multiplied. Groups and planes are added in order, so
// the result for a row does not depend on the other rows. The first tile of rows keeps the codes of
// a block, widened to 16 bits, for the other tiles.
#pragma once
#include "tiled_rows.h"

class QuantizedRows : public TiledRows<QuantizedRows> {
    friend TiledRows;
    static constexpr int64_t NUM_PLANES = 3;
    // If more than 1 / DENSE of the pairs are not zero, all are multiplied.
    static constexpr int64_t DENSE = 4;
    static constexpr float RATIO = 0x1p15f;  // ratio of the scales of two planes

    struct Plane {
        Buffer<int16_t> code_memory;
        Buffer<int32_t> total_memory;
        Buffer<uint64_t> pair_memory;
        int16_t* codes;   // [num_groups, num_rows, group_size]
        int32_t* totals;  // [num_groups, num_rows], sums of codes
        uint64_t* pairs;  // [num_groups, num_rows], a bit for each pair that is not zero

        void shape(int64_t num, int64_t group_size) {
            codes = code_memory.get(num * group_size);
            totals = total_memory.get(num);
            pairs = pair_memory.get(num);
        }
    };
    static_assert(MAX_GROUP_SIZE / 2 <= 64);  // bits of `pairs`

    Plane planes[NUM_PLANES];
    Buffer<float> scale_memory;
    float* x_scales;  // [num_groups, num_rows]
    int64_t num_rows;
    int64_t num_groups;
    alignas(64) float sums[MAX_ROWS * WIDTH];
    alignas(64) int16_t kept[MAX_GROUP_SIZE * WIDTH];  // codes of a block, line by line

public:
    Weight weight;

    void pack(const auto& find_row, int64_t num_rows_, int64_t in_features) {
        int64_t group_size = weight.group_size;
        num_rows = num_rows_;
        num_groups = round_up(in_features, group_size) / group_size;
        for (Plane& plane : planes) plane.shape(num_groups * num_rows, group_size);
        x_scales = scale_memory.get(num_groups * num_rows);
        for (int64_t group = 0; group < num_groups; group++)
            for (int64_t row = 0; row < num_rows; row++) {
                int64_t start = group * group_size;
                quantize(find_row(row) + start, std::min(group_size, in_features - start),
                         group * num_rows + row);
            }
    }

private:
    // Quantize `size` numbers, the i-th group of a row in the order of x_scales.
    void quantize(const T* x, int64_t size, int64_t i) {
        constexpr int32_t INFINITE = 0x7F800000;
        constexpr int32_t FRACTION_BITS = 23;
        constexpr int32_t LEADING_BITS = 14 << FRACTION_BITS;  // bits of plane 0 after the first
        // 2^-82. Below it, the scale of the last plane would not be a normal float.
        constexpr int32_t TINY = 0x16800000;
        // The bits of absolute values compare like the values, and those of NaN are the highest.
        Integers highest = {};
        for (int64_t j = 0; j < size; j += LANES) {
            Integers bits = bit_cast<Integers>(widen(x + j, size - j)) & 0x7FFFFFFF;
            highest = bits > highest ? bits : highest;
        }
        int32_t most = 0;
        for (int64_t lane = 0; lane < LANES; lane++) most = std::max<int32_t>(most, highest[lane]);
        float scale = bit_cast<float>((std::max(most, TINY) & INFINITE) - LEADING_BITS);
        alignas(64) float rest[MAX_GROUP_SIZE];
        for (int64_t j = 0; j < weight.group_size; j += LANES) {
            Vector wide = j < size ? widen(x + j, size - j) : Vector{};
            narrow(wide * (1 / scale), rest + j);
        }
        // NaN or infinity becomes the scale of its group, so all outputs of the row are invalid.
        x_scales[i] = most < INFINITE ? scale : bit_cast<float>(most);
        bool is_any_left = true;
        for (Plane& plane : planes) {
            plane.pairs[i] = 0;
            plane.totals[i] = 0;
            if (is_any_left)
                is_any_left = fill(plane, i, rest);
            else
                std::fill_n(plane.codes + i * weight.group_size, weight.group_size, 0);
        }
    }

    // Round `rest` to the i-th group of a plane. Leave the remainder for the next plane, and return
    // whether there is any.
    bool fill(Plane& plane, int64_t i, float* rest) {
        constexpr float NO_FRACTION = 0x1.8p23f;
        int64_t group_size = weight.group_size;
        int16_t* to = plane.codes + i * group_size;
        Integers sums = {};
        Integers is_left = {};
        for (int64_t j = 0; j < group_size; j += LANES) {
            Vector shifted = load(rest + j) + NO_FRACTION;
            Integers codes = bit_cast<Integers>(shifted) - bit_cast<int32_t>(NO_FRACTION);
            Vector left = (load(rest + j) - (shifted - NO_FRACTION)) * RATIO;
            sums += codes;
            is_left |= left != 0;
            narrow(left, rest + j);
            Shorts low = __builtin_convertvector(codes, Shorts);
            memcpy(to + j, &low, sizeof low);
        }
        bool is_any_left = false;
        for (int64_t lane = 0; lane < LANES; lane++) {
            plane.totals[i] += sums[lane];
            is_any_left |= is_left[lane] != 0;
        }
        for (int64_t pair = 0; pair < group_size / 2; pair++)
            plane.pairs[i] |= uint64_t((to[2 * pair] | to[2 * pair + 1]) != 0) << pair;
        return is_any_left;
    }

    template <int BITS>
    void sum_up(const uint8_t* panel) {
        Tiling tiling(num_rows);
        int64_t block_size = weight.block_size();
        int64_t num_pairs = weight.group_size / 2;
        int64_t bytes_per_line = block_size / tiling.num_tiles / num_pairs;
        for (int64_t group = 0; group < num_groups; group++) {
            Block block(panel + group * block_size);
            const uint8_t* next = panel + group * block_size + BYTES_AHEAD;
            int64_t row = 0;
            for (int64_t tile = 0; tile < tiling.num_tiles; tile++) {
                int64_t size = tiling.size(tile);
                auto multiply = choose<BITS>(tiling, tile);
                (this->*multiply)(block, planes[0], group, row, 1, next, bytes_per_line);
                float unit = 1;
                for (int64_t plane = 1; plane < NUM_PLANES; plane++) {
                    unit /= RATIO;
                    const uint64_t* pairs = planes[plane].pairs + group * num_rows + row;
                    int64_t num = 0;
                    for (int64_t m = 0; m < size; m++) num += __builtin_popcountll(pairs[m]);
                    if (DENSE * num > size * num_pairs)
                        (this->*multiply)(block, planes[plane], group, row, unit, next, 0);
                    else
                        for (int64_t m = 0; m < size; m++)
                            if (pairs[m])
                                multiply_pairs<BITS>(block, planes[plane], group, row + m, unit);
                }
                row += size;
                next += bytes_per_line * num_pairs;
            }
        }
    }

    // For each sum, add the products of two inputs and two codes.
    static Integers add_products(Integers sum, Integers pair, Codes codes) {
#if defined(__AVX512VNNI__)
        return (Integers)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)pair, (__m512i)codes);
#elif defined(__AVX512BW__)
        return sum + (Integers)_mm512_madd_epi16((__m512i)pair, (__m512i)codes);
#elif defined(__AVX2__)
        return sum + (Integers)_mm256_madd_epi16((__m256i)pair, (__m256i)codes);
#else
        return sum + (Integers)_mm_madd_epi16((__m128i)pair, (__m128i)codes);
#endif
    }

    // Add the products of a group, whose codes are relative to 0 in `tile`, to the sums of a row.
    void add(const Block& block, const Plane& plane, int64_t group, int64_t row, float unit,
             int64_t output, Integers tile) {
        int64_t i = group * num_rows + row;
        float* sum = &sums[row * WIDTH + output];
        Integers products = tile - block.load_zeros(output) * plane.totals[i];
        Vector scale = load(block.scales + output) * (x_scales[i] * unit);
        Vector total = load(sum) + __builtin_convertvector(products, Vector) * scale;
        memcpy(sum, &total, sizeof total);
    }

    // Multiply M rows of a plane by a block. Read the codes from `kept` if they have 16 bits, and
    // otherwise write them there if the tile KEEPS them. Meanwhile prefetch from `next`, a few
    // bytes for every line of the block, because a core can have few cache lines in flight.
    template <int BITS, bool KEEPS, int M>
    void multiply_tile(const Block& block, const Plane& plane, int64_t group, int64_t row,
                       float unit, const uint8_t* next, int64_t bytes_per_line) {
        // Few rows leave registers for more vectors.
        constexpr int64_t V = std::min<int64_t>(VECTORS_PER_LINE, M == 1 ? 8 : M <= 3 ? 4 : 2);
        int64_t group_size = weight.group_size;
        int64_t step = bytes_per_line * V / VECTORS_PER_LINE;
        const int16_t* x = plane.codes + (group * num_rows + row) * group_size;
        for (int64_t first = 0; first < VECTORS_PER_LINE; first += V) {
            Integers tile[M][V] = {};
            const uint8_t* line = BITS == 16 ? (const uint8_t*)kept : block.codes;
            for (int64_t i = 0; i < group_size; i += 2) {
                __builtin_prefetch(next);
                next += step;
                Codes codes[V];
                for (int64_t column = 0; column < V; column++) {
                    codes[column] = load_codes<BITS>(line, first + column);
                    int16_t* to = kept + i * WIDTH + (first + column) * 2 * LANES;
                    if (KEEPS) memcpy(to, &codes[column], sizeof(Codes));
                }
                for (int64_t m = 0; m < M; m++) {
                    int32_t pair;
                    memcpy(&pair, x + m * group_size + i, sizeof pair);
                    for (int64_t column = 0; column < V; column++)
                        tile[m][column] =
                            add_products(tile[m][column], Integers{} + pair, codes[column]);
                }
                line += 2 * WIDTH * BITS / 8;
            }
            // Unrolled, because gcc would otherwise spill the tile.
#pragma GCC unroll 12
            for (int64_t m = 0; m < M; m++)
                for (int64_t column = 0; column < V; column++)
                    add(block, plane, group, row + m, unit, (first + column) * LANES,
                        tile[m][column]);
        }
    }

    // Multiply the pairs of a row of a plane that are not zero.
    template <int BITS>
    void multiply_pairs(const Block& block, const Plane& plane, int64_t group, int64_t row,
                        float unit) {
        int64_t i = group * num_rows + row;
        Integers tile[VECTORS_PER_LINE] = {};
        for (uint64_t pairs = plane.pairs[i]; pairs; pairs &= pairs - 1) {
            int64_t first = 2 * __builtin_ctzll(pairs);
            int32_t pair;
            memcpy(&pair, plane.codes + i * weight.group_size + first, sizeof pair);
            const uint8_t* line = block.codes + first * WIDTH * BITS / 8;
            for (int64_t vector = 0; vector < VECTORS_PER_LINE; vector++)
                tile[vector] = add_products(tile[vector], Integers{} + pair,
                                            load_codes<BITS>(line, vector));
        }
        for (int64_t vector = 0; vector < VECTORS_PER_LINE; vector++)
            add(block, plane, group, row, unit, vector * LANES, tile[vector]);
    }
};
