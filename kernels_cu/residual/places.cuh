// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Residual channels: where blocks, rows and scales lie, in memory and in shared memory.
#pragma once

#include "common/scale_layout.cuh"
#include "residual/block.cuh"

namespace fp4kit {

// Where main and residual blocks stand in a row.
template <class Index>
struct BlockPlaces {
  Index main_blocks;
  Index first;  // the first main block that has a residual block
  Index blocks;
  bool interleaved;

  FP4KIT_HD BlockPlaces(i64 main_count, i64 first_extra, i64 count, i64 is_interleaved)
      : main_blocks(static_cast<Index>(main_count)), first(static_cast<Index>(first_extra)),
        blocks(static_cast<Index>(count)), interleaved(is_interleaved != 0) {}

  FP4KIT_HD Index main(Index block) const {
    return block + (interleaved && block > first ? block - first : 0);
  }
  FP4KIT_HD Index extra(Index block) const {
    return interleaved ? main(block) + 1 : main_blocks + block - first;
  }
};

// Kernels work on groups of eight rows whose scales fill 32-byte sectors where four of their blocks
// come together: in the 128x4 tile two neighbours, and the same rows 32, 64, 96 below.
constexpr u32 kGroupRows = 8;
constexpr u32 kSectorBytes = kGroupRows * kTileCols;
constexpr u32 kTileGroups128 = kTileRows128 / kGroupRows;

// Where a group's rows lie: four pairs of neighbours.
struct GroupRows {
  u32 row_groups;  // from a group's first row to the next group's in a tile
  u32 row_tiles;   // what is more than that in the next tile
  u32 row_pairs;   // from a pair's first row to the next pair's
  bool large;

  FP4KIT_HD explicit GroupRows(int layout)
      : row_groups(kGroupRows), row_tiles(0), row_pairs(2), large(layout == kLayoutSwizzled128x4) {
    if (large) {
      row_groups = 2;
      row_tiles = kTileRows128 - 2 * kTileGroups128;
      row_pairs = 32;
    }
  }

  FP4KIT_HD void hide() {
    row_groups = opaque(row_groups);
    row_tiles = opaque(row_tiles);
    row_pairs = opaque(row_pairs);
  }

  FP4KIT_HD u32 row(u32 group, u32 local) const {
    return group * row_groups + group / kTileGroups128 * row_tiles + down(local);
  }

  // From a group's row 0, or from another even one, to the row that is `local` further.
  FP4KIT_HD u32 down(u32 local) const { return local / 2 * row_pairs + local % 2; }

  // The row of a group whose scale byte `place` of a sector is.
  FP4KIT_HD u32 local(u32 place) const {
    return large ? place / 16 + place % 16 / kTileCols * 2 : place / kTileCols;
  }
};

// Where byte `inside` of sector `sector` of a group is stored, `across` tiles in a row of them.
FP4KIT_HD u64 sector_offset(int layout, u32 group, u32 sector, u32 across, u32 inside) {
  if (layout != kLayoutSwizzled128x4) {
    return (static_cast<u64>(group) * across + sector) * kSectorBytes + inside;
  }
  const u64 tile = static_cast<u64>(group / kTileGroups128) * across + sector;
  return tile * kTileBytes128 + group % kTileGroups128 * kSectorBytes + inside;
}

// Rows staged to restore an order: a word holds a channel of two rows of a 16-bit type. The words
// of a 16-byte access lie in two halves of that memory (of `half` words), so that neighbouring
// threads meet every bank once.
template <class T>
FP4KIT_HD u32 staged_place(u32 channel, u32 half) {
  if constexpr (T::kSize == 4) return channel;
  return channel / 8 * 4 + channel % 4 + (channel % 8 / 4) * half;
}

template <class T>
FP4KIT_HD u32 staged_row(u32 cols) {
  return T::kSize == 4 ? cols : cols / 2;
}

FP4KIT_HD u32 index_place(u32 block, u32 i, u32 main_blocks) {
  return (i / 8 * main_blocks + block) * 8 + i % 8;
}

// Two places are kept in a word; each as an offset in bytes, added to `base`, by one instruction.
template <bool kHigh>
FP4KIT_HD u32 place_in(u32 kept, u32 base) {
#ifdef __CUDA_ARCH__
  u32 result;
  asm("dp2a.lo.u32.u32 %0, %1, %3, %2;"
      : "=r"(result)
      : "r"(kept), "r"(base), "n"(kHigh ? 1024 : 4));
  return result;
#else
  return base + (kHigh ? kept >> 16 : kept & 0xFFFFu) * 4;
#endif
}

FP4KIT_HD u32& word_at(u32* start, u32 place) {
  return *reinterpret_cast<u32*>(reinterpret_cast<u8*>(start) + place);
}

// An order's entry, or the last channel: an order that nobody has checked reaches nothing outside.
FP4KIT_HD i64 channel_inside(i64 channel, i64 cols) {
  return static_cast<u64>(channel) < static_cast<u64>(cols) ? channel : cols - 1;
}

// Brings the 32 bytes around an address to the second-level cache.
FP4KIT_DEVICE void prefetch_sector(const void* from) {
#ifdef __CUDA_ARCH__
  asm volatile("prefetch.global.L2 [%0];" : : "l"(from));
#else
  static_cast<void>(from);
#endif
}

FP4KIT_DEVICE void store_both(
    u8* codes, u32 gap, u32 tasks, const CodedBlock& main, const CodedBlock& extra) {
  constexpr u32 kAtOnce = kHasExtra | kEvenFirst;
  if ((tasks & kAtOnce) == kAtOnce) {
    const u32 both[4] = {main.code[0], main.code[1], extra.code[0], extra.code[1]};
    store_words(codes, both);
    return;
  }
  store_words(codes, main.code);
  if (tasks & kHasExtra) store_words(codes + static_cast<u64>(gap) * 8, extra.code);
}

}  // namespace fp4kit
