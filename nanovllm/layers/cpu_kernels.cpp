// Kernels for the CPU: what torch has no single operation for. cpu_kernels.py compiles them and says what each computes.
//
// Plain loops, which the compiler turns into vector code. Numbers are widened to float where they are read and rounded
// where they are written. The threads are torch's own: both use the OpenMP library that torch has loaded.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include <omp.h>

// Where the processor multiplies bfloat16. If it has AMX too, oneDNN makes more of that.
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
#include <immintrin.h>
#define TILED
#endif

constexpr int64_t SPLIT = 128;       // tokens of a context that one task attends to
constexpr int PANELS = 4, ROWS = 6;   // of a tile of a matrix product: 24 sums and 4 weights, of 32 registers
constexpr int64_t BYTES_OF_X = 1 << 19;  // that stay in a core's second-level cache while all weights go by
constexpr int64_t SERIAL = 1 << 14;  // numbers that one thread turns faster than others wake up

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

// One query token of all heads against `num_tokens` tokens of its context: what their values, weighted, add up to, and
// for the join with the rest of the context the highest score and the sum of the weights exp(score - highest).
// All heads of a token are read before the next token, in the order of memory.
static void attend_to_part(const float* query, const T* keys, const T* values, const int32_t* block_table,
                           int64_t first_token, int64_t num_tokens, int64_t block_size, int64_t num_kv_heads,
                           int64_t group_size, int64_t head_dim, float* sums, float* highest, float* totals) {
    int64_t num_heads = num_kv_heads * group_size, slot_size = num_kv_heads * head_dim;
    float weights[num_heads][SPLIT];
    auto slot_of = [&](int64_t i) {
        int64_t token = first_token + i;
        return (block_table[token / block_size] * block_size + token % block_size) * slot_size;
    };
    for (int64_t i = 0; i < num_tokens; i++) {
        const T* key = keys + slot_of(i);
        for (int64_t head = 0; head < num_heads; head++) {
            const T* k = key + head / group_size * head_dim;
            const float* q = query + head * head_dim;
            float score = 0;
#pragma omp simd reduction(+ : score)
            for (int64_t d = 0; d < head_dim; d++) score += q[d] * k[d];
            weights[head][i] = score;
        }
    }
    for (int64_t head = 0; head < num_heads; head++) {
        float* w = weights[head];
        highest[head] = *std::max_element(w, w + num_tokens);
        float total = 0;
#pragma omp simd reduction(+ : total)
        for (int64_t i = 0; i < num_tokens; i++) {
            w[i] = expf(w[i] - highest[head]);
            total += w[i];
        }
        totals[head] = total;
    }
    std::fill_n(sums, num_heads * head_dim, 0);
    for (int64_t i = 0; i < num_tokens; i++) {
        const T* value = values + slot_of(i);
        for (int64_t head = 0; head < num_heads; head++) {
            const T* v = value + head / group_size * head_dim;
            float *sum = sums + head * head_dim, weight = weights[head][i];
#pragma omp simd
            for (int64_t d = 0; d < head_dim; d++) sum[d] += weight * v[d];
        }
    }
}

#ifdef TILED
// A product of M rows of x and PANELS panels of the weight: [M, 16 * PANELS] sums of products of pairs, all in registers.
// A panel is [in_features / 2, 16, 2]: of 16 outputs the next pair, side by side, as the instruction wants them.
// Meanwhile the panels that come next are fetched into the cache, by each of the tiles a share.
template <int M>
static void multiply_tile(const bfloat16* x, const bfloat16* weight, const bfloat16* bias, bfloat16* output, int64_t in_features,
                          int64_t out_features, int64_t columns_left, int64_t tile, int64_t num_tiles) {
    __m512 sums[M][PANELS];
    __mmask16 masks[PANELS];
    for (int panel = 0; panel < PANELS; panel++) {
        int64_t columns = std::clamp<int64_t>(columns_left - 16 * panel, 0, 16);
        masks[panel] = (1 << columns) - 1;
        __m256i narrow = _mm256_maskz_loadu_epi16(bias ? masks[panel] : 0, bias + 16 * panel);
        for (int row = 0; row < M; row++)
            sums[row][panel] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
    }
    int64_t until_fetch = tile;
    for (int64_t i = 0; i < in_features; i += 2) {
        __m512bh pairs[PANELS];
        for (int panel = 0; panel < PANELS; panel++)
            pairs[panel] = (__m512bh)_mm512_loadu_si512(weight + (panel * in_features + i) * 16);
        if (until_fetch-- == 0) {
            until_fetch = num_tiles - 1;
            for (int panel = PANELS; panel < 2 * PANELS; panel++)
                _mm_prefetch(weight + (panel * in_features + i) * 16, _MM_HINT_T1);
        }
        for (int row = 0; row < M; row++) {
            int32_t pair;
            memcpy(&pair, x + row * in_features + i, sizeof pair);
            for (int panel = 0; panel < PANELS; panel++)
                sums[row][panel] = _mm512_dpbf16_ps(sums[row][panel], (__m512bh)_mm512_set1_epi32(pair), pairs[panel]);
        }
    }
    for (int row = 0; row < M; row++)
        for (int panel = 0; panel < PANELS; panel++)
            _mm256_mask_storeu_epi16(output + row * out_features + 16 * panel, masks[panel],
                                     (__m256i)_mm512_cvtneps_pbh(sums[row][panel]));
}

static constexpr decltype(&multiply_tile<1>) TILES[] = {nullptr,          multiply_tile<1>, multiply_tile<2>, multiply_tile<3>,
                                                        multiply_tile<4>, multiply_tile<5>, multiply_tile<6>};
#endif

extern "C" {

void store_kvcache(const T* key, const T* value, int64_t key_stride, int64_t value_stride, const int64_t* slot_mapping,
                   int64_t num_tokens, int64_t slot_size, T* keys, T* values) {
#pragma omp parallel for if (num_tokens * slot_size > SERIAL)
    for (int64_t token = 0; token < num_tokens; token++) {
        int64_t slot = slot_mapping[token];
        if (slot < 0) continue;
        memcpy(keys + slot * slot_size, key + token * key_stride, slot_size * sizeof(T));
        memcpy(values + slot * slot_size, value + token * value_stride, slot_size * sizeof(T));
    }
}

void decode_attention(const T* query, const T* keys, const T* values, T* output, const int32_t* cu_seqlens_q,
                      const int32_t* context_lens, const int32_t* block_tables, int64_t num_seqs, int64_t table_width,
                      int64_t block_size, int64_t num_kv_heads, int64_t group_size, int64_t head_dim, float scale) {
    int64_t num_heads = num_kv_heads * group_size, size = num_heads * head_dim;
    struct Part {
        int64_t seq, first_token;
    };
    std::vector<Part> parts;
    for (int64_t seq = 0; seq < num_seqs; seq++)
        if (cu_seqlens_q[seq + 1] - cu_seqlens_q[seq] == 1)
            for (int64_t token = 0; token < context_lens[seq]; token += SPLIT) parts.push_back({seq, token});

    // Of each part: sums [num_heads, head_dim], highest [num_heads], totals [num_heads]
    static thread_local std::vector<float> results;
    int64_t stride = size + 2 * num_heads;
    if (results.size() < parts.size() * stride) results.resize(parts.size() * stride);
    float* result = results.data();
#pragma omp parallel for schedule(dynamic)
    for (size_t i = 0; i < parts.size(); i++) {
        auto [seq, first_token] = parts[i];
        float scaled_query[size], *sums = result + i * stride, *highest = sums + size;
        const T* q = query + cu_seqlens_q[seq] * size;
        for (int64_t d = 0; d < size; d++) scaled_query[d] = scale * q[d];
        attend_to_part(scaled_query, keys, values, block_tables + seq * table_width, first_token,
                       std::min(SPLIT, context_lens[seq] - first_token), block_size, num_kv_heads, group_size, head_dim,
                       sums, highest, highest + num_heads);
    }
    // Joined, each part's weights shrink by exp(its highest score - the highest of all).
#pragma omp parallel for schedule(dynamic) if (parts.size() * size > SERIAL)
    for (size_t i = 0; i < parts.size(); i++) {
        if (parts[i].first_token > 0) continue;
        size_t end = i + 1;
        while (end < parts.size() && parts[end].first_token > 0) end++;
        T* out = output + cu_seqlens_q[parts[i].seq] * size;
        for (int64_t head = 0; head < num_heads; head++) {
            float highest = -FLT_MAX, total = 0, sum[head_dim];
            std::fill_n(sum, head_dim, 0);
            for (size_t part = i; part < end; part++) highest = std::max(highest, result[part * stride + size + head]);
            for (size_t part = i; part < end; part++) {
                const float* from = result + part * stride;
                float factor = expf(from[size + head] - highest);
                total += factor * from[size + num_heads + head];
                for (int64_t d = 0; d < head_dim; d++) sum[d] += factor * from[head * head_dim + d];
            }
            for (int64_t d = 0; d < head_dim; d++) out[head * head_dim + d] = sum[d] / total;
        }
    }
}

#ifdef TILED
void linear(const bfloat16* x, const bfloat16* weight, const bfloat16* bias, bfloat16* output, int64_t num_rows, int64_t in_features,
            int64_t out_features) {
    constexpr int64_t WIDTH = 16 * PANELS;
    int64_t rows_at_once = std::max<int64_t>(ROWS, BYTES_OF_X / (2 * in_features) / ROWS * ROWS);
    for (int64_t start = 0; start < num_rows; start += rows_at_once) {
        int64_t rows = std::min(rows_at_once, num_rows - start), num_tiles = (rows + ROWS - 1) / ROWS;
#pragma omp parallel for
        for (int64_t column = 0; column < out_features; column += WIDTH)
            for (int64_t i = 0; i < num_tiles; i++) {
                int64_t row = start + rows * i / num_tiles, end = start + rows * (i + 1) / num_tiles;
                TILES[end - row](x + row * in_features, weight + column * in_features, bias ? bias + column : nullptr,
                                 output + row * out_features + column, in_features, out_features,
                                 out_features - column, i, num_tiles);
            }
    }
}
#endif

void rms_norm(const T* x, const T* weight, T* output, int64_t num_tokens, int64_t stride, int64_t num_heads,
              int64_t size, float eps) {
#pragma omp parallel for if (num_tokens * num_heads * size > SERIAL)
    for (int64_t row = 0; row < num_tokens * num_heads; row++) {
        const T* in = x + row / num_heads * stride + row % num_heads * size;
        T* out = output + row * size;
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < size; i++) squares += float(in[i]) * float(in[i]);
        float factor = 1 / sqrtf(squares / size + eps);
        for (int64_t i = 0; i < size; i++) {
            T normed;
            normed = in[i] * factor;  // rounded before the weight is applied, as in Hugging Face's models
            out[i] = normed * weight[i];
        }
    }
}

void rotary(const T* x, const float* cos, const float* sin, T* output, int64_t num_tokens, int64_t stride,
            int64_t num_heads, int64_t half) {
#pragma omp parallel for if (num_tokens * num_heads * half > SERIAL)
    for (int64_t token = 0; token < num_tokens; token++)
        for (int64_t head = 0; head < num_heads; head++) {
            const T *first = x + token * stride + head * 2 * half, *second = first + half;
            T* out = output + (token * num_heads + head) * 2 * half;
            const float *c = cos + token * half, *s = sin + token * half;
            for (int64_t i = 0; i < half; i++) {
                float a = first[i], b = second[i];
                out[i] = a * c[i] - b * s[i];
                out[half + i] = b * c[i] + a * s[i];
            }
        }
}

void silu_and_multiply(const T* gate_up, T* output, int64_t num_tokens, int64_t size) {
#pragma omp parallel for if (num_tokens * size > SERIAL)
    for (int64_t token = 0; token < num_tokens; token++) {
        const T *gate = gate_up + token * 2 * size, *up = gate + size;
        T* out = output + token * size;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) {
            float g = gate[i];
            out[i] = g / (1 + expf(-g)) * up[i];
        }
    }
}

// The token with the highest logit + temperature * Gumbel noise per row, the first of equals. The noise is
// sampler.gumbel_noise: see there.
void sample(const T* logits, const int32_t* token_hashes, const int32_t* noise_keys, const float* temperatures,
            int64_t* tokens, int64_t num_rows, int64_t vocab_size) {
    constexpr int64_t CHUNK = 1024;
#pragma omp parallel for
    for (int64_t row = 0; row < num_rows; row++) {
        const T* in = logits + row * vocab_size;
        float temperature = temperatures ? temperatures[row] : 0, highest = -FLT_MAX, scores[CHUNK];
        tokens[row] = 0;
        for (int64_t start = 0; start < vocab_size; start += CHUNK) {
            int64_t size = std::min(CHUNK, vocab_size - start);
            std::copy(in + start, in + start + size, scores);
            if (temperature > 0) {
                uint32_t key = noise_keys[2 * row], factor = noise_keys[2 * row + 1] | 1;
#pragma omp simd
                for (int64_t i = 0; i < size; i++) {
                    uint32_t x = token_hashes[start + i] ^ key;
                    x = (x ^ x >> 16) * factor;
                    x = (x ^ x >> 15) * 0x2C1B3C6D >> 1;
                    float uniform = int32_t(x) * (0x1p-31f * (1 - 0x1p-23f)) + 0x1p-33f;
                    scores[i] -= temperature * logf(-log1pf(-uniform));
                }
            }
            float highest_here = -FLT_MAX;
#pragma omp simd reduction(max : highest_here)
            for (int64_t i = 0; i < size; i++) highest_here = std::max(highest_here, scores[i]);
            if (highest_here > highest) {
                highest = highest_here;
                tokens[row] = start + (std::find(scores, scores + size, highest) - scores);
            }
        }
    }
}

}  // extern "C"
