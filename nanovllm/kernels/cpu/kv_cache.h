// What attention of decodes and of longer queries have in common: how K/V are stored, and which
// tokens a query attends to.
#pragma once
#include "team.h"

// Return the first token that the query token at `position` attends to. Without a window, which is
// then 0, this is the first token of the context.
static int64_t find_first_visible(int64_t position, int64_t window) {
    return window ? std::max<int64_t>(0, position + 1 - window) : 0;
}

struct Heads {  // of attention, filled by Python: see declarations.py
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;
    float scale;     // of scores
    int64_t window;  // tokens that a query attends to, or 0 if it attends to all
};

struct Sequences {  // of a batch, and where their K/V are, filled by Python
    const int32_t* cu_seqlens_q;
    const int32_t* context_lens;
    const int32_t* slot_mapping;
    const int32_t* block_tables;
    int64_t num_seqs;
    int64_t table_width;
    int64_t block_size;
};

extern "C" void store_kvcache(const T* key, const T* value, int64_t key_stride,
                              int64_t value_stride, const int32_t* slot_mapping, int64_t num_tokens,
                              int64_t slot_size, T* keys, T* values) {
    parallel_for(num_tokens, slot_size, [=](int64_t token) {
        int64_t slot = slot_mapping[token];
        if (slot < 0) return;
        memcpy(keys + slot * slot_size, key + token * key_stride, slot_size * sizeof(T));
        memcpy(values + slot * slot_size, value + token * value_stride, slot_size * sizeof(T));
    });
}
