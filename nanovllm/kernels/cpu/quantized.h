// Multiplies rows of x by a panel of a quantized weight. layers/quantized.py specifies the numbers.
//
// A panel has a block for every group of inputs, and the blocks follow each other in memory:
//
//     scales  float [WIDTH]
//     zeros   int16 [WIDTH]
//     codes   [group_size / 2, WIDTH, 2], of 8 or 4 bits
//
// The codes of two inputs are a line. 8-bit codes are signed, so they and their zeros are relative
// to 128. A line of 4-bit codes has 16 words of 16 bits. Code i is in word i % 16, at bit i / 16 *
// 4. Shifts and masks of whole vectors separate them.
#pragma once
#include "team.h"

constexpr int64_t MAX_GROUP_SIZE = 128;
constexpr int64_t BYTES_AHEAD = 1 << 12;  // distance of prefetches

typedef int16_t Codes __attribute__((vector_size(sizeof(Vector))));
typedef int16_t Shorts __attribute__((vector_size(sizeof(Vector) / 2)));
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

    Vector load_zeros(int64_t first) const {
        Shorts narrow;
        memcpy(&narrow, zeros + first, sizeof narrow);
        return __builtin_convertvector(__builtin_convertvector(narrow, Integers), Vector);
    }
};

// Load a vector of a line.
template <int BITS>
static Codes load_codes(const uint8_t* line, int64_t vector) {
    constexpr int64_t NUM = 2 * LANES;
    Codes codes;
    if constexpr (BITS == 8) {
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
#if defined(__AVX512F__)
        Codes shifts;
        for (int64_t i = 0; i < NUM; i++) shifts[i] = (first + i) / WORDS * 4;
        codes = (Codes)_mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)line));
        codes = codes >> shifts & 15;
#else
        memcpy(&codes, line + first % WORDS * 2, sizeof codes);
        codes = codes >> int(first / WORDS * 4) & 15;  // one shift for all, which is faster
#endif
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
            const uint8_t* line = block.codes + i * WIDTH * weight.bits / 8;
            int first;
            int second;
            if (weight.bits == 8) {
                first = int8_t(line[2 * column]);
                second = int8_t(line[2 * column + 1]);
            } else {  // from adjacent words
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

#if defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__)) || \
    (defined(__SSE2__) && !defined(__AVX__))
#define MULTIPLIES_PAIRS  // of 16-bit integers, in whole vectors
#endif

#if defined(T_IS_16_BITS) && defined(MULTIPLIES_PAIRS) && !defined(USE_AMX)
// Multiplies in integers, because converting codes to floats would take longer than multiplying
// them. Each group of inputs of a row becomes integers of 16 bits, with a scale. Their error, 2^-16
// of the largest number in the group, is below the rounding of 16-bit dtypes. One instruction then
// multiplies two inputs by two codes for each sum of a vector. With x = x_code * x_scale, an output
// is
//
//     sum over groups of  sum(code * x_code) * x_scale * scale  -  sum(x) * zero * scale
//
// The sums of codes are exact, and groups are added in order, so the result for a row does not
// depend on the other rows.
class QuantizedRows {
    Buffer<int16_t> code_memory;
    Buffer<float> scale_memory;
    Buffer<float> total_memory;
    int16_t* x_codes;  // [num_groups, num_rows, group_size]
    float* x_scales;   // [num_groups, num_rows]
    float* x_totals;   // [num_groups, num_rows]
    int64_t num_rows;
    int64_t num_groups;
    alignas(64) float sums[MAX_ROWS * WIDTH];

public:
    Weight weight;

    void pack(const auto& find_row, int64_t num_rows_, int64_t in_features) {
        int64_t group_size = weight.group_size;
        num_rows = num_rows_;
        num_groups = round_up(in_features, group_size) / group_size;
        x_codes = code_memory.get(num_groups * num_rows * group_size);
        x_scales = scale_memory.get(num_groups * num_rows);
        x_totals = total_memory.get(num_groups * num_rows);
        for (int64_t group = 0; group < num_groups; group++)
            for (int64_t row = 0; row < num_rows; row++) {
                int64_t start = group * group_size;
                quantize(find_row(row) + start, std::min(group_size, in_features - start),
                         group * num_rows + row);
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
    // Quantize `size` numbers, the i-th group of a row in the order of x_codes.
    void quantize(const T* x, int64_t size, int64_t i) {
        constexpr float LARGEST_CODE = 32767;
        constexpr float TINY = 0x1p-100f;  // the inverse of smaller numbers can overflow
        constexpr float NO_FRACTION = 0x1.8p23f;
        // The bits of absolute values compare like the values, and those of NaN are the highest.
        // NaN or infinity becomes the scale of its group, so all outputs of the row are invalid.
        Integers highest = {};
        for (int64_t j = 0; j < size; j += LANES) {
            Integers bits = bit_cast<Integers>(widen(x + j, size - j)) & 0x7FFFFFFF;
            highest = bits > highest ? bits : highest;
        }
        int32_t most = 0;
        for (int64_t lane = 0; lane < LANES; lane++) most = std::max<int32_t>(most, highest[lane]);
        float largest = bit_cast<float>(most);
        float inverse = largest > TINY ? LARGEST_CODE / largest : 0;
        Integers sums = {};
        for (int64_t j = 0; j < weight.group_size; j += LANES) {
            Vector wide = j < size ? widen(x + j, size - j) : Vector{};
            Vector shifted = wide * inverse + NO_FRACTION;
            Integers codes = bit_cast<Integers>(shifted) - bit_cast<int32_t>(NO_FRACTION);
            sums += codes;
            Shorts narrow = __builtin_convertvector(codes, Shorts);
            memcpy(x_codes + i * weight.group_size + j, &narrow, sizeof narrow);
        }
        int32_t total = 0;
        for (int64_t lane = 0; lane < LANES; lane++) total += sums[lane];
        x_scales[i] = largest / LARGEST_CODE;
        x_totals[i] = total * x_scales[i];
    }

    template <int BITS>
    void sum_up(const uint8_t* panel) {
        // Nothing is divided in the loops, because divisions take long.
        int64_t num_tiles = round_up(num_rows, ROWS) / ROWS;
        int64_t rows_per_tile = num_rows / num_tiles;
        int64_t num_larger_tiles = num_rows % num_tiles;
        int64_t block_size = weight.block_size();
        int64_t bytes_per_line = block_size / num_tiles / (weight.group_size / 2);
        for (int64_t group = 0; group < num_groups; group++) {
            const uint8_t* block = panel + group * block_size;
            const uint8_t* next = block + BYTES_AHEAD;
            int64_t row = 0;
            for (int64_t tile = 0; tile < num_tiles; tile++) {
                int64_t size = tile < num_larger_tiles ? rows_per_tile + 1 : rows_per_tile;
                auto multiply = find_tile<BITS, ROWS>(size);
                (this->*multiply)(Block(block), group, row, next, bytes_per_line);
                row += size;
                next += bytes_per_line * (weight.group_size / 2);
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

    // Multiply M rows by a block. Meanwhile prefetch from `next`, a few bytes for every line of the
    // block, because a core can have few cache lines in flight.
    template <int BITS, int M>
    void multiply_tile(const Block& block, int64_t group, int64_t row, const uint8_t* next,
                       int64_t bytes_per_line) {
        // Few rows leave registers for more vectors.
        constexpr int64_t V = std::min<int64_t>(VECTORS_PER_LINE, M == 1 ? 8 : M <= 3 ? 4 : 2);
        int64_t group_size = weight.group_size;
        int64_t first_row = group * num_rows + row;
        int64_t step = bytes_per_line * V / VECTORS_PER_LINE;
        const int16_t* x = x_codes + first_row * group_size;
        for (int64_t first = 0; first < VECTORS_PER_LINE; first += V) {
            Integers tile[M][V] = {};
            const uint8_t* line = block.codes;
            for (int64_t i = 0; i < group_size; i += 2) {
                __builtin_prefetch(next);
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
                int64_t output = (first + column) * LANES;
                Vector scale = load(block.scales + output);
                Vector zero = block.load_zeros(output) * scale;
                for (int64_t m = 0; m < M; m++) {
                    float* sum = &sums[(row + m) * WIDTH + output];
                    Vector total = group > 0 ? load(sum) : Vector{};
                    total += __builtin_convertvector(tile[m][column], Vector) *
                             (scale * x_scales[first_row + m]);
                    total -= zero * x_totals[first_row + m];
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
        Vector scales[VECTORS_PER_LINE];
        Vector zeros[VECTORS_PER_LINE];
        for (int64_t vector = 0; vector < VECTORS_PER_LINE; vector++) {
            scales[vector] = load(block.scales + vector * LANES);
            zeros[vector] = block.load_zeros(vector * LANES);
        }
        for (int64_t i = 0; i < weight.group_size; i += 2) {
            const uint8_t* line = block.codes + i * WIDTH * BITS / 8;
            __builtin_prefetch(line + BYTES_AHEAD);
            for (int64_t vector = 0; vector < VECTORS_PER_LINE; vector++) {
                Integers both = (Integers)load_codes<BITS>(line, vector);
                Vector even = __builtin_convertvector(both << 16 >> 16, Vector) - zeros[vector];
                Vector odd = __builtin_convertvector(both >> 16, Vector) - zeros[vector];
                store(even * scales[vector], odd * scales[vector], to + i * WIDTH, vector * LANES);
            }
        }
    }

    // Store an even and an odd input of LANES outputs in the order of a panel.
    static void store(Vector even, Vector odd, T* to, int64_t column) {
        if constexpr (PAIR == 1) {
            narrow(even, to + column);
            narrow(odd, to + WIDTH + column);
        } else {
            Shorts evens;
            Shorts odds;
            narrow(even, (T*)&evens);
            narrow(odd, (T*)&odds);
            Bits pairs = __builtin_convertvector(evens, Bits) & 0xFFFF;
            pairs |= __builtin_convertvector(odds, Bits) << 16;
            memcpy(to + PAIR * column, &pairs, sizeof pairs);
        }
    }
};
#endif
