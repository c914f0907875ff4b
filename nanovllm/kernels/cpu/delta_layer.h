// A decoder layer with a Gated DeltaNet in one call, or its first half, if experts follow.
// models/qwen3_5.py specifies it.
#pragma once
#include "gated_delta.h"
#include "gemm.h"

struct DeltaLayer {  // filled by Python: see declarations.py
    Norm input_norm;
    Norm post_attention_norm;  // the weights of this, gate_up and down are null without an MLP
    DeltaRule rule;
    Weight qkvz;
    Weight ba;
    Weight out;
    Weight gate_up;
    Weight down;
};

// Run the layer on x [num_tokens, hidden_size], in place.
extern "C" void delta_layer(const DeltaLayer* layer, T* x, float* states, const int32_t* read_slots,
                            const int32_t* write_slots, const int32_t* cu_seqlens_q,
                            int64_t num_tokens, int64_t num_seqs) {
    const DeltaRule* rule = &layer->rule;
    int64_t hidden_size = layer->out.out_features;
    int64_t num_heads = rule->num_value_heads;
    int64_t value_size = num_heads * rule->value_dim;
    int64_t qkv_size = 2 * rule->num_key_heads * rule->key_dim + value_size;
    int64_t ba_size = 2 * num_heads;
    int64_t qkvz_stride = find_stride(qkv_size + value_size);
    int64_t gated_stride = find_stride(layer->gate_up.out_features);
    int64_t wide_stride = std::max(qkvz_stride, gated_stride);
    static thread_local Buffer<T> buffer;
    T* normed = buffer.get(num_tokens * (hidden_size + wide_stride + ba_size + value_size));
    T* qkvz = normed + num_tokens * hidden_size;
    T* ba = qkvz + num_tokens * wide_stride;
    T* output = ba + num_tokens * ba_size;
    T* gated = qkvz;  // in the same memory, after these were read
    Team::form(true, [=] {
        auto project = [=](const T* from, int64_t from_stride, const Weight& w, T* to,
                           int64_t stride) {
            linear(from, w, nullptr, to == x ? x : nullptr, to, num_tokens, from_stride, stride);
        };
        rms_norm(x, layer->input_norm, nullptr, normed, num_tokens, hidden_size);
        project(normed, hidden_size, layer->qkvz, qkvz, qkvz_stride);
        project(normed, hidden_size, layer->ba, ba, ba_size);
        gated_delta_rule(rule, qkvz, qkvz + qkv_size, ba, ba + num_heads, qkvz_stride, qkvz_stride,
                         ba_size, ba_size, states, read_slots, write_slots, cu_seqlens_q, num_seqs,
                         output);
        project(output, value_size, layer->out, x, hidden_size);
        if (!layer->post_attention_norm.weight) return;
        rms_norm(x, layer->post_attention_norm, nullptr, normed, num_tokens, hidden_size);
        project(normed, hidden_size, layer->gate_up, gated, gated_stride);
        project(gated, gated_stride, layer->down, x, hidden_size);
    });
}
