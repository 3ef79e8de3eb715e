// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// 16 rows of one column, or of two neighbouring ones, in registers: a row of them is one access.
#pragma once

#include "rht/rht.cuh"

namespace fp4kit {

// Two elements of a row are one access.
template <class T>
struct Pair;
template <>
struct Pair<F32> {
  using Access = uint2;
};
template <>
struct Pair<F16> {
  using Access = u32;
};
template <>
struct Pair<Bf16> {
  using Access = u32;
};

// kAcross: columns, 1 or 2.
template <class T, int kAcross>
struct ColumnGroup {
  static constexpr int kRowWords = kAcross * T::kSize > 4 ? 2 : 1;
  u32 word[kGroupSize][kRowWords];

  // Row i of 16 from memory.
  __device__ __forceinline__ void load_row(const typename T::Bits* __restrict__ x, int i) {
    if constexpr (kAcross == 1) {
      word[i][0] = __ldg(x);
    } else if constexpr (kRowWords == 1) {
      word[i][0] = __ldg(reinterpret_cast<const typename Pair<T>::Access*>(x));
    } else {
      const uint2 pair = __ldg(reinterpret_cast<const typename Pair<T>::Access*>(x));
      word[i][0] = pair.x;
      word[i][1] = pair.y;
    }
  }

  __device__ __forceinline__ void load(const typename T::Bits* __restrict__ x, i64 step) {
#pragma unroll
    for (int i = 0; i < kGroupSize; ++i, x += step) load_row(x, i);
  }

  __device__ __forceinline__ void store_row(typename T::Bits* __restrict__ out, int i) const {
    if constexpr (kAcross == 1) {
      *out = static_cast<typename T::Bits>(word[i][0]);
    } else {
      store_words(out, word[i]);
    }
  }

  // Negates the rows whose bit in `mask` is 1.
  __device__ __forceinline__ void flip_signs(u32 mask) {
#pragma unroll
    for (int i = 0; i < kGroupSize; ++i) {
      const u32 sign = ((mask >> i) & 1u) * (T::kSize == 4 ? kSignBit : 0x80008000u);
#pragma unroll
      for (int k = 0; k < kRowWords; ++k) word[i][k] = opaque(word[i][k] ^ sign);
    }
  }

  __device__ __forceinline__ float value(int i, int column) const {
    if constexpr (T::kSize == 4) {
      return as_float(word[i][column]);
    } else {
      return Words<T, 2>{{word[i][0]}}.value(column);
    }
  }

  __device__ __forceinline__ void column(int column, float (&v)[kGroupSize]) const {
#pragma unroll
    for (int i = 0; i < kGroupSize; ++i) v[i] = value(i, column);
  }
};

}  // namespace fp4kit
