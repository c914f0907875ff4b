// Causal attention of several query tokens per sequence, as matrix products of tiles (FlashAttention-2, Dao 2023).
//
// PIECE tokens of the context at a time become panels, of keys and of values, which QUERIES query tokens share, some rows at
// a time: scores, weights and the sums of values stay in a core's cache. A row keeps the highest score so far; where a piece
// brings a higher one, what the row has summed up before is rescaled.
#pragma once
#include <array>

#include "products.h"

#ifdef T_IS_16_BITS
constexpr int64_t QUERIES = 256, PIECE = 256, ROWS_AT_ONCE = round_up(32, ROWS);

// The queries of one KV head, with `tokens_before` them: each sees these, and of the queries itself and those before it.
class PrefixAttention {
    std::vector<T> zeros, rows, weights, key_panels, value_panels;
    std::vector<float> scores, outputs, highest, totals;
    Rows query_rows, weight_rows;
    int64_t padded_dim;

    // Of `num_tokens` from `first` on, up to a whole panel.
    void pack(const T* keys, const T* values, const int32_t* block_table, int64_t first, int64_t num_tokens,
              int64_t block_size, int64_t row_size, int64_t head_dim) {
        for (int64_t token = 0; token < round_up(num_tokens, WIDTH); token += 2) {
            const T *key[2], *value[2];
            for (int i = 0; i < 2; i++) {
                int64_t position = first + std::min(token + i, num_tokens - 1);
                int64_t offset = (block_table[position / block_size] * block_size + position % block_size) * row_size;
                key[i] = keys + offset, value[i] = values + offset;
            }
            T* to = &key_panels[token / WIDTH * WIDTH * padded_dim + token % WIDTH * 2];
            for (int i = 0; i < 2; i++)
                for (int64_t d = 0; d < head_dim; d += 2) memcpy(to + d * WIDTH + 2 * i, key[i] + d, 2 * sizeof(T));
            const T *left = token < num_tokens ? value[0] : zeros.data(), *right = token + 1 < num_tokens ? value[1] : zeros.data();
            // Zeros behind the context: a weight of zero would not silence everything that could be there.
            for (int64_t start = 0; start < head_dim; start += WIDTH) {
                to = &value_panels[start * PIECE + token * WIDTH];
                for (int64_t d = 0; d < std::min(WIDTH, head_dim - start); d++) to[2 * d] = left[start + d], to[2 * d + 1] = right[start + d];
            }
        }
    }

  public:
    void attend(const T* query, const T* keys, const T* values, T* output, const int32_t* block_table,
                int64_t tokens_before, int64_t num_queries, int64_t block_size, int64_t num_kv_heads,
                int64_t group_size, int64_t head_dim, float scale) {
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
        value_panels.resize(PIECE * padded_dim);
        weights.resize(ROWS_AT_ONCE * PIECE);
        scores.resize(ROWS_AT_ONCE * PIECE);
        outputs.assign(round_up(num_rows + ROWS_AT_ONCE, ROWS) * padded_dim, 0);
        highest.assign(num_rows, -FLT_MAX);
        totals.assign(num_rows, 0);

        for (int64_t first = 0; first < context_len; first += PIECE) {
            int64_t num_tokens = std::min(PIECE, context_len - first);
            pack(keys, values, block_table, first, num_tokens, block_size, num_kv_heads * head_dim, head_dim);
            auto find_visible = [&](int64_t row) { return std::min(num_tokens, tokens_before + row / group_size + 1 - first); };
            for (int64_t start = std::max<int64_t>(0, first - tokens_before) * group_size; start < num_rows; start += ROWS_AT_ONCE) {
                int64_t size = std::min(ROWS_AT_ONCE, num_rows - start), visible = find_visible(start + size - 1);
                query_rows.pack(&rows[start * head_dim], head_dim, size, head_dim);
                for (int64_t panel = 0; panel < visible; panel += WIDTH)
                    query_rows.multiply(&key_panels[panel * padded_dim], &scores[panel], PIECE, false);
                for (int64_t row = 0; row < size; row++) {
                    T* w = &weights[row * PIECE];
                    float rescale = weigh(&scores[row * PIECE], w, find_visible(start + row), scale, start + row);
                    std::fill(w + find_visible(start + row), w + round_up(visible, LINE), T{});
                    if (rescale != 1)
                        for (int64_t i = 0; i < padded_dim; i++) outputs[(start + row) * padded_dim + i] *= rescale;
                }
                weight_rows.pack(weights.data(), PIECE, size, round_up(visible, 2));
                for (int64_t panel = 0; panel < head_dim; panel += WIDTH)
                    weight_rows.multiply(&value_panels[panel * PIECE], &outputs[start * padded_dim + panel], padded_dim, true);
            }
        }
        for (int64_t row = 0; row < num_rows; row++)
            for (int64_t i = 0; i < head_dim; i++)
                output[offset_of(row) + i] = outputs[row * padded_dim + i] / totals[row];
    }

  private:
    // Turns a row's scores into weights; what was summed up for the row before is to be multiplied by the result.
    float weigh(const float* s, T* w, int64_t visible, float scale, int64_t row) {
        float base = highest[row] / scale, total = 0;
#pragma omp simd reduction(max : base)
        for (int64_t i = 0; i < visible; i++) base = s[i] > base ? s[i] : base;
        base *= scale;
#pragma omp simd reduction(+ : total)
        for (int64_t i = 0; i < visible; i++) {
            float weight = exponential(scale * s[i] - base);
            w[i] = weight;
            total += weight;
        }
        float rescale = exponential(highest[row] - base);
        highest[row] = base, totals[row] = totals[row] * rescale + total;
        return rescale;
    }
};

extern "C" void prefill_attention(const T* query, const T* keys, const T* values, T* output, const int32_t* cu_seqlens_q, const
                                  int32_t* context_lens, const int32_t* block_tables, int64_t num_seqs, int64_t table_width,
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
