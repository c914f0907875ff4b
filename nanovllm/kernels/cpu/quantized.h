// The panels of quantized weights. layers/quantized.py specifies the numbers. centered.h, planes.h
// and dequantized.h multiply rows of x by such a panel. gemm.h includes one of them.
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
#include "panels.h"

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

    Integers load_zeros(int64_t first) const {
        Shorts narrow;
        memcpy(&narrow, zeros + first, sizeof narrow);
        return __builtin_convertvector(narrow, Integers);
    }
};

// Load a vector of a line, whose codes can have been widened to 16 bits.
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
