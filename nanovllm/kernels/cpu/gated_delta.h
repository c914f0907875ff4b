// The gated delta rule, from the convolution to the gated norm. layers/gated_delta.py specifies it.
//
// The columns of S do not depend on each other. COLUMNS of them stay in the L1 cache while up to
// TOKENS_AT_ONCE tokens are computed, one after the other. They are read from the old slot with the
// first token, and written to the new slot with the last one. A chunked form with GEMMs would need
// about as many operations per token, because of its triangular system. Since every token is
// computed in the same way, results do not depend on how a prompt is divided into chunks.
#pragma once
#include "layers.h"

constexpr int64_t TOKENS_AT_ONCE = 64;
constexpr int64_t COLUMN_VECTORS = 4;
constexpr int64_t COLUMNS = COLUMN_VECTORS * LANES;

struct DeltaRule {             // filled by Python: see declarations.py
    const float* conv_weight;  // [conv_size, num_channels]
    const float* A_log;
    const float* dt_bias;
    const float* norm_weight;
    int64_t num_key_heads;
    int64_t num_value_heads;
    int64_t key_dim;  // even
    int64_t value_dim;
    int64_t conv_size;
    float norm_eps;
};

// What the convolution of a sequence reads. The channels of earlier steps are in the state.
struct Channels {
    const T* qkv;  // of the first token
    int64_t stride;
    const float* window_end;  // behind the token before the first
    const float* weight;
    int64_t num_channels;
    int64_t conv_size;

    Vector read(int64_t token, int64_t channel, int64_t num) const {
        return token < 0 ? widen(window_end + token * num_channels + channel, num)
                         : widen(qkv + token * stride + channel, num);
    }

    // Causal convolution and SiLU of a head with `dim` channels from `channel`. A row has `padded`
    // numbers. There must be room for conv_size - 1 more rows than tokens.
    void convolve(int64_t first_token, int64_t num_tokens, int64_t channel, int64_t dim,
                  float* rows, int64_t padded) const {
        for (int64_t row = 0; row < num_tokens + conv_size - 1; row++)
            for (int64_t i = 0; i < padded; i += LANES)
                narrow(read(first_token + row - conv_size + 1, channel + i, dim - i),
                       rows + row * padded + i);
        for (float* row = rows; row < rows + num_tokens * padded; row += padded)
            for (int64_t i = 0; i < padded; i += LANES) {
                Vector sum = {};
                for (int64_t tap = 0; tap < conv_size; tap++)
                    sum += load(row + tap * padded + i) *
                           widen(weight + tap * num_channels + channel + i, dim - i);
                narrow(silu(sum), row + i);
            }
    }

    // Store what the next step reads. `window` can be this step's own, because rows move forward.
    void store_window(int64_t num_tokens, int64_t channel, int64_t dim, float* window) const {
        for (int64_t row = 0; row < conv_size - 1; row++)
            for (int64_t i = 0; i < dim; i += LANES)
                narrow(read(num_tokens + row - conv_size + 1, channel + i, dim - i),
                       window + row * num_channels + channel + i, dim - i);
    }
};

// Scale each row to the length `length`.
static void normalize(float* rows, int64_t num_rows, int64_t dim, float length) {
    for (float* row = rows; row < rows + num_rows * dim; row += dim) {
        float factor = length / sqrtf(mean_square(row, dim) * dim + 1e-6f);
        for (int64_t i = 0; i < dim; i++) row[i] *= factor;
    }
}

// Columns of S. Their rows are `stride` apart.
struct Columns {
    float* numbers;
    int64_t stride;
};

// Compute one token with `num` columns, which are read from `from` and written to `to`. WHOLE means
// that there are at least COLUMNS.
template <bool WHOLE>
static void advance(Columns from, Columns to, int64_t num, int64_t key_dim, const float* query,
                    const float* key, const float* value, float beta, float decay, float* output) {
    auto read = [=](int64_t row, int64_t i) {
        const float* numbers = from.numbers + row * from.stride + i;
        return WHOLE ? load(numbers) : widen(numbers, num - i);
    };
    Vector found[2][COLUMN_VECTORS] = {};  // S^T k, the sums of even and of odd rows
    for (int64_t row = 0; row < key_dim; row += 2)
        for (int i = 0; i < 2; i++)
            for (int v = 0; v < COLUMN_VECTORS; v++)
                found[i][v] += read(row + i, v * LANES) * key[row + i];
    Vector u[COLUMN_VECTORS];
    for (int v = 0; v < COLUMN_VECTORS; v++)
        u[v] = beta * (load(value + v * LANES) - decay * (found[0][v] + found[1][v]));
    Vector sums[COLUMN_VECTORS] = {};
    for (int64_t row = 0; row < key_dim; row++) {
        float k = key[row];  // copies, because the compiler expects that a store changes the key
        float q = query[row];
        for (int v = 0; v < COLUMN_VECTORS; v++) {
            Vector updated = decay * read(row, v * LANES) + k * u[v];
            float* numbers = to.numbers + row * to.stride + v * LANES;
            if (WHOLE)
                narrow(updated, numbers);
            else
                narrow(updated, numbers, num - v * LANES);
            sums[v] += updated * q;
        }
    }
    for (int v = 0; v < COLUMN_VECTORS; v++) narrow(sums[v], output + v * LANES);
}

// A task computes a key head of a sequence, with the value heads that belong to it. The strides are
// the distances of tokens in the inputs.
extern "C" void gated_delta_rule(const DeltaRule* rule, const T* qkv, const T* gate, const T* beta,
                                 const T* decay, int64_t qkv_stride, int64_t gate_stride,
                                 int64_t beta_stride, int64_t decay_stride, float* states,
                                 const int32_t* read_slots, const int32_t* write_slots,
                                 const int32_t* cu_seqlens_q, int64_t num_seqs, T* output) {
    DeltaRule r = *rule;
    int64_t num_key_heads = r.num_key_heads;
    int64_t key_dim = r.key_dim;
    int64_t value_dim = r.value_dim;
    int64_t conv_size = r.conv_size;
    int64_t group_size = r.num_value_heads / num_key_heads;
    int64_t key_size = num_key_heads * key_dim;
    int64_t value_size = r.num_value_heads * value_dim;
    int64_t matrix_size = key_dim * value_dim;
    int64_t matrices_size = r.num_value_heads * matrix_size;
    int64_t num_channels = 2 * key_size + value_size;
    int64_t state_size = matrices_size + (conv_size - 1) * num_channels;
    int64_t padded_key = round_up(key_dim, LANES);
    int64_t padded_value = round_up(value_dim, COLUMNS);

    parallel_for(num_seqs * num_key_heads, group_size * matrix_size, [=](int64_t task) {
        int64_t seq = task / num_key_heads;
        int64_t key_head = task % num_key_heads;
        int64_t start = cu_seqlens_q[seq];
        int64_t num_tokens = cu_seqlens_q[seq + 1] - start;
        float* old_state = states + read_slots[seq] * state_size;
        float* new_state = states + write_slots[seq] * state_size;
        Channels channels{qkv + start * qkv_stride, qkv_stride, old_state + state_size,
                          r.conv_weight, num_channels, conv_size};
        int64_t query_channel = key_head * key_dim;
        int64_t key_channel = key_size + key_head * key_dim;
        int64_t value_channel = 2 * key_size + key_head * group_size * value_dim;

        static thread_local Buffer<float> memory;
        int64_t num_rows = TOKENS_AT_ONCE + conv_size - 1;
        float* columns = memory.get(key_dim * COLUMNS + num_rows * 2 * (padded_key + padded_value));
        float* queries = columns + key_dim * COLUMNS;
        float* keys = queries + num_rows * padded_key;
        float* values = keys + num_rows * padded_key;
        float* sums = values + num_rows * padded_value;
        float betas[TOKENS_AT_ONCE];
        float decays[TOKENS_AT_ONCE];

        for (int64_t first = 0; first < num_tokens; first += TOKENS_AT_ONCE) {
            int64_t size = std::min(TOKENS_AT_ONCE, num_tokens - first);
            channels.convolve(first, size, query_channel, key_dim, queries, padded_key);
            channels.convolve(first, size, key_channel, key_dim, keys, padded_key);
            normalize(queries, size, padded_key, 1 / sqrtf(key_dim));
            normalize(keys, size, padded_key, 1);
            for (int64_t i = 0; i < group_size; i++) {
                int64_t head = key_head * group_size + i;
                channels.convolve(first, size, value_channel + i * value_dim, value_dim, values,
                                  padded_value);
                for (int64_t j = 0; j < size; j++) {
                    int64_t token = start + first + j;
                    betas[j] = 1 / (1 + expf(-float(beta[token * beta_stride + head])));
                    float x = decay[token * decay_stride + head] + r.dt_bias[head];
                    float softplus = x > 20 ? x : log1pf(expf(x));
                    decays[j] = expf(-expf(r.A_log[head]) * softplus);
                }
                for (int64_t column = 0; column < value_dim; column += COLUMNS) {
                    int64_t offset = head * matrix_size + column;
                    auto compute = value_dim - column < COLUMNS ? advance<false> : advance<true>;
                    Columns cached{columns, COLUMNS};
                    Columns from{(first > 0 ? new_state : old_state) + offset, value_dim};
                    for (int64_t j = 0; j < size; j++) {
                        Columns to = j < size - 1 ? cached : Columns{new_state + offset, value_dim};
                        compute(from, to, value_dim - column, key_dim, queries + j * padded_key,
                                keys + j * padded_key, values + j * padded_value + column, betas[j],
                                decays[j], sums + j * padded_value + column);
                        from = cached;
                    }
                }
                for (int64_t j = 0; j < size; j++) {
                    int64_t token = start + first + j;
                    const float* sum = sums + j * padded_value;
                    const T* g = gate + token * gate_stride + head * value_dim;
                    T* out = output + token * value_size + head * value_dim;
                    float factor = 1 / sqrtf(mean_square(sum, value_dim) + r.norm_eps);
                    for (int64_t k = 0; k < value_dim; k += LANES) {
                        int64_t num = value_dim - k;
                        narrow(load(sum + k) * factor * widen(r.norm_weight + k, num) *
                                   silu(widen(g + k, num)),
                               out + k, num);
                    }
                }
            }
        }
        float* window = new_state + matrices_size;
        channels.store_window(num_tokens, query_channel, key_dim, window);
        channels.store_window(num_tokens, key_channel, key_dim, window);
        channels.store_window(num_tokens, value_channel, group_size * value_dim, window);
    });
}
