// The experts of a layer in one call. Experts of models/moe.py specifies it.
#pragma once
#include <vector>

#include "gemm.h"

// Compute for each token of x [num_tokens, hidden_size] its experts, whose ids are in `chosen`
// [num_tokens, num_chosen]. The output is [num_tokens, num_chosen, hidden_size]. The rows of an
// expert are gathered, so that its weights are read once. A token must not choose one twice.
extern "C" void experts(const T* x, const int64_t* chosen, const Weight* gate_up,
                        const Weight* down, T* output, int64_t num_tokens, int64_t num_chosen,
                        int64_t num_experts, int64_t hidden_size, int64_t intermediate_size) {
    // The places in `chosen`, sorted by expert. Those of an expert begin at its start.
    int64_t num_places = num_tokens * num_chosen;
    std::vector<int64_t> starts(num_experts + 1);
    std::vector<int64_t> places(num_places);
    for (int64_t i = 0; i < num_places; i++) starts[chosen[i] + 1]++;
    for (int64_t i = 0; i < num_experts; i++) starts[i + 1] += starts[i];
    std::vector<int64_t> ends = starts;
    for (int64_t i = 0; i < num_places; i++) places[ends[chosen[i]]++] = i;

    int64_t gated_stride = find_stride(intermediate_size);
    static thread_local Buffer<T> buffer;
    T* rows = buffer.get(num_tokens * (hidden_size + gated_stride));
    T* gated = rows + num_tokens * hidden_size;
    Team::form(true, [&] {
        for (int64_t expert = 0; expert < num_experts; expert++) {
            const int64_t* own = places.data() + starts[expert];
            int64_t num_rows = starts[expert + 1] - starts[expert];
            if (num_rows == 0) continue;
            parallel_for(num_rows, hidden_size, [=](int64_t i) {
                std::copy_n(x + own[i] / num_chosen * hidden_size, hidden_size,
                            rows + i * hidden_size);
            });
            linear(rows, gate_up + expert, nullptr, nullptr, gated, num_rows, hidden_size,
                   hidden_size, intermediate_size, gated_stride, SILU);
            linear(gated, down + expert, nullptr, nullptr, rows, num_rows, intermediate_size,
                   gated_stride, hidden_size, hidden_size, NO_GATE);
            parallel_for(num_rows, hidden_size, [=](int64_t i) {
                std::copy_n(rows + i * hidden_size, hidden_size, output + own[i] * hidden_size);
            });
        }
    });
}
