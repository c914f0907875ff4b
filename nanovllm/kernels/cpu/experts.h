// The experts of a layer in one call. Experts of models/moe.py specifies it.
#pragma once
#include <vector>

#include "gemm.h"

// Compute for each token of x [num_tokens, hidden_size] the experts whose ids are in `chosen`
// [num_tokens, num_chosen], and the sum of their outputs with these weights [num_tokens,
// num_chosen]. The rows of an expert are gathered, so that its matrices are read once. The sums are
// in the order of the experts. A token must not choose an expert twice.
extern "C" void experts(const T* x, const int64_t* chosen, const float* weights,
                        const Weight* gate_up, const Weight* down, T* output, int64_t num_tokens,
                        int64_t num_chosen, int64_t num_experts) {
    int64_t hidden_size = gate_up->in_features;
    // The places in `chosen`, sorted by expert. Those of an expert begin at its start.
    int64_t num_places = num_tokens * num_chosen;
    std::vector<int64_t> starts(num_experts + 1);
    std::vector<int64_t> places(num_places);
    for (int64_t i = 0; i < num_places; i++) starts[chosen[i] + 1]++;
    for (int64_t i = 0; i < num_experts; i++) starts[i + 1] += starts[i];
    std::vector<int64_t> ends = starts;
    for (int64_t i = 0; i < num_places; i++) places[ends[chosen[i]]++] = i;

    int64_t num_numbers = num_tokens * hidden_size;
    int64_t gated_stride = find_stride(gate_up->out_features);
    static thread_local Buffer<T> buffer;
    static thread_local Buffer<float> sum_buffer;
    T* rows = buffer.get(num_numbers + num_tokens * gated_stride);
    T* gated = rows + num_numbers;
    float* sums = sum_buffer.get(num_numbers);
    std::fill_n(sums, num_numbers, 0.0f);
    Team::form(true, [&] {
        for (int64_t expert = 0; expert < num_experts; expert++) {
            const int64_t* own = places.data() + starts[expert];
            int64_t num_rows = starts[expert + 1] - starts[expert];
            if (num_rows == 0) continue;
            parallel_for(num_rows, hidden_size, [=](int64_t i) {
                std::copy_n(x + own[i] / num_chosen * hidden_size, hidden_size,
                            rows + i * hidden_size);
            });
            linear(rows, gate_up[expert], nullptr, nullptr, gated, num_rows, hidden_size,
                   gated_stride);
            linear(gated, down[expert], nullptr, nullptr, rows, num_rows, gated_stride,
                   hidden_size);
            parallel_for(num_rows, hidden_size, [=](int64_t i) {
                float* sum = sums + own[i] / num_chosen * hidden_size;
                for (int64_t j = 0; j < hidden_size; j++)
                    sum[j] += weights[own[i]] * float(rows[i * hidden_size + j]);
            });
        }
        parallel_for(num_tokens, hidden_size, [=](int64_t i) {
            for (int64_t j = i * hidden_size; j < (i + 1) * hidden_size; j++) output[j] = sums[j];
        });
    });
}

// Compute routed + sigmoid(gate) * shared, where `gate` has a number for each token.
extern "C" void add_shared(const T* routed, const T* shared, const T* gate, T* output,
                           int64_t num_tokens, int64_t hidden_size) {
    parallel_for(num_tokens, hidden_size, [=](int64_t token) {
        float weight = 1 / (1 + expf(-float(gate[token])));
        for (int64_t i = token * hidden_size; i < (token + 1) * hidden_size; i++)
            output[i] = float(routed[i]) + weight * float(shared[i]);
    });
}
