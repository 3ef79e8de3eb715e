// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// quantize rows into swizzled_128x4 scales, the fast path of 16-element blocks, for a matrix or for
// the members of a group: as quantize/rowwise.cu, and a multiple of four blocks in a row.
//
// In memory order each warp would write its scales as eight pieces of four bytes in different
// sectors. Here a warp takes what fills one sector: the scale tile is 32 lines of 16 bytes, line r
// holding rows r, r + 32, r + 64, r + 96 with four scales each. A warp takes two lines, a strip of
// 32 bytes. Its loads stay whole: four blocks of a row are 128 contiguous bytes of 16-bit elements.
// Strips are ordered (tile row, line, tile column). Rows past the last one exist only as scales,
// written 0 here.
//
// Launch: 256 threads, at most rowwise_blocks() blocks per multiprocessor; groups: one block for
// every `stretch` rounds of a strip for each warp; the table counts the rounds of members.
#include "common/members.cuh"
#include "quantize/rowwise.cuh"

namespace fp4kit {

constexpr int kLineBytes = 16;
constexpr int kLineRows = 4;  // rows that share a line, 32 apart
constexpr int kRowStep = kTileRows128 / kLineRows;
constexpr int kLines = 2;  // lines that a warp takes
constexpr int kSectorBytes = kLines * kLineBytes;
constexpr u32 kStripsDown = kRowStep / kLines;  // strips of a tile
constexpr int kWarps = kThreads / 32;

// How a tile is cut into strips: `down` of them below one another, over all tile rows.
struct FullTiles {
  // The first row of a strip, and of a lane's byte of the strip's scales from there.
  __device__ static __forceinline__ u32 row(u32 down) {
    return down / kStripsDown * kTileRows128 + down % kStripsDown * kLines;
  }

  __device__ static __forceinline__ u32 lane_row(u32 place) {
    return place / kLineBytes + place % kLineBytes / kTileCols * kRowStep;
  }

  // Where the strip's scales are, in units of kVecBytes, and a lane's byte from there.
  static constexpr u32 kVecBytes = kSectorBytes;

  __device__ static __forceinline__ u32 piece(u32 down, u32 col, u32 across) {
    return (down / kStripsDown * across + col) * kStripsDown + down % kStripsDown;
  }

  __device__ static __forceinline__ u32 lane_byte(u32 place) { return place; }

  // Writes what else there is of the scales, from the lane's byte on.
  __device__ static __forceinline__ void clear(u8*, u32, u32, u32) {}
};

// The strips of a row of tiles of which not all rows exist: eight rows below one another, so that
// no lane idles. The first four strips down also write the padding below their rows.
struct PartialTiles {
  static constexpr u32 kRows = 8;

  __device__ static __forceinline__ u32 row(u32 down) { return down * kRows; }

  __device__ static __forceinline__ u32 lane_row(u32 place) { return place / kTileCols; }

  static constexpr u32 kVecBytes = kTileCols;

  __device__ static __forceinline__ u64 piece(u32 down, u32 col, u32) {
    constexpr u32 kDown = kRowStep / kRows;
    return static_cast<u64>(col) * (kTileBytes128 / kTileCols) + down % kDown * kRows * kLineRows +
           down / kDown;
  }

  __device__ static __forceinline__ u32 lane_byte(u32 place) {
    return place / kTileCols * kLineBytes + place % kTileCols;
  }

  __device__ static __forceinline__ void clear(u8* scale, u32 down, u32 row, u32 rows) {
    if (down >= kRowStep / kRows) return;
#pragma unroll
    for (u32 k = 1; k < kLineRows; ++k) {
      if (row + k * kRowStep >= rows) scale[k * kTileCols] = 0;
    }
  }
};

// Strips of PartialTiles down a tile of so many rows, one at least.
FP4KIT_DEVICE u32 partial_tile_strips(u32 rows) {
  constexpr u32 kLeast = kRowStep / PartialTiles::kRows;
  const u32 strips = (rows + PartialTiles::kRows - 1) / PartialTiles::kRows;
  return strips < kLeast ? kLeast : strips;
}

// Quantizes every `stride`-th set of kWarps strips of a matrix of `rows` rows of `row_blocks`
// blocks, from `strip` to before `count`. No sum with a stride may exceed 32 bits.
template <class Format, class T, int kRecipe, bool kSecond, class Strips, class RoundingType>
FP4KIT_DEVICE void quantize_strips(const typename T::Bits* __restrict__ x, u8* __restrict__ packed,
    u8* __restrict__ block_scale, const float* __restrict__ second, FactorTable& table,
    const RoundingType& rounding, u32 strip, u32 count, u32 stride, u32 rows, u32 row_blocks,
    int rule, bool high_first) {
  constexpr int kCodeBytes = 4 * Format::kGroupWords;
  static_assert(Format::kGroups == 1, "a lane takes a block");
  const u32 across = row_blocks / kTileCols;
  const u32 place = threadIdx.x % 32;  // byte of the strip's scales that this block fills
  const u32 row_offset = Strips::lane_row(place);
  const u32 lane_byte = Strips::lane_byte(place);
  const u32 block_offset = row_offset * row_blocks + place % kTileCols;

  strip += threadIdx.x / 32;
  u32 down = strip / across;
  u32 col = strip % across;  // its tile column
  struct Loaded {
    Words<T> elements;
    u32 block, row, down;
    decltype(Strips::piece(0, 0, 0)) piece;
    bool inside;
  } next;
  const auto load = [&] {
    const u32 row = Strips::row(down);
    next.block = row * row_blocks + block_offset + col * kTileCols;
    next.piece = Strips::piece(down, col, across);
    next.down = down;
    next.row = row + row_offset;
    next.inside = strip < count && next.row < rows;
    load_elements<true, T>(
        x + static_cast<u64>(next.block) * kGroupSize, next.inside ? kGroupSize : 0, next.elements);
  };
  load();
  const u32 stride_down = stride / across;
  const u32 stride_across = stride % across;
  const Level level = fill_factor_table<Format, kRecipe, kSecond>(table, second);
#pragma unroll 1
  while (strip < count) {
    const Loaded now = next;
    strip += stride;
    down += stride_down;
    col += stride_across;
    if (col >= across) {
      col -= across;
      ++down;
    }
    load();
    u32 codes[Format::kGroupWords];
    const u32 byte = quantize_group<Format, T, kRecipe, kSecond>(
        now.elements, table, level, rounding, now.block, rule, high_first, codes);
    if (now.inside) store_codes<true>(packed + static_cast<u64>(now.block) * kCodeBytes, codes);
    u8* scale = block_scale + (static_cast<u64>(now.piece) * Strips::kVecBytes + lane_byte);
    *scale = now.inside ? static_cast<u8>(byte) : 0;
    Strips::clear(scale, now.down, now.row, rows);
  }
}

template <class Format, class T, int kRecipe, bool kSecond, class... SeedWords>
__global__ void __launch_bounds__(kThreads, rowwise_blocks<T>())
    quantize_rowwise_swizzled_kernel(const typename T::Bits* __restrict__ x,
        const float* __restrict__ second, u8* __restrict__ packed, u8* __restrict__ block_scale,
        SeedWords... seed, i64 strips, i64 rows, i64 blocks, i64 high_first, i64 rule) {
  __shared__ FactorTable table;
  quantize_strips<Format, T, kRecipe, kSecond, FullTiles>(x, packed, block_scale, second, table,
      Rounding<SeedWords...>{seed...}, blockIdx.x * kWarps, static_cast<u32>(strips),
      gridDim.x * kWarps, static_cast<u32>(rows), static_cast<u32>(blocks), static_cast<int>(rule),
      high_first != 0);
}

// Rounds are first those of full tiles, then those of the last tile row if it is not.
template <class Format, class T, int kRecipe, bool kSecond, class Table>
__global__ void __launch_bounds__(kThreads, rowwise_blocks<T>())
    grouped_quantize_rowwise_swizzled_kernel(const typename T::Bits* __restrict__ x,
        const float* __restrict__ second, u8* __restrict__ packed, u8* __restrict__ block_scale,
        const __grid_constant__ Table table, i64 stretch, i64 high_first, i64 rule) {
  __shared__ FactorTable factors;
  for_members(table, stretch, [&](const Member& member, i64 first_round, i64 end_round) {
    const u32 blocks = static_cast<u32>(member.cols / kGroupSize);
    const u32 across = blocks / kTileCols;
    const u32 whole = static_cast<u32>(member.rows / kTileRows128);
    const u32 rest = static_cast<u32>(member.rows % kTileRows128);
    const u32 rounds = whole * across * (kStripsDown / kWarps);
    const u32 first = static_cast<u32>(first_round);
    const u32 end = static_cast<u32>(end_round);
    const auto quantize = [&](auto strips, i64 row, u32 strip, u32 count, u32 rows) {
      quantize_strips<Format, T, kRecipe, kSecond, decltype(strips)>(
          x + member.start + row * member.cols,
          packed + member.row.packed + row * blocks * (4 * Format::kGroupWords),
          block_scale + member.row.block_scale + row * blocks, second + member.row.second, factors,
          Rounding<>(), strip, count, kWarps, rows, blocks, static_cast<int>(rule),
          high_first != 0);
    };
    if (first < rounds) {
      const u32 stop = end < rounds ? end : rounds;
      quantize(FullTiles(), 0, first * kWarps, stop * kWarps, whole * kTileRows128);
    }
    if (end > rounds) {
      if (first < rounds) __syncthreads();
      const u32 begin = first < rounds ? 0 : (first - rounds) * kWarps;
      const u32 strips = partial_tile_strips(rest) * across;
      const u32 stop = (end - rounds) * kWarps;
      quantize(PartialTiles(), static_cast<i64>(whole) * kTileRows128, begin,
          stop < strips ? stop : strips, rest);
    }
  });
}

}  // namespace fp4kit
