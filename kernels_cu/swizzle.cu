// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// swizzle / unswizzle: block scales between linear and tiled order. Must equal
// ReferenceBackend.swizzle and .unswizzle (fp4kit/layout.py gives the order).
//
// Algorithm: a thread moves one 4-column strip of a tile: kRows rows, r, r + 32, r + 64 and r + 96
// of a 128x4 tile (16 tiled bytes in a row), or one row of an 8x4 tile (4 tiled bytes).
//   1. neighbouring threads take 8 tiles side by side, then the next strip: a warp then reads 32
//      linear bytes from each row and writes 64 (or 16) tiled bytes, whole memory sectors
//   2. rows and columns past the matrix read as 0 and are never written in linear order
//
// Memory layout: linear is (rows, cols); tiled is padded to whole tiles.
// Launch: 256 threads, enough blocks for 32 strips of each group of 8 tiles (kWords = true where
// the linear rows start on 4 bytes, else byte by byte).
#include "swizzle.cuh"

namespace fp4kit {

constexpr int kTileGroup = 8;

// Where a thread's strip lies.
struct Strip {
  i64 row;    // first row
  i64 col;    // first of four columns
  i64 tiled;  // offset of its first tiled byte
  bool exists;
};

template <int kLayout>
__device__ __forceinline__ Strip find_strip(i64 tile_rows, i64 tiles) {
  constexpr int kStrips = kLayout == kLayoutSwizzled128x4 ? 32 : kTileRows8;
  constexpr int kRowsPerTile = kLayout == kLayoutSwizzled128x4 ? kTileRows128 : kTileRows8;
  constexpr int kStripBytes = kTileCols * kRowsPerTile / kStrips;
  const i64 index = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
  const i64 groups = (tiles + kTileGroup - 1) / kTileGroup;
  const int strip = static_cast<int>(index / kTileGroup % kStrips);
  const i64 group = index / (kTileGroup * kStrips);
  const i64 tile_row = group / groups;
  const i64 tile_col = (group - tile_row * groups) * kTileGroup + index % kTileGroup;
  const i64 tile = tile_row * tiles + tile_col;
  return {tile_row * kRowsPerTile + strip, tile_col * kTileCols,
          tile * (kTileCols * kRowsPerTile) + strip * kStripBytes,
          tile_row < tile_rows && tile_col < tiles};
}

template <bool kWords>
__device__ __forceinline__ u32 load_linear(const u8* __restrict__ row, i64 valid) {
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
__device__ __forceinline__ void store_linear(u8* __restrict__ row, i64 valid, u32 word) {
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
__global__ void __launch_bounds__(kThreads)
    swizzle_kernel(const u8* __restrict__ linear, u8* __restrict__ tiled, i64 rows, i64 cols,
                   i64 tile_rows, i64 tiles) {
  constexpr int kRows = kLayout == kLayoutSwizzled128x4 ? 4 : 1;
  const Strip strip = find_strip<kLayout>(tile_rows, tiles);
  if (!strip.exists) return;
  u32 word[kRows];
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const i64 row = strip.row + 32 * k;
    word[k] =
        row < rows ? load_linear<kWords>(linear + row * cols + strip.col, cols - strip.col) : 0;
  }
  u8* out = tiled + strip.tiled;
  if constexpr (kWords && kRows == 4) {
    *reinterpret_cast<uint4*>(out) = make_uint4(word[0], word[1], word[2], word[3]);
  } else {
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      store_linear<kWords>(out + kTileCols * k, kTileCols, word[k]);
    }
  }
}

template <int kLayout, bool kWords>
__global__ void __launch_bounds__(kThreads)
    unswizzle_kernel(const u8* __restrict__ tiled, u8* __restrict__ linear, i64 rows, i64 cols,
                     i64 tile_rows, i64 tiles) {
  constexpr int kRows = kLayout == kLayoutSwizzled128x4 ? 4 : 1;
  const Strip strip = find_strip<kLayout>(tile_rows, tiles);
  if (!strip.exists) return;
  u32 word[kRows];
  const u8* in = tiled + strip.tiled;
  if constexpr (kWords && kRows == 4) {
    const uint4 all = __ldg(reinterpret_cast<const uint4*>(in));
    word[0] = all.x;
    word[1] = all.y;
    word[2] = all.z;
    word[3] = all.w;
  } else {
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      word[k] = load_linear<kWords>(in + kTileCols * k, kTileCols);
    }
  }
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const i64 row = strip.row + 32 * k;
    if (row < rows) {
      store_linear<kWords>(linear + row * cols + strip.col, cols - strip.col, word[k]);
    }
  }
}

}  // namespace fp4kit
