// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// What the fast quantizing kernels of rows share: a table in shared memory that turns each of the
// 128 non-negative E4M3 scale bytes into its element factor, which takes every division out of the
// loop; and the loop over whole, aligned groups of 16.
#pragma once

#include "activation/activations.cuh"
#include "common/scale_layout.cuh"
#include "common/stochastic.cuh"

namespace fp4kit {

constexpr int kScaleBytes = 128;
constexpr Level kUnitLevel{1.0f, 1.0f, 1.0f, 1.0f, false};

// Thread blocks per multiprocessor.
template <class T>
FP4KIT_HD constexpr int rowwise_blocks() {
  return T::kSize == 4 ? FP4KIT_FLAT_BLOCKS_4 : FP4KIT_FLAT_BLOCKS_2;
}

struct FactorTable {
  float factor[kScaleBytes];
  Level level;
};

// Fills the table, by all threads of the block. MX formats need none.
template <class Format, int kRecipe, bool kSecond>
FP4KIT_DEVICE Level fill_factor_table(FactorTable& table, const float* second) {
  static_assert(kThreads >= kScaleBytes, "one thread per entry");
  if constexpr (Format::kIsMx) {
    return kUnitLevel;
  } else {
    if (threadIdx.x < kScaleBytes) {
      const Level level = make_level<kRecipe, kSecond>(kSecond ? __ldg(second) : 1.0f);
      table.factor[threadIdx.x] = element_factor<Format, kRecipe, kSecond>(threadIdx.x, level);
      if (threadIdx.x == 0) table.level = level;
    }
    __syncthreads();
    return table.level;
  }
}

// Codes of group number `group` and the scale byte of its block, by whole warps.
template <class Format, class T, int kRecipe, bool kSecond, class RoundingType>
FP4KIT_DEVICE u32 quantize_group(const Words<T>& elements, const FactorTable& table,
    const Level& level, const RoundingType& rounding, u32 group, int rule, bool high_first,
    u32 (&codes)[Format::kGroupWords]) {
  u32 raw;
  const float amax = block_amax<Format, T>(elements, raw);
  const u32 byte = block_scale_byte<Format, T, kRecipe, kSecond>(amax, level, rule);
  float factor;
  if constexpr (Format::kIsMx) {
    factor = inverse_e8m0(byte);
  } else {
    factor = table.factor[byte % kScaleBytes];
  }
  const bool ordinary = is_ordinary_scale<Format>(byte, rule) && is_ordinary_level<kRecipe>(level);
  rounding.template encode<Format, kRecipe>(elements, raw, ordinary, factor, group, codes);
  order_nibbles<Format>(codes, high_first);
  return byte;
}

struct RowShape {
  u32 blocks;  // in a row
  u32 magic;   // divides by them, as FastDivide
  u32 shift;
  u32 tiles;  // in a row of scale tiles

  FP4KIT_DEVICE RowShape(i64 row_blocks, i64 magic_, i64 shift_, i64 stored_cols)
      : blocks(static_cast<u32>(row_blocks)), magic(static_cast<u32>(magic_)),
        shift(static_cast<u32>(shift_)), tiles(static_cast<u32>(stored_cols) / kTileCols) {}

  FP4KIT_DEVICE u32 row_of(u32 block) const {
    return static_cast<u32>((static_cast<u64>(block) * magic) >> shift);
  }
};

// scale_offset of block number `block`.
template <int kLayout>
FP4KIT_DEVICE i64 rowwise_scale_offset(u32 block, const RowShape& shape) {
  if constexpr (kLayout == kLayoutLinear) {
    return block;
  } else {
    const u32 row = shape.row_of(block);
    const u32 col = block - row * shape.blocks;
    constexpr bool kTall = kLayout == kLayoutSwizzled128x4;
    const i64 tile =
        static_cast<i64>(row / (kTall ? kTileRows128 : kTileRows8)) * shape.tiles + col / kTileCols;
    return tile * (kTall ? kTileBytes128 : kTileBytes8) + place_in_tile(kTall, row, col);
  }
}

// Groups from number `offset` of a row on, or a function of them. For swiglu the other half of each
// row lies between; `row_of` then gives the row of a group.
template <class ElementType, int kFunction, class RowOf>
struct GroupSource {
  using T = ElementType;
  const typename T::Bits* __restrict__ gate;
  const typename T::Bits* __restrict__ factor;
  u32 row_groups;
  u32 offset;
  RowOf row_of;

  FP4KIT_DEVICE void load(u32 group, bool inside, ActivatedGroup<T, kFunction>& loaded) const {
    u64 source = group;
    if constexpr (kFunction == kSwiglu) {
      const u32 place = offset + group;
      source = place + static_cast<u64>(row_of(place)) * row_groups;
    }
    loaded.load(gate, factor, source, inside);
  }
};

// Quantizes every `stride`-th set of kThreads groups from `first` to before `count`; the next one
// is on its way while one is worked on. No sum of count and stride may exceed 32 bits.
template <class Format, int kRecipe, bool kSecond, int kLayout, class T, int kFunction, class RowOf,
    class RoundingType>
FP4KIT_DEVICE void quantize_groups(const GroupSource<T, kFunction, RowOf>& source,
    u8* __restrict__ packed, u8* __restrict__ block_scale, const float* __restrict__ second,
    FactorTable& table, const RoundingType& rounding, u32 first, u32 count, u32 stride,
    const RowShape& shape, int rule, bool high_first) {
  constexpr int kCodeBytes = 4 * Format::kGroupWords;
  ActivatedGroup<T, kFunction> prefetched;
  const auto load = [&](u32 group) { source.load(group, group < count, prefetched); };
  load(first + threadIdx.x);
  const Level level = fill_factor_table<Format, kRecipe, kSecond>(table, second);
#pragma unroll 1
  for (u32 start = first; start < count; start += stride) {
    const u32 group = start + threadIdx.x;
    const ActivatedGroup<T, kFunction> loaded = prefetched;
    load(group + stride);
    u32 codes[Format::kGroupWords];
    const u32 byte = quantize_group<Format, T, kRecipe, kSecond>(
        loaded.elements(), table, level, rounding, group, rule, high_first, codes);
    if (group >= count) continue;
    store_codes<true>(packed + static_cast<u64>(group) * kCodeBytes, codes);
    if (group % Format::kGroups == 0) {
      const u32 block = group / Format::kGroups;
      block_scale[rowwise_scale_offset<kLayout>(block, shape)] = static_cast<u8>(byte);
    }
  }
}

}  // namespace fp4kit
