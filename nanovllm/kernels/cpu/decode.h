// Attention of queries of up to SHORT_QUERY tokens (defined in library.py), in which every token is
// a separate decode.
//
// A context is divided into splits of SPLIT tokens, which are tasks for the threads, and the
// results are combined as in the Triton backend. Splits begin at multiples of SPLIT, and the first
// one is cut where the window begins. Several query tokens therefore divide their context as
// decodes do.
//
// The keys, and then the values, of TOKENS tokens are read at a time, with all heads, in the order
// of memory. While those of one head are multiplied, those of the same head of the `next` tokens
// are prefetched, spread over time because a core can have few cache lines in flight.
#pragma once
#include "kv_cache.h"

constexpr int64_t SPLIT = 256;
constexpr int64_t TOKENS = 8;

// Multiply the queries of a group [group_size, size] by the keys of TOKENS tokens. Store products
// [group_size, SPLIT].
template <class Number>
static void multiply_keys(const Number* query, const Number* const* keys, const T* const* next,
                          int64_t group_size, int64_t size, float* products) {
    for (int64_t head = 0; head < group_size; head++)
        for (int token = 0; token < TOKENS; token++) {
            if (head == 0) prefetch(next[token], size);
            const Number* q = query + head * size;
            const Number* key = keys[token];
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < size; i++) sum += float(q[i]) * float(key[i]);
            products[head * SPLIT + token] = sum;
        }
}

// Add weights [group_size, SPLIT] of TOKENS tokens times their values to sums [group_size, size].
template <class Number>
static void add_values(const Number* const* values, const T* const* next, const Number* weights,
                       int64_t group_size, int64_t size, float* sums) {
    for (int token = 0; token < TOKENS; token++) prefetch(next[token], size);
    for (int64_t head = 0; head < group_size; head++) {
        const Number* w = weights + head * SPLIT;
        float* to = sums + head * size;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) {
            float sum = to[i];
            for (int token = 0; token < TOKENS; token++)
                sum += float(w[token]) * float(values[token][i]);
            to[i] = sum;
        }
    }
}

#ifdef IN_PAIRS
// The same with instructions that multiply pairs of bfloat16. Interleave numbers 0 to 15 (half 0)
// or 16 to 31 (half 1) of two registers.
static __m512i interleave(__m512i left, __m512i right, int half) {
    alignas(64) static constexpr uint16_t order[64] = {
        // 32 and above select from `right`.
        0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
        11, 43, 12, 44, 13, 45, 14, 46, 15, 47, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53,
        22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
    return _mm512_permutex2var_epi16(left, _mm512_load_si512(order + 32 * half), right);
}

static void multiply_keys(const bfloat16* query, const bfloat16* const* keys,
                          const bfloat16* const* next, int64_t group_size, int64_t size,
                          float* products) {
    if (size % 32) return multiply_keys<bfloat16>(query, keys, next, group_size, size, products);
    for (int64_t head = 0; head < group_size; head++) {
        const bfloat16* q = query + head * size;
        for (int token = 0; token < TOKENS; token += 4) {
            __m512 sums[4] = {};
#pragma GCC unroll 4
            for (int64_t i = 0; i < size; i += 32)
                for (int t = 0; t < 4; t++) {
                    if (head == 0) __builtin_prefetch(next[token + t] + i);
                    sums[t] = _mm512_dpbf16_ps(sums[t], (__m512bh)_mm512_loadu_si512(q + i),
                                               (__m512bh)_mm512_loadu_si512(keys[token + t] + i));
                }
            // Four sums of 16 numbers each are reduced by halves, all at once.
            __m512 pairs01 = _mm512_add_ps(_mm512_unpacklo_ps(sums[0], sums[1]),
                                           _mm512_unpackhi_ps(sums[0], sums[1]));
            __m512 pairs23 = _mm512_add_ps(_mm512_unpacklo_ps(sums[2], sums[3]),
                                           _mm512_unpackhi_ps(sums[2], sums[3]));
            __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(pairs01), _mm512_castps_pd(pairs23));
            __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(pairs01), _mm512_castps_pd(pairs23));
            __m512 quads = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
            __m256 halves =
                _mm256_add_ps(_mm512_castps512_ps256(quads), _mm512_extractf32x8_ps(quads, 1));
            __m128 products_of_4 =
                _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
            _mm_storeu_ps(products + head * SPLIT + token, products_of_4);
        }
    }
}

static void add_values(const bfloat16* const* values, const bfloat16* const* next,
                       const bfloat16* weights, int64_t group_size, int64_t size, float* sums) {
    if (size % 32) return add_values<bfloat16>(values, next, weights, group_size, size, sums);
    for (int64_t i = 0; i < size; i += 32) {
        __m512bh pairs[2][TOKENS / 2];
        for (int pair = 0; pair < TOKENS / 2; pair++) {
            for (int token : {2 * pair, 2 * pair + 1}) __builtin_prefetch(next[token] + i);
            __m512i left = _mm512_loadu_si512(values[2 * pair] + i);
            __m512i right = _mm512_loadu_si512(values[2 * pair + 1] + i);
            for (int half = 0; half < 2; half++)
                pairs[half][pair] = (__m512bh)interleave(left, right, half);
        }
        for (int64_t head = 0; head < group_size; head++)
            for (int half = 0; half < 2; half++) {
                float* to = sums + head * size + i + 16 * half;
                __m512 sum = _mm512_loadu_ps(to);
                for (int pair = 0; pair < TOKENS / 2; pair++) {
                    int32_t two_weights;
                    memcpy(&two_weights, weights + head * SPLIT + 2 * pair, sizeof two_weights);
                    sum = _mm512_dpbf16_ps(sum, pairs[half][pair],
                                           (__m512bh)_mm512_set1_epi32(two_weights));
                }
                _mm512_storeu_ps(to, sum);
            }
    }
}
#endif

// Attention of one query token, all heads, to `num_tokens` tokens of its context. Store the
// weighted sums of the values, the highest score, and the sum of the weights exp(score - highest),
// which are needed to combine splits. With a HEAD_DIM that the compiler knows, loops have no
// remainders.
template <int64_t HEAD_DIM>
static void attend_to_part(const T* query, const T* keys, const T* values,
                           const int32_t* block_table, int64_t first_token, int64_t num_tokens,
                           int64_t block_size, int64_t num_kv_heads, int64_t group_size,
                           int64_t any_dim, float scale, float* sums, float* highest,
                           float* totals) {
    int64_t head_dim = HEAD_DIM ? HEAD_DIM : any_dim;
    int64_t num_heads = num_kv_heads * group_size;
    float scores[num_heads][SPLIT];
    Factor weights[num_heads][SPLIT];
    Factor queries[num_heads * head_dim];
    Factor memory[TOKENS * head_dim];  // one head of TOKENS tokens, if it has to be widened
    std::copy_n(query, num_heads * head_dim, queries);
    // The keys or values of TOKENS tokens from `token`. Past the end, the last token is repeated.
    auto find = [&](const T* cache, int64_t token, const T** found) {
        int64_t position = first_token + std::min(token, num_tokens - 1);
        int64_t block = position / block_size;
        int64_t offset = position % block_size;
        for (int64_t i = 0; i < TOKENS; i++) {
            found[i] = cache + (block_table[block] * block_size + offset) * num_kv_heads * head_dim;
            if (token + i + 1 >= num_tokens) continue;
            offset++;
            if (offset == block_size) {
                block++;
                offset = 0;
            }
        }
    };
    const T* now[TOKENS];        // keys or values of TOKENS tokens, from the current KV head on
    const T* next[TOKENS];       // those that are read after them
    const Factor* wide[TOKENS];  // one head of `now`
    auto widen_now = [&] {
        for (int64_t i = 0; i < TOKENS; i++) {
            Factor* copy = memory + i * head_dim;
            if (std::is_same_v<T, Factor>) {
                wide[i] = (const Factor*)now[i];
            } else {
                std::copy_n(now[i], head_dim, copy);
                wide[i] = copy;
            }
        }
    };
    auto move_to_next_head = [&] {
        for (int64_t i = 0; i < TOKENS; i++) {
            now[i] += head_dim;
            next[i] += head_dim;
        }
    };
    for (int64_t token = 0; token < num_tokens; token += TOKENS) {
        bool is_last = token + TOKENS >= num_tokens;
        find(keys, token, now);
        find(is_last ? values : keys, is_last ? 0 : token + TOKENS, next);
        for (int64_t head = 0; head < num_heads; head += group_size) {
            widen_now();
            multiply_keys(queries + head * head_dim, wide, next, group_size, head_dim,
                          &scores[head][token]);
            move_to_next_head();
        }
    }
    for (int64_t head = 0; head < num_heads; head++) {
        totals[head] = exponentiate(scores[head], num_tokens, scale, highest[head]);
        std::copy_n(scores[head], num_tokens, weights[head]);
        std::fill(weights[head] + num_tokens, weights[head] + round_up(num_tokens, TOKENS),
                  Factor{});
    }
    std::fill_n(sums, num_heads * head_dim, 0);
    for (int64_t token = 0; token < num_tokens; token += TOKENS) {
        find(values, token, now);
        find(values, token + TOKENS, next);
        for (int64_t head = 0; head < num_heads; head += group_size) {
            widen_now();
            add_values(wide, next, &weights[head][token], group_size, head_dim,
                       sums + head * head_dim);
            move_to_next_head();
        }
    }
}

extern "C" void decode_attention(const T* query, const T* keys, const T* values, T* output,
                                 const Sequences* seqs, const Heads* heads) {
    const int32_t* context_lens = seqs->context_lens;
    int64_t num_heads = heads->num_heads;
    int64_t group_size = num_heads / heads->num_kv_heads;
    int64_t head_dim = heads->head_dim;
    int64_t window = heads->window;
    int64_t size = num_heads * head_dim;
    struct Part {  // one query token and one split of its context
        int64_t seq;
        int64_t row;
        int64_t first_token;
        int64_t num_tokens;
        bool is_first;  // of this row
    };
    std::vector<Part> parts;  // query tokens that read the same K/V are adjacent
    for (int64_t seq = 0; seq < seqs->num_seqs; seq++) {
        int64_t start = seqs->cu_seqlens_q[seq];
        int64_t query_len = seqs->cu_seqlens_q[seq + 1] - start;
        if (query_len > SHORT_QUERY) continue;
        int64_t tokens_before = context_lens[seq] - query_len;
        int64_t first = find_first_visible(tokens_before, window) / SPLIT * SPLIT;
        for (; first < context_lens[seq]; first += SPLIT)
            for (int64_t i = 0; i < query_len; i++) {
                int64_t position = tokens_before + i;
                int64_t first_visible = find_first_visible(position, window);
                int64_t begin = std::max(first, first_visible);
                int64_t end = std::min(first + SPLIT, position + 1);
                if (begin < end)
                    parts.push_back({seq, start + i, begin, end - begin, begin == first_visible});
            }
    }

    auto attend = head_dim == 64    ? attend_to_part<64>
                  : head_dim == 128 ? attend_to_part<128>
                  : head_dim == 256 ? attend_to_part<256>
                                    : attend_to_part<0>;
    Team::form(parts.size() > 1, [&] {
        Team& team = Team::get();
        // Results of a split: sums [num_heads, head_dim], highest [num_heads], totals [num_heads].
        int64_t stride = size + 2 * num_heads;
        team.share(1, [&](int64_t) { team.memory.get(parts.size() * stride); });
        float* results = team.memory.get(0);
        team.share(parts.size(), [&](int64_t i) {
            auto [seq, row, first_token, num_tokens, _] = parts[i];
            float* sums = results + i * stride;
            float* highest = sums + size;
            attend(query + row * size, keys, values, seqs->block_tables + seq * seqs->table_width,
                   first_token, num_tokens, seqs->block_size, heads->num_kv_heads, group_size,
                   head_dim, heads->scale, sums, highest, highest + num_heads);
        });
        // Combine splits: the weights of each are scaled by exp(its highest score - the highest of
        // all).
        parallel_for(parts.size(), size, [&](size_t i) {
            if (!parts[i].is_first) return;
            // The first split of a row finds the others, which come after it.
            std::vector<const float*> of_row;
            for (size_t part = i; part < parts.size() && parts[part].seq == parts[i].seq; part++)
                if (parts[part].row == parts[i].row) of_row.push_back(results + part * stride);
            T* out = output + parts[i].row * size;
            for (int64_t head = 0; head < num_heads; head++) {
                float highest = -FLT_MAX;
                float total = 0;
                float sum[head_dim];
                std::fill_n(sum, head_dim, 0);
                for (const float* from : of_row) highest = std::max(highest, from[size + head]);
                for (const float* from : of_row) {
                    float factor = exponential(from[size + head] - highest);
                    total += factor * from[size + num_heads + head];
                    for (int64_t d = 0; d < head_dim; d++)
                        sum[d] += factor * from[head * head_dim + d];
                }
                for (int64_t d = 0; d < head_dim; d++) out[head * head_dim + d] = sum[d] / total;
            }
        });
    });
}
