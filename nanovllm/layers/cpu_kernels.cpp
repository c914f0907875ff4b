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
constexpr int64_t QUERIES = 256;     // query tokens that share the panels made of their context
constexpr int PANELS = 4, ROWS = 6;  // of a tile of a matrix product: 24 sums and 4 weights, of 32 registers
constexpr int64_t WIDTH = 16 * PANELS;
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

// The products of a query with four keys.
template <class Number>
static void multiply_keys(const Number* query, const Number* const* keys, int64_t size, float* products) {
    for (int key = 0; key < 4; key++) {
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < size; i++) sum += float(query[i]) * float(keys[key][i]);
        products[key] = sum;
    }
}

// sums += the weighted sum of four values.
template <class Number>
static void add_values(const Number* const* values, const float* weights, int64_t size, float* sums) {
    for (int value = 0; value < 4; value++) {
#pragma omp simd
        for (int64_t i = 0; i < size; i++) sums[i] += weights[value] * values[value][i];
    }
}

#ifdef TILED
static void multiply_keys(const bfloat16* query, const bfloat16* const* keys, int64_t size, float* products) {
    if (size % 32) return multiply_keys<bfloat16>(query, keys, size, products);
    __m512 sums[4] = {};
    for (int64_t i = 0; i < size; i += 32)
        for (int key = 0; key < 4; key++)
            sums[key] = _mm512_dpbf16_ps(sums[key], (__m512bh)_mm512_loadu_si512(query + i),
                                         (__m512bh)_mm512_loadu_si512(keys[key] + i));
    // Four sums over 16 numbers each: halved together, until a number of each is left.
    __m512 pairs01 = _mm512_add_ps(_mm512_unpacklo_ps(sums[0], sums[1]), _mm512_unpackhi_ps(sums[0], sums[1]));
    __m512 pairs23 = _mm512_add_ps(_mm512_unpacklo_ps(sums[2], sums[3]), _mm512_unpackhi_ps(sums[2], sums[3]));
    __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(pairs01), _mm512_castps_pd(pairs23));
    __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(pairs01), _mm512_castps_pd(pairs23));
    __m512 quads = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
    __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(quads), _mm512_extractf32x8_ps(quads, 1));
    _mm_storeu_ps(products, _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
}

static void add_values(const bfloat16* const* values, const float* weights, int64_t size, float* sums) {
    if (size % 32) return add_values<bfloat16>(values, weights, size, sums);
    // Numbers 0 to 15 and 16 to 31 of two values, alternating: 32 and above means the second value.
    alignas(64) static constexpr uint16_t alternate[64] = {
        0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
        11, 43, 12, 44, 13, 45, 14, 46, 15, 47, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53,
        22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
    __m512bh weight_pairs[2];
    for (int pair = 0; pair < 2; pair++) {
        bfloat16 rounded[2];
        rounded[0] = weights[2 * pair], rounded[1] = weights[2 * pair + 1];
        int32_t bits;
        memcpy(&bits, rounded, sizeof bits);
        weight_pairs[pair] = (__m512bh)_mm512_set1_epi32(bits);
    }
    for (int64_t i = 0; i < size; i += 32)
        for (int64_t half = 0; half < 2; half++) {
            __m512i order = _mm512_load_si512(alternate + 32 * half);
            __m512 sum = _mm512_loadu_ps(sums + i + 16 * half);
            for (int pair = 0; pair < 2; pair++) {
                __m512i left = _mm512_loadu_si512(values[2 * pair] + i), right = _mm512_loadu_si512(values[2 * pair + 1] + i);
                sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_permutex2var_epi16(left, order, right), weight_pairs[pair]);
            }
            _mm512_storeu_ps(sums + i + 16 * half, sum);
        }
}
#endif

// One query token of all heads against `num_tokens` tokens of its context: what their values, weighted, add up to, and
// for the join with the rest of the context the highest score and the sum of the weights exp(score - highest).
// All heads of a token are read before the next token, in the order of memory.
static void attend_to_part(const T* query, const T* keys, const T* values, const int32_t* block_table,
                           int64_t first_token, int64_t num_tokens, int64_t block_size, int64_t num_kv_heads,
                           int64_t group_size, int64_t head_dim, float scale, float* sums, float* highest,
                           float* totals) {
    int64_t num_heads = num_kv_heads * group_size;
    float weights[num_heads][SPLIT];
    // Four tokens' keys or values, from `token` on. In place of those behind the end, the last one again.
    auto find = [&](const T* cache, int64_t token, const T* found[4]) {
        for (int64_t i = 0; i < 4; i++) {
            int64_t position = first_token + std::min(token + i, num_tokens - 1);
            int64_t slot = block_table[position / block_size] * block_size + position % block_size;
            found[i] = cache + slot * num_kv_heads * head_dim;
        }
    };
    const T* four[4];
    for (int64_t token = 0; token < num_tokens; token += 4) {
        find(keys, token, four);
        for (int64_t head = 0; head < num_heads;) {
            for (int64_t end = head + group_size; head < end; head++)
                multiply_keys(query + head * head_dim, four, head_dim, &weights[head][token]);
            for (const T*& key : four) key += head_dim;
        }
    }
    for (int64_t head = 0; head < num_heads; head++) {
        float *w = weights[head], total = 0;
        highest[head] = scale * *std::max_element(w, w + num_tokens);
#pragma omp simd reduction(+ : total)
        for (int64_t i = 0; i < num_tokens; i++) {
            w[i] = expf(scale * w[i] - highest[head]);
            total += w[i];
        }
        totals[head] = total;
        std::fill(w + num_tokens, w + (num_tokens + 3) / 4 * 4, 0.0f);
    }
    std::fill_n(sums, num_heads * head_dim, 0);
    for (int64_t token = 0; token < num_tokens; token += 4) {
        find(values, token, four);
        for (int64_t head = 0; head < num_heads;) {
            for (int64_t end = head + group_size; head < end; head++)
                add_values(four, &weights[head][token], head_dim, sums + head * head_dim);
            for (const T*& value : four) value += head_dim;
        }
    }
}

#ifdef TILED
static void store(bfloat16* to, __mmask16 mask, __m512 values) {
    _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(values));
}

static void store(float* to, __mmask16 mask, __m512 values) { _mm512_mask_storeu_ps(to, mask, values); }

// A product of M rows of x and PANELS panels of a matrix: [M, 16 * PANELS] sums of products of pairs, all in registers.
// A panel is [panel_size / 32, 16, 2]: of 16 outputs the next pair, side by side, as the instruction wants them.
// Meanwhile the panels that come next are fetched into the cache, by each of the tiles a share.
template <int M, class Output>
static void multiply_tile(const bfloat16* x, int64_t x_stride, const bfloat16* panels, int64_t panel_size,
                          const bfloat16* bias, Output* output, int64_t output_stride, int64_t in_features,
                          int64_t columns_left, int64_t tile, int64_t num_tiles) {
    __m512 sums[M][PANELS];
    __mmask16 masks[PANELS];
    for (int panel = 0; panel < PANELS; panel++) {
        masks[panel] = (1 << std::clamp<int64_t>(columns_left - 16 * panel, 0, 16)) - 1;
        __m256i narrow = _mm256_maskz_loadu_epi16(bias ? masks[panel] : 0, bias + 16 * panel);
        for (int row = 0; row < M; row++)
            sums[row][panel] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
    }
    int64_t until_fetch = tile;
    for (int64_t i = 0; i < in_features; i += 2) {
        __m512bh pairs[PANELS];
        for (int panel = 0; panel < PANELS; panel++)
            pairs[panel] = (__m512bh)_mm512_loadu_si512(panels + panel * panel_size + i * 16);
        if (until_fetch-- == 0) {
            until_fetch = num_tiles - 1;
            for (int panel = PANELS; panel < 2 * PANELS; panel++)
                _mm_prefetch(panels + panel * panel_size + i * 16, _MM_HINT_T1);
        }
        for (int row = 0; row < M; row++) {
            int32_t pair;
            memcpy(&pair, x + row * x_stride + i, sizeof pair);
            for (int panel = 0; panel < PANELS; panel++)
                sums[row][panel] = _mm512_dpbf16_ps(sums[row][panel], (__m512bh)_mm512_set1_epi32(pair), pairs[panel]);
        }
    }
    for (int row = 0; row < M; row++)
        for (int panel = 0; panel < PANELS; panel++)
            store(output + row * output_stride + 16 * panel, masks[panel], sums[row][panel]);
}

// All rows of x with one column of PANELS panels.
template <class Output>
static void multiply_column(const bfloat16* x, int64_t x_stride, int64_t num_rows, const bfloat16* panels,
                            int64_t panel_size, const bfloat16* bias, Output* output, int64_t output_stride,
                            int64_t in_features, int64_t columns_left) {
    static constexpr decltype(&multiply_tile<1, Output>) of_rows[ROWS + 1] = {
        nullptr,                  multiply_tile<1, Output>, multiply_tile<2, Output>, multiply_tile<3, Output>,
        multiply_tile<4, Output>, multiply_tile<5, Output>, multiply_tile<6, Output>};
    int64_t num_tiles = (num_rows + ROWS - 1) / ROWS;
    for (int64_t tile = 0; tile < num_tiles; tile++) {
        int64_t row = num_rows * tile / num_tiles, end = num_rows * (tile + 1) / num_tiles;
        of_rows[end - row](x + row * x_stride, x_stride, panels, panel_size, bias, output + row * output_stride,
                           output_stride, in_features, columns_left, tile, num_tiles);
    }
}

// Up to QUERIES query tokens of one sequence and one KV head. Keys and values become panels, so that scores and outputs
// are products of tiles; `tokens_before` are visible to all of the queries, and each sees itself and those before it.
static void attend_to_prefix(const bfloat16* query, const bfloat16* keys, const bfloat16* values, bfloat16* output,
                             const int32_t* block_table, int64_t tokens_before, int64_t num_queries,
                             int64_t block_size, int64_t num_kv_heads, int64_t group_size, int64_t head_dim,
                             float scale) {
    constexpr int64_t ROWS_AT_ONCE = 4 * ROWS;
    int64_t context_len = tokens_before + num_queries, num_rows = num_queries * group_size;
    int64_t padded_len = (context_len + WIDTH - 1) / WIDTH * WIDTH, padded_dim = (head_dim + WIDTH - 1) / WIDTH * WIDTH;
    static thread_local std::vector<bfloat16> key_panels, value_panels, rows, weights, outputs;
    static thread_local std::vector<float> scores;
    key_panels.assign(padded_len * head_dim, {});
    value_panels.assign(padded_dim * padded_len, {});
    rows.resize(num_rows * head_dim);
    outputs.resize(num_rows * head_dim);
    weights.resize(ROWS_AT_ONCE * padded_len);
    scores.resize(ROWS_AT_ONCE * padded_len);

    for (int64_t token = 0; token < context_len; token++) {
        int64_t slot = block_table[token / block_size] * block_size + token % block_size;
        const bfloat16 *key = keys + slot * num_kv_heads * head_dim, *value = values + slot * num_kv_heads * head_dim;
        bfloat16* k = &key_panels[token / 16 * 16 * head_dim + token % 16 * 2];
        bfloat16* v = &value_panels[token / 2 * 32 + token % 2];
        for (int64_t d = 0; d < head_dim; d += 2) memcpy(k + d * 16, key + d, 2 * sizeof(bfloat16));
        for (int64_t d = 0; d < head_dim; d++) v[d / 16 * 16 * padded_len + d % 16 * 2] = value[d];
    }
    for (int64_t row = 0; row < num_rows; row++)
        memcpy(&rows[row * head_dim], query + (row / group_size * num_kv_heads * group_size + row % group_size) * head_dim,
               head_dim * sizeof(bfloat16));

    for (int64_t start = 0; start < num_rows; start += ROWS_AT_ONCE) {
        int64_t size = std::min(ROWS_AT_ONCE, num_rows - start);
        int64_t visible = tokens_before + (start + size - 1) / group_size + 1;
        for (int64_t column = 0; column < visible; column += WIDTH)
            multiply_column(&rows[start * head_dim], head_dim, size, &key_panels[column * head_dim], 16 * head_dim,
                            nullptr, &scores[column], padded_len, head_dim, WIDTH);
        for (int64_t row = 0; row < size; row++) {
            int64_t row_visible = tokens_before + (start + row) / group_size + 1;
            float *s = &scores[row * padded_len], highest = *std::max_element(s, s + row_visible), total = 0;
#pragma omp simd reduction(+ : total)
            for (int64_t token = 0; token < row_visible; token++) {
                s[token] = expf(scale * (s[token] - highest));
                total += s[token];
            }
            bfloat16* w = &weights[row * padded_len];
            float factor = 1 / total;
            for (int64_t token = 0; token < row_visible; token++) w[token] = s[token] * factor;
            std::fill(w + row_visible, w + visible + visible % 2, bfloat16{});
        }
        for (int64_t column = 0; column < head_dim; column += WIDTH)
            multiply_column(weights.data(), padded_len, size, &value_panels[column * padded_len], 16 * padded_len, nullptr,
                            &outputs[start * head_dim + column], head_dim, visible + visible % 2, head_dim - column);
    }
    for (int64_t row = 0; row < num_rows; row++)
        memcpy(output + (row / group_size * num_kv_heads * group_size + row % group_size) * head_dim,
               &outputs[row * head_dim], head_dim * sizeof(bfloat16));
}
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
        float *sums = result + i * stride, *highest = sums + size;
        attend_to_part(query + cu_seqlens_q[seq] * size, keys, values, block_tables + seq * table_width, first_token,
                       std::min(SPLIT, context_lens[seq] - first_token), block_size, num_kv_heads, group_size, head_dim,
                       scale, sums, highest, highest + num_heads);
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
void linear(const bfloat16* x, const bfloat16* panels, const bfloat16* bias, bfloat16* output, int64_t num_rows,
            int64_t in_features, int64_t out_features) {
    int64_t rows_at_once = std::max<int64_t>(ROWS, BYTES_OF_X / (2 * in_features) / ROWS * ROWS);
    for (int64_t row = 0; row < num_rows; row += rows_at_once) {
#pragma omp parallel for
        for (int64_t column = 0; column < out_features; column += WIDTH)
            multiply_column(x + row * in_features, in_features, std::min(rows_at_once, num_rows - row),
                            panels + column * in_features, 16 * in_features, bias ? bias + column : nullptr,
                            output + row * out_features + column, out_features, in_features, out_features - column);
    }
}

void prefill_attention(const bfloat16* query, const bfloat16* keys, const bfloat16* values, bfloat16* output,
                       const int32_t* cu_seqlens_q, const int32_t* context_lens, const int32_t* block_tables,
                       int64_t num_seqs, int64_t table_width, int64_t block_size, int64_t num_kv_heads,
                       int64_t group_size, int64_t head_dim, float scale) {
    struct Part {
        int64_t seq, first_query, kv_head;
    };
    std::vector<Part> parts;
    for (int64_t seq = 0; seq < num_seqs; seq++)
        if (int64_t query_len = cu_seqlens_q[seq + 1] - cu_seqlens_q[seq]; query_len > 1)
            for (int64_t first = (query_len - 1) / QUERIES * QUERIES; first >= 0; first -= QUERIES)  // the longest first
                for (int64_t kv_head = 0; kv_head < num_kv_heads; kv_head++) parts.push_back({seq, first, kv_head});
#pragma omp parallel for schedule(dynamic)
    for (size_t i = 0; i < parts.size(); i++) {
        auto [seq, first, kv_head] = parts[i];
        int64_t start = cu_seqlens_q[seq], query_len = cu_seqlens_q[seq + 1] - start;
        int64_t offset = ((start + first) * num_kv_heads + kv_head) * group_size * head_dim;
        attend_to_prefix(query + offset, keys + kv_head * head_dim, values + kv_head * head_dim, output + offset,
                         block_tables + seq * table_width, context_lens[seq] - query_len + first,
                         std::min(QUERIES, query_len - first), block_size, num_kv_heads, group_size, head_dim, scale);
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
