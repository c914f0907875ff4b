#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

// Where T is bfloat16, and the processor has instructions that multiply pairs of them.
#if defined(T_IS_BFLOAT16) && defined(__AVX512BF16__)
#include <immintrin.h>
#define MULTIPLIES
#endif

constexpr int64_t SERIAL = 1 << 14;  // numbers that one thread turns faster than others wake up

static int64_t round_up(int64_t size, int64_t multiple) { return (size + multiple - 1) / multiple * multiple; }

static float silu(float x) { return x / (1 + expf(-x)); }

static float find_highest(const float* numbers, int64_t size) {
    float highest = -FLT_MAX;
    for (int64_t i = 0; i < size; i++) highest = numbers[i] > highest ? numbers[i] : highest;
    return highest;
}

// In place of each score exp(scale * score - highest); their sum. highest is then scale * the highest score.
static float exponentiate(float* scores, int64_t size, float scale, float& highest) {
    highest = scale * find_highest(scores, size);
    float base = highest, total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < size; i++) {
        scores[i] = expf(scale * scores[i] - base);
        total += scores[i];
    }
    return total;
}

struct bfloat16 {
    uint16_t bits;  // the upper half of a float's

    operator float() const {
        uint32_t wide = uint32_t(bits) << 16;
        float value;
        memcpy(&value, &wide, sizeof value);
        return value;
    }

    bfloat16& operator=(float value) {  // to nearest, ties to even
        uint32_t wide;
        memcpy(&wide, &value, sizeof value);
        bits = (wide + 0x7FFF + ((wide >> 16) & 1)) >> 16;
        return *this;
    }
};

#ifdef MULTIPLIES
// Numbers 0 to 15 (half 0) or 16 to 31 (half 1) of two registers, alternating: pairs, as products take them.
static __m512i alternate(__m512i left, __m512i right, int half) {
    alignas(64) static constexpr uint16_t order[64] = {  // 32 and above: of `right`
        0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
        11, 43, 12, 44, 13, 45, 14, 46, 15, 47, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53,
        22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
    return _mm512_permutex2var_epi16(left, _mm512_load_si512(order + 32 * half), right);
}
#endif
