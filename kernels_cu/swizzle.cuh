// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Where things lie: scale offsets of each layout (fp4kit/layout.py), and the division that turns a
// flat index into coordinates. All offsets are 64 bits wide.
#pragma once

#include "fp4_types.cuh"

namespace fp4kit {

// Bytes of a tile and its extent, of the two swizzled layouts.
constexpr int kTileCols = 4;
constexpr int kTileRows128 = 128;
constexpr int kTileRows8 = 8;
constexpr int kTileBytes128 = kTileRows128 * kTileCols;
constexpr int kTileBytes8 = kTileRows8 * kTileCols;

// Offset of scale (row, col) in a stored matrix of `stored_cols` columns, padding included. The
// 128x4 tile is 32 rows of 16 bytes: rows r, r + 32, r + 64, r + 96 with four columns each.
FP4KIT_HD i64 scale_offset(int layout, i64 row, i64 col, i64 stored_cols) {
  if (layout == kLayoutLinear) return row * stored_cols + col;
  const i64 tiles = stored_cols / kTileCols;
  const u32 tile_col = static_cast<u32>(col) % kTileCols;
  if (layout == kLayoutSwizzled128x4) {
    const u32 r = static_cast<u32>(row) % kTileRows128;
    const i64 tile = (row / kTileRows128) * tiles + col / kTileCols;
    return tile * kTileBytes128 + (r % 32) * 16 + (r / 32) * kTileCols + tile_col;
  }
  const i64 tile = (row / kTileRows8) * tiles + col / kTileCols;
  return tile * kTileBytes8 + (static_cast<u32>(row) % kTileRows8) * kTileCols + tile_col;
}

// Division by a number known to the host: floor(n / divisor) = n * magic >> shift for n < 2^31,
// with magic = floor(2^shift / divisor) + 1 and shift = 31 + ceil(log2 divisor)
// (cuda_launch.fast_division). magic = 0 asks for a plain 64-bit division: larger indices.
struct FastDivide {
  i64 divisor;
  u32 magic;
  u32 shift;

  FP4KIT_HD i64 operator()(i64 n) const {
    if (magic == 0) return n / divisor;
    return static_cast<i64>((static_cast<u64>(static_cast<u32>(n)) * magic) >> shift);
  }
};

}  // namespace fp4kit
