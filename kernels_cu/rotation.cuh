// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// The Hadamard rotation of 16 elements (fp4kit/rotation.py), operation by operation.
#pragma once

#include "lane.cuh"

namespace fp4kit {

// Signs are changed on the bits, and the result is hidden from the compiler: it would turn the pair
// into a negation or an absolute value of floats, which flush subnormals (seen in PTX of
// NVRTC 12.9).
FP4KIT_HD float flip_sign(float value, u32 sign) { return as_float(opaque(as_bits(value) ^ sign)); }

// Four butterfly stages of sums and differences, then / 4.
FP4KIT_HD void butterfly(float (&v)[kLaneElements]) {
#pragma unroll
  for (int h = 1; h < kLaneElements; h *= 2) {
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) {
      if ((i & h) == 0) {
        const float a = v[i];
        const float b = v[i + h];
        v[i] = add_rn(a, b);
        v[i + h] = sub_rn(a, b);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) v[i] = mul_rn(v[i], 0.25f);
}

// Negates the elements whose bit in `mask` is 1.
FP4KIT_HD void flip_signs(float (&v)[kLaneElements], u32 mask) {
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) {
    v[i] = flip_sign(v[i], ((mask >> i) & 1u) << 31);
  }
}

// The rotated elements as R: Bf16 rounds them, F32 does not. NaN may come out as any NaN.
template <class R>
FP4KIT_HD Words<R> rotate_floats(float (&v)[kLaneElements]) {
  butterfly(v);
  Words<R> result;
#pragma unroll
  for (int i = 0; i < Words<R>::kWords; ++i) {
    if constexpr (R::kSize == 4) {
      result.word[i] = as_bits(v[i]);
    } else {
      result.word[i] = pack_pair<R>(v[2 * i], v[2 * i + 1]);
    }
  }
  return result;
}

template <class R, class T>
FP4KIT_HD Words<R> rotate_lane(const Words<T>& x, u32 mask) {
  float v[kLaneElements];
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) v[i] = x.value(i);
  flip_signs(v, mask);
  return rotate_floats<R>(v);
}

}  // namespace fp4kit
