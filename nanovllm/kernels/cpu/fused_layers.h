// Decoder layers in one call, of the other kernels: models/decoder.py says what they compute.
//
// Tokens are projected in pieces: what lies between two products then stays in the caches, and all layers use the same
// memory for it.
#pragma once
#include "collectives.h"
#include "decode.h"
#include "layers.h"
#include "prefill.h"

#ifdef T_IS_16_BITS
struct Layer {
    const T *input_norm, *post_attention_norm, *q_norm, *k_norm;
    const T *qkv, *qkv_bias, *o, *o_bias, *gate_up, *down;
    int64_t hidden_size, num_heads, num_kv_heads, head_dim, intermediate_size;
    float eps, scale;
};

// Adds to x [num_tokens, hidden_size], in place. A kv_cache [2, num_slots, num_kv_heads, head_dim] per layer. Where there are
// several ranks, this one is `member`; rank 0 adds biases and residuals to its share of a product, before the shares are added.
extern "C" void decoder_layers(const Layer* layers, T* const* kv_caches, int64_t num_layers, int64_t num_slots, T* x, const float*
                               cos, const float* sin, const int64_t* slot_mapping, const int32_t* cu_seqlens_q, const int32_t*
                               context_lens, const int32_t* block_tables, int64_t num_tokens, int64_t num_seqs, int64_t
                               table_width, int64_t block_size, Member* member) {
    constexpr int64_t PIECE = 512;
    bool is_first = !member || member->rank == 0;
    static thread_local std::vector<T> numbers;
    size_t needed = 0;
    for (int64_t i = 0; i < num_layers; i++) {
        const Layer& layer = layers[i];
        int64_t q_size = layer.num_heads * layer.head_dim, kv_size = layer.num_kv_heads * layer.head_dim;
        int64_t of_token = layer.hidden_size + q_size + 3 * kv_size + layer.intermediate_size;
        needed = std::max<size_t>(needed, std::min(PIECE, num_tokens) * of_token + 2 * num_tokens * q_size);
    }
    if (numbers.size() < needed) numbers.resize(needed);
    T* memory = numbers.data();
    Team::form(true, [=] {
        for (int64_t i = 0; i < num_layers; i++) {
            auto [input_norm, post_attention_norm, q_norm, k_norm, qkv_weight, qkv_bias, o_weight, o_bias, gate_up_weight,
                  down_weight, hidden_size, num_heads, num_kv_heads, head_dim, intermediate_size, eps, scale] = layers[i];
            int64_t q_size = num_heads * head_dim, kv_size = num_kv_heads * head_dim, qkv_size = q_size + 2 * kv_size;
            int64_t half = head_dim / 2, piece = std::min(PIECE, num_tokens);
            T *keys = kv_caches[i], *values = keys + num_slots * kv_size;
            T *normed = memory, *qkv = normed + piece * hidden_size, *key = qkv + piece * qkv_size;
            T *gated = key + piece * kv_size, *query = gated + piece * intermediate_size;
            T* attended = query + num_tokens * q_size;

            for (int64_t first = 0; first < num_tokens; first += PIECE) {
                int64_t size = std::min(PIECE, num_tokens - first);
                const float *c = cos + first * half, *s = sin + first * half;
                rms_norm(x + first * hidden_size, input_norm, normed, size, hidden_size, eps);
                linear(normed, qkv_weight, qkv_bias, nullptr, qkv, size, hidden_size, qkv_size, false);
                rotary(qkv, c, s, q_norm, query + first * q_size, size, qkv_size, num_heads, half, eps);
                rotary(qkv + q_size, c, s, k_norm, key, size, qkv_size, num_kv_heads, half, eps);
                store_kvcache(key, qkv + q_size + kv_size, kv_size, qkv_size, slot_mapping + first, size, kv_size, keys, values);
            }
            // All tokens' K/V are written: now those of one step can see each other.
            for (auto attend : {decode_attention, prefill_attention})
                attend(query, keys, values, attended, cu_seqlens_q, context_lens, block_tables, num_seqs, table_width,
                       block_size, num_kv_heads, num_heads / num_kv_heads, head_dim, scale);
            for (int64_t first = 0; first < num_tokens; first += PIECE) {
                int64_t size = std::min(PIECE, num_tokens - first);
                T* to = x + first * hidden_size;
                const T* residual = is_first ? to : nullptr;
                linear(attended + first * q_size, o_weight, is_first ? o_bias : nullptr, residual, to, size, q_size, hidden_size,
                       false);
                if (member) all_reduce(member, to, size * hidden_size);
                rms_norm(to, post_attention_norm, normed, size, hidden_size, eps);
                linear(normed, gate_up_weight, nullptr, nullptr, gated, size, hidden_size, intermediate_size, true);
                linear(gated, down_weight, nullptr, residual, to, size, intermediate_size, hidden_size, false);
                if (member) all_reduce(member, to, size * hidden_size);
            }
        }
    });
}
#endif
