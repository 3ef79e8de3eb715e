// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Where things lie: scale offsets of each layout (fp4kit/layout.py), and the division that turns a
// flat index into coordinates. All offsets are 64 bits wide.
#pragma once

#include "common/types.cuh"

namespace fp4kit {

constexpr int kTileCols = 4;
constexpr int kTileRows128 = 128;
constexpr int kTileRows8 = 8;
constexpr int kTileBytes128 = kTileRows128 * kTileCols;
constexpr int kTileBytes8 = kTileRows8 * kTileCols;

// Place of scale (row, col) of a tile: the 128x4 one is 32 lines of 16 bytes, line r holding rows
// r, r + 32, r + 64, r + 96 with four columns each.
FP4KIT_HD constexpr u32 place_in_tile(bool tall, u32 row, u32 col) {
  if (!tall) return row % kTileRows8 * kTileCols + col % kTileCols;
  const u32 r = row % kTileRows128;
  return r % 32 * 16 + r / 32 * kTileCols + col % kTileCols;
}

// Offset of scale (row, col) in a stored matrix of `stored_cols` columns, padding included.
FP4KIT_HD i64 scale_offset(int layout, i64 row, i64 col, i64 stored_cols) {
  if (layout == kLayoutLinear) return row * stored_cols + col;
  const bool tall = layout == kLayoutSwizzled128x4;
  const i64 tile =
      (tall ? row / kTileRows128 : row / kTileRows8) * (stored_cols / kTileCols) + col / kTileCols;
  return tile * (tall ? kTileBytes128 : kTileBytes8) +
         place_in_tile(tall, static_cast<u32>(row), static_cast<u32>(col));
}

// The codes and scales of a matrix in one direction, whose rows (or columns) are its vectors.
struct QuantizedView {
  const float* second;
  u8* packed;
  u8* block_scale;
  i64 blocks;       // per vector
  i64 stored_cols;  // of the scale matrix, padding included
  i64 scales;       // second-level values
  i64 vectors_per_scale;
};

// Division by a number known to the host (cuda_launch.fast_division): floor(n / divisor) = n *
// magic >> shift for n < 2^31. magic = 0 asks for a plain 64-bit division.
struct FastDivide {
  i64 divisor;
  u32 magic;
  u32 shift;

  FP4KIT_HD FastDivide(i64 divisor_, i64 magic_, i64 shift_)
      : divisor(divisor_), magic(static_cast<u32>(magic_)), shift(static_cast<u32>(shift_)) {}

  FP4KIT_HD i64 operator()(i64 n) const {
    if (magic == 0) return n / divisor;
    return static_cast<i64>((static_cast<u64>(static_cast<u32>(n)) * magic) >> shift);
  }
};

// FastDivide for n < 2^31 and a magic number.
FP4KIT_HD u32 small_quotient(u32 n, const FastDivide& divide) {
  return static_cast<u32>((static_cast<u64>(n) * divide.magic) >> divide.shift);
}

// scale_offset() of every layout without branches, its constants worked out once. For rows below
// 2^31 and stored columns below 2^24.
struct ScalePlaces {
  u32 row_shift;   // log2 of a tile's rows
  u32 row_bytes;   // of a row of tiles
  u32 tile_bytes;  // four columns of it
  u32 low_mask;    // the part of a row number that strides by `low_bytes`
  u32 low_bytes;
  u32 high_mask;  // the part above 32 rows, in the 128-row tile alone

  FP4KIT_HD ScalePlaces(int layout, u32 stored_cols)
      : row_shift(0), row_bytes(stored_cols), tile_bytes(kTileCols), low_mask(0), low_bytes(0),
        high_mask(0) {
    if (layout == kLayoutLinear) return;
    const bool large = layout == kLayoutSwizzled128x4;
    row_shift = large ? 7 : 3;
    row_bytes = stored_cols << row_shift;
    tile_bytes = large ? kTileBytes128 : kTileBytes8;
    low_mask = large ? 31 : 7;
    low_bytes = large ? 16 : kTileCols;
    high_mask = large ? 3 : 0;
  }

  FP4KIT_HD i64 operator()(u32 row, u32 col) const {
    const u32 inside = col / kTileCols * tile_bytes + (row & low_mask) * low_bytes +
                       (row >> 5 & high_mask) * kTileCols + col % kTileCols;
    return static_cast<i64>(static_cast<u64>(row >> row_shift) * row_bytes + inside);
  }
};

#ifdef __CUDACC__

FP4KIT_DEVICE void clear_padding(u8* __restrict__ block_scale, int layout, i64 rows, i64 blocks,
    i64 stored_rows, i64 stored_cols) {
  const i64 extra_cols = stored_cols - blocks;
  const i64 below = (stored_rows - rows) * stored_cols;
  const i64 total = below + rows * extra_cols;
  const i64 stride = static_cast<i64>(gridDim.x) * kThreads;
  for (i64 i = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x; i < total; i += stride) {
    const bool is_below = i < below;
    const i64 index = is_below ? i : i - below;
    const i64 width = is_below ? stored_cols : extra_cols;
    const i64 line = index / width;
    const i64 row = is_below ? rows + line : line;
    const i64 col = is_below ? index - line * width : blocks + index - line * width;
    block_scale[scale_offset(layout, row, col, stored_cols)] = 0;
  }
}

#endif  // __CUDACC__

}  // namespace fp4kit
