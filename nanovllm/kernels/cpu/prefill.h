// Causal attention of several query tokens per sequence, as matrix products of tiles (FlashAttention-2, Dao 2023).
//
// PIECE tokens of the context at a time become panels, of keys and of values, which QUERIES query tokens share, some rows at
// a time: scores, weights and the sums of values stay in a core's cache. A row keeps the highest score so far; where a piece
// brings a higher one, what the row has summed up before is rescaled.
#pragma once
#include <array>

#include "products.h"

#ifdef T_IS_16_BITS
constexpr int64_t QUERIES = 512, PIECE = 512, ROWS_AT_ONCE = round_up(32, ROWS);
constexpr int64_t STRIDE = PIECE + 16;  // of scores: with a power of two, a tile's rows would meet in few lines of the cache
constexpr int64_t AHEAD = 8;            // tokens whose keys and values are fetched ahead

// 2^x for x from -126, below which it stays the same, to 0. To 3 parts in 10^6, as it will be rounded to 16 bits. NaN stays NaN.
static Vector power_of_2(Vector x) {
    typedef int32_t Bits __attribute__((vector_size(sizeof(Vector))));
    x = x < -126 ? Vector{} - 126 : x;
    Vector shifted = x + 0x1.8p23f, rest = x - (shifted - 0x1.8p23f);  // at this size a float has no fraction
    Vector sum = Vector{} + 0.00958285f;
    for (float coefficient : {0.05590643f, 0.24024099f, 0.69312419f, 1.0f}) sum = sum * rest + coefficient;
    return (Vector)((Bits)sum + ((Bits)shifted << 23));
}

// The queries of one KV head, with `tokens_before` them: each sees these, and of the queries itself and those before it.
class PrefixAttention {
    std::vector<T> zeros, rows, weights, key_panels, value_panels;
    std::vector<float> scores, outputs, highest, totals;
    Rows query_rows, weight_rows;
    int64_t padded_dim;

    // Of `num_tokens` from `first` on, up to a whole panel.
    void pack(const T* keys, const T* values, const int32_t* block_table, int64_t first, int64_t num_tokens,
              int64_t block_size, int64_t row_size, int64_t head_dim) {
        auto find = [&](int64_t token) {  // its place in the cache; for those behind the end, the last one's
            int64_t position = first + std::min(token, num_tokens - 1);
            return (block_table[position / block_size] * block_size + position % block_size) * row_size;
        };
        for (int64_t token = 0; token < round_up(num_tokens, WIDTH); token += 2) {
            const T* value[2];
            for (int i = 0; i < 2; i++) {
                int64_t place = find(token + i), next = find(token + i + AHEAD);
                for (int64_t d = 0; d < head_dim; d += LINE) {
                    __builtin_prefetch(keys + next + d);
                    __builtin_prefetch(values + next + d);
                }
                T* to = &key_panels[token / WIDTH * WIDTH * padded_dim + (token % WIDTH + i) * 2];
                for (int64_t d = 0; d < head_dim; d += 2) memcpy(to + d * WIDTH, keys + place + d, 2 * sizeof(T));
                // A weight of zero would not silence everything that could be behind the context.
                value[i] = token + i < num_tokens ? values + place : zeros.data();
            }
            for (int64_t d = 0; d < head_dim; d += WIDTH)
                interleave(value[0] + d, value[1] + d, &value_panels[d * PIECE + token * WIDTH], std::min(WIDTH, head_dim - d));
        }
    }

    static void interleave(const T* __restrict left, const T* __restrict right, T* __restrict to, int64_t size) {
        if (size == WIDTH)  // a loop of a length that the compiler knows
            for (int64_t i = 0; i < WIDTH; i++) to[2 * i] = left[i], to[2 * i + 1] = right[i];
        else
            for (int64_t i = 0; i < size; i++) to[2 * i] = left[i], to[2 * i + 1] = right[i];
    }

  public:
    void attend(const T* query, const T* keys, const T* values, T* output, const int32_t* block_table, int64_t tokens_before,
                int64_t num_queries, int64_t block_size, int64_t num_kv_heads, int64_t group_size, int64_t head_dim,
                float scale) {
        scale *= 1.44269504f;  // log2(e): weights are powers of 2
        int64_t num_rows = num_queries * group_size, context_len = tokens_before + num_queries;
        padded_dim = round_up(head_dim, WIDTH);
        auto offset_of = [&](int64_t row) {  // in query and output, where the other KV heads' rows lie between
            return (row / group_size * num_kv_heads * group_size + row % group_size) * head_dim;
        };
        rows.resize(num_rows * head_dim);
        for (int64_t row = 0; row < num_rows; row++)
            memcpy(&rows[row * head_dim], query + offset_of(row), head_dim * sizeof(T));
        zeros.assign(head_dim, T{});
        key_panels.resize(PIECE * padded_dim);
        if (head_dim < padded_dim) std::fill(key_panels.begin(), key_panels.end(), T{});  // what no pair is written to
        value_panels.resize(PIECE * padded_dim);
        weights.resize(ROWS_AT_ONCE * PIECE);
        scores.resize(ROWS_AT_ONCE * STRIDE);
        outputs.resize((num_rows + ROWS_AT_ONCE) * padded_dim);
        highest.assign(num_rows, -FLT_MAX);
        totals.assign(num_rows, 0);

        for (int64_t first = 0; first < context_len; first += PIECE) {
            int64_t num_tokens = std::min(PIECE, context_len - first);
            pack(keys, values, block_table, first, num_tokens, block_size, num_kv_heads * head_dim, head_dim);
            auto find_visible = [&](int64_t row) {  // tokens of this piece
                return std::min(num_tokens, tokens_before + row / group_size + 1 - first);
            };
            int64_t first_row = std::max<int64_t>(0, first - tokens_before) * group_size;  // to see any of them
            for (int64_t start = first_row; start < num_rows; start += ROWS_AT_ONCE) {
                int64_t size = std::min(ROWS_AT_ONCE, num_rows - start), visible = find_visible(start + size - 1);
                query_rows.pack(&rows[start * head_dim], head_dim, size, head_dim);
                for (int64_t panel = 0; panel < visible; panel += WIDTH)
                    query_rows.multiply(&key_panels[panel * padded_dim], &scores[panel], STRIDE, false);
                for (int64_t row = 0; row < size; row++) {
                    float rescale = weigh(&scores[row * STRIDE], &weights[row * PIECE], find_visible(start + row),
                                          round_up(visible, LINE), scale, start + row);
                    float* sums = &outputs[(start + row) * padded_dim];
                    if (first > 0 && rescale != 1)
                        for (int64_t i = 0; i < padded_dim; i++) sums[i] *= rescale;
                }
                weight_rows.pack(weights.data(), PIECE, size, round_up(visible, 2));
                for (int64_t panel = 0; panel < head_dim; panel += WIDTH)
                    weight_rows.multiply(&value_panels[panel * PIECE], &outputs[start * padded_dim + panel], padded_dim,
                                         first > 0);
            }
        }
        for (int64_t row = 0; row < num_rows; row++)
            for (int64_t i = 0; i < head_dim; i++)
                output[offset_of(row) + i] = outputs[row * padded_dim + i] / totals[row];
    }

  private:
    // Turns a row's scores into weights, zeros from the visible ones to `end`. What was summed up for the row before is to be
    // multiplied by the result. Four vectors at a time, since one would wait for the other.
    float weigh(float* s, T* w, int64_t visible, int64_t end, float scale, int64_t row) {
        constexpr int64_t AT_ONCE = 4 * LANES;
        std::fill(s + visible, s + round_up(visible, AT_ONCE), -INFINITY);
        Vector bases[4], sums[4] = {};
        for (Vector& base : bases) base = Vector{} + highest[row];
        for (int64_t i = 0; i < visible; i += AT_ONCE)
            for (int j = 0; j < 4; j++) {
                Vector score = load(s + i + j * LANES);
                bases[j] = score > bases[j] ? score : bases[j];
            }
        float base = highest[row], total = 0;
        const float* lanes = (const float*)bases;
#pragma omp simd reduction(max : base)
        for (int64_t i = 0; i < AT_ONCE; i++) base = lanes[i] > base ? lanes[i] : base;
        for (int64_t i = 0; i < visible; i += AT_ONCE)
            for (int j = 0; j < 4; j++) {
                Vector weight = power_of_2((load(s + i + j * LANES) - base) * scale);
                narrow(weight, w + i + j * LANES);
                sums[j] += weight;
            }
        std::fill(w + visible, w + end, T{});
        lanes = (const float*)sums;
#pragma omp simd reduction(+ : total)
        for (int64_t i = 0; i < AT_ONCE; i++) total += lanes[i];
        float rescale = power_of_2(Vector{} + (highest[row] - base) * scale)[0];
        highest[row] = base, totals[row] = totals[row] * rescale + total;
        return rescale;
    }
};

extern "C" void prefill_attention(const T* query, const T* keys, const T* values, T* output, const int32_t* cu_seqlens_q,
                                  const int32_t* context_lens, const int32_t* block_tables, int64_t num_seqs, int64_t table_width,
                                  int64_t block_size, int64_t num_kv_heads, int64_t group_size, int64_t head_dim, float scale) {
    std::vector<std::array<int64_t, 3>> parts;  // sequence, first query token, KV head
    for (int64_t seq = 0; seq < num_seqs; seq++)
        if (int64_t query_len = cu_seqlens_q[seq + 1] - cu_seqlens_q[seq]; query_len > 1)
            for (int64_t first = (query_len - 1) / QUERIES * QUERIES; first >= 0; first -= QUERIES)  // the longest first
                for (int64_t kv_head = 0; kv_head < num_kv_heads; kv_head++) parts.push_back({seq, first, kv_head});
    if (parts.empty()) return;
    Team::form(true, [&] {
        [[maybe_unused]] Tiles tiles;
        static thread_local PrefixAttention attention;
        Team::get().share(parts.size(), [&](int64_t i) {
            auto [seq, first, kv_head] = parts[i];
            int64_t start = cu_seqlens_q[seq], query_len = cu_seqlens_q[seq + 1] - start;
            int64_t offset = ((start + first) * num_kv_heads + kv_head) * group_size * head_dim;
            attention.attend(query + offset, keys + kv_head * head_dim, values + kv_head * head_dim, output + offset,
                             block_tables + seq * table_width, context_lens[seq] - query_len + first,
                             std::min(QUERIES, query_len - first), block_size, num_kv_heads, group_size, head_dim,
                             scale);
        });
    });
}
#endif
