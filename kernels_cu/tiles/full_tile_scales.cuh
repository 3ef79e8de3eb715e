// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// How full wide tiles store scales as whole 32-byte sectors or lines.
#pragma once

#include "common/scale_layout.cuh"
#include "tiles/tile.cuh"

namespace fp4kit {

// ---- Vectors ----

// Column scales buffered to fill 32-byte sectors, where a matrix is full stacks of four wide tiles:
// a thread block takes the tiles of a stack one after the other and keeps the scales of its columns
// until they are 32 bytes of each, instead of four writes to a sector.
constexpr u32 kStack = 4;                    // tiles
constexpr u32 kTileScales = kTileRows / 16;  // of a vector in a tile, along rows and columns

struct BufferedScales {
  u32 word[kStack - 1][kThreads];
};

// Four lanes side by side have a byte of four vectors each, of four blocks: lane i gets those of
// vector i.
FP4KIT_DEVICE u32 transpose_scales(u32 bytes) {
  u32 other = __shfl_xor_sync(0xFFFFFFFFu, bytes, 1);
  bytes = byte_perm(bytes, other, threadIdx.x & 1 ? 0x3715u : 0x6240u);
  other = __shfl_xor_sync(0xFFFFFFFFu, bytes, 2);
  return byte_perm(bytes, other, threadIdx.x & 2 ? 0x3276u : 0x5410u);
}

// Stores the scales of a column, of which this lane has four and the one four lanes from it the
// other four. `target`: where those of the stack begin; `part`: which tile of it.
FP4KIT_DEVICE void store_buffered_scales(
    u8* target, BufferedScales& held, u32 word, u32 part, bool alone) {
  const bool second = threadIdx.x / 4 % 2;
  const auto kept = [&](u32 number) -> u32& { return held.word[number][threadIdx.x]; };
  if (alone) {
    *reinterpret_cast<u32*>(target + part * kTileScales + (second ? 4 : 0)) = word;
  } else if (part != kStack - 1) {
    kept(part) = word;
  } else {
    const u32 sent[2] = {second ? kept(0) : kept(2), second ? kept(1) : word};
    const u32 own[2] = {second ? kept(2) : kept(0), second ? word : kept(1)};
    const u32 first = __shfl_xor_sync(0xFFFFFFFFu, sent[0], 4);
    const u32 last = __shfl_xor_sync(0xFFFFFFFFu, sent[1], 4);
    *reinterpret_cast<uint4*>(target + (second ? 16 : 0)) =
        second ? make_uint4(first, own[0], last, own[1]) : make_uint4(own[0], first, own[1], last);
  }
}

// ---- Squares ----

// Scales of squares in full wide tiles. Sixteen vectors have the same ones. In swizzled_128x4 all
// of a tile's scales lie together, and are stored as whole lines. Linear ones would be four writes
// to a sector: the tiles store the first vector of each sixteen, and scales/repeat_scales.cu the
// others.
constexpr u32 kSquareRows = FP4KIT_NVFP4_BLOCK_SIZE;
constexpr u32 kTileSquares = kTileRows / kSquareRows;

struct alignas(8) SquareScales {
  u8 down[kTileSquares][kTileSquares];
  u8 across[kTileSquares][kTileSquares];

  FP4KIT_DEVICE void set(u32 row, u32 col, u32 byte) {
    down[row][col] = static_cast<u8>(byte);
    across[col][row] = static_cast<u8>(byte);
  }
};

template <int kLayout>
FP4KIT_DEVICE void store_squares(
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
