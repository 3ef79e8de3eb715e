// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// What the fast quantizing kernels share: a table in shared memory that turns each of the 128
// non-negative E4M3 scale bytes into its element factor. It is filled once per thread block, which
// takes every division out of the loop over blocks of elements.
#pragma once

#include "common/stochastic.cuh"

namespace fp4kit {

constexpr int kScaleBytes = 128;

// Thread blocks per multiprocessor. Each thread holds two groups' elements.
template <class T>
FP4KIT_HD constexpr int rowwise_blocks() {
  return T::kSize == 4 ? FP4KIT_FLAT_BLOCKS_4 : FP4KIT_FLAT_BLOCKS_2;
}

struct FactorTable {
  float factor[kScaleBytes];
  Level level;
};

// Fills the table; every thread of the block must call it. MX formats need none.
template <class Format, int kRecipe, bool kSecond>
__device__ __forceinline__ Level fill_factor_table(FactorTable& table, const float* second) {
  static_assert(kThreads >= kScaleBytes, "one thread per entry");
  if constexpr (Format::kIsMx) {
    return Level{1.0f, 1.0f, 1.0f, 1.0f, false};
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

// Codes of group number `group` and the scale byte of its block. Every thread of the warp must call
// it.
template <class Format, class T, int kRecipe, bool kSecond, class RoundingType>
__device__ __forceinline__ u32 quantize_group(const Words<T>& elements, const FactorTable& table,
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
  if (Format::kIsFp4 && high_first) {
#pragma unroll
    for (int i = 0; i < Format::kGroupWords; ++i) codes[i] = swap_nibbles(codes[i]);
  }
  return byte;
}

}  // namespace fp4kit
