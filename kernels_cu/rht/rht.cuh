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

// The larger of `known` and 4 times any magnitude that butterfly() would leave, NaN ignored. Of a
// sum and its difference one is the sum of the magnitudes, and no smaller than the other; both are
// NaN, or this sum is not. It takes half of the last stage, and rounding may follow the maximum of
// many groups: greater values do not round to smaller ones.
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

// What butterfly_amax() stands for, as bits of a float; `to_bf16`: of values rounded to that.
FP4KIT_HD u32 rotated_amax_bits(float most, bool to_bf16) {
  const float amax = mul_rn(most, 0.25f);
  return as_bits(to_bf16 ? round_to<Bf16>(amax) : amax);
}

// What negates the elements in word `i` whose bits in `mask` are 1.
template <class T>
FP4KIT_HD u32 sign_word(u32 mask, int i) {
  if constexpr (T::kSize == 4) {
    return ((mask >> i) & 1u) << 31;
  } else {
    return (((mask >> (2 * i)) & 1u) << 15) | (((mask >> (2 * i + 1)) & 1u) << 31);
  }
}

// Negates the elements whose bit in `mask` is 1, as they lie in memory. The result is hidden from
// the compiler: it would turn changed signs of floats into negations, which flush subnormals (seen
// in PTX of NVRTC 12.9).
template <class T>
FP4KIT_HD void flip_signs(Words<T>& x, u32 mask) {
#pragma unroll
  for (int i = 0; i < Words<T>::kWords; ++i) {
    x.word[i] = opaque(x.word[i] ^ sign_word<T>(mask, i));
  }
}

// The rotated elements as R: Bf16 rounds them, F32 does not. NaN may come out as any NaN.
template <class R>
FP4KIT_HD Words<R> rotate_floats(float (&v)[kGroupSize]) {
  butterfly(v);
  Words<R> result;
  pack_words<R, false>(v, result.word);
  return result;
}

// The elements as floats, those in `mask` negated.
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

}  // namespace fp4kit
