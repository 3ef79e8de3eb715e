// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Tiles that waste no rows. A member's last rows of tiles (a band) seldom are 128 rows high, but a
// tile of few rows takes nearly as long as a whole one: its threads are there. So a band is cut
// into strips as high as a block and as wide as a tile, counted downwards, then to the right, and
// every tile is the next 128 rows of strips, one below the other. Of a whole band those are tiles
// as usual.
#pragma once

#include "tile_config.cuh"

namespace fp4kit {

// A configuration for columns of blocks, whose tiles may be folded.
template <class C>
struct Folded : C {
  static_assert(C::kVector && C::kCols && !C::kRows && !C::kWhole, "columns alone");
  static_assert(C::Format::kIsFp4 && !C::V::kSquare && C::kOneLevel, "of one factor table");
  static_assert(C::kBlock % (kThreads / (C::TileType::kWords / 4)) == 0, "rows loaded at once");
  static constexpr bool kFolds = true;
};

// Strips of a band of so many rows.
template <class C>
__device__ __forceinline__ u32 band_strips(u32 rows) {
  return (rows + C::kBlock - 1) / C::kBlock;
}

// What a strip of a task's tile covers: block number `down` of the band in `cols_left` columns from
// col0 on, if that is inside of the matrix.
struct Strip {
  u32 down;
  i64 col0;
  u32 cols_left;
  bool inside;
};

// Strip number `number` of a tile.
template <class C>
__device__ __forceinline__ Strip strip_of(const Task<typename C::T>& task, u32 number) {
  if constexpr (C::kFolds) {
    const u32 height = band_strips<C>(task.rows_left);
    if (height != C::kDown) {
      const u32 count = task.first_strip + number;
      const u32 right = count / height;
      const u32 passed = right * C::kColumns;
      return {count - right * height, task.col0 + passed, task.cols_left - passed,
              passed < task.cols_left};
    }
    return {number, task.col0, task.cols_left, true};
  } else {
    return {number, task.col0, task.cols_left, number < band_strips<C>(task.rows_left)};
  }
}

// load_tile of a tile that may be folded.
template <class C>
__device__ __forceinline__ void load_folded(typename C::TileType& tile,
                                            const Task<typename C::T>& task) {
  using T = typename C::T;
  const typename T::Bits* source = task.x + (task.row0 * task.cols + task.col0);
  if (task.rows_left == kTileRows && task.cols_left >= C::kColumns) {
    load_tile<true>(tile, source, task.cols, kTileRows, C::kColumns);
    return;
  }
  constexpr u32 kPieces = C::TileType::kWords / 4;  // of 16 bytes in a row
  constexpr u32 kRowsAtOnce = kThreads / kPieces;
  const u32 first = threadIdx.x / kPieces;
  const u32 end = band_strips<C>(task.rows_left) * C::kBlock;
  u32 row = task.first_strip * C::kBlock;
  u32 col = threadIdx.x % kPieces * (16 / T::kSize);
  source += (row + first) * task.cols + col;
  u32* target = &tile.at(first, threadIdx.x % kPieces * 4);
#pragma unroll
  for (u32 k = 0; k < kTileRows / kRowsAtOnce; ++k) {
    copy_piece(target + C::TileType::offset(k * kRowsAtOnce, 0), source,
               row + first < task.rows_left && col < task.cols_left);
    row += kRowsAtOnce;
    source += kRowsAtOnce * task.cols;
    if (row == end) {
      source += C::kColumns - end * task.cols;
      row = 0;
      col += C::kColumns;
    }
  }
}

}  // namespace fp4kit
