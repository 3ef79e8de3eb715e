// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Tiles of columns alone, 256 rows high and 64 columns wide, that waste no rows.
//
// A column's codes of such a tile are 128 bytes: where columns do not begin on 32 bytes, both ends
// of each piece share a sector with another tile's, so that few long pieces are best. A member's
// last rows (its remainder) seldom fill 256, but a tile of few rows takes nearly as long as a full
// one. So they are cut into strips as high as a block and as wide as a tile, counted downwards,
// then to the right, and every tile is the next 256 rows of strips.
#pragma once

#include "tiles/config.cuh"

namespace fp4kit {

template <class C>
struct Tall : C {
  static_assert(C::kIsWide && C::kVector && C::kCols && !C::kRows && !C::kFull, "columns alone");
  static_assert(C::Format::kIsFp4 && !C::V::kSquare && C::kOneLevel, "of one factor table");
  static constexpr bool kPacksRows = true;
  static constexpr u32 kColumns = kNarrow;
  static constexpr u32 kHeight = 2 * kTileRows;
  static constexpr u32 kDown = kHeight / C::kBlock;
  // Nobody takes blocks of several rows at once: groups of rows alone are padded.
  using TileType = Tile<typename C::T, kColumns, kHeight, 0>;
};

// Strips down so many remainder rows.
template <class C>
FP4KIT_DEVICE u32 remainder_blocks(u32 rows) {
  return (rows + C::kBlock - 1) / C::kBlock;
}

// A strip of a task's tile: block number `down` of the remainder rows in `cols_left` columns from
// col0 on.
struct Strip {
  u32 down;
  i64 col0;
  u32 cols_left;
  bool inside;
};

template <class C>
FP4KIT_DEVICE Strip strip_of(const Task<typename C::T>& task, u32 number) {
  if constexpr (C::kPacksRows) {
    const u32 height = remainder_blocks<C>(task.rows_left);
    if (height != C::kDown) {
      const u32 count = task.first_strip + number;
      const u32 right = count / height;
      const u32 passed = right * C::kColumns;
      return {count - right * height, task.col0 + passed, task.cols_left - passed,
          passed < task.cols_left};
    }
    return {number, task.col0, task.cols_left, true};
  } else {
    return {number, task.col0, task.cols_left, number < remainder_blocks<C>(task.rows_left)};
  }
}

template <class C>
FP4KIT_DEVICE void load_tall(typename C::TileType& tile, const Task<typename C::T>& task) {
  using T = typename C::T;
  constexpr u32 kVecs = C::TileType::kWords / 4;  // of 16 bytes in a row
  constexpr u32 kRowsAtOnce = kThreads / kVecs;
  constexpr u32 kRounds = C::kHeight / kRowsAtOnce;
  constexpr u32 kStrips = kRowsAtOnce / C::kBlock;  // of a round
  static_assert(kStrips * C::kBlock == kRowsAtOnce, "whole strips");
  const u32 first = threadIdx.x / kVecs;
  const u32 place = threadIdx.x % kVecs * (16 / T::kSize);
  const typename T::Bits* source = task.x + (task.row0 * task.cols + task.col0 + place);
  u32* target = &tile.at(first, threadIdx.x % kVecs * 4);
  i64 step = kRowsAtOnce * task.cols;
  if (task.rows_left == C::kHeight && task.cols_left >= C::kColumns) {
    source += first * task.cols;
#pragma unroll
    for (u32 k = 0; k < kRounds; ++k) {
      copy_vec(target + C::TileType::offset(k * kRowsAtOnce, 0), source, true);
      source += step;
    }
    return;
  }
  const u32 height = remainder_blocks<C>(task.rows_left);
  const u32 end = height * C::kBlock;
  const i64 back = end * task.cols - C::kColumns;  // from below the band to the next columns
  const Strip begin = strip_of<C>(task, first / C::kBlock);
  u32 row = begin.down * C::kBlock + first % C::kBlock;
  u32 col = static_cast<u32>(begin.col0 - task.col0) + place;
  source += row * task.cols + (col - place);
  // A round of several strips lies all to the right where there is one strip down.
  const bool flat = end < kRowsAtOnce;
  const u32 rows = flat ? 0 : kRowsAtOnce;
  const u32 cols = flat ? kStrips * C::kColumns : 0;
  if (flat) step = cols;
#pragma unroll
  for (u32 k = 0; k < kRounds; ++k) {
    copy_vec(target + C::TileType::offset(k * kRowsAtOnce, 0), source,
        row < task.rows_left && col < task.cols_left);
    row += rows;
    col += cols;
    source += step;
    if (row >= end) {
      row -= end;
      col += C::kColumns;
      source -= back;
    }
  }
}

}  // namespace fp4kit
