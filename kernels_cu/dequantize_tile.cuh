// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// What a thread block does to decode one tile of codes. Must equal ReferenceBackend.dequantize.
//
// Algorithm: the thread block fills the tile in shared memory, one block of codes per thread, and
// writes it out along the rows.
#pragma once

#include "tile_config.cuh"

namespace fp4kit {

template <class Format, class Out, int kRecipe, bool kSecond>
__device__ __forceinline__ DecodeFactors factors_of(u32 byte, float second, float range) {
  if constexpr (kRecipe == kRecipeTe) {
    const Level level = make_te_level(second, range);
    return {te_decode_factor(decode_fp8<E4m3>(byte), level, range), 1.0f};
  } else {
    const Level level = make_level<kRecipe, kSecond>(second);
    return decode_factors<Format, kRecipe, kSecond, Out>(byte, level);
  }
}

// The codes of a lane: 16 elements of block `block` of a vector, beginning with element `first`.
template <class Format, bool kTransposed>
__device__ __forceinline__ void load_codes(const u8* __restrict__ packed, i64 vector, i64 block,
                                           int first, i64 blocks, i64 cols, bool high_first,
                                           u32 (&code)[Format::kLaneWords]) {
  if constexpr (Format::kIsFp4 || !kTransposed) {
    const i64 lane = (vector * blocks + block) * Format::kLanes + first / kLaneElements;
    const u8* bytes = packed + lane * (4 * Format::kLaneWords);
#pragma unroll
    for (int i = 0; i < Format::kLaneWords; ++i) {
      code[i] = 0;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        code[i] |= static_cast<u32>(__ldg(bytes + 4 * i + k)) << (8 * k);
      }
      if (Format::kIsFp4 && high_first) code[i] = swap_nibbles(code[i]);
    }
  } else {
    // Columnwise FP8 lies as the elements do.
#pragma unroll
    for (int i = 0; i < Format::kLaneWords; ++i) {
      code[i] = 0;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const i64 row = block * Format::kBlockSize + first + 4 * i + k;
        code[i] |= static_cast<u32>(__ldg(packed + row * cols + vector)) << (8 * k);
      }
    }
  }
}

// Fills the tile of out (rows, cols) that begins at (row0, col0).
template <class Format, class Out, int kRecipe, bool kSecond, bool kColumns>
__device__ __forceinline__ void dequantize_tile(Tile<Out>& tile, const Side& side,
                                                typename Out::Bits* __restrict__ out, i64 rows,
                                                i64 cols, i64 row0, i64 col0, int layout,
                                                bool high_first, float range) {
  constexpr int kBlock = Format::kBlockSize;
  constexpr int kVectors = kColumns ? kTileColumns : kTileRows;
  constexpr int kBlocks = (kColumns ? kTileRows : kTileColumns) / kBlock;
  const i64 vectors = kColumns ? cols : rows;
  for (int index = threadIdx.x; index < kVectors * kBlocks; index += kThreads) {
    // Codes that lie together go to neighbouring threads.
    const bool blocks_first = Format::kIsFp4 || !kColumns;
    const int b = blocks_first ? index % kBlocks : index / kVectors;
    const int v = blocks_first ? index / kBlocks : index % kVectors;
    const i64 vector = (kColumns ? col0 : row0) + v;
    const i64 block = (kColumns ? row0 : col0) / kBlock + b;
    if (vector >= vectors || block >= side.blocks) continue;
    const i64 at = kColumns && !Format::kIsFp4 && layout == kLayoutLinear
                       ? block * cols + vector
                       : scale_offset(layout, vector, block, side.stored_cols);
    const i64 index_of_scale = side.scales == 1 ? 0 : vector / side.vectors_per_scale;
    const float level = kSecond ? __ldg(side.second + index_of_scale) : 1.0f;
    const DecodeFactors factors =
        factors_of<Format, Out, kRecipe, kSecond>(__ldg(side.block_scale + at), level, range);
#pragma unroll
    for (int l = 0; l < Format::kLanes; ++l) {
      u32 code[Format::kLaneWords];
      load_codes<Format, kColumns>(side.packed, vector, block, l * kLaneElements, side.blocks, cols,
                                   high_first, code);
      float value[kLaneElements];
      decode_lane<Format, kRecipe, kSecond>(code, factors, value);
#pragma unroll
      for (int i = 0; i < kLaneElements; ++i) {
        const int along = b * kBlock + l * kLaneElements + i;
        tile.set(kColumns ? along : v, kColumns ? v : along,
                 static_cast<typename Out::Bits>(to_output_bits<Out>(value[i])));
      }
    }
  }
  __syncthreads();
  for (int index = threadIdx.x; index < kTileRows * kTileColumns; index += kThreads) {
    const i64 row = row0 + index / kTileColumns;
    const i64 col = col0 + index % kTileColumns;
    if (row < rows && col < cols) {
      out[row * cols + col] = tile.get(index / kTileColumns, index % kTileColumns);
    }
  }
}

}  // namespace fp4kit
