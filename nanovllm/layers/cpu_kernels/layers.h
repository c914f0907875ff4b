// What the layers do to every number, and the choice of the next token.
#pragma once
#include "common.h"

static void normalize(const T* x, const T* weight, int64_t size, float eps, T* output) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < size; i++) squares += float(x[i]) * float(x[i]);
    float factor = 1 / sqrtf(squares / size + eps);
    for (int64_t i = 0; i < size; i++) {
        T normed;
        normed = x[i] * factor;  // rounded before the weight is applied, as in Hugging Face's models
        output[i] = normed * weight[i];
    }
}

extern "C" void rms_norm(const T* x, const T* weight, T* output, int64_t num_tokens, int64_t size, float eps) {
#pragma omp parallel for if (num_tokens * size > SERIAL)
    for (int64_t token = 0; token < num_tokens; token++) normalize(x + token * size, weight, size, eps, output + token * size);
}

extern "C" void rotary(const T* x, const float* cos, const float* sin, const T* norm_weight, T* output,
                       int64_t num_tokens, int64_t stride, int64_t num_heads, int64_t half, float eps) {
#pragma omp parallel for if (num_tokens * num_heads * half > SERIAL)
    for (int64_t token = 0; token < num_tokens; token++)
        for (int64_t head = 0; head < num_heads; head++) {
            const T* in = x + token * stride + head * 2 * half;
            T normed[2 * half], *out = output + (token * num_heads + head) * 2 * half;
            if (norm_weight) normalize(in, norm_weight, 2 * half, eps, normed);
            const T *first = norm_weight ? normed : in, *second = first + half;
            const float *c = cos + token * half, *s = sin + token * half;
            for (int64_t i = 0; i < half; i++) {
                float a = first[i], b = second[i];
                out[i] = a * c[i] - b * s[i];
                out[half + i] = b * c[i] + a * s[i];
            }
        }
}

extern "C" void silu_and_multiply(const T* gate_up, T* output, int64_t num_tokens, int64_t size) {
#pragma omp parallel for if (num_tokens * size > SERIAL)
    for (int64_t token = 0; token < num_tokens; token++) {
        const T *gate = gate_up + token * 2 * size, *up = gate + size;
        T* out = output + token * size;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) {
            out[i] = silu(gate[i]) * up[i];
        }
    }
}

// The token with the highest logit + temperature * Gumbel noise per row, the first of equals. The noise is
// sampler.gumbel_noise: see there. The lower the uniform number that it is made of, the higher it is. A chunk of the
// vocabulary without one that is low enough to win needs no logarithms; most chunks have none.
extern "C" void sample(const T* logits, const int32_t* token_hashes, const int32_t* noise_keys, const float* temperatures,
                       int64_t* tokens, int64_t num_rows, int64_t vocab_size) {
    constexpr int64_t CHUNK = 1024;
#pragma omp parallel for
    for (int64_t row = 0; row < num_rows; row++) {
        const T* in = logits + row * vocab_size;
        float temperature = temperatures ? temperatures[row] : 0, highest = -FLT_MAX;
        float scores[CHUNK], uniforms[CHUNK];
        tokens[row] = 0;
        for (int64_t start = 0; start < vocab_size; start += CHUNK) {
            int64_t size = std::min(CHUNK, vocab_size - start);
            std::copy(in + start, in + start + size, scores);
            if (temperature > 0) {
                float lead = start ? (find_highest(scores, size) - highest) / temperature : FLT_MAX;
                float limit = 1.01f * -expm1f(-expf(std::min(lead, 10.0f)));
                uint32_t key = noise_keys[2 * row], factor = noise_keys[2 * row + 1] | 1;
                int32_t num_low = 0;
#pragma omp simd reduction(+ : num_low)
                for (int64_t i = 0; i < size; i++) {
                    uint32_t x = token_hashes[start + i] ^ key;
                    x = (x ^ x >> 16) * factor;
                    x = (x ^ x >> 15) * 0x2C1B3C6D >> 1;
                    uniforms[i] = int32_t(x) * (0x1p-31f * (1 - 0x1p-23f)) + 0x1p-33f;
                    num_low += uniforms[i] <= limit;
                }
                if (num_low == 0) continue;
#pragma omp simd
                for (int64_t i = 0; i < size; i++) scores[i] -= temperature * logf(-log1pf(-uniforms[i]));
            }
            float highest_here = find_highest(scores, size);
            if (highest_here > highest) {
                highest = highest_here;
                tokens[row] = start + (std::find(scores, scores + size, highest) - scores);
            }
        }
    }
}
