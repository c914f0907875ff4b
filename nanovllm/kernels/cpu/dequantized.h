// Multiplies rows of x by a panel of a quantized weight, which is dequantized first. This is for
// float32, for AMX, and for processors that do not multiply pairs of integers.
#pragma once
#include "quantized.h"
#include "rows.h"

// QuantizedRows dequantizes a panel into a buffer, which `Rows` multiplies.
class QuantizedRows {
    Buffer<T> memory;
    Rows rows;
    int64_t num_groups;

public:
    Weight weight;

    void pack(const auto& find_row, int64_t num_rows, int64_t in_features) {
        num_groups = round_up(in_features, weight.group_size) / weight.group_size;
        rows.pack(find_row, num_rows, in_features);
    }

    void multiply(const T* panel, const Epilogue& epilogue, T* output, int64_t output_stride) {
        T* dequantized = memory.get(num_groups * weight.group_size * WIDTH);
        auto dequantize =
            weight.bits == 4 ? &QuantizedRows::dequantize<4> : &QuantizedRows::dequantize<8>;
        for (int64_t group = 0; group < num_groups; group++)
            (this->*dequantize)(Block((const uint8_t*)panel + group * weight.block_size()),
                                dequantized + group * weight.group_size * WIDTH);
        rows.multiply(dequantized, epilogue, output, output_stride);
    }

    void finish(int64_t num) { rows.finish(num); }

private:
    template <int BITS>
    void dequantize(const Block& block, T* to) {
        Vector scales[VECTORS_PER_LINE];
        Vector zeros[VECTORS_PER_LINE];
        for (int64_t vector = 0; vector < VECTORS_PER_LINE; vector++) {
            scales[vector] = load(block.scales + vector * LANES);
            zeros[vector] = __builtin_convertvector(block.load_zeros(vector * LANES), Vector);
        }
        for (int64_t i = 0; i < weight.group_size; i += 2) {
            const uint8_t* line = block.codes + i * WIDTH * BITS / 8;
            __builtin_prefetch(line + BYTES_AHEAD);
            for (int64_t vector = 0; vector < VECTORS_PER_LINE; vector++) {
                Integers both = (Integers)load_codes<BITS>(line, vector);
                Vector even = __builtin_convertvector(both << 16 >> 16, Vector) - zeros[vector];
                Vector odd = __builtin_convertvector(both >> 16, Vector) - zeros[vector];
                store(even * scales[vector], odd * scales[vector], to + i * WIDTH, vector * LANES);
            }
        }
    }

    // Store an even and an odd input of LANES outputs in the order of a panel.
    static void store(Vector even, Vector odd, T* to, int64_t column) {
        if constexpr (PAIR == 1) {
            narrow(even, to + column);
            narrow(odd, to + WIDTH + column);
        } else {
            Shorts evens;
            Shorts odds;
            narrow(even, (T*)&evens);
            narrow(odd, (T*)&odds);
            Bits pairs = __builtin_convertvector(evens, Bits) & 0xFFFF;
            pairs |= __builtin_convertvector(odds, Bits) << 16;
            memcpy(to + PAIR * column, &pairs, sizeof pairs);
        }
    }
};
