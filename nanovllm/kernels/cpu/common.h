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

template <class To, class From>
static To bit_cast(From from) {
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

// exp(x) for x up to 88, to about a unit in the last place, of which compilers make vector code: x = n * log(2) + rest, and
// the polynomial is Cephes' exp(rest). 0 below -87.7; NaN stays NaN, as it compares false.
static float exponential(float x) {
    x = x < -88 ? -88 : x;  // with std::max, gcc makes no vector code of it
    float shifted = x * 1.44269504f + 0x1.8p23f, n = shifted - 0x1.8p23f;  // at this size a float has no fraction
    float rest = x - n * 0.693359375f + n * 2.12194440e-4f;  // the first product is exact
    float sum = 1.9875691500e-4f * rest + 1.3981999507e-3f;
    for (float coefficient : {8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f, 1.0f, 1.0f})
        sum = sum * rest + coefficient;
    return sum * bit_cast<float>((bit_cast<uint32_t>(shifted) + 127) << 23);  // times 2^n, which is 0 where n is -127
}

static float silu(float x) { return x / (1 + exponential(x > -88 ? -x : 88)); }

// In place of each score exp(scale * score - highest); their sum. highest is then scale * the highest score, but finite
// where all scores are -inf: they weigh nothing.
static float exponentiate(float* scores, int64_t size, float scale, float& highest) {
    float base = -FLT_MAX, total = 0;
#pragma omp simd reduction(max : base)
    for (int64_t i = 0; i < size; i++) base = scores[i] > base ? scores[i] : base;
    highest = base *= scale;
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < size; i++) {
        scores[i] = exponential(scale * scores[i] - base);
        total += scores[i];
    }
    return total;
}

struct bfloat16 {
    uint16_t bits;  // the upper half of a float's

    operator float() const { return bit_cast<float>(uint32_t(bits) << 16); }

    bfloat16& operator=(float value) {  // to nearest, ties to even
        uint32_t wide = bit_cast<uint32_t>(value);
        bits = (wide + 0x7FFF + ((wide >> 16) & 1)) >> 16;
        return *this;
    }
};

#ifdef MULTIPLIES
// Numbers 0 to 15 (half 0) or 16 to 31 (half 1) of two registers, alternating: pairs, as products take them.
static __m512i interleave(__m512i left, __m512i right, int half) {
    alignas(64) static constexpr uint16_t order[64] = {  // 32 and above: of `right`
        0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
        11, 43, 12, 44, 13, 45, 14, 46, 15, 47, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53,
        22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
    return _mm512_permutex2var_epi16(left, _mm512_load_si512(order + 32 * half), right);
}
#endif
