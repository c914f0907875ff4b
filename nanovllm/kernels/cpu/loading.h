// What happens to a weight while an engine starts: it is quantized, and prepacked into panels. Each
// weight is one call, because a call waits for all threads at its end, also for one whose core
// another process uses. layers/quantized.py specifies the codes, to the bit.
#pragma once
#include "quantized.h"
#include "team.h"

template <class Number>
static void quantize_row(const Number* row, uint8_t* codes, float* scales, int16_t* zeros,
                         int64_t in_features, int64_t group_size, int64_t largest_code) {
    for (int64_t start = 0; start < in_features; start += group_size) {
        int64_t end = std::min(start + group_size, in_features);
        float low = 0;
        float high = 0;
        int has_nan = 0;  // comparisons skip NaN
#pragma omp simd reduction(min : low) reduction(max : high) reduction(| : has_nan)
        for (int64_t i = start; i < end; i++) {
            float number = row[i];
            low = number < low ? number : low;
            high = number > high ? number : high;
            has_nan |= number != number;
        }
        float scale = has_nan ? NAN : (high - low) / largest_code;
        float inverse = scale == 0 ? 0 : 1 / scale;
        float zero = rintf(-low * inverse);
        for (int64_t i = start; i < end; i++) {
            float code = rintf(row[i] * inverse) + zero;
            code = code > 0 ? code : 0;  // also if it is NaN
            codes[i] = int(code > largest_code ? largest_code : code);
        }
        *scales++ = scale;
        *zeros++ = zero;
    }
}

template <class Number>
static void quantize_rows(const Number* weight, uint8_t* codes, float* scales, int16_t* zeros,
                          int64_t num_rows, int64_t in_features, int64_t bits,
                          int64_t group_size) {
    int64_t num_groups = round_up(in_features, group_size) / group_size;
    int64_t num_bytes = (in_features * bits + 7) / 8;
    parallel_for(num_rows, in_features, [=](int64_t row) {
        static thread_local Buffer<uint8_t> memory;
        uint8_t* unpacked = memory.get(in_features + 1);
        unpacked[in_features] = 0;  // the second code of the last byte, if their number is odd
        quantize_row(weight + row * in_features, unpacked, scales + row * num_groups,
                     zeros + row * num_groups, in_features, group_size, (1 << bits) - 1);
        uint8_t* packed = codes + row * num_bytes;
        if (bits == 8)
            std::copy_n(unpacked, num_bytes, packed);
        else
#pragma omp simd
            for (int64_t i = 0; i < num_bytes; i++)
                packed[i] = unpacked[2 * i] | unpacked[2 * i + 1] << 4;
    });
}

// Quantize a weight of any of the three dtypes, by its place in DEFINES of library.py.
extern "C" void quantize_weight(const void* weight, int64_t dtype, uint8_t* codes, float* scales,
                                int16_t* zeros, int64_t num_rows, int64_t in_features,
                                int64_t bits, int64_t group_size) {
    auto quantize = [=](auto* numbers) {
        quantize_rows(numbers, codes, scales, zeros, num_rows, in_features, bits, group_size);
    };
    if (dtype == 0) quantize((const float*)weight);
    if (dtype == 1) quantize((const bfloat16*)weight);
    if (dtype == 2) quantize((const float16*)weight);
}

// The rows of a weight that become panels. It has two parts if it is gated, and otherwise one.
struct PanelRows {
    int64_t rows_per_part;
    int64_t rows_per_panel;  // of each part

    PanelRows(int64_t num_rows, int64_t num_parts)
        : rows_per_part(num_rows / num_parts), rows_per_panel(WIDTH / num_parts) {}

    int64_t num_panels() const {
        return round_up(rows_per_part, rows_per_panel) / rows_per_panel;
    }

    // Return the row that is an output of a panel, or -1 for padding.
    int64_t find(int64_t panel, int64_t output) const {
        int64_t row = panel * rows_per_panel + output % rows_per_panel;
        return row < rows_per_part ? output / rows_per_panel * rows_per_part + row : -1;
    }
};

extern "C" void prepack(const T* weight, T* panels, int64_t num_rows, int64_t in_features,
                        int64_t num_parts) {
    constexpr int64_t CHUNK = 128;  // inputs whose lines stay cached until all rows are in them
    int64_t depth = round_up(in_features, LINE);
    PanelRows rows(num_rows, num_parts);
    parallel_for(rows.num_panels(), WIDTH * depth, [=](int64_t panel) {
        T* lines = panels + panel * WIDTH * depth;
        for (int64_t start = 0; start < depth; start += CHUNK)
            for (int64_t output = 0; output < WIDTH; output++) {
                int64_t row = rows.find(panel, output);
                int64_t num_inputs = row < 0 ? 0 : in_features;  // zeros follow
                for (int64_t i = start; i < std::min(start + CHUNK, depth); i += PAIR) {
                    T* pair = lines + i * WIDTH + output * PAIR;
                    if (i < num_inputs)
                        std::copy_n(weight + row * in_features + i, PAIR, pair);
                    else
                        std::fill_n(pair, PAIR, T{});
                }
            }
    });
}

// Make a block of a panel: a group of inputs.
static void prepack_group(const uint8_t (&codes)[WIDTH][MAX_GROUP_SIZE], uint8_t* lines,
                          int64_t bits, int64_t group_size) {
    if (bits == 8) {
        for (int64_t i = 0; i < group_size; i += 2)
            for (int64_t output = 0; output < WIDTH; output++) {
                *lines++ = codes[output][i] ^ 128;
                *lines++ = codes[output][i + 1] ^ 128;
            }
        return;
    }
    for (int64_t i = 0; i < group_size / 2; i++)  // a byte has two inputs
        for (int64_t output = 0; output < 8; output++) {
            uint8_t bytes[4];
            for (int64_t j = 0; j < 4; j++) bytes[j] = codes[output + 8 * j][i];
            *lines++ = (bytes[0] & 15) | bytes[1] << 4;
            *lines++ = (bytes[2] & 15) | bytes[3] << 4;
            *lines++ = bytes[0] >> 4 | (bytes[1] & 0xF0);
            *lines++ = bytes[2] >> 4 | (bytes[3] & 0xF0);
        }
}

extern "C" void prepack_codes(const uint8_t* codes, const float* scales, const int16_t* zeros,
                              uint8_t* panels, int64_t num_rows, int64_t in_features,
                              int64_t num_parts, int64_t bits, int64_t group_size) {
    Weight weight{panels, bits, group_size};
    int64_t num_groups = round_up(in_features, group_size) / group_size;
    int64_t bytes_per_row = (in_features * bits + 7) / 8;
    int64_t bytes_per_group = group_size * bits / 8;
    PanelRows rows(num_rows, num_parts);
    parallel_for(rows.num_panels(), WIDTH * in_features, [=](int64_t panel) {
        for (int64_t group = 0; group < num_groups; group++) {
            Block block(panels + (panel * num_groups + group) * weight.block_size());
            uint8_t group_codes[WIDTH][MAX_GROUP_SIZE] = {};  // padded with zeros
            for (int64_t output = 0; output < WIDTH; output++) {
                int64_t row = rows.find(panel, output);
                float scale = 0;
                int64_t zero = 0;
                if (row >= 0) {
                    scale = scales[row * num_groups + group];
                    zero = zeros[row * num_groups + group];
                    int64_t first = group * bytes_per_group;
                    int64_t num_bytes = std::min(bytes_per_group, bytes_per_row - first);
                    std::copy_n(codes + row * bytes_per_row + first, num_bytes,
                                group_codes[output]);
                }
                ((float*)block.scales)[output] = scale;
                ((int16_t*)block.zeros)[output] = bits == 8 ? zero - 128 : zero;
            }
            prepack_group(group_codes, (uint8_t*)block.codes, bits, group_size);
        }
    });
}
