// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// quantize, the fast path: whole blocks, 16-byte alignment, at most one second-level value, fewer
// than 2^31 lanes. The bytes are those of quantize.cu, which serves everything else.
//
// What makes it fast, beside what quantize.cu does already:
//   1. blocks of a tensor are one flat sequence, so a linear layout needs no rows and columns
//   2. what follows from the second level is worked out once per thread block instead of once per
//      block of elements (scale_table.cuh)
//   3. a grid that just fills the device, each thread striding over lanes; the elements of its next
//      lane are on their way while it works on one
//
// Memory layout: as in quantize.cu. In a swizzled layout the padding is written 0 by a second,
// short loop (skipped where there is none).
//
// Launch: 256 threads; at most flat_blocks() blocks per multiprocessor.
#include "scale_table.cuh"
#include "swizzle.cuh"

namespace fp4kit {

// scale_offset for a layout known at compile time and coordinates of 31 bits.
template <int kLayout>
__device__ __forceinline__ i64 flat_scale_offset(u32 scale, u32 row, u32 col, u32 tiles) {
  if constexpr (kLayout == kLayoutLinear) {
    return scale;
  } else if constexpr (kLayout == kLayoutSwizzled128x4) {
    const u32 r = row % kTileRows128;
    const i64 tile = static_cast<i64>(row / kTileRows128) * tiles + col / kTileCols;
    return tile * kTileBytes128 + (r % 32) * 16 + (r / 32) * kTileCols + col % kTileCols;
  } else {
    const i64 tile = static_cast<i64>(row / kTileRows8) * tiles + col / kTileCols;
    return tile * kTileBytes8 + (row % kTileRows8) * kTileCols + col % kTileCols;
  }
}

template <class Format, class T, int kRecipe, bool kSecond, int kLayout>
__global__ void __launch_bounds__(kThreads, flat_blocks<T>())
    quantize_flat_kernel(const typename T::Bits* __restrict__ x, const float* __restrict__ second,
                         u8* __restrict__ packed, u8* __restrict__ block_scale, i64 lanes, i64 rows,
                         i64 blocks, i64 stored_rows, i64 stored_cols, i64 magic, i64 shift,
                         i64 high_first, i64 rule, i64 has_padding) {
  constexpr int kCodeBytes = 4 * Format::kLaneWords;
  __shared__ ScaleTable table;
  const Level level = fill_scale_table<Format, kRecipe, kSecond>(table, second);

  // Lanes are fewer than 2^31, so that no sum with a stride exceeds 32 bits.
  const u32 count = static_cast<u32>(lanes);
  const u32 stride = gridDim.x * kThreads;
  Words<T> ahead;
  const auto load = [&](u32 lane) {
    load_elements<true, T>(x + static_cast<u64>(lane) * kLaneElements,
                           lane < count ? kLaneElements : 0, ahead);
  };
  load(blockIdx.x * kThreads + threadIdx.x);
#pragma unroll 1
  for (u32 start = blockIdx.x * kThreads; start < count; start += stride) {
    const u32 lane = start + threadIdx.x;
    const Words<T> elements = ahead;
    load(lane + stride);
    u32 codes[Format::kLaneWords];
    const u32 byte = quantize_lane<Format, T, kRecipe, kSecond>(
        elements, table, level, static_cast<int>(rule), high_first != 0, codes);
    if (lane >= count) continue;
    store_codes<true>(packed + static_cast<u64>(lane) * kCodeBytes, codes);
    if (lane % Format::kLanes == 0) {
      const u32 scale = lane / Format::kLanes;
      u32 row = 0, col = 0;
      if constexpr (kLayout != kLayoutLinear) {
        row = static_cast<u32>((static_cast<u64>(scale) * static_cast<u32>(magic)) >>
                               static_cast<u32>(shift));
        col = scale - row * static_cast<u32>(blocks);
      }
      const u32 across = static_cast<u32>(stored_cols) / kTileCols;
      block_scale[flat_scale_offset<kLayout>(scale, row, col, across)] = static_cast<u8>(byte);
    }
  }
  if (kLayout != kLayoutLinear && has_padding) {
    clear_padding(block_scale, kLayout, rows, blocks, stored_rows, stored_cols);
  }
}

}  // namespace fp4kit
