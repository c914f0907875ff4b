// All decoder layers in one call, made of the other kernels. models/decoder.py and
// models/gemma3.py specify what they compute.
//
// Tokens are projected in chunks, so that what lies between two GEMMs stays in the caches. All
// layers use the same memory for it.
#pragma once
#include "decode.h"
#include "layers.h"
#include "prefill.h"

struct Layer {  // filled by Python: see declarations.py
    Norm before_attention;
    Norm before_mlp;
    Norm after_attention;  // the weights of these four can be null
    Norm after_mlp;
    Norm q_norm;
    Norm k_norm;
    const T* qkv_bias;  // can be null
    const T* o_bias;
    Weight qkv;
    Weight o;
    Weight gate_up;
    Weight down;
    Heads heads;
    int64_t rope_index;  // index of its cos and sin
};

// Run the layers on x [num_tokens, hidden_size], in place. Each layer has its own keys and values
// [num_slots, num_kv_heads, head_dim], and each RoPE of the model its own cos and sin. seqs[0] is
// for layers that attend to all tokens, and seqs[1] for layers with a window. With `only_kv`, the
// layers only write their K/V.
extern "C" void decoder_layers(const Layer* layers, T* const* keys, T* const* values,
                               int64_t num_layers, T* x, const Rope* ropes,
                               const Sequences* seqs, int64_t num_tokens, int64_t only_kv) {
    // If there are ENOUGH tokens for every thread, each chunk belongs to one thread, which finds in
    // its own cache what it has written there. Otherwise all threads share a chunk.
    constexpr int64_t TOKENS_PER_CHUNK = 512;
    constexpr int64_t ENOUGH = 256;
    int64_t num_threads = TeamSize::get().find();
    int64_t num_turns = (num_tokens - 1) / (TOKENS_PER_CHUNK * num_threads) + 1;
    bool is_shared = num_tokens < ENOUGH * num_threads;
    int64_t chunk = is_shared ? std::min(TOKENS_PER_CHUNK, num_tokens)
                              : (num_tokens - 1) / (num_turns * num_threads) + 1;

    // Memory of a chunk (normed, qkv, gated), and of every token (query, attended).
    int64_t chunk_size = 0;
    int64_t token_size = 0;
    for (int64_t i = 0; i < num_layers; i++) {
        const Layer& layer = layers[i];
        int64_t qkv_stride = find_stride(layer.qkv.out_features);
        int64_t gated_stride = find_stride(layer.gate_up.out_features);
        int64_t strides = layer.qkv.in_features + qkv_stride + gated_stride;
        chunk_size = std::max(chunk_size, chunk * strides);
        token_size = std::max(token_size, 2 * layer.o.in_features);
    }
    static thread_local Buffer<T> buffer;
    T* memory = buffer.get((is_shared ? 1 : num_threads) * chunk_size + num_tokens * token_size);
    Team::form(true, [=] {
        // Run work(first token, number of tokens, memory of the chunk) for all chunks.
        auto for_chunks = [=](const auto& work) {
            T* chunk_memory = memory + num_tokens * token_size;
            auto turn = [&](int64_t i) {
                int64_t first = i * chunk;
                int64_t place = is_shared ? 0 : omp_get_thread_num();
                work(first, std::min(chunk, num_tokens - first), chunk_memory + place * chunk_size);
            };
            int64_t num_chunks = (num_tokens - 1) / chunk + 1;
            if (is_shared)
                for (int64_t i = 0; i < num_chunks; i++) turn(i);
            else
                Team::get().share(num_chunks,
                                  [&](int64_t i) { Team::work_alone([&] { turn(i); }); });
        };
        for (int64_t i = 0; i < num_layers; i++) {
            const Layer& layer = layers[i];
            int64_t num_heads = layer.heads.num_heads;
            int64_t num_kv_heads = layer.heads.num_kv_heads;
            int64_t head_dim = layer.heads.head_dim;
            int64_t hidden_size = layer.qkv.in_features;
            int64_t q_size = num_heads * head_dim;
            int64_t kv_size = num_kv_heads * head_dim;
            int64_t qkv_stride = find_stride(layer.qkv.out_features);
            int64_t gated_stride = find_stride(layer.gate_up.out_features);
            int64_t skipped = only_kv ? q_size / WIDTH * WIDTH : 0;  // outputs, in whole panels
            Weight qkv_weight = layer.qkv;
            qkv_weight.panels = layer.qkv.find_panel(skipped / WIDTH);
            qkv_weight.out_features -= skipped;
            const T* bias = layer.qkv_bias ? layer.qkv_bias + skipped : nullptr;
            const Rope& rope = ropes[layer.rope_index];
            const Sequences& own = layer.heads.window > 0 ? seqs[1] : seqs[0];
            T* query = memory;
            T* attended = query + num_tokens * q_size;

            for_chunks([&](int64_t first, int64_t size, T* normed) {
                T* qkv = normed + chunk * hidden_size;
                T* key = qkv + q_size;
                T* value = key + kv_size;
                int64_t angle = first * rope.half;
                Rope angles{rope.cos + angle, rope.sin + angle, rope.half};
                rms_norm(x + first * hidden_size, layer.before_attention, nullptr, normed, size,
                         hidden_size);
                linear(normed, qkv_weight, bias, nullptr, qkv + skipped, size, hidden_size,
                       qkv_stride);
                if (!only_kv)
                    rotary(qkv, angles, layer.q_norm, query + first * q_size, qkv_stride, q_size,
                           size, num_heads, head_dim);
                rotary(key, angles, layer.k_norm, key, qkv_stride, qkv_stride, size, num_kv_heads,
                       head_dim);
                store_kvcache(key, value, qkv_stride, qkv_stride, own.slot_mapping + first, size,
                              kv_size, keys[i], values[i]);
            });
            if (only_kv) continue;
            // The K/V of all tokens are written, so tokens of this step can attend to each other.
            for (auto attend : {decode_attention, prefill_attention})
                attend(query, keys[i], values[i], attended, &own, &layer.heads);
            for_chunks([&](int64_t first, int64_t size, T* normed) {
                T* gated = normed + chunk * hidden_size;
                T* to = x + first * hidden_size;
                // Add the product of a branch's last weight, which a norm can come after, to x.
                auto add = [&](const T* from, int64_t from_stride, const Weight& weight,
                               const T* bias, const Norm& norm) {
                    bool has_norm = norm.weight != nullptr;
                    linear(from, weight, bias, has_norm ? nullptr : to, has_norm ? normed : to,
                           size, from_stride, hidden_size);
                    if (has_norm) rms_norm(normed, norm, to, to, size, hidden_size);
                };
                add(attended + first * q_size, q_size, layer.o, layer.o_bias,
                    layer.after_attention);
                rms_norm(to, layer.before_mlp, nullptr, normed, size, hidden_size);
                linear(normed, layer.gate_up, nullptr, nullptr, gated, size, hidden_size,
                       gated_stride);
                add(gated, gated_stride, layer.down, nullptr, layer.after_mlp);
            });
        }
    });
}
