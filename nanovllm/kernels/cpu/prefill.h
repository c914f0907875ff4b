// Causal attention of queries of several tokens, as GEMMs of tiles (FlashAttention-2, Dao 2023).
//
// CONTEXT_TILE tokens of the context at a time are packed into panels of keys and of values.
// QUERIES query tokens share them, some rows at a time, so that scores, weights and sums of values
// stay in a core's cache. A row keeps the highest score so far. If a tile has a higher one, the
// row's previous sums are rescaled. The tokens before a window are skipped, except those that
// share a panel with the window of an adjacent row.
#pragma once
#include <array>

#include "gemm.h"
#include "kv_cache.h"

constexpr int64_t QUERIES = 512;
constexpr int64_t CONTEXT_TILE = 256;
constexpr int64_t ROWS_AT_ONCE = round_up(32, ROWS);
static_assert(CONTEXT_TILE <= BLOCK);  // a row of weights lies in one block
// Of scores. With a power of two, the rows of a tile would compete for few sets of the cache.
constexpr int64_t STRIDE = CONTEXT_TILE + 16;
// Of scores: whole cache lines of weights, and two vectors.
constexpr int64_t CHUNK = std::max(LINE, 2 * LANES);
static_assert(WIDTH % CHUNK == 0);  // so that a part of a tile begins at a chunk
constexpr int64_t AHEAD = 8;  // tokens whose keys and values are prefetched

// Weights are powers of 2, or of e if they are not rounded to 16 bits afterwards.
#ifdef T_IS_16_BITS
constexpr float LOG2_BASE = LOG2_E;
static Vector power(Vector x) { return power_of_two(x); }
#else
constexpr float LOG2_BASE = 1;
static Vector power(Vector x) { return exponential(x); }
#endif

// The queries of one KV head. Each attends to the `tokens_before` tokens before the queries, to the
// queries before it, and to itself, as far as they are in its window.
class PrefillAttention {
    Buffer<T> key_memory;
    Buffer<T> value_memory;
    Buffer<float> score_memory;
    Buffer<float> output_memory;
    std::vector<T> zeros;
    std::vector<float> highest;  // score of each row so far
    std::vector<float> totals;   // sum of each row's weights
    T* key_panels;               // [CONTEXT_TILE / WIDTH, padded_dim / PAIR, WIDTH, PAIR]
    T* value_panels;             // [padded_dim / WIDTH, CONTEXT_TILE / PAIR, WIDTH, PAIR]
    float* scores;               // [ROWS_AT_ONCE, STRIDE], then weights
    float* outputs;              // [num_rows, padded_dim], sums of values
    Rows queries;
    Rows weights;
    int64_t padded_dim;

    // Pack `num_tokens` tokens from `first`, rounded up to a whole panel.
    void pack(const T* keys, const T* values, const int32_t* block_table, int64_t first,
              int64_t num_tokens, int64_t block_size, int64_t row_size, int64_t head_dim) {
        // The token's offset in the cache; past the end, that of the last token.
        auto find = [&](int64_t token) {
            int64_t position = first + std::min(token, num_tokens - 1);
            return (block_table[position / block_size] * block_size + position % block_size) *
                   row_size;
        };
        for (int64_t token = 0; token < round_up(num_tokens, WIDTH); token += PAIR) {
            const T* value[PAIR];
            for (int i = 0; i < PAIR; i++) {
                int64_t place = find(token + i);
                int64_t next = find(token + i + AHEAD);
                prefetch(keys + next, head_dim);
                prefetch(values + next, head_dim);
                T* panel = key_panels + token / WIDTH * WIDTH * padded_dim;
                T* to = panel + (token % WIDTH + i) * PAIR;
                for (int64_t d = 0; d < head_dim; d += PAIR)
                    memcpy(to + d * WIDTH, keys + place + d, PAIR * sizeof(T));
                // Slots past the context can be NaN, which a weight of 0 would not remove.
                value[i] = token + i < num_tokens ? values + place : zeros.data();
            }
            for (int64_t d = 0; d < head_dim; d += WIDTH)
                interleave(value[0] + d, value[PAIR - 1] + d,
                           &value_panels[d * CONTEXT_TILE + token * WIDTH],
                           std::min(WIDTH, head_dim - d));
        }
    }

    static void interleave(const float* value, const float*, float* to, int64_t size) {
        std::copy_n(value, size, to);
    }

    template <class Number>
    static void interleave(const Number* __restrict left, const Number* __restrict right,
                           Number* __restrict to, int64_t size) {
        auto pair = [=](int64_t i) {
            uint32_t bits = left[i].bits | uint32_t(right[i].bits) << 16;
            memcpy(to + 2 * i, &bits, sizeof bits);
        };
        if (size == WIDTH)  // the compiler knows this length
            for (int64_t i = 0; i < WIDTH; i++) pair(i);
        else
            for (int64_t i = 0; i < size; i++) pair(i);
    }

public:
    void attend(const T* query, const T* keys, const T* values, T* output,
                const int32_t* block_table, int64_t tokens_before, int64_t num_queries,
                int64_t block_size, int64_t num_kv_heads, int64_t group_size, int64_t head_dim,
                float scale, int64_t window) {
        int64_t num_rows = num_queries * group_size;
        int64_t context_len = tokens_before + num_queries;
        padded_dim = round_up(head_dim, WIDTH);
        // Offset in query and output, where rows of other KV heads lie between.
        auto offset_of = [&](int64_t row) {
            return (row / group_size * num_kv_heads * group_size + row % group_size) * head_dim;
        };
        zeros.assign(head_dim, T{});
        key_panels = key_memory.get(CONTEXT_TILE * padded_dim);
        value_panels = value_memory.get(CONTEXT_TILE * padded_dim);
        // The padding, which is not written below.
        if (head_dim < padded_dim) std::fill_n(key_panels, CONTEXT_TILE * padded_dim, T{});
        scores = score_memory.get(ROWS_AT_ONCE * STRIDE);
        outputs = output_memory.get((num_rows + ROWS_AT_ONCE) * padded_dim);
        highest.assign(num_rows, -FLT_MAX);
        totals.assign(num_rows, 0);

        queries.pack([&](int64_t row) { return query + offset_of(row); }, num_rows, head_dim);
        int64_t first = find_first_visible(tokens_before, window);
        for (; first < context_len; first += CONTEXT_TILE) {
            int64_t num_tokens = std::min(CONTEXT_TILE, context_len - first);
            pack(keys, values, block_table, first, num_tokens, block_size, num_kv_heads * head_dim,
                 head_dim);
            // A row attends to the tokens of this tile from find_begin(row), which is negative if
            // it attends to earlier tiles as well, to find_end(row).
            auto find_begin = [&](int64_t row) {
                int64_t visible = find_first_visible(tokens_before + row / group_size, window);
                return std::min(visible - first, num_tokens);
            };
            auto find_end = [&](int64_t row) {
                return std::clamp<int64_t>(tokens_before + row / group_size + 1 - first, 0,
                                           num_tokens);
            };
            // The first row that attends to any of them.
            int64_t first_row = std::max<int64_t>(0, first - tokens_before) * group_size;
            first_row -= first_row % ROWS_AT_ONCE;
            for (int64_t start = first_row; start < num_rows; start += ROWS_AT_ONCE) {
                // Of these rows, the first sees the earliest token and the last the latest one.
                int64_t first_begin = find_begin(start);
                if (first_begin == num_tokens) break;  // all other windows begin after this tile
                bool is_added = first_begin < 0;
                int64_t size = std::min(ROWS_AT_ONCE, num_rows - start);
                int64_t begin = std::max<int64_t>(0, first_begin) / WIDTH * WIDTH;
                int64_t end = round_up(find_end(start + size - 1), CHUNK);
                for (int64_t panel = begin; panel < end; panel += WIDTH)
                    queries.multiply(&key_panels[panel * padded_dim], start, start + size,
                                     &scores[panel], STRIDE, false);
                for (int64_t row = 0; row < size; row++) {
                    float* s = &scores[row * STRIDE];
                    std::fill(s + begin, s + std::max(begin, find_begin(start + row)), -INFINITY);
                    std::fill(s + find_end(start + row), s + end, -INFINITY);
                }
                float* sums = &outputs[start * padded_dim];
                weigh(size, begin, end, scale * LOG2_BASE, &highest[start], &totals[start],
                      is_added ? sums : nullptr);
                for (int64_t panel = 0; panel < head_dim; panel += WIDTH)
                    weights.multiply(&value_panels[panel * CONTEXT_TILE + begin * WIDTH], 0, size,
                                     sums + panel, padded_dim, is_added);
            }
        }
        for (int64_t row = 0; row < num_rows; row++) {
            T rounded[padded_dim];
            float inverse = 1 / totals[row];
            for (int64_t i = 0; i < padded_dim; i += LANES)
                narrow(load(&outputs[row * padded_dim + i]) * inverse, rounded + i);
            memcpy(output + offset_of(row), rounded, head_dim * sizeof(T));
        }
    }

private:
    // Turn scores from `begin` to `end` into weights, power(scale * (score - highest)). If a row's
    // highest score so far is exceeded, rescale its `sums`, if there are any.
    void weigh(int64_t num_rows, int64_t begin, int64_t end, float scale, float* highest,
               float* totals, float* sums) {
        float bases[ROWS_AT_ONCE];  // the new highest scores
        float shrinks[round_up(ROWS_AT_ONCE, LANES)] = {};
        for (int64_t row = 0; row < num_rows; row++) {
            const float* s = &scores[row * STRIDE];
            Vector most = load(s + begin);
            for (int64_t i = begin + LANES; i < end; i += LANES)
                most = load(s + i) > most ? load(s + i) : most;
            float base = highest[row];
#pragma omp simd reduction(max : base)
            for (int64_t i = 0; i < LANES; i++) base = most[i] > base ? most[i] : base;
            bases[row] = base;
            shrinks[row] = (highest[row] - base) * scale;
        }
        for (int64_t row = 0; row < num_rows; row += LANES) {
            Vector shrink = power(load(shrinks + row));
            memcpy(shrinks + row, &shrink, sizeof shrink);
        }
        weights.shape(num_rows, end - begin);
        for (int64_t row = 0; row < num_rows; row++) {
            const float* s = &scores[row * STRIDE];
            Vector sum = {};
            auto* to = weights.find(row, 0);
            // Finite also for a row whose window begins after this tile: all its scores are -inf.
            float base = std::max(bases[row] * scale, -FLT_MAX);
            for (int64_t i = begin; i < end; i += CHUNK) {
                for (int64_t j = 0; j < CHUNK; j += 2 * LANES) {
                    Vector first = power(load(s + i + j) * scale - base);
                    Vector second = power(load(s + i + j + LANES) * scale - base);
                    narrow(first, second, to + j);
                    sum += first + second;
                }
                to += CHUNK / LINE * Rows::NEXT_LINE;
            }
            totals[row] = totals[row] * shrinks[row] + horizontal_sum(sum);
            highest[row] = bases[row];
            if (sums && shrinks[row] != 1)
                for (int64_t i = 0; i < padded_dim; i++) sums[row * padded_dim + i] *= shrinks[row];
        }
    }
};

extern "C" void prefill_attention(const T* query, const T* keys, const T* values, T* output,
                                  const Sequences* seqs, const Heads* heads) {
    const int32_t* cu_seqlens_q = seqs->cu_seqlens_q;
    int64_t num_kv_heads = heads->num_kv_heads;
    int64_t group_size = heads->num_heads / num_kv_heads;
    int64_t head_dim = heads->head_dim;
    std::vector<std::array<int64_t, 3>> parts;  // sequence, first query token, KV head
    for (int64_t seq = 0; seq < seqs->num_seqs; seq++) {
        int64_t query_len = cu_seqlens_q[seq + 1] - cu_seqlens_q[seq];
        if (query_len <= SHORT_QUERY) continue;
        // The last queries come first, because they attend to the most tokens.
        for (int64_t first = (query_len - 1) / QUERIES * QUERIES; first >= 0; first -= QUERIES)
            for (int64_t kv_head = 0; kv_head < num_kv_heads; kv_head++)
                parts.push_back({seq, first, kv_head});
    }
    if (parts.empty()) return;
    Team::form(true, [&] {
        [[maybe_unused]] Tiles tiles;
        static thread_local PrefillAttention attention;
        Team::get().share(parts.size(), [&](int64_t i) {
            auto [seq, first, kv_head] = parts[i];
            int64_t start = cu_seqlens_q[seq];
            int64_t query_len = cu_seqlens_q[seq + 1] - start;
            int64_t offset = ((start + first) * num_kv_heads + kv_head) * group_size * head_dim;
            attention.attend(query + offset, keys + kv_head * head_dim, values + kv_head * head_dim,
                             output + offset, seqs->block_tables + seq * seqs->table_width,
                             seqs->context_lens[seq] - query_len + first,
                             std::min(QUERIES, query_len - first), seqs->block_size, num_kv_heads,
                             group_size, head_dim, heads->scale, heads->window);
        });
    });
}
