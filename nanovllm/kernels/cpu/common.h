#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#ifdef __x86_64__
#include <immintrin.h>
#endif

static constexpr int64_t round_up(int64_t size, int64_t multiple) { return (size + multiple - 1) / multiple * multiple; }

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

struct float16 {
    uint16_t bits;  // a sign, 5 bits of exponent and 10 of fraction

    operator float() const {
        uint32_t magnitude = (bits & 0x7FFF) << 13;  // the exponent is 112 less than a float's; 31 is that of infinity
        float value = bit_cast<float>(magnitude + (magnitude < 0x0F800000 ? 0x38000000 : 0x70000000));
        value = magnitude < 0x00800000 ? 2 * value - 0x1p-14f : value;  // subnormal: no 1 before the fraction
        return bit_cast<float>(bit_cast<uint32_t>(value) | (bits & 0x8000) << 16);
    }

    float16& operator=(float value) {  // to nearest, ties to even
        uint32_t wide = bit_cast<uint32_t>(value), magnitude = wide & 0x7FFFFFFF;
        uint32_t normal = (magnitude - 0x38000000 + 0xFFF + (magnitude >> 13 & 1)) >> 13;
        uint32_t subnormal = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f);  // a unit of 0.5 is one of these
        uint32_t finite = magnitude < 0x38800000 ? subnormal - 0x3F000000 : normal;
        bits = (magnitude < 0x47800000 ? finite : magnitude <= 0x7F800000 ? 0x7C00 : 0x7E00) | (wide >> 16 & 0x8000);
        return *this;
    }
};

#ifdef T_IS_16_BITS
#if defined(__AVX512F__)
typedef float Vector __attribute__((vector_size(64)));
#elif defined(__AVX__)
typedef float Vector __attribute__((vector_size(32)));
#else
typedef float Vector __attribute__((vector_size(16)));
#endif

static Vector widen(const T* from) {
    [[maybe_unused]] constexpr bool is_bfloat16 = std::is_same_v<T, bfloat16>;
#if defined(__AVX512F__)
    __m256i bits = _mm256_loadu_si256((const __m256i*)from);
    return is_bfloat16 ? (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16) : (Vector)_mm512_cvtph_ps(bits);
#elif defined(__AVX2__) && defined(__F16C__)
    __m128i bits = _mm_loadu_si128((const __m128i*)from);
    return is_bfloat16 ? (Vector)_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16) : (Vector)_mm256_cvtph_ps(bits);
#else
    Vector wide;
    for (size_t i = 0; i < sizeof wide / sizeof(float); i++) wide[i] = from[i];
    return wide;
#endif
}

constexpr int64_t LANES = sizeof(Vector) / sizeof(float);

static Vector load(const float* from) {
    Vector vector;
    memcpy(&vector, from, sizeof vector);
    return vector;
}

static void narrow(Vector wide, T* to) {
#if defined(T_IS_BFLOAT16) && defined(__AVX512BF16__)
    _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh((__m512)wide));
#else
    for (int64_t i = 0; i < LANES; i++) to[i] = wide[i];
#endif
}
#endif
