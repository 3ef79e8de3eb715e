// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Scales of matrices that are whole stacks of four wide tiles, one below the other. A thread block
// takes the tiles of a stack one after the other and keeps the scales of its columns until they are
// 32 bytes of each: as pieces of 8 bytes every one was a write of its own, and shared its sector
// with three others.
#pragma once

#include "tiles/tile.cuh"

namespace fp4kit {

constexpr u32 kStack = 4;                    // tiles
constexpr u32 kTileScales = kTileRows / 16;  // of a vector in a tile, along rows and columns

// Four scales of one column in each of the tiles but the last, for each thread.
struct BufferedScales {
  u32 word[kStack - 1][kThreads];
};

#ifdef __CUDACC__

// Four lanes side by side have four blocks, of four vectors each: one byte per vector. Gives lane i
// those of vector i, one byte per block.
__device__ __forceinline__ u32 transpose_scales(u32 bytes) {
  u32 other = __shfl_xor_sync(0xFFFFFFFFu, bytes, 1);
  bytes = byte_perm(bytes, other, threadIdx.x & 1 ? 0x3715u : 0x6240u);
  other = __shfl_xor_sync(0xFFFFFFFFu, bytes, 2);
  return byte_perm(bytes, other, threadIdx.x & 2 ? 0x3276u : 0x5410u);
}

// Stores the scales of a column, of which this lane has four and the one four lanes from it the
// other four of this tile. `target`: where those of the stack begin; `part`: which tile of it.
__device__ __forceinline__ void store_buffered_scales(
    u8* target, BufferedScales& held, u32 word, u32 part, bool alone) {
  const bool second = threadIdx.x / 4 % 2;
  const auto kept = [&](u32 number) -> u32& { return held.word[number][threadIdx.x]; };
  if (alone) {
    *reinterpret_cast<u32*>(target + part * kTileScales + (second ? 4 : 0)) = word;
  } else if (part != kStack - 1) {
    kept(part) = word;
  } else {
    // Two tiles each.
    const u32 sent[2] = {second ? kept(0) : kept(2), second ? kept(1) : word};
    const u32 own[2] = {second ? kept(2) : kept(0), second ? word : kept(1)};
    const u32 first = __shfl_xor_sync(0xFFFFFFFFu, sent[0], 4);
    const u32 last = __shfl_xor_sync(0xFFFFFFFFu, sent[1], 4);
    *reinterpret_cast<uint4*>(target + (second ? 16 : 0)) =
        second ? make_uint4(first, own[0], last, own[1]) : make_uint4(own[0], first, own[1], last);
  }
}

#endif  // __CUDACC__

}  // namespace fp4kit
