// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Scales of squares in wide tiles that are whole. Sixteen vectors have the same ones. In the order
// of swizzled_128x4 all of a tile's scales lie together, and are stored as whole lines. Linear
// scales would be pieces of 8 bytes, each a write of its own in a sector shared with three others:
// of those the tiles store the first vector of each sixteen, and scales/repeat_scales.cu the
// others.
#pragma once

#include "common/scale_layout.cuh"
#include "tiles/tile.cuh"

namespace fp4kit {

constexpr u32 kSquareRows = FP4KIT_NVFP4_BLOCK_SIZE;
constexpr u32 kTileSquares = kTileRows / kSquareRows;

// By squares, in the order of rows and in that of columns.
struct alignas(8) SquareScales {
  u8 down[kTileSquares][kTileSquares];
  u8 across[kTileSquares][kTileSquares];

  __device__ __forceinline__ void set(u32 row, u32 col, u32 byte) {
    down[row][col] = static_cast<u8>(byte);
    across[col][row] = static_cast<u8>(byte);
  }
};

// One direction's scales of a tile, `target` on; a thread block of 256.
template <int kLayout>
__device__ __forceinline__ void store_squares(
    u8* target, u64 stride, const u8 (&scales)[kTileSquares][kTileSquares]) {
  const u32 thread = threadIdx.x;
  if constexpr (kLayout == kLayoutLinear) {
    if (thread < kTileSquares) {
      *reinterpret_cast<uint2*>(target + thread * kSquareRows * stride) =
          *reinterpret_cast<const uint2*>(scales[thread]);
    }
  } else {
    static_assert(kLayout == kLayoutSwizzled128x4, "one word for each thread");
    const u32 vector = thread % 4 * 32 + thread % kTileRows / 4;
    const u8* source = scales[vector / kSquareRows] + thread / kTileRows * kTileCols;
    *reinterpret_cast<u32*>(target + thread * 4) = *reinterpret_cast<const u32*>(source);
  }
}

}  // namespace fp4kit
