// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// FP4 weights to tiles for matrix products (prepared.cuh), and back: Backend.prepare_weights and
// restore_weights of fp4kit/reference/prepared.py.
//
// Rows are those of the product, blocks run along the depth, scales in any layout. A warp takes a
// tile, a lane the words and scales that it has there. What lies outside of the matrix is 0 in the
// tile. `odd` counts scale bytes that the kernels of small products cannot take as they are.
#include "common/e2m1.cuh"
#include "common/elements.cuh"
#include "common/scale_layout.cuh"
#include "matmul/prepared.cuh"

namespace fp4kit {

template <class Format>
__global__ void __launch_bounds__(kThreads)
    prepare_weights_kernel(const u8* __restrict__ packed, const u8* __restrict__ block_scale,
        u8* __restrict__ tiles, u32* __restrict__ odd, i64 rows, i64 stored_bytes, i64 blocks,
        i64 stored_cols, i64 layout, i64 high_first, i64 row_tiles, i64 depth_tiles) {
  using Tile = PreparedTile<Format>;
  const i64 number = (static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x) / 32;
  if (number >= row_tiles * depth_tiles) return;
  const u32 lane = threadIdx.x % 32;
  const i64 first_row = number / depth_tiles * kPreparedRows;
  const i64 depth_tile = number % depth_tiles;
  u8* tile = tiles + number * Tile::kBytes;
  u32 found = 0;
#pragma unroll
  for (u32 r = 0; r < 2; ++r) {
    const u32 row = lane / 4 * 2 + r;
    const bool inside = first_row + row < rows;
    const i64 first = depth_tile * (kPreparedDepth / 2) + lane % 4 * 16;
    const u8* source = packed + (first_row + row) * stored_bytes + first;
    u32 magnitudes = 0;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      u32 word = 0;
#pragma unroll
      for (u32 b = 0; b < 4; ++b) {
        const u32 place = 4 * i + b;
        if (inside && first + place < stored_bytes) {
          word |= static_cast<u32>(__ldg(source + place)) << (8 * b);
        }
      }
      magnitudes |= word & kCodeMagnitudes;
      if (high_first != 0) word = swap_nibbles(word);
      *reinterpret_cast<u32*>(tile + Tile::word_place(row, lane % 4 * 4 + i)) = prepare_word(word);
    }
#pragma unroll
    for (u32 b = 0; b < Tile::kLaneBlocks; ++b) {
      const u32 block = lane % 4 * Tile::kLaneBlocks + b;
      const i64 col = depth_tile * Tile::kBlocks + block;
      u32 scale = 0;
      if (inside && col < blocks) {
        scale = __ldg(block_scale +
                      scale_offset(static_cast<int>(layout), first_row + row, col, stored_cols));
        // A lane's codes of a row are one block then.
        const bool lost = Format::kIsMx && scale < kLeastScaleE8m0 && magnitudes != 0;
        found += lost || is_odd_scale<Format>(scale);
      }
      tile[Tile::scale_place(row, block)] = static_cast<u8>(scale);
    }
  }
  if (found != 0) atomicAdd(odd, found);
}

template <class Format>
__global__ void __launch_bounds__(kThreads) restore_weights_kernel(const u8* __restrict__ tiles,
    u8* __restrict__ packed, u8* __restrict__ block_scale, i64 rows, i64 stored_bytes, i64 blocks,
    i64 high_first, i64 row_tiles, i64 depth_tiles) {
  using Tile = PreparedTile<Format>;
  const i64 number = (static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x) / 32;
  if (number >= row_tiles * depth_tiles) return;
  const u32 lane = threadIdx.x % 32;
  const i64 first_row = number / depth_tiles * kPreparedRows;
  const i64 depth_tile = number % depth_tiles;
  const u8* tile = tiles + number * Tile::kBytes;
#pragma unroll
  for (u32 r = 0; r < 2; ++r) {
    const u32 row = lane / 4 * 2 + r;
    if (first_row + row >= rows) continue;
    const i64 first = depth_tile * (kPreparedDepth / 2) + lane % 4 * 16;
    u8* target = packed + (first_row + row) * stored_bytes + first;
    u32 word[4];
    unpack_vec(
        __ldg(reinterpret_cast<const uint4*>(tile + Tile::word_place(row, lane % 4 * 4))), word);
#pragma unroll
    for (u32& each : word) {
      each = restore_word(each);
      if (high_first != 0) each = swap_nibbles(each);
    }
    if (stored_bytes % 16 == 0 && reinterpret_cast<u64>(packed) % 16 == 0) {
      if (first < stored_bytes) *reinterpret_cast<uint4*>(target) = pack_vec(word);
    } else {
#pragma unroll
      for (u32 i = 0; i < 16; ++i) {
        if (first + i < stored_bytes) target[i] = static_cast<u8>(word[i / 4] >> (8 * (i % 4)));
      }
    }
#pragma unroll
    for (u32 b = 0; b < Tile::kLaneBlocks; ++b) {
      const u32 block = lane % 4 * Tile::kLaneBlocks + b;
      const i64 col = depth_tile * Tile::kBlocks + block;
      if (col < blocks) {
        block_scale[(first_row + row) * blocks + col] = __ldg(tile + Tile::scale_place(row, block));
      }
    }
  }
}

}  // namespace fp4kit
