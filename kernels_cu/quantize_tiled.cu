// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// quantize into swizzled_128x4 scales, the fast path of 16-element blocks: as quantize_flat.cu, and
// whole tiles across (a multiple of four blocks in a row).
//
// Taking lanes in memory order would make each warp write its scales as eight pieces of four bytes
// in different sectors. Here a warp takes what fills one piece of the tile instead: the tile is 32
// lines of 16 bytes, line r holding rows r, r + 32, r + 64, r + 96 with four scales each. A warp
// takes two lines, a sector of 32 bytes. Its loads stay whole: four blocks of a row are 128
// contiguous bytes of 16-bit elements.
//
// Rows past the last one exist only as scales: they are written 0 here, so no padding is left over.
//
// Launch: 256 threads, at most FLAT_BLOCKS blocks per multiprocessor; a strip is what one warp
// takes at once, strips are ordered (tile row, line, tile column).
#include "scale_table.cuh"
#include "swizzle.cuh"

namespace fp4kit {

constexpr int kLineBytes = 16;
constexpr int kLineRows = 4;  // rows that share a line, 32 apart
constexpr int kRowStep = kTileRows128 / kLineRows;

template <class Format, class T, int kRecipe, bool kSecond>
__global__ void __launch_bounds__(kThreads, FP4KIT_FLAT_BLOCKS)
    quantize_tiled_kernel(const typename T::Bits* __restrict__ x, const float* __restrict__ second,
                          u8* __restrict__ packed, u8* __restrict__ block_scale, i64 strips,
                          i64 rows, i64 blocks, i64 magic, i64 shift, i64 high_first, i64 rule) {
  constexpr int kUnroll = flat_unroll<T>();
  constexpr int kWarps = kThreads / 32;
  constexpr int kCodeBytes = 4 * Format::kLaneWords;
  static_assert(Format::kLanes == 1, "a lane takes a block");
  constexpr int kLines = 2;                       // lines that a warp takes
  constexpr u32 kStripsDown = kRowStep / kLines;  // strips of a tile
  __shared__ ScaleTable table;
  const Level level = fill_scale_table<Format, kRecipe, kSecond>(table, second);

  const u32 warp = threadIdx.x / 32;
  const u32 place = threadIdx.x % 32;  // byte of the sector that this block fills
  const u32 line = place / kLineBytes;
  const u32 row_step = place % kLineBytes / kTileCols * kRowStep;
  const u32 tile_col = place % kTileCols;
  const u32 across = static_cast<u32>(blocks) / kTileCols;
  const u32 stride = gridDim.x * (kWarps * kUnroll);

  // Strips are fewer than 2^31, and so is every sum with a stride.
  for (u32 start = blockIdx.x * (kWarps * kUnroll); start < static_cast<u32>(strips);
       start += stride) {
    Words<T> elements[kUnroll];
    u32 row[kUnroll];
    u32 tile[kUnroll];
    u32 down[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const u32 strip = start + u * kWarps + warp;
      const u32 over = static_cast<u32>((static_cast<u64>(strip) * static_cast<u32>(magic)) >>
                                        static_cast<u32>(shift));
      tile[u] = strip - over * across;
      down[u] = over;
      row[u] = over / kStripsDown * kTileRows128 + over % kStripsDown * kLines + line + row_step;
      const bool inside = strip < static_cast<u32>(strips) && row[u] < rows;
      const i64 block = static_cast<i64>(row[u]) * blocks + (tile[u] * kTileCols + tile_col);
      load_elements<true, T>(x + block * kLaneElements, inside ? kLaneElements : 0, elements[u]);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const u32 strip = start + u * kWarps + warp;
      u32 codes[Format::kLaneWords];
      const u32 byte = quantize_lane<Format, T, kRecipe, kSecond>(
          elements[u], table, level, static_cast<int>(rule), high_first != 0, codes);
      if (strip >= static_cast<u32>(strips)) continue;
      const bool inside = row[u] < rows;
      if (inside) {
        const i64 block = static_cast<i64>(row[u]) * blocks + (tile[u] * kTileCols + tile_col);
        store_codes<true>(packed + block * kCodeBytes, codes);
      }
      const i64 at = (static_cast<i64>(down[u] / kStripsDown) * across + tile[u]) * kTileBytes128 +
                     down[u] % kStripsDown * (kLines * kLineBytes) + place;
      block_scale[at] = inside ? static_cast<u8>(byte) : 0;
    }
  }
}

}  // namespace fp4kit
