// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// The loop of the fast quantizing kernels into swizzled_128x4 scales, for 16-element blocks and
// whole tiles across (a multiple of four blocks in a row).
//
// Taking lanes in memory order would make each warp write its scales as eight pieces of four bytes
// in different sectors. Here a warp takes what fills one piece of the tile instead: the tile is 32
// lines of 16 bytes, line r holding rows r, r + 32, r + 64, r + 96 with four scales each. A warp
// takes two lines, a sector of 32 bytes: a strip. Its loads stay whole: four blocks of a row are
// 128 contiguous bytes of 16-bit elements. Strips are ordered (tile row, line, tile column).
//
// Rows past the last one exist only as scales: they are written 0 here, so no padding is left over.
#pragma once

#include "scale_table.cuh"
#include "swizzle.cuh"

namespace fp4kit {

constexpr int kLineBytes = 16;
constexpr int kLineRows = 4;  // rows that share a line, 32 apart
constexpr int kRowStep = kTileRows128 / kLineRows;
constexpr int kLines = 2;  // lines that a warp takes
constexpr int kSectorBytes = kLines * kLineBytes;
constexpr u32 kStripsDown = kRowStep / kLines;  // strips of a tile
constexpr int kWarps = kThreads / 32;

// Quantizes every `stride`-th set of kWarps strips of a matrix of `rows` rows of `row_blocks`
// blocks, from `strip` to before `count`. The next block is on its way while one is worked on.
// Fewer than 2^31 of each, so that no sum with a stride exceeds 32 bits.
template <class Format, class T, int kRecipe, bool kSecond, class RoundingType>
__device__ __forceinline__ void quantize_strips(
    const typename T::Bits* __restrict__ x, u8* __restrict__ packed, u8* __restrict__ block_scale,
    const float* __restrict__ second, ScaleTable& table, const RoundingType& rounding, u32 strip,
    u32 count, u32 stride, u32 rows, u32 row_blocks, int rule, bool high_first) {
  constexpr int kCodeBytes = 4 * Format::kLaneWords;
  static_assert(Format::kLanes == 1, "a lane takes a block");
  const u32 across = row_blocks / kTileCols;
  const u32 place = threadIdx.x % 32;  // byte of the sector that this block fills
  const u32 row_offset = place / kLineBytes + place % kLineBytes / kTileCols * kRowStep;
  const u32 block_offset = row_offset * row_blocks + place % kTileCols;
  const u32 stride_down = stride / across;
  const u32 stride_across = stride % across;

  strip += threadIdx.x / 32;
  u32 down = strip / across;  // its line pair, counted over all tile rows
  u32 col = strip % across;   // its tile column
  Words<T> ahead;
  u32 block, sector;
  bool inside;
  const auto load = [&] {
    const u32 tile_row = down / kStripsDown;
    const u32 pair = down % kStripsDown;
    const u32 row = tile_row * kTileRows128 + pair * kLines;
    block = row * row_blocks + block_offset + col * kTileCols;
    sector = (tile_row * across + col) * kStripsDown + pair;
    inside = strip < count && row + row_offset < rows;
    load_elements<true, T>(x + static_cast<u64>(block) * kLaneElements, inside ? kLaneElements : 0,
                           ahead);
  };
  load();
  const Level level = fill_scale_table<Format, kRecipe, kSecond>(table, second);
#pragma unroll 1
  while (strip < count) {
    const Words<T> elements = ahead;
    const u32 my_block = block;
    const u32 my_sector = sector;
    const bool in_tensor = inside;
    strip += stride;
    down += stride_down;
    col += stride_across;
    if (col >= across) {
      col -= across;
      ++down;
    }
    load();
    u32 codes[Format::kLaneWords];
    const u32 byte = quantize_lane<Format, T, kRecipe, kSecond>(elements, table, level, rounding,
                                                                my_block, rule, high_first, codes);
    if (in_tensor) store_codes<true>(packed + static_cast<u64>(my_block) * kCodeBytes, codes);
    block_scale[static_cast<u64>(my_sector) * kSectorBytes + place] =
        in_tensor ? static_cast<u8>(byte) : 0;
  }
}

}  // namespace fp4kit
