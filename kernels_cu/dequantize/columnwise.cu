// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// dequantize of columnwise codes. Must equal ReferenceBackend.dequantize.
//
// Launch: 256 threads, one block per tile.
#include "dequantize/columnwise.cuh"

namespace fp4kit {

template <class Format, class Out, int kRecipe, bool kSecond, bool kOneLevel>
__global__ void __launch_bounds__(kThreads) dequantize_columnwise_kernel(u8* packed,
    u8* block_scale, const float* second, typename Out::Bits* __restrict__ out, i64 rows, i64 cols,
    i64 tiles_across, i64 blocks, i64 stored_cols, i64 scales, i64 vectors_per_scale, i64 layout,
    i64 high_first, i64 range, i64 reciprocal) {
  // A grid has fewer than 2^31 blocks.
  const u32 across = static_cast<u32>(tiles_across);
  const u32 down = blockIdx.x / across;
  const QuantizedView side{
      second, packed, block_scale, blocks, stored_cols, scales, vectors_per_scale};
  dequantize_columnwise<Format, Out, kRecipe, kSecond, kOneLevel>(side, out, rows, cols,
      static_cast<i64>(down) * kTileRows,
      static_cast<i64>(blockIdx.x - down * across) * kTileColumns,
      {static_cast<int>(layout), high_first != 0, Range(range, reciprocal)});
}

}  // namespace fp4kit
