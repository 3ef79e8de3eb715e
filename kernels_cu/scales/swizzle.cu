// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// swizzle / unswizzle: block scales between linear and tiled order (fp4kit/layout.py). Must equal
// ReferenceBackend.swizzle and .unswizzle.
//
// A thread moves four rows of four columns, which are 16 tiled bytes in a row: rows r, r + 32, r +
// 64 and r + 96 of a 128x4 tile, rows 4r .. 4r + 3 of an 8x4 tile. Neighbouring threads take 8
// tiles side by side: a warp then reads 32 linear bytes from each row and writes whole sectors of
// tiled ones. Rows and columns past the matrix read as 0 and are never written in linear order.
//
// Launch: 256 threads, enough blocks for all strips of each group of 8 tiles, 32 or 2 a tile
// (kWords: where the linear rows start on 4 bytes, else byte by byte).
#include "common/elements.cuh"
#include "common/scale_layout.cuh"

namespace fp4kit {

constexpr int kTileGroup = 8;
constexpr int kStripRows = 4;

template <int kLayout>
struct Tile {
  static constexpr bool kTall = kLayout == kLayoutSwizzled128x4;
  static constexpr int kRows = kTall ? kTileRows128 : kTileRows8;
  static constexpr int kStrips = kRows / kStripRows;
  // Rows of a strip lie this far apart, and strips begin that far apart.
  static constexpr int kRowStep = kTall ? kStrips : 1;
  static constexpr int kStripStep = kTall ? 1 : kStripRows;
};

struct Strip {
  i64 row;    // first row
  i64 col;    // first of four columns
  i64 tiled;  // offset of its first tiled byte
  bool exists;
};

template <int kLayout>
FP4KIT_DEVICE Strip find_strip(i64 tile_rows, i64 tiles) {
  using Shape = Tile<kLayout>;
  constexpr int kStripBytes = kTileCols * kStripRows;
  const i64 index = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
  const i64 groups = (tiles + kTileGroup - 1) / kTileGroup;
  const int strip = static_cast<int>(index / kTileGroup % Shape::kStrips);
  const i64 group = index / (kTileGroup * Shape::kStrips);
  const i64 tile_row = group / groups;
  const i64 tile_col = (group - tile_row * groups) * kTileGroup + index % kTileGroup;
  const i64 tile = tile_row * tiles + tile_col;
  return {tile_row * Shape::kRows + strip * Shape::kStripStep, tile_col * kTileCols,
      tile * (kTileCols * Shape::kRows) + strip * kStripBytes,
      tile_row < tile_rows && tile_col < tiles};
}

template <int kLayout, class Function>
FP4KIT_DEVICE void for_rows(const Strip& strip, i64 rows, const Function& function) {
#pragma unroll
  for (int k = 0; k < kStripRows; ++k) {
    const i64 row = strip.row + Tile<kLayout>::kRowStep * k;
    function(k, row, row < rows);
  }
}

template <bool kWords>
FP4KIT_DEVICE u32 load_linear(const u8* __restrict__ row, i64 valid) {
  if constexpr (kWords) {
    return valid > 0 ? __ldg(reinterpret_cast<const unsigned int*>(row)) : 0;
  } else {
    u32 word = 0;
#pragma unroll
    for (int i = 0; i < kTileCols; ++i) {
      if (i < valid) word |= static_cast<u32>(__ldg(row + i)) << (8 * i);
    }
    return word;
  }
}

template <bool kWords>
FP4KIT_DEVICE void store_linear(u8* __restrict__ row, i64 valid, u32 word) {
  if constexpr (kWords) {
    if (valid > 0) *reinterpret_cast<unsigned int*>(row) = word;
  } else {
#pragma unroll
    for (int i = 0; i < kTileCols; ++i) {
      if (i < valid) row[i] = static_cast<u8>(word >> (8 * i));
    }
  }
}

// kWords also needs tiled on 16 bytes and cols a multiple of 4.
template <int kLayout, bool kWords>
__global__ void __launch_bounds__(kThreads) swizzle_kernel(const u8* __restrict__ linear,
    u8* __restrict__ tiled, i64 rows, i64 cols, i64 tile_rows, i64 tiles) {
  const Strip strip = find_strip<kLayout>(tile_rows, tiles);
  if (!strip.exists) return;
  u32 word[kStripRows];
  for_rows<kLayout>(strip, rows, [&](int k, i64 row, bool inside) {
    const i64 place = row * cols + strip.col;
    word[k] = inside ? load_linear<kWords>(linear + place, cols - strip.col) : 0;
  });
  store_codes<kWords, false>(tiled + strip.tiled, word);
}

template <int kLayout, bool kWords>
__global__ void __launch_bounds__(kThreads) unswizzle_kernel(const u8* __restrict__ tiled,
    u8* __restrict__ linear, i64 rows, i64 cols, i64 tile_rows, i64 tiles) {
  u32 word[kStripRows];
  const Strip strip = find_strip<kLayout>(tile_rows, tiles);
  if (!strip.exists) return;
  const u8* in = tiled + strip.tiled;
  if constexpr (kWords) {
    unpack_vec(__ldg(reinterpret_cast<const uint4*>(in)), word);
  } else {
    load_codes<false, kStripRows * kTileCols>(in, word);
  }
  for_rows<kLayout>(strip, rows, [&](int k, i64 row, bool inside) {
    if (inside) store_linear<kWords>(linear + row * cols + strip.col, cols - strip.col, word[k]);
  });
}

}  // namespace fp4kit
