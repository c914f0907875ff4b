// Causal attention of several query tokens per sequence, as two matrix products: panels are made of the keys, and then of
// the values, of a sequence and a KV head, and QUERIES query tokens share them.
#pragma once
#include <array>

#include "products.h"

#ifdef T_IS_16_BITS
constexpr int64_t QUERIES = 256;

// The queries of one KV head, with `tokens_before` them: each sees these, and of the queries itself and those before it.
static void attend_to_prefix(const T* query, const T* keys, const T* values, T* output, const int32_t* block_table, int64_t
                             tokens_before, int64_t num_queries, int64_t block_size, int64_t num_kv_heads, int64_t group_size,
                             int64_t head_dim, float scale) {
    constexpr int64_t ROWS_AT_ONCE = 4 * ROWS;
    int64_t context_len = tokens_before + num_queries, num_rows = num_queries * group_size;
    int64_t padded_len = round_up(context_len, WIDTH), padded_dim = round_up(head_dim, WIDTH);
    static thread_local std::vector<T> key_panels, value_panels, rows, weights, outputs;
    static thread_local std::vector<float> scores;
    std::vector<T> zeros(head_dim);  // behind the context: a weight of zero would not silence everything that could be there
    static thread_local Rows query_rows, weight_rows;
    key_panels.resize(padded_len * padded_dim);
    value_panels.resize(padded_dim * padded_len);
    rows.resize(num_rows * head_dim);
    outputs.resize(num_rows * head_dim);
    weights.resize(ROWS_AT_ONCE * padded_len);
    scores.resize(ROWS_AT_ONCE * padded_len);

    for (int64_t token = 0; token < padded_len; token += 2) {
        const T *pair[2], *value_pair[2];
        for (int i = 0; i < 2; i++) {
            int64_t seen = std::min(token + i, context_len - 1), block = block_table[seen / block_size];
            int64_t offset = (block * block_size + seen % block_size) * num_kv_heads * head_dim;
            pair[i] = keys + offset;
            value_pair[i] = token + i < context_len ? values + offset : zeros.data();
        }
        T* to = &key_panels[token / WIDTH * WIDTH * padded_dim + token % WIDTH * 2];
        for (int i = 0; i < 2; i++)
            for (int64_t d = 0; d < padded_dim; d += 2) {
                int32_t two = 0;
                if (d < head_dim) memcpy(&two, pair[i] + d, sizeof two);
                memcpy(to + 2 * i + d * WIDTH, &two, sizeof two);
            }
        for (int64_t first = 0; first < padded_dim; first += WIDTH) {
            to = &value_panels[first * padded_len + token * WIDTH];
            const T *left = value_pair[0] + first, *right = value_pair[1] + first;
#pragma omp simd
            for (int64_t d = 0; d < std::min(WIDTH, head_dim - first); d++) to[2 * d] = left[d], to[2 * d + 1] = right[d];
        }
    }
    auto offset_of = [&](int64_t row) {  // in query and output, where the other KV heads' rows lie between
        return (row / group_size * num_kv_heads * group_size + row % group_size) * head_dim;
    };
    for (int64_t row = 0; row < num_rows; row++)
        memcpy(&rows[row * head_dim], query + offset_of(row), head_dim * sizeof(T));

    for (int64_t start = 0; start < num_rows; start += ROWS_AT_ONCE) {
        int64_t size = std::min(ROWS_AT_ONCE, num_rows - start);
        int64_t visible = tokens_before + (start + size - 1) / group_size + 1;
        query_rows.pack(&rows[start * head_dim], head_dim, size, head_dim);
        for (int64_t panel = 0; panel < visible; panel += WIDTH)
            query_rows.multiply(&key_panels[panel * padded_dim], Epilogue{WIDTH}, &scores[panel], padded_len);
        for (int64_t row = 0; row < size; row++) {
            int64_t row_visible = tokens_before + (start + row) / group_size + 1;
            float *s = &scores[row * padded_len], highest;
            float factor = 1 / exponentiate(s, row_visible, scale, highest);
            T* w = &weights[row * padded_len];
            for (int64_t token = 0; token < row_visible; token++) w[token] = s[token] * factor;
            std::fill(w + row_visible, w + round_up(visible, 2), T{});
        }
        weight_rows.pack(weights.data(), padded_len, size, round_up(visible, 2));
        for (int64_t panel = 0; panel < head_dim; panel += WIDTH)
            weight_rows.multiply(&value_panels[panel * padded_len], Epilogue{std::min(WIDTH, head_dim - panel)},
                                 &outputs[start * head_dim + panel], head_dim);
    }
    for (int64_t row = 0; row < num_rows; row++)
        memcpy(output + offset_of(row), &outputs[row * head_dim], head_dim * sizeof(T));
}

extern "C" void prefill_attention(const T* query, const T* keys, const T* values, T* output, const int32_t* cu_seqlens_q, const
                                  int32_t* context_lens, const int32_t* block_tables, int64_t num_seqs, int64_t table_width,
                                  int64_t block_size, int64_t num_kv_heads, int64_t group_size, int64_t head_dim, float scale) {
    std::vector<std::array<int64_t, 3>> parts;  // sequence, first query token, KV head
    for (int64_t seq = 0; seq < num_seqs; seq++)
        if (int64_t query_len = cu_seqlens_q[seq + 1] - cu_seqlens_q[seq]; query_len > 1)
            for (int64_t first = (query_len - 1) / QUERIES * QUERIES; first >= 0; first -= QUERIES)  // the longest first
                for (int64_t kv_head = 0; kv_head < num_kv_heads; kv_head++) parts.push_back({seq, first, kv_head});
    if (parts.empty()) return;
#pragma omp parallel
    {
        [[maybe_unused]] Tiles tiles;
#pragma omp for schedule(dynamic)
        for (size_t i = 0; i < parts.size(); i++) {
            auto [seq, first, kv_head] = parts[i];
            int64_t start = cu_seqlens_q[seq], query_len = cu_seqlens_q[seq + 1] - start;
            int64_t offset = ((start + first) * num_kv_heads + kv_head) * group_size * head_dim;
            attend_to_prefix(query + offset, keys + kv_head * head_dim, values + kv_head * head_dim, output + offset,
                             block_tables + seq * table_width, context_lens[seq] - query_len + first,
                             std::min(QUERIES, query_len - first), block_size, num_kv_heads, group_size, head_dim,
                             scale);
        }
    }
}
#endif
