// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// The loop of the fast quantizing kernels over whole, aligned groups that follow each other.
#pragma once

#include "common/scale_layout.cuh"
#include "quantize/factor_table.cuh"

namespace fp4kit {

// scale_offset for a layout known at compile time and coordinates of 31 bits.
template <int kLayout>
__device__ __forceinline__ i64 rowwise_scale_offset(u32 scale, u32 row, u32 col, u32 tiles) {
  if constexpr (kLayout == kLayoutLinear) {
    return scale;
  } else if constexpr (kLayout == kLayoutSwizzled128x4) {
    const u32 r = row % kTileRows128;
    const i64 tile = static_cast<i64>(row / kTileRows128) * tiles + col / kTileCols;
    return tile * kTileBytes128 + (r % 32) * 16 + (r / 32) * kTileCols + col % kTileCols;
  } else {
    const i64 tile = static_cast<i64>(row / kTileRows8) * tiles + col / kTileCols;
    return tile * kTileBytes8 + (row % kTileRows8) * kTileCols + col % kTileCols;
  }
}

// The shape of what is quantized, for scales that are not linear.
struct RowShape {
  u32 blocks;  // in a row
  u32 magic;   // divides by them, as FastDivide
  u32 shift;
  u32 stored_cols;
};

__device__ __forceinline__ u32 row_of_block(u32 scale, const RowShape& shape) {
  return static_cast<u32>((static_cast<u64>(scale) * shape.magic) >> shape.shift);
}

template <int kLayout>
__device__ __forceinline__ i64 rowwise_scale_offset(u32 scale, const RowShape& shape) {
  u32 row = 0, col = 0;
  if constexpr (kLayout != kLayoutLinear) {
    row = row_of_block(scale, shape);
    col = scale - row * shape.blocks;
  }
  return rowwise_scale_offset<kLayout>(scale, row, col, shape.stored_cols / kTileCols);
}

// Elements that are quantized as they lie in memory. A source says what it loads of a group, and
// what elements it makes of that.
template <class ElementType>
struct PlainSource {
  using T = ElementType;
  using Loaded = Words<T>;
  const typename T::Bits* __restrict__ x;

  __device__ __forceinline__ void load(u32 group, bool inside, Loaded& loaded) const {
    load_elements<true, T>(
        x + static_cast<u64>(group) * kGroupSize, inside ? kGroupSize : 0, loaded);
  }
  __device__ __forceinline__ Words<T> elements(const Loaded& loaded) const { return loaded; }
};

// Quantizes every `stride`-th set of kThreads groups from `first` to before `count`. What a
// thread's next group needs is on its way while it works on one, and what the first needs while the
// table is filled. No sum of count and stride may exceed 32 bits.
template <class Format, int kRecipe, bool kSecond, int kLayout, class Source, class RoundingType>
__device__ __forceinline__ void quantize_groups(const Source& source, u8* __restrict__ packed,
    u8* __restrict__ block_scale, const float* __restrict__ second, FactorTable& table,
    const RoundingType& rounding, u32 first, u32 count, u32 stride, const RowShape& shape, int rule,
    bool high_first) {
  using T = typename Source::T;
  constexpr int kCodeBytes = 4 * Format::kGroupWords;
  typename Source::Loaded prefetched;
  const auto load = [&](u32 group) { source.load(group, group < count, prefetched); };
  load(first + threadIdx.x);
  const Level level = fill_factor_table<Format, kRecipe, kSecond>(table, second);
#pragma unroll 1
  for (u32 start = first; start < count; start += stride) {
    const u32 group = start + threadIdx.x;
    const typename Source::Loaded loaded = prefetched;
    load(group + stride);
    const Words<T> elements = source.elements(loaded);
    u32 codes[Format::kGroupWords];
    const u32 byte = quantize_group<Format, T, kRecipe, kSecond>(
        elements, table, level, rounding, group, rule, high_first, codes);
    if (group >= count) continue;
    store_codes<true>(packed + static_cast<u64>(group) * kCodeBytes, codes);
    if (group % Format::kGroups == 0) {
      const u32 scale = group / Format::kGroups;
      block_scale[rowwise_scale_offset<kLayout>(scale, shape)] = static_cast<u8>(byte);
    }
  }
}

}  // namespace fp4kit
