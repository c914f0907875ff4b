// The gated delta rule, from the convolution to the gated norm. layers/gated_delta.py specifies it.
//
// The columns of S do not depend on each other. A task copies COLUMNS of them into the L1 cache,
// computes up to TOKENS_AT_ONCE tokens there, one after the other, and writes them to the new slot.
// A chunked form with GEMMs would need about as many operations per token, because of its
// triangular system. Since every token is computed in the same way, its result does not depend on
// the tokens that are computed with it.
#pragma once
#include "layers.h"

constexpr int64_t TOKENS_AT_ONCE = 64;
constexpr int64_t COLUMN_VECTORS = 4;
constexpr int64_t COLUMNS = COLUMN_VECTORS * LANES;

struct DeltaRule {  // mirrored by gated_delta.py
    const float* conv_weight;  // [conv_size, number of channels]
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

// The inputs of a sequence's convolution. Those of the tokens before this step are in the state.
struct Channels {
    const T* qkv;
    int64_t stride;
    const float* window_end;
    int64_t num_channels;

    Vector read(int64_t token, int64_t channel, int64_t num) const {
        return token < 0 ? widen(window_end + token * num_channels + channel, num)
                         : widen(qkv + token * stride + channel, num);
    }

    // Causal convolution and SiLU of a head, which begins at `channel`. Rows of `output` have
    // `padded` numbers.
    void convolve(int64_t first_token, int64_t num_tokens, int64_t channel, int64_t dim,
                  const float* weight, int64_t conv_size, float* output, int64_t padded) const {
        for (int64_t token = 0; token < num_tokens; token++)
            for (int64_t i = 0; i < padded; i += LANES) {
                Vector sum = {};
                for (int64_t tap = 0; tap < conv_size; tap++)
                    sum += read(first_token + token + tap - conv_size + 1, channel + i, dim - i) *
                           widen(weight + tap * num_channels + channel + i, dim - i);
                narrow(silu(sum), output + token * padded + i, LANES);
            }
    }

    // Store the window of the next step, which can overwrite this one's.
    void store_window(int64_t num_tokens, int64_t channel, int64_t dim, int64_t conv_size,
                      float* window) const {
        for (int64_t row = 0; row < conv_size - 1; row++)
            for (int64_t i = 0; i < dim; i += LANES)
                narrow(read(num_tokens + row - conv_size + 1, channel + i, dim - i),
                       window + row * num_channels + channel + i, dim - i);
    }
};

// Turn rows into vectors of length `length`.
static void normalize(float* rows, int64_t num_rows, int64_t dim, float length) {
    for (float* row = rows; row < rows + num_rows * dim; row += dim) {
        float factor = length / sqrtf(mean_square(row, dim) * dim + 1e-6f);
        for (int64_t i = 0; i < dim; i++) row[i] *= factor;
    }
}

// Up to COLUMNS columns of S. Rows are `stride` apart.
struct Columns {
    float* numbers;
    int64_t stride;
};

// Compute one token with `num` columns of S, which are read from `old` and written to `updated`.
// WHOLE means that they are COLUMNS.
template <bool WHOLE>
static void advance(const Columns& old, const Columns& updated, int64_t num, const float* query,
                    const float* key, const float* value, float beta, float decay, int64_t key_dim,
                    float* output) {
    auto read = [=](int64_t row, int64_t i) {
        const float* from = old.numbers + row * old.stride + i;
        return WHOLE ? load(from) : widen(from, num - i);
    };
    Vector found[2][COLUMN_VECTORS] = {};  // S^T k, of even and of odd rows
    for (int64_t row = 0; row < key_dim; row += 2)
        for (int i = 0; i < 2; i++)
            for (int v = 0; v < COLUMN_VECTORS; v++)
                found[i][v] += read(row + i, v * LANES) * key[row + i];
    Vector u[COLUMN_VECTORS];
    for (int v = 0; v < COLUMN_VECTORS; v++)
        u[v] = beta * (load(value + v * LANES) - decay * (found[0][v] + found[1][v]));
    Vector sums[COLUMN_VECTORS] = {};
    for (int64_t row = 0; row < key_dim; row++) {
        float k = key[row];  // read before the stores, which the compiler expects to change it
        float q = query[row];
        for (int v = 0; v < COLUMN_VECTORS; v++) {
            Vector s = decay * read(row, v * LANES) + k * u[v];
            float* to = updated.numbers + row * updated.stride + v * LANES;
            if (WHOLE)
                narrow(s, to);
            else
                narrow(s, to, num - v * LANES);
            sums[v] += s * q;
        }
    }
    for (int v = 0; v < COLUMN_VECTORS; v++) narrow(sums[v], output + v * LANES);
}

// The strides are the distances of tokens in the inputs.
extern "C" void gated_delta_rule(const DeltaRule* rule_pointer, const T* qkv, const T* gate,
                                 const T* beta, const T* decay, int64_t qkv_stride,
                                 int64_t gate_stride, int64_t beta_stride, int64_t decay_stride,
                                 float* states, const int32_t* read_slots,
                                 const int32_t* write_slots, const int32_t* cu_seqlens_q,
                                 int64_t num_seqs, T* output) {
    const DeltaRule rule = *rule_pointer;
    int64_t key_dim = rule.key_dim;
    int64_t value_dim = rule.value_dim;
    int64_t conv_size = rule.conv_size;
    int64_t key_size = rule.num_key_heads * key_dim;
    int64_t value_size = rule.num_value_heads * value_dim;
    int64_t num_channels = 2 * key_size + value_size;
    int64_t matrix_size = key_dim * value_dim;
    int64_t matrices_size = rule.num_value_heads * matrix_size;
    int64_t state_size = matrices_size + (conv_size - 1) * num_channels;
    int64_t group_size = rule.num_value_heads / rule.num_key_heads;
    int64_t padded_key = round_up(key_dim, LANES);
    int64_t padded_value = round_up(value_dim, COLUMNS);

    // A task is a key head of a sequence, with its value heads.
    parallel_for(num_seqs * rule.num_key_heads, group_size * matrix_size, [=](int64_t task) {
        int64_t seq = task / rule.num_key_heads;
        int64_t key_head = task % rule.num_key_heads;
        int64_t start = cu_seqlens_q[seq];
        int64_t num_tokens = cu_seqlens_q[seq + 1] - start;
        float* old_state = states + read_slots[seq] * state_size;
        float* new_state = states + write_slots[seq] * state_size;
        Channels channels{qkv + start * qkv_stride, qkv_stride, old_state + state_size,
                          num_channels};
        static thread_local Buffer<float> memory;
        float* columns = memory.get(key_dim * COLUMNS +
                                    TOKENS_AT_ONCE * 2 * (padded_key + padded_value));
        float* query = columns + key_dim * COLUMNS;
        float* key = query + TOKENS_AT_ONCE * padded_key;
        float* value = key + TOKENS_AT_ONCE * padded_key;
        float* sums = value + TOKENS_AT_ONCE * padded_value;

        for (int64_t first = 0; first < num_tokens; first += TOKENS_AT_ONCE) {
            int64_t size = std::min(TOKENS_AT_ONCE, num_tokens - first);
            float* old_matrices = first > 0 ? new_state : old_state;
            int64_t channel = key_head * key_dim;
            channels.convolve(first, size, channel, key_dim, rule.conv_weight, conv_size, query,
                              padded_key);
            channels.convolve(first, size, channel + key_size, key_dim, rule.conv_weight,
                              conv_size, key, padded_key);
            normalize(query, size, padded_key, 1 / sqrtf(key_dim));
            normalize(key, size, padded_key, 1);
            for (int64_t head = key_head * group_size; head < (key_head + 1) * group_size; head++) {
                channels.convolve(first, size, 2 * key_size + head * value_dim, value_dim,
                                  rule.conv_weight, conv_size, value, padded_value);
                float betas[TOKENS_AT_ONCE];
                float decays[TOKENS_AT_ONCE];
                for (int64_t i = 0; i < size; i++) {
                    int64_t token = start + first + i;
                    betas[i] = 1 / (1 + expf(-float(beta[token * beta_stride + head])));
                    float x = decay[token * decay_stride + head] + rule.dt_bias[head];
                    float softplus = x > 20 ? x : log1pf(expf(x));
                    decays[i] = expf(-expf(rule.A_log[head]) * softplus);
                }
                for (int64_t column = 0; column < value_dim; column += COLUMNS) {
                    int64_t num = value_dim - column;
                    auto compute = num < COLUMNS ? advance<false> : advance<true>;
                    Columns cached{columns, COLUMNS};
                    Columns from{old_matrices + head * matrix_size + column, value_dim};
                    for (int64_t i = 0; i < size; i++) {
                        Columns to = cached;
                        if (i == size - 1)
                            to = {new_state + head * matrix_size + column, value_dim};
                        compute(from, to, num, query + i * padded_key, key + i * padded_key,
                                value + i * padded_value + column, betas[i], decays[i], key_dim,
                                sums + i * padded_value + column);
                        from = cached;
                    }
                }
                for (int64_t i = 0; i < size; i++) {
                    const float* sum = sums + i * padded_value;
                    const T* g = gate + (start + first + i) * gate_stride + head * value_dim;
                    T* out = output + (start + first + i) * value_size + head * value_dim;
                    float factor = 1 / sqrtf(mean_square(sum, value_dim) + rule.norm_eps);
                    for (int64_t j = 0; j < value_dim; j += LANES)
                        narrow(load(sum + j) * factor * widen(rule.norm_weight + j, value_dim - j) *
                                   silu(widen(g + j, value_dim - j)),
                               out + j, value_dim - j);
                }
            }
        }
        auto store_window = [&](int64_t channel, int64_t dim) {
            channels.store_window(num_tokens, channel, dim, conv_size, new_state + matrices_size);
        };
        store_window(key_head * key_dim, key_dim);
        store_window(key_size + key_head * key_dim, key_dim);
        store_window(2 * key_size + key_head * group_size * value_dim, group_size * value_dim);
    });
}
