// The sampler: filters rows of logits, and samples a token from each row.
#pragma once
#include "team.h"

// Rows of logits in the model's dtype, or in float32 after penalties or filters. One library reads
// both, because compiling a second one would block a running engine for seconds. All kernels
// compute with a float32 copy, so equal logits give equal tokens in every library.
struct Logits {
    const void* numbers;
    bool is_float32;
    int64_t vocab_size;

    void copy(int64_t row, int64_t first_token, int64_t num, float* output) const {
        int64_t first = row * vocab_size + first_token;
        if (is_float32)
            std::copy_n((const float*)numbers + first, num, output);
        else
            std::copy_n((const T*)numbers + first, num, output);
    }
};

template <class Weigh>
static float sum_weights(const float* values, int64_t num, const Weigh& weigh) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < num; i++) sum += weigh(values[i]);
    return sum;
}

struct Cut {
    float logit;     // the lowest logit that stays
    int64_t num;     // number of tokens at or above it
    float mass = 0;  // sum of their weights
};

// Find the lowest logit that stays: fewer than max_num tokens, with less mass than max_mass, have
// higher logits. The highest logit always stays. This is quickselect, and reorders `values`.
template <class Weigh>
static Cut find_cut(float* values, int64_t num, float highest, int64_t max_num, float max_mass,
                    const Weigh& weigh) {
    // The highest of a sample is the first pivot, so that few tokens are above it.
    float pivot = -INFINITY;
    for (int64_t i = 0; i < num; i += 256) pivot = std::max(pivot, values[i]);
    Cut cut{highest, 0};
    // Invariant: `cut` describes the tokens in front of `values`, which stay. The `num` tokens from
    // there on are undecided. All others are lower and are removed.
    while (num > 0) {
        auto is_above = [=](float value) { return value > pivot; };
        auto is_equal = [=](float value) { return value == pivot; };
        float* equal = std::partition(values, values + num, is_above);
        int64_t num_above = equal - values;
        float mass_above = sum_weights(values, num_above, weigh);
        if (cut.num + num_above >= max_num || cut.mass + mass_above >= max_mass) {
            num = num_above;
        } else {
            float* below = std::partition(equal, values + num, is_equal);
            cut.logit = pivot;
            cut.num += below - values;
            cut.mass += mass_above;
            cut.mass += (below - equal) * weigh(pivot);
            num -= below - values;
            values = below;
        }
        if (num > 0) pivot = values[num / 2];
    }
    return cut;
}

struct Filter {
    float temperature;
    int64_t top_k;  // vocab_size: off
    float top_p;    // 1 or more: off
    float min_p;
};

// Replace the logits of tokens that top-k, then top-p, then min-p remove by -inf.
static void filter_row(float* row, int64_t vocab_size, const Filter& filter) {
    static thread_local Buffer<float> buffer;
    float* values = buffer.get(vocab_size);
    float highest = -INFINITY;
#pragma omp simd reduction(max : highest)
    for (int64_t token = 0; token < vocab_size; token++) {
        // NaN stays in `row` and does not take part in sorting.
        values[token] = row[token] == row[token] ? row[token] : -INFINITY;
        highest = values[token] > highest ? values[token] : highest;
    }
    // An infinite logit wins anyway. If all are -infinity, there is nothing to remove.
    if (!std::isfinite(highest)) return;
    float inverse = 1 / filter.temperature;
    auto weigh = [=](float logit) { return exponential((logit - highest) * inverse); };
    Cut cut{-INFINITY, vocab_size};
    float mass = 0;  // total weight of the tokens that top-p selects from
    if (filter.top_k < vocab_size) {
        cut = find_cut(values, vocab_size, highest, filter.top_k, INFINITY, weigh);
        // More than top_k tokens stay if some are equal at the cut. The surplus does not count.
        int64_t surplus = std::max<int64_t>(0, cut.num - filter.top_k);
        mass = cut.mass - surplus * weigh(cut.logit);
    } else if (filter.top_p < 1) {
        mass = sum_weights(values, vocab_size, weigh);
    }
    if (filter.top_p < 1)
        cut = find_cut(values, cut.num, highest, filter.top_k, filter.top_p * mass, weigh);
    float lowest = std::max(cut.logit, highest + filter.temperature * logf(filter.min_p));
    for (int64_t token = 0; token < vocab_size; token++)
        row[token] = row[token] < lowest ? -INFINITY : row[token];
}

// Write the logits as float32, and filter some of the rows.
extern "C" void filter_logits(const void* logits, int64_t is_float32, float* output,
                              const int64_t* rows, const float* temperatures, const int64_t* top_ks,
                              const float* top_ps, const float* min_ps, int64_t num_logits,
                              int64_t vocab_size, int64_t num_rows) {
    Logits input{logits, is_float32 != 0, vocab_size};
    parallel_for(num_logits, vocab_size,
                 [=](int64_t row) { input.copy(row, 0, vocab_size, output + row * vocab_size); });
    parallel_for(num_rows, vocab_size, [=](int64_t i) {
        Filter filter{temperatures[i], top_ks[i], top_ps[i], min_ps[i]};
        filter_row(output + rows[i] * vocab_size, vocab_size, filter);
    });
}

// What the noise of a row depends on. gumbel_noise of layers/noise.py is -log(-log(1 - uniform)),
// where `uniform` is a hash of the token and the row's key.
struct Noise {
    const int32_t* token_hashes = nullptr;
    uint32_t key = 0;
    uint32_t factor = 0;
    float temperature = 0;  // 0: greedy, without noise
};

// Mark the tokens whose logit is above `highest` or NaN. Return their number.
static int32_t find_candidates(const float* logits, int64_t num, float highest,
                               int32_t* is_candidate) {
    int32_t num_candidates = 0;
#pragma omp simd reduction(+ : num_candidates)
    for (int64_t i = 0; i < num; i++) {
        is_candidate[i] = !(logits[i] <= highest);
        num_candidates += is_candidate[i];
    }
    return num_candidates;
}

// The same with noise, for the tokens from `start` on. Because -log(1 - uniform) exceeds uniform,
// a score can be above `highest` only if uniform < exp((logit - highest) / temperature).
static int32_t find_candidates_with_noise(const float* logits, int64_t num, float highest,
                                          const Noise& noise, int64_t start, float* uniforms,
                                          int32_t* is_candidate) {
    const int32_t* hashes = noise.token_hashes + start;
    float inverse = 1 / noise.temperature;
    int32_t num_candidates = 0;
#pragma omp simd reduction(+ : num_candidates)
    for (int64_t i = 0; i < num; i++) {
        uint32_t x = hashes[i] ^ noise.key;
        x = (x ^ x >> 16) * noise.factor;
        x = (x ^ x >> 15) * 0x2C1B3C6D >> 1;
        uniforms[i] = int32_t(x) * (0x1p-31f * (1 - 0x1p-23f)) + 0x1p-33f;
        float lead = (logits[i] - highest) * inverse;
        // 1.01 is more than rounding can take from `lead` and its exponential.
        float limit = 1.01f * exponential(lead > 0 ? 0 : lead);
        is_candidate[i] = !(uniforms[i] > limit);
        num_candidates += is_candidate[i];
    }
    return num_candidates;
}

// Find the token with the highest score, logit + temperature * noise, the first of equals. Return
// -1 if a logit is NaN. Logarithms are slow, so only candidates get a score: tokens that can exceed
// the scores of all earlier chunks. In the first chunk these are all tokens, so chunks begin small.
static int64_t sample_row(const Logits& logits, int64_t row, const Noise& noise) {
    constexpr int64_t FIRST_CHUNK = 16;
    constexpr int64_t CHUNK = 1024;
    float chunk[CHUNK];
    float uniforms[CHUNK];
    int32_t is_candidate[CHUNK];
    int64_t best = 0;
    float highest = -FLT_MAX;
    int64_t size;
    // Invariant: of the tokens before `start`, `best` has the highest score, which is `highest`.
    for (int64_t start = 0; start < logits.vocab_size; start += size) {
        size = std::min({std::max(start, FIRST_CHUNK), CHUNK, logits.vocab_size - start});
        logits.copy(row, start, size, chunk);
        int32_t num_left;
        if (noise.temperature > 0)
            num_left = find_candidates_with_noise(chunk, size, highest, noise, start, uniforms,
                                                  is_candidate);
        else
            num_left = find_candidates(chunk, size, highest, is_candidate);
        for (int64_t i = 0; num_left > 0; i++) {
            if (!is_candidate[i]) continue;
            num_left--;
            float score = chunk[i];
            if (noise.temperature > 0) score -= noise.temperature * logf(-log1pf(-uniforms[i]));
            if (std::isnan(score)) return -1;
            if (score > highest) {
                highest = score;
                best = start + i;
            }
        }
    }
    return best;
}

// Sample a token from each row. Without `temperatures` all rows are greedy.
extern "C" void sample(const void* logits, int64_t is_float32, const int32_t* token_hashes,
                       const int32_t* noise_keys, const float* temperatures, int64_t* tokens,
                       int64_t num_rows, int64_t vocab_size) {
    Logits input{logits, is_float32 != 0, vocab_size};
    parallel_for(num_rows, vocab_size, [=](int64_t row) {
        Noise noise;
        if (temperatures) {
            noise.token_hashes = token_hashes;
            noise.key = noise_keys[2 * row];
            noise.factor = noise_keys[2 * row + 1] | 1;
            noise.temperature = temperatures[row];
        }
        tokens[row] = sample_row(input, row, noise);
    });
}
