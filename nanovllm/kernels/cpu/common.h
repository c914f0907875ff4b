// Vectors of floats, 16-bit numbers, exponentials, and memory that begins at a cache line.
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

static constexpr int64_t round_up(int64_t size, int64_t multiple) {
    return (size + multiple - 1) / multiple * multiple;
}

// Memory that begins at a cache line and never shrinks.
template <class Number>
class Buffer {
    struct alignas(64) Line {
        Number numbers[64 / sizeof(Number)];
    };
    std::vector<Line> lines;

public:
    Number* get(size_t size) {
        size_t num_lines = size * sizeof(Number) / sizeof(Line) + 1;
        if (lines.size() < num_lines) lines.resize(num_lines);
        return lines[0].numbers;
    }
};

template <class Number>
static void prefetch(const Number* numbers, int64_t size) {
    for (int64_t i = 0; i < size; i += 64 / sizeof(Number)) __builtin_prefetch(numbers + i);
}

template <class To, class From>
static To bit_cast(From from) {
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

#if defined(__AVX512F__)
constexpr int64_t LANES = 16;
#elif defined(__AVX__)
constexpr int64_t LANES = 8;
#else
constexpr int64_t LANES = 4;
#endif
typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));

constexpr float LOG2_E = 1.44269504f;

// exp(x) for x up to 88, with an error of about one unit in the last place: x = n * log(2) + rest,
// and the polynomial is exp(rest) of the Cephes library. The result is 0 below -87.7, and NaN for
// NaN. The argument is a vector, or a float in a loop that the compiler vectorizes.
template <class Float, class Bits>
static Float exponential(Float x) {
    x = x < -88 ? Float{} - 88 : x;          // gcc does not vectorize std::max
    Float shifted = x * LOG2_E + 0x1.8p23f;  // floats of this size have no fraction
    Float n = shifted - 0x1.8p23f;
    Float rest = x - n * 0.693359375f + n * 2.12194440e-4f;  // the first product is exact
    Float sum = 1.9875691500e-4f * rest + 1.3981999507e-3f;
    for (float coefficient :
         {8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f, 1.0f, 1.0f})
        sum = sum * rest + coefficient;
    // Multiply by 2^n, which is 0 for n = -127.
    return sum * bit_cast<Float>((bit_cast<Bits>(shifted) + 127) << 23);
}

// 2^x for x up to 127, accurate to 18 bits and twice as fast. The result is 0 below -126.5, and NaN
// for NaN.
[[maybe_unused]] static Vector power_of_two(Vector x) {
    constexpr float NO_FRACTION = 0x1.8p23f + 127;  // its lower bits become the exponent of 2^n
    x = x < -127 ? Vector{} - 127 : x;
    Vector shifted = x + NO_FRACTION;
    Vector rest = x - (shifted - NO_FRACTION);
    Vector sum = 9.57010197e-3f * rest + 5.59178608e-2f;
    for (float coefficient : {0.240247448f, 0.693121815f, 0.999999261f})
        sum = sum * rest + coefficient;
    return sum * bit_cast<Vector>(bit_cast<Bits>(shifted) << 23);
}

static float exponential(float x) { return exponential<float, uint32_t>(x); }
static Vector exponential(Vector x) { return exponential<Vector, Bits>(x); }
// Multiply x by sigmoid(y).
static Vector times_sigmoid(Vector x, Vector y) {
    return x / (1 + exponential(y > -88 ? -y : Vector{} + 88));
}

static Vector silu(Vector x) { return times_sigmoid(x, x); }

// The approximation by tanh, x / 2 * (1 + tanh(y)), where y is sqrt(2 / pi) * (x + 0.044715 * x^3).
// This is x * sigmoid(2 * y).
static Vector gelu(Vector x) {
    return times_sigmoid(x, 1.59576912f * (x + 0.044715f * x * x * x));
}

// The function of a gate, as in linear.py.
enum Gate { NO_GATE, SILU, GELU };

static Vector activate(Vector gate, int64_t kind) { return kind == GELU ? gelu(gate) : silu(gate); }

// Replace each score by exp(scale * score - highest) and return the sum. `highest` becomes scale *
// the highest score, or a finite number if all scores are -inf, whose weights are 0.
static float exponentiate(float* scores, int64_t size, float scale, float& highest) {
    float base = -FLT_MAX;
#pragma omp simd reduction(max : base)
    for (int64_t i = 0; i < size; i++) base = scores[i] > base ? scores[i] : base;
    base *= scale;
    highest = base;
    float total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < size; i++) {
        scores[i] = exponential(scale * scores[i] - base);
        total += scores[i];
    }
    return total;
}

struct bfloat16 {
    uint16_t bits;  // the upper half of a float

    operator float() const { return bit_cast<float>(uint32_t(bits) << 16); }

    bfloat16& operator=(float value) {  // rounds to nearest, ties to even
        uint32_t wide = bit_cast<uint32_t>(value);
        bits = (wide + 0x7FFF + ((wide >> 16) & 1)) >> 16;
        return *this;
    }
};

struct float16 {
    uint16_t bits;  // sign, 5 bits of exponent, 10 bits of fraction

    operator float() const {
        // The exponent is 112 less than a float's, and 31 stands for infinity.
        uint32_t magnitude = (bits & 0x7FFF) << 13;
        float value =
            bit_cast<float>(magnitude + (magnitude < 0x0F800000 ? 0x38000000 : 0x70000000));
        value = magnitude < 0x00800000 ? 2 * value - 0x1p-14f : value;  // subnormal: no implicit 1
        return bit_cast<float>(bit_cast<uint32_t>(value) | (bits & 0x8000) << 16);
    }

    float16& operator=(float value) {  // rounds to nearest, ties to even
        uint32_t wide = bit_cast<uint32_t>(value);
        uint32_t magnitude = wide & 0x7FFFFFFF;
        uint32_t normal = (magnitude - 0x38000000 + 0xFFF + (magnitude >> 13 & 1)) >> 13;
        // One unit in the last place of 0.5 is that of a subnormal.
        uint32_t subnormal = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f);
        uint32_t finite = magnitude < 0x38800000 ? subnormal - 0x3F000000 : normal;
        uint32_t not_finite = magnitude <= 0x7F800000 ? 0x7C00 : 0x7E00;  // infinity or NaN
        bits = (magnitude < 0x47800000 ? finite : not_finite) | (wide >> 16 & 0x8000);
        return *this;
    }
};

// The operands of products: pairs of bfloat16 if the processor can multiply them, else floats.
#if defined(T_IS_BFLOAT16) && defined(__AVX512BF16__)
#define IN_PAIRS
using Factor = bfloat16;
#else
using Factor = float;
#endif

static Vector load(const float* from) {
    Vector vector;
    memcpy(&vector, from, sizeof vector);
    return vector;
}

static Vector widen(const float* from) { return load(from); }
[[maybe_unused]] static void narrow(Vector wide, float* to) { memcpy(to, &wide, sizeof wide); }

#ifdef T_IS_16_BITS
static Vector widen(const T* from) {
    [[maybe_unused]] constexpr bool is_bfloat16 = std::is_same_v<T, bfloat16>;
#if defined(__AVX512F__)
    __m256i bits = _mm256_loadu_si256((const __m256i*)from);
    return is_bfloat16 ? (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16)
                       : (Vector)_mm512_cvtph_ps(bits);
#elif defined(__AVX2__) && defined(__F16C__)
    __m128i bits = _mm_loadu_si128((const __m128i*)from);
    return is_bfloat16 ? (Vector)_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16)
                       : (Vector)_mm256_cvtph_ps(bits);
#else
    Vector wide;
    for (int64_t i = 0; i < LANES; i++) wide[i] = from[i];
    return wide;
#endif
}

static void narrow(Vector wide, T* to) {
#ifdef IN_PAIRS
    _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh((__m512)wide));
#else
    for (int64_t i = 0; i < LANES; i++) to[i] = wide[i];
#endif
}
#endif

// Narrow two vectors at once. Two vectors of 16 floats fill a cache line of 16-bit numbers, which
// is written faster than its halves.
template <class Number>
static void narrow(Vector first, Vector second, Number* to) {
#ifdef IN_PAIRS
    if (std::is_same_v<Number, bfloat16>)
        return _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
#endif
    narrow(first, to);
    narrow(second, to + LANES);
}

// Widen or narrow `num` numbers, which can be fewer than a vector.
template <class Number>
static Vector widen(const Number* from, int64_t num) {
    if (num >= LANES) return widen(from);
    Number part[LANES] = {};
    std::copy_n(from, num, part);
    return widen(part);
}

template <class Number>
static void narrow(Vector wide, Number* to, int64_t num) {
    if (num >= LANES) return narrow(wide, to);
    Number part[LANES];
    narrow(wide, part);
    std::copy_n(part, num, to);
}

static Vector rounded(Vector wide) {
    T numbers[LANES];
    narrow(wide, numbers);
    return widen(numbers);
}

static float horizontal_sum(Vector numbers) {
    // Before each turn, the sum is that of the first 2 * half numbers.
    for (int64_t half = LANES / 2; half > 0; half /= 2)
        for (int64_t i = 0; i < half; i++) numbers[i] += numbers[half + i];
    return numbers[0];
}
