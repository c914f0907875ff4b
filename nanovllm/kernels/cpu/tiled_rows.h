// What centered.h and planes.h have in common: rows of x, which a panel of a quantized weight is
// multiplied by in tiles of up to ROWS rows.
//
// `Self` is the class that inherits this, and has num_rows and `sums`. Its sum_up<BITS>(panel) adds
// the products of all rows to `sums`, with functions multiply_tile<BITS, KEEPS, M>, one for each
// number M of rows.
#pragma once
#include "quantized.h"
#include "rows.h"

// Tiles whose sizes differ by at most one. Nothing is divided in loops over tiles, because
// divisions take long.
struct Tiling {
    int64_t num_tiles;
    int64_t rows_per_tile;
    int64_t num_larger_tiles;

    explicit Tiling(int64_t num_rows)
        : num_tiles(round_up(num_rows, ROWS) / ROWS),
          rows_per_tile(num_rows / num_tiles),
          num_larger_tiles(num_rows % num_tiles) {}

    int64_t size(int64_t tile) const {
        return tile < num_larger_tiles ? rows_per_tile + 1 : rows_per_tile;
    }
};

template <class Self>
class TiledRows {
protected:
    // Return the function for a tile. The first tile converts the codes, and keeps them if there
    // are others, which read them with 16 bits.
    template <int BITS>
    static auto choose(const Tiling& tiling, int64_t tile) {
        int64_t size = tiling.size(tile);
        return tile > 0               ? find_tile<16, false>(size)
               : tiling.num_tiles > 1 ? find_tile<BITS, true>(size)
                                      : find_tile<BITS, false>(size);
    }

private:
    // Return multiply_tile for 1 to M rows.
    template <int BITS, bool KEEPS, int M = ROWS>
    static auto find_tile(int64_t num) {
        if constexpr (M > 1)
            if (num < M) return find_tile<BITS, KEEPS, M - 1>(num);
        return &Self::template multiply_tile<BITS, KEEPS, M>;
    }

public:
    void multiply(const T* panel, const Epilogue& epilogue, T* output, int64_t output_stride) {
        Self& self = static_cast<Self&>(*this);
        std::fill_n(self.sums, self.num_rows * WIDTH, 0);
        auto sum_up = self.weight.bits == 4 ? &Self::template sum_up<4> : &Self::template sum_up<8>;
        (self.*sum_up)((const uint8_t*)panel);
        for (int64_t row = 0; row < self.num_rows; row++)
            epilogue.store(&self.sums[row * WIDTH], output, row * output_stride);
    }

    void finish(int64_t) {}  // multiply() has no deferred epilogue
};
