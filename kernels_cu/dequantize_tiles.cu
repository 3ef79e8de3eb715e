// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// dequantize of variants: columnwise codes, or rowwise ones with another largest scale.
//
// Launch: 256 threads, one block per tile.
#include "dequantize_tile.cuh"

namespace fp4kit {

template <class Format, class Out, int kRecipe, bool kSecond, bool kColumns>
__global__ void __launch_bounds__(kThreads)
    dequantize_tiles_kernel(u8* packed, u8* block_scale, const float* second,
                            typename Out::Bits* __restrict__ out, i64 rows, i64 cols,
                            i64 tiles_across, i64 blocks, i64 stored_cols, i64 scales,
                            i64 vectors_per_scale, i64 layout, i64 high_first, i64 range) {
  __shared__ Tile<Out> tile;
  const i64 down = blockIdx.x / tiles_across;
  const Side side{second, packed, block_scale, blocks, stored_cols, scales, vectors_per_scale};
  dequantize_tile<Format, Out, kRecipe, kSecond, kColumns>(
      tile, side, out, rows, cols, down * kTileRows,
      (blockIdx.x - down * tiles_across) * kTileColumns, static_cast<int>(layout), high_first != 0,
      static_cast<float>(range));
}

}  // namespace fp4kit
