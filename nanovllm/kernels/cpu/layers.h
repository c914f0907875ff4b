// Elementwise parts of the layers, and sampling.
#pragma once
#include "team.h"

static float mean_square(const T* x, int64_t size) {
    Vector squares = {};
    for (int64_t i = 0; i < size; i += LANES)
        squares += widen(x + i, size - i) * widen(x + i, size - i);
    return horizontal_sum(squares) / size;
}

// Rounds before the weight is applied, as Hugging Face models do.
static Vector normalize(const T* x, const T* weight, float factor, int64_t num) {
    return rounded(widen(x, num) * factor) * widen(weight, num);
}

extern "C" void rms_norm(const T* x, const T* weight, T* output, int64_t num_tokens, int64_t size,
                         float eps) {
    parallel_for(num_tokens, size, [=](int64_t token) {
        const T* in = x + token * size;
        float factor = 1 / sqrtf(mean_square(in, size) + eps);
        for (int64_t i = 0; i < size; i += LANES)
            narrow(normalize(in + i, weight + i, factor, size - i), output + token * size + i,
                   size - i);
    });
}

// `weight` and `bias` can be null.
extern "C" void layer_norm(const T* x, const T* weight, const T* bias, T* output,
                           int64_t num_tokens, int64_t size, float eps) {
    parallel_for(num_tokens, size, [=](int64_t token) {
        const T* in = x + token * size;
        float sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < size; i++) sum += in[i];
        float mean = sum / size;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < size; i++) squares += (in[i] - mean) * (in[i] - mean);
        float factor = 1 / sqrtf(squares / size + eps);
        for (int64_t i = 0; i < size; i += LANES) {
            Vector normed = (widen(in + i, size - i) - mean) * factor;
            if (weight) normed *= widen(weight + i, size - i);
            if (bias) normed += widen(bias + i, size - i);
            narrow(normed, output + token * size + i, size - i);
        }
    });
}

extern "C" void cos_and_sin(const int32_t* positions, const float* inv_freq, float attention_factor,
                            float* cos, float* sin, int64_t num_tokens, int64_t half) {
    constexpr int64_t COST = 16;  // of a pair, as a number of elements
    parallel_for(num_tokens, COST * half, [=](int64_t token) {
        for (int64_t i = 0; i < half; i++) {
            float angle = positions[token] * inv_freq[i];
            cos[token * half + i] = cosf(angle) * attention_factor,
                               sin[token * half + i] = sinf(angle) * attention_factor;
        }
    });
}

extern "C" void rotary(const T* x, const float* cos, const float* sin, const T* norm_weight,
                       T* output, int64_t num_tokens, int64_t stride, int64_t output_stride,
                       int64_t num_heads, int64_t half, float eps) {
    parallel_for(num_tokens, 2 * num_heads * half, [=](int64_t token) {
        const T* in = x + token * stride;
        T* out = output + token * output_stride;
        // Square roots and divisions are slow one by one, so they are computed for all heads at
        // once.
        float factors[num_heads];
        for (int64_t head = 0; head < num_heads; head++)
            factors[head] = norm_weight ? mean_square(in + head * 2 * half, 2 * half) + eps : 1;
#pragma omp simd
        for (int64_t head = 0; head < num_heads; head++) factors[head] = 1 / sqrtf(factors[head]);
        for (int64_t head = 0; head < num_heads; head++, in += 2 * half, out += 2 * half) {
            auto read = [&](int64_t i, int64_t num) {
                return norm_weight ? rounded(normalize(in + i, norm_weight + i, factors[head], num))
                                   : widen(in + i, num);
            };
            for (int64_t i = 0; i < half; i += LANES) {
                int64_t num = half - i;
                Vector a = read(i, num), b = read(half + i, num);
                Vector c = widen(cos + token * half + i, num),
                       s = widen(sin + token * half + i, num);
                narrow(a * c - b * s, out + i, num);
                narrow(b * c + a * s, out + half + i, num);
            }
        }
    });
}

extern "C" void silu_and_mul(const T* gate_up, T* output, int64_t num_tokens, int64_t size) {
    parallel_for(num_tokens, size, [=](int64_t token) {
        const T *gate = gate_up + token * 2 * size, *up = gate + size;
        for (int64_t i = 0; i < size; i += LANES)
            narrow(silu(widen(gate + i, size - i)) * widen(up + i, size - i),
                   output + token * size + i, size - i);
    });
}

extern "C" void relu(T* x, int64_t num_tokens, int64_t size) {
    parallel_for(num_tokens, size, [=](int64_t token) {
        for (T* number = x + token * size; number < x + (token + 1) * size; number++)
            *number = *number < 0 ? 0 : float(*number);  // NaN stays
    });
}

struct Cut {
    float logit;     // the lowest logit that stays
    int64_t num;     // number of tokens at or above it
    float mass = 0;  // sum of their weights
};

// Find the lowest logit that stays: fewer than max_num tokens, with less mass than max_mass, have
// higher logits. The highest logit always stays. This is quickselect. Tokens that stay are moved to
// the front of `values`. The first pivot is chosen so that few tokens are above it.
template <class Weigh>
static Cut find_cut(float* values, int64_t num, float highest, int64_t max_num, float max_mass,
                    const Weigh& weigh) {
    Cut cut{highest, 0};
    float pivot = -INFINITY;
    for (int64_t i = 0; i < num; i += 256) pivot = std::max(pivot, values[i]);
    for (; num > 0; pivot = values[num / 2]) {
        float *above =
                  std::partition(values, values + num, [=](float value) { return value > pivot; }),
              mass = 0;
#pragma omp simd reduction(+ : mass)
        for (float* value = values; value < above; value++) mass += weigh(*value);
        if (cut.num + (above - values) >= max_num || cut.mass + mass >= max_mass) {
            num = above - values;
        } else {
            float* below =
                std::partition(above, values + num, [=](float value) { return value == pivot; });
            cut = {pivot, cut.num + (below - values),
                   cut.mass + mass + (below - above) * weigh(pivot)};
            num -= below - values, values = below;
        }
    }
    return cut;
}

// Write the logits as float. In some rows, tokens that top-k, then top-p, then min-p remove become
// -inf.
extern "C" void filter_logits(const T* logits, float* output, const int64_t* rows,
                              const float* temperatures, const int64_t* top_ks, const float* top_ps,
                              const float* min_ps, int64_t num_logits, int64_t vocab_size,
                              int64_t num_rows) {
    parallel_for(num_logits, vocab_size, [=](int64_t row) {
        std::copy_n(logits + row * vocab_size, vocab_size, output + row * vocab_size);
    });
    parallel_for(num_rows, vocab_size, [=](int64_t i) {
        static thread_local Buffer<float> buffer;
        float *row = output + rows[i] * vocab_size, *values = buffer.get(vocab_size + 1),
              highest = -INFINITY;
#pragma omp simd reduction(max : highest)
        for (int64_t token = 0; token < vocab_size; token++) {
            // NaN stays in `row` and does not take part in sorting.
            values[token] = row[token] == row[token] ? row[token] : -INFINITY;
            highest = values[token] > highest ? values[token] : highest;
        }
        if (!std::isfinite(highest)) return;
        float inverse = 1 / temperatures[i], mass = 0;
        auto weigh = [=](float logit) { return exponential((logit - highest) * inverse); };
        Cut cut{-INFINITY, vocab_size};
        if (top_ks[i] < vocab_size) {
            cut = find_cut(values, vocab_size, highest, top_ks[i], INFINITY, weigh);
            mass = cut.mass - std::max<int64_t>(0, cut.num - top_ks[i]) * weigh(cut.logit);
        } else if (top_ps[i] < 1) {
#pragma omp simd reduction(+ : mass)
            for (int64_t token = 0; token < vocab_size; token++) mass += weigh(values[token]);
        }
        if (top_ps[i] < 1)
            cut = find_cut(values, cut.num, highest, top_ks[i], top_ps[i] * mass, weigh);
        float lowest = std::max(cut.logit, highest + temperatures[i] * logf(min_ps[i]));
        for (int64_t token = 0; token < vocab_size; token++)
            row[token] = row[token] < lowest ? -INFINITY : row[token];
    });
}

// Find the token with the highest logit + temperature * Gumbel noise in each row, the first of
// equals, or -1 if a logit is NaN. The noise is gumbel_noise of layers/noise.py, -log(-log(1 -
// uniform)). Because -log(1 - uniform) exceeds uniform, a token can win only if uniform <
// exp((logit - highest score so far) / temperature). Few tokens pass this test and need logarithms.
// All of the first tokens pass, so chunks begin small.
extern "C" void sample(const T* logits, const int32_t* token_hashes, const int32_t* noise_keys,
                       const float* temperatures, int64_t* tokens, int64_t num_rows,
                       int64_t vocab_size) {
    constexpr int64_t FIRST_CHUNK = 16, CHUNK = 1024;
    parallel_for(num_rows, vocab_size, [=](int64_t row) {
        const T* in = logits + row * vocab_size;
        float temperature = temperatures ? temperatures[row] : 0, inverse = 1 / temperature,
              highest = -FLT_MAX;
        float scores[CHUNK], uniforms[CHUNK];
        int32_t can_win[CHUNK];
        int64_t token = 0, size;
        for (int64_t start = 0; start < vocab_size && token >= 0; start += size) {
            size = std::min({std::max(start, FIRST_CHUNK), CHUNK, vocab_size - start});
            int32_t num_left = 0;
            if (temperature > 0) {
                uint32_t key = noise_keys[2 * row], factor = noise_keys[2 * row + 1] | 1;
#pragma omp simd reduction(+ : num_left)
                for (int64_t i = 0; i < size; i++) {
                    uint32_t x = token_hashes[start + i] ^ key;
                    x = (x ^ x >> 16) * factor;
                    x = (x ^ x >> 15) * 0x2C1B3C6D >> 1;
                    scores[i] = in[start + i];
                    uniforms[i] = int32_t(x) * (0x1p-31f * (1 - 0x1p-23f)) + 0x1p-33f;
                    float lead = (scores[i] - highest) * inverse;
                    can_win[i] =
                        !(uniforms[i] > 1.01f * exponential(lead > 0 ? 0 : lead));  // true for NaN
                    num_left += can_win[i];
                }
            } else {
#pragma omp simd reduction(+ : num_left)
                for (int64_t i = 0; i < size; i++) {
                    scores[i] = in[start + i];
                    can_win[i] = !(scores[i] <= highest);
                    num_left += can_win[i];
                }
            }
            for (int64_t i = 0; num_left > 0 && token >= 0; i++) {
                if (!can_win[i]) continue;
                num_left--;
                float score = scores[i];
                if (temperature > 0) score -= temperature * logf(-log1pf(-uniforms[i]));
                if (score > highest) highest = score, token = start + i;
                if (std::isnan(score)) token = -1;
            }
        }
        tokens[row] = token;
    });
}
