// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// quantize of variants: along rows, along columns, or both from one read; blocks or square tiles;
// rotated, rounded stochastically, with a searched scale.
//
// Launch: 256 threads, one block per tile, tiles of a row next to each other. Scales past the last
// vector or block are not written here: the launcher clears the scales of padded layouts first.
#include "quantize_tile.cuh"

namespace fp4kit {

// Thread blocks per multiprocessor that registers are limited for.
template <class C>
FP4KIT_HD constexpr int tile_blocks() {
  return 4;
}

template <class C>
__global__ void __launch_bounds__(kThreads, tile_blocks<C>())
    quantize_tiles_kernel(const typename C::T::Bits* __restrict__ x, i64 rows, i64 cols,
                          i64 tiles_across, const float* row_second, u8* row_packed, u8* row_scale,
                          i64 row_blocks, i64 row_stored, i64 row_scales, i64 row_per_scale,
                          const float* col_second, u8* col_packed, u8* col_scale, i64 col_blocks,
                          i64 col_stored, i64 col_scales, i64 col_per_scale, i64 layout,
                          i64 high_first, i64 rule, i64 range, i64 row_mask, i64 col_mask, i64 key,
                          i64 stream) {
  __shared__ TileShared<C> shared;
  const i64 down = blockIdx.x / tiles_across;
  const Task<typename C::T> task{
      x,
      rows,
      cols,
      down * kTileRows,
      (blockIdx.x - down * tiles_across) * kTileColumns,
      {row_second, row_packed, row_scale, row_blocks, row_stored, row_scales, row_per_scale},
      {col_second, col_packed, col_scale, col_blocks, col_stored, col_scales, col_per_scale},
      static_cast<u32>(stream)};
  const Options options{
      static_cast<int>(layout),  static_cast<int>(rule),     high_first != 0,
      static_cast<float>(range), static_cast<u32>(row_mask), static_cast<u32>(col_mask),
      static_cast<u64>(key)};
  quantize_tile<C>(shared, task, options);
}

}  // namespace fp4kit
