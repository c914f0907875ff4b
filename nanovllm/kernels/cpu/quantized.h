// Multiplies rows of x by a panel of a quantized weight. layers/quantized.py specifies the numbers.
//
// A panel has a block for every group of inputs, and the blocks follow each other in memory:
//
//     scales  float [WIDTH]
//     zeros   int16 [WIDTH]
//     codes   [group_size / 2, WIDTH, 2], of 8 or 4 bits
//
// The codes of two inputs are a line. 8-bit codes are signed, so they and their zeros are relative
// to 128. Of the 64 4-bit codes of a line, code i is in word i % 16 of 16 bits, at bit i / 16 * 4, so
// that shifts and masks of whole vectors separate them.
#pragma once
#include "team.h"

constexpr int64_t MAX_GROUP_SIZE = 128;

typedef int16_t Codes __attribute__((vector_size(sizeof(Vector))));
typedef int32_t Integers __attribute__((vector_size(sizeof(Vector))));
constexpr int64_t VECTORS_PER_LINE = WIDTH / LANES;  // a vector has both inputs of LANES outputs

struct Block {
    const float* scales;
    const int16_t* zeros;
    const uint8_t* codes;

    explicit Block(const void* block)
        : scales((const float*)block),
          zeros((const int16_t*)(scales + WIDTH)),
          codes((const uint8_t*)(zeros + WIDTH)) {}

    Integers load_zeros(int64_t first) const {
        typedef int16_t Zeros __attribute__((vector_size(sizeof(Vector) / 2)));
        Zeros narrow;
        memcpy(&narrow, zeros + first, sizeof narrow);
        return __builtin_convertvector(narrow, Integers);
    }
};

// Load a vector of a line. With 16 BITS, the codes have been loaded and stored before.
template <int BITS>
static Codes load_codes(const uint8_t* line, int64_t vector) {
    constexpr int64_t NUM = 2 * LANES;
    Codes codes;
    if constexpr (BITS == 16) {
        memcpy(&codes, line + vector * sizeof codes, sizeof codes);
    } else if constexpr (BITS == 8) {
        // gcc would widen in two halves.
#if defined(__AVX512BW__)
        return (Codes)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)line + vector));
#elif defined(__AVX2__) && !defined(__AVX512F__)
        return (Codes)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)line + vector));
#else
        for (int64_t i = 0; i < NUM; i++) codes[i] = int8_t(line[vector * NUM + i]);
#endif
    } else {
        constexpr int64_t WORDS = 16;
        int64_t first = vector * NUM;
        for (int64_t i = 0; i < NUM; i += WORDS)
            memcpy((int16_t*)&codes + i, line + first % WORDS * 2,
                   std::min(WORDS, NUM) * sizeof(int16_t));
        // One shift for all words is faster than one for each.
        if constexpr (NUM <= WORDS) return codes >> int(first / WORDS * 4) & 15;
        Codes shifts;
        for (int64_t i = 0; i < NUM; i++) shifts[i] = (first + i) / WORDS * 4;
        return codes >> shifts & 15;
    }
    return codes;
}

// Write a row of a weight: an output of a panel.
static void dequantize_row(const Weight& weight, const T* panel, int64_t column, T* row,
                           int64_t in_features) {
    for (int64_t start = 0; start < in_features; start += weight.group_size) {
        Block block((const uint8_t*)panel + start / weight.group_size * weight.block_size());
        float centered[MAX_GROUP_SIZE];
        for (int64_t i = 0; i < weight.group_size; i += 2) {
            const uint8_t* line = block.codes + i / 2 * 2 * WIDTH * weight.bits / 8;
            int first;
            int second;
            if (weight.bits == 8) {
                first = int8_t(line[2 * column]);
                second = int8_t(line[2 * column + 1]);
            } else {
                const uint8_t* words = line + column % 8 * 4 + column / 16;
                int shift = column / 8 % 2 * 4;
                first = words[0] >> shift & 15;
                second = words[2] >> shift & 15;
            }
            centered[i] = first - block.zeros[column];
            centered[i + 1] = second - block.zeros[column];
        }
        int64_t size = std::min(weight.group_size, in_features - start);
        for (int64_t i = 0; i < size; i++) row[start + i] = centered[i] * block.scales[column];
    }
}

#if defined(T_IS_16_BITS) && !defined(USE_AMX) &&                                            \
    (defined(__AVX512BW__) || defined(__AVX2__) && !defined(__AVX512F__) ||                  \
     defined(__SSE2__) && !defined(__AVX__))
// Multiplies in integers. Each group of inputs of a row becomes integers of 16 bits, with one scale.
// Their error, 2^-16 of the largest number in the group, is below the rounding of 16-bit dtypes. One
// instruction then adds the products of two inputs and two codes to each sum of a vector, twice as
// many as in float, and codes of 8 bits are widened in one instruction.
//
//     output = sum over groups of  scale * x_scale * (sum(code * x_code) - zero * sum(x_code))
//
// Sums of a group are exact, and groups are added in order, so a row does not depend on the others.
// For few rows, codes are widened as they are read. For many rows, the codes of a group are widened
// once into the L1 cache.
class QuantizedRows {
    static constexpr int64_t FEW_TILES = 1;
    static constexpr int64_t TILE_VECTORS = std::min<int64_t>(2, VECTORS_PER_LINE);
    static constexpr int64_t AHEAD = 1 << 12;  // bytes from a block to what is prefetched meanwhile
    Buffer<int16_t> number_memory;
    Buffer<float> scale_memory;
    Buffer<int32_t> total_memory;
    int16_t* numbers;  // [num_groups, num_rows, group_size]
    float* scales;     // [num_groups, num_rows]
    int32_t* totals;   // [num_groups, num_rows], the sums of numbers
    int64_t num_rows;
    int64_t num_groups;
    alignas(64) float sums[MAX_ROWS * WIDTH];
    alignas(64) Codes widened[MAX_GROUP_SIZE / 2 * VECTORS_PER_LINE];

public:
    Weight weight;

    void pack(const auto& find_row, int64_t num_rows_, int64_t in_features) {
        int64_t group_size = weight.group_size;
        num_rows = num_rows_;
        num_groups = round_up(in_features, group_size) / group_size;
        numbers = number_memory.get(num_groups * num_rows * group_size);
        scales = scale_memory.get(num_groups * num_rows);
        totals = total_memory.get(num_groups * num_rows);
        for (int64_t group = 0; group < num_groups; group++)
            for (int64_t row = 0; row < num_rows; row++) {
                int64_t start = group * group_size;
                int64_t i = group * num_rows + row;
                quantize(find_row(row) + start, std::min(group_size, in_features - start),
                         numbers + i * group_size, scales[i], totals[i]);
            }
    }

    void multiply(const T* panel, const Epilogue& epilogue, T* output, int64_t output_stride) {
        auto sum_up = weight.bits == 4 ? &QuantizedRows::sum_up<4> : &QuantizedRows::sum_up<8>;
        (this->*sum_up)((const uint8_t*)panel);
        for (int64_t row = 0; row < num_rows; row++)
            epilogue.store(&sums[row * WIDTH], output, row * output_stride);
    }

    void finish(int64_t) {}  // multiply() has no deferred epilogue

private:
    // The bits of absolute values compare like the values, and those of NaN are the highest. If a
    // group contains NaN or infinity, that is its scale, so all outputs of the row are invalid.
    void quantize(const T* x, int64_t size, int16_t* to, float& scale, int32_t& total) {
        constexpr float LARGEST = 32767;
        constexpr float TINY = 0x1p-100f;  // the inverse of smaller numbers would overflow
        constexpr float NO_FRACTION = 0x1.8p23f;
        typedef int16_t Numbers __attribute__((vector_size(sizeof(Vector) / 2)));
        Integers highest = {};
        for (int64_t i = 0; i < size; i += LANES) {
            Integers bits = bit_cast<Integers>(widen(x + i, size - i)) & 0x7FFFFFFF;
            highest = bits > highest ? bits : highest;
        }
        int32_t most = 0;
        for (int64_t i = 0; i < LANES; i++) most = std::max<int32_t>(most, highest[i]);
        float largest = bit_cast<float>(most);
        float inverse = largest > TINY ? LARGEST / largest : 0;
        scale = largest / LARGEST;
        Integers sum = {};
        for (int64_t i = 0; i < weight.group_size; i += LANES) {
            Vector wide = i < size ? widen(x + i, size - i) : Vector{};
            Vector shifted = wide * inverse + NO_FRACTION;
            Integers rounded = bit_cast<Integers>(shifted) - bit_cast<int32_t>(NO_FRACTION);
            sum += rounded;
            Numbers narrow = __builtin_convertvector(rounded, Numbers);
            memcpy(to + i, &narrow, sizeof narrow);
        }
        total = 0;
        for (int64_t i = 0; i < LANES; i++) total += sum[i];
    }

    template <int BITS>
    void sum_up(const uint8_t* panel) {
        int64_t num_tiles = round_up(num_rows, ROWS) / ROWS;
        int64_t block_size = weight.block_size();
        bool is_widened = num_tiles > FEW_TILES;
        for (int64_t group = 0; group < num_groups; group++) {
            const uint8_t* at = panel + group * block_size;
            Block block(at);
            if (is_widened) {
                for (int64_t i = 0; i < weight.group_size / 2 * VECTORS_PER_LINE; i++)
                    widened[i] = load_codes<BITS>(
                        block.codes + i / VECTORS_PER_LINE * 2 * WIDTH * BITS / 8,
                        i % VECTORS_PER_LINE);
                block.codes = (const uint8_t*)widened;
            }
            for (int64_t tile = 0; tile < num_tiles; tile++) {
                int64_t row = num_rows * tile / num_tiles;
                int64_t past = num_rows * (tile + 1) / num_tiles;
                auto multiply = is_widened ? find_tile<16, ROWS>(past - row)
                                           : find_tile<BITS, ROWS>(past - row);
                const uint8_t* next = at + AHEAD + block_size * tile / num_tiles;
                (this->*multiply)(block, group, row, next, block_size / num_tiles);
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

    using MultiplyTile = void (QuantizedRows::*)(const Block&, int64_t, int64_t, const uint8_t*,
                                                 int64_t);

    // Multiply M rows by a block. Meanwhile prefetch `num_bytes` from `next`, a few at a time,
    // because a core can have few cache lines in flight.
    template <int BITS, int M>
    void multiply_tile(const Block& block, int64_t group, int64_t row, const uint8_t* next,
                       int64_t num_bytes) {
        // Few rows leave registers for more vectors.
        constexpr int64_t V = M <= 3 ? VECTORS_PER_LINE : TILE_VECTORS;
        int64_t group_size = weight.group_size;
        int64_t first_row = group * num_rows + row;
        int64_t step = num_bytes * V / (VECTORS_PER_LINE * group_size / 2);
        const int16_t* x = numbers + first_row * group_size;
        for (int64_t first = 0; first < VECTORS_PER_LINE; first += V) {
            Integers tile[M][V];
            for (int64_t column = 0; column < V; column++) {
                Integers zeros = block.load_zeros((first + column) * LANES);
                for (int64_t m = 0; m < M; m++) tile[m][column] = -totals[first_row + m] * zeros;
            }
            const uint8_t* line = block.codes;
            for (int64_t i = 0; i < group_size; i += 2) {
                __builtin_prefetch(next, 0, BITS == 16 ? 2 : 3);
                next += step;
                Codes codes[V];
                for (int64_t column = 0; column < V; column++)
                    codes[column] = load_codes<BITS>(line, first + column);
                for (int64_t m = 0; m < M; m++) {
                    int32_t pair;
                    memcpy(&pair, x + m * group_size + i, sizeof pair);
                    for (int64_t column = 0; column < V; column++)
                        tile[m][column] =
                            add_products(tile[m][column], Integers{} + pair, codes[column]);
                }
                line += 2 * WIDTH * BITS / 8;
            }
            for (int64_t column = 0; column < V; column++) {
                Vector scale = load(block.scales + (first + column) * LANES);
                for (int64_t m = 0; m < M; m++) {
                    float* sum = &sums[(row + m) * WIDTH + (first + column) * LANES];
                    Vector total = group > 0 ? load(sum) : Vector{};
                    total += __builtin_convertvector(tile[m][column], Vector) *
                             (scale * scales[first_row + m]);
                    memcpy(sum, &total, sizeof total);
                }
            }
        }
    }

    // Return multiply_tile for 1 to M rows.
    template <int BITS, int M>
    static MultiplyTile find_tile(int64_t num) {
        if constexpr (M > 1)
            if (num < M) return find_tile<BITS, M - 1>(num);
        return &QuantizedRows::multiply_tile<BITS, M>;
    }
};
#else
// Dequantizes a panel into a buffer, which the kernel for panels of T multiplies.
class QuantizedRows {
    Buffer<T> memory;
    Rows rows;
    int64_t num_groups;

public:
    Weight weight;

    void pack(const auto& find_row, int64_t num_rows, int64_t in_features) {
        num_groups = round_up(in_features, weight.group_size) / weight.group_size;
        rows.pack(find_row, num_rows, in_features);
    }

    void multiply(const T* panel, const Epilogue& epilogue, T* output, int64_t output_stride) {
        T* dequantized = memory.get(num_groups * weight.group_size * WIDTH);
        auto dequantize =
            weight.bits == 4 ? &QuantizedRows::dequantize<4> : &QuantizedRows::dequantize<8>;
        for (int64_t group = 0; group < num_groups; group++)
            (this->*dequantize)(Block((const uint8_t*)panel + group * weight.block_size()),
                                dequantized + group * weight.group_size * WIDTH);
        rows.multiply(dequantized, epilogue, output, output_stride);
    }

    void finish(int64_t num) { rows.finish(num); }

private:
    template <int BITS>
    void dequantize(const Block& block, T* to) {
        for (int64_t vector = 0; vector < VECTORS_PER_LINE; vector++) {
            int64_t column = vector * LANES;
            Vector scale = load(block.scales + column);
            Vector zero = __builtin_convertvector(block.load_zeros(column), Vector);
            for (int64_t i = 0; i < weight.group_size; i += 2) {
                const uint8_t* line = block.codes + i * WIDTH * BITS / 8;
                Integers both = (Integers)load_codes<BITS>(line, vector);
                Vector even = __builtin_convertvector(both << 16 >> 16, Vector);
                Vector odd = __builtin_convertvector(both >> 16, Vector);
                store((even - zero) * scale, (odd - zero) * scale, to + i * WIDTH, column);
            }
        }
    }

    // Store an even and an odd input of LANES outputs in the order of a panel.
    static void store(Vector even, Vector odd, T* to, int64_t column) {
        if constexpr (PAIR == 1) {
            narrow(even, to + column);
            narrow(odd, to + WIDTH + column);
        } else {
            T evens[LANES];
            T odds[LANES];
            narrow(even, evens);
            narrow(odd, odds);
            for (int64_t i = 0; i < LANES; i++) {
                to[PAIR * (column + i)] = evens[i];
                to[PAIR * (column + i) + 1] = odds[i];
            }
        }
    }
};
#endif
