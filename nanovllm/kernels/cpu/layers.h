// RMSNorm and RoPE. A task computes one token.
#pragma once
#include "team.h"

template <class Number>
static float mean_square(const Number* x, int64_t size) {
    Vector squares = {};
    for (int64_t i = 0; i < size; i += LANES)
        squares += widen(x + i, size - i) * widen(x + i, size - i);
    return horizontal_sum(squares) / size;
}

// The classes of norms, as in norm.py. Most Hugging Face models round before the weight is
// applied.
enum NormKind { ROUNDED_TWICE, ROUNDED_ONCE, ZERO_CENTERED };

struct Norm {  // filled by Python: see declarations.py
    const T* weight;  // can be null where a norm is optional
    int64_t size;     // of the weight
    float eps;
    int64_t kind;
};

// Multiply by the weight, or by 1 + weight if the norm is ZERO_CENTERED.
static Vector normalize(const T* x, const T* weight, float factor, int64_t num, int64_t kind) {
    Vector normed = widen(x, num) * factor;
    if (kind == ZERO_CENTERED) return normed * (1 + widen(weight, num));
    return (kind == ROUNDED_ONCE ? normed : rounded(normed)) * widen(weight, num);
}

// Add `residual`, if it is not null. It can be the output.
static void rms_norm(const T* x, Norm norm, const T* residual, T* output, int64_t num_tokens,
                     int64_t size) {
    parallel_for(num_tokens, size, [=](int64_t token) {
        const T* in = x + token * size;
        float factor = 1 / sqrtf(mean_square(in, size) + norm.eps);
        for (int64_t i = 0; i < size; i += LANES) {
            int64_t num = size - i;
            int64_t place = token * size + i;
            Vector sum = normalize(in + i, norm.weight + i, factor, num, norm.kind);
            if (residual) sum += widen(residual + place, num);
            narrow(sum, output + place, num);
        }
    });
}

extern "C" void rms_norm(const T* x, const Norm* norm, T* output, int64_t num_tokens) {
    rms_norm(x, *norm, nullptr, output, num_tokens, norm->size);
}

struct Rope {  // of all tokens, filled by Python
    const float* cos;
    const float* sin;
    int64_t half;  // the first 2 * half dimensions of a head are rotated
};

// Rotate the first 2 * half dimensions of a head by the angles of its token, and apply RMSNorm
// before, with `factor`, if there is a `norm_weight`. All loads of a vector come before its stores,
// because `out` can be `in`.
static void rotate(const T* in, const float* cos, const float* sin, const T* norm_weight,
                   float factor, int64_t norm_kind, T* out, int64_t head_dim, int64_t half) {
    auto read = [&](int64_t i, int64_t num) {
        if (!norm_weight) return widen(in + i, num);
        return rounded(normalize(in + i, norm_weight + i, factor, num, norm_kind));
    };
    for (int64_t i = 0; i < half; i += LANES) {
        int64_t num = half - i;
        Vector first = read(i, num);
        Vector second = read(half + i, num);
        Vector c = widen(cos + i, num);
        Vector s = widen(sin + i, num);
        narrow(first * c - second * s, out + i, num);
        narrow(second * c + first * s, out + half + i, num);
    }
    for (int64_t i = 2 * half; i < head_dim; i += LANES)
        narrow(read(i, head_dim - i), out + i, head_dim - i);
}

// RMSNorm, if it has a weight, and RoPE of all heads. The strides are the distances of tokens in x
// and `output`, which can be the same memory.
static void rotary(const T* x, Rope rope, Norm norm, T* output, int64_t stride,
                   int64_t output_stride, int64_t num_tokens, int64_t num_heads,
                   int64_t head_dim) {
    int64_t half = rope.half;
    parallel_for(num_tokens, num_heads * head_dim, [=](int64_t token) {
        const T* in = x + token * stride;
        T* out = output + token * output_stride;
        // Square roots and divisions are slow one by one, so they are computed for all heads at
        // once.
        float factors[num_heads];
        for (int64_t head = 0; head < num_heads; head++)
            factors[head] = norm.weight ? mean_square(in + head * head_dim, head_dim) : 1;
#pragma omp simd
        for (int64_t head = 0; head < num_heads; head++)
            factors[head] = 1 / sqrtf(factors[head] + norm.eps);
        for (int64_t head = 0; head < num_heads; head++) {
            int64_t first = head * head_dim;
            rotate(in + first, rope.cos + token * half, rope.sin + token * half, norm.weight,
                   factors[head], norm.kind, out + first, head_dim, half);
        }
    });
}

extern "C" void rotary(const T* x, const Rope* rope, const Norm* norm, T* output, int64_t stride,
                       int64_t num_tokens, int64_t num_heads, int64_t head_dim) {
    rotary(x, *rope, *norm, output, stride, num_heads * head_dim, num_tokens, num_heads, head_dim);
}
