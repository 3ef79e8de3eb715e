// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// The Hadamard rotation of 16 elements (fp4kit/api/rotation.py), operation by operation.
#pragma once

#include "common/group16.cuh"

namespace fp4kit {

// Butterfly stages of sums and differences, at distances below `kEnd`.
template <int kEnd>
FP4KIT_HD void butterfly_stages(float (&v)[kGroupSize]) {
#pragma unroll
  for (int h = 1; h < kEnd; h *= 2) {
#pragma unroll
    for (int i = 0; i < kGroupSize; ++i) {
      if ((i & h) == 0) {
        const float a = v[i];
        const float b = v[i + h];
        v[i] = add_rn(a, b);
        v[i + h] = sub_rn(a, b);
      }
    }
  }
}

// Four stages, then / 4.
FP4KIT_HD void butterfly(float (&v)[kGroupSize]) {
  butterfly_stages<kGroupSize>(v);
#pragma unroll
  for (int i = 0; i < kGroupSize; ++i) v[i] = mul_rn(v[i], 0.25f);
}

// The larger of `known` and 4 times any magnitude that butterfly() would leave, NaN ignored: of a
// sum and its difference one is the sum of the magnitudes, and no smaller than the other. Rounding
// may follow the maximum of many groups.
FP4KIT_HD float butterfly_amax(float known, float (&v)[kGroupSize]) {
  constexpr int kHalf = kGroupSize / 2;
  butterfly_stages<kHalf>(v);
  float most[kHalf];
#pragma unroll
  for (int i = 0; i < kHalf; ++i) most[i] = add_magnitudes_rn(v[i], v[i + kHalf]);
#pragma unroll
  for (int h = kHalf / 2; h > 0; h /= 2) {
#pragma unroll
    for (int i = 0; i < h; ++i) most[i] = max_number(most[i], most[i + h]);
  }
  return max_number(known, most[0]);
}

// What butterfly_amax() stands for, as bits of a float, perhaps rounded to bfloat16.
FP4KIT_HD u32 rotated_amax_bits(float most, bool to_bf16) {
  const float amax = mul_rn(most, 0.25f);
  return as_bits(to_bf16 ? round_to<Bf16>(amax) : amax);
}

template <class T>
FP4KIT_HD u32 sign_word(u32 mask, int i) {
  if constexpr (T::kSize == 4) {
    return ((mask >> i) & 1u) << 31;
  } else {
    return (((mask >> (2 * i)) & 1u) << 15) | (((mask >> (2 * i + 1)) & 1u) << 31);
  }
}

// Negates the elements whose bit in `mask` is 1, as they lie in memory. Hidden from the compiler,
// which would make negations of it that flush subnormals.
template <class T>
FP4KIT_HD void flip_signs(Words<T>& x, u32 mask) {
#pragma unroll
  for (int i = 0; i < Words<T>::kWords; ++i) {
    x.word[i] = opaque(x.word[i] ^ sign_word<T>(mask, i));
  }
}

// The rotated elements as R: Bf16 rounds them, F32 does not.
template <class R>
FP4KIT_HD Words<R> rotate_floats(float (&v)[kGroupSize]) {
  butterfly(v);
  Words<R> result;
  pack_words<R, false>(v, result.word);
  return result;
}

template <class T>
FP4KIT_HD void signed_values(Words<T> x, u32 mask, float (&v)[kGroupSize]) {
  flip_signs(x, mask);
#pragma unroll
  for (int i = 0; i < kGroupSize; ++i) v[i] = x.value(i);
}

template <class R, class T>
FP4KIT_HD Words<R> rotate_group(const Words<T>& x, u32 mask) {
  float v[kGroupSize];
  signed_values(x, mask, v);
  return rotate_floats<R>(v);
}

template <class T>
FP4KIT_HD float group_butterfly_amax(float known, const Words<T>& x, u32 mask) {
  float v[kGroupSize];
  signed_values(x, mask, v);
  return butterfly_amax(known, v);
}

#ifdef __CUDACC__

// ---- Columns ----

// 16 rows of one column, or of two neighbouring ones (kAcross); a row of them is one access.
template <class T, int kAcross>
struct ColumnGroup {
  static constexpr int kRowWords = kAcross * T::kSize > 4 ? 2 : 1;
  u32 word[kGroupSize][kRowWords];

  FP4KIT_DEVICE void load_row(const typename T::Bits* __restrict__ x, int i) {
    if constexpr (kAcross == 1) {
      word[i][0] = __ldg(x);
    } else if constexpr (kRowWords == 1) {
      word[i][0] = __ldg(reinterpret_cast<const u32*>(x));
    } else {
      const uint2 pair = __ldg(reinterpret_cast<const uint2*>(x));
      word[i][0] = pair.x;
      word[i][1] = pair.y;
    }
  }

  FP4KIT_DEVICE void load(const typename T::Bits* __restrict__ x, i64 step) {
#pragma unroll
    for (int i = 0; i < kGroupSize; ++i, x += step) load_row(x, i);
  }

  FP4KIT_DEVICE void store_row(typename T::Bits* __restrict__ out, int i) const {
    if constexpr (kAcross == 1) {
      *out = static_cast<typename T::Bits>(word[i][0]);
    } else {
      store_words(out, word[i]);
    }
  }

  FP4KIT_DEVICE void flip_signs(u32 mask) {
#pragma unroll
    for (int i = 0; i < kGroupSize; ++i) {
      const u32 sign = ((mask >> i) & 1u) * (T::kSize == 4 ? kSignBit : 0x80008000u);
#pragma unroll
      for (int k = 0; k < kRowWords; ++k) word[i][k] = opaque(word[i][k] ^ sign);
    }
  }

  FP4KIT_DEVICE float value(int i, int column) const {
    if constexpr (T::kSize == 4) {
      return as_float(word[i][column]);
    } else {
      return Words<T, 2>{{word[i][0]}}.value(column);
    }
  }

  FP4KIT_DEVICE void column(int column, float (&v)[kGroupSize]) const {
#pragma unroll
    for (int i = 0; i < kGroupSize; ++i) v[i] = value(i, column);
  }
};

#endif  // __CUDACC__

}  // namespace fp4kit
