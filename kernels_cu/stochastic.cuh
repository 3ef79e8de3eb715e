// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Random bits and stochastic rounding to E2M1 (fp4kit/philox.py), equal bit by bit.
#pragma once

#include "lane.cuh"

namespace fp4kit {

// The random bits of 16 elements.
struct Random {
  u32 word[4];

  // 24 bits for element e, a constant after unrolling: bits 8 to 31 of a turned word.
  FP4KIT_HD u32 bits(int e) const {
    constexpr u32 kSelectors[4] = {0x4321u, 0x4032u, 0x4103u, 0x4210u};
    return byte_perm(word[e / 4], 0u, kSelectors[e % 4]);
  }

  // The number in [0, 1) that they stand for.
  FP4KIT_HD float uniform(int e) const {
    return mul_rn(static_cast<float>(bits(e)), 1.0f / 16777216.0f);
  }
};

FP4KIT_HD void multiply_wide(u32 a, u32 b, u32& high, u32& low) {
  const u64 product = static_cast<u64>(a) * b;
  high = static_cast<u32>(product >> 32);
  low = static_cast<u32>(product);
}

// Philox4x32-10 of the counter (group, direction, stream).
FP4KIT_HD Random philox(u64 group, u32 direction, u32 stream, u64 key) {
  u32 c0 = static_cast<u32>(group);
  u32 c1 = static_cast<u32>(group >> 32);
  u32 c2 = direction;
  u32 c3 = stream;
  u32 k0 = static_cast<u32>(key);
  u32 k1 = static_cast<u32>(key >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    u32 high0, low0, high1, low1;
    multiply_wide(0xD2511F53u, c0, high0, low0);
    multiply_wide(0xCD9E8D57u, c2, high1, low1);
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// 1.5 * 2^23 + k as bits: adding a small number rounds it to an integer in the last bits. The half
// keeps sums with numbers below zero in the same binade.
constexpr u32 kMagicHalf = kMagic23 | (1u << (kF32MantissaBits - 1));

// kMagicHalf + the magnitude code of y >= 0, rounded up with a probability of the distance.
//
// On the grid of y's range the code is base + floor(t) + (u < t - floor(t)), t = y / step, which is
// base + ceil(t - u). Rounding up to a float first and to an integer then gives the same, as
// integers are floats; so neither a comparison nor the fraction is needed. The step is a power of
// two that follows from y's exponent, the base is twice the exponent.
//
// Without kCapped y must be below 8.
template <bool kCapped>
FP4KIT_HD u32 stochastic_magic(float y, u32 random) {
  constexpr u32 kOne = static_cast<u32>(kF32Bias) << kF32MantissaBits;
  u32 bits = as_bits(y);
  if constexpr (kCapped) bits = min_u32(bits, as_bits(kE2m1Max));
  const u32 exponent = max_u32(bits, kOne) & kInfBits;
  const float steps = mul_rn(as_float(opaque(bits)), as_float(exponent ^ kInfBits));
  const float shifted = fma_up(static_cast<float>(random), -1.0f / 16777216.0f, steps);
  const u32 base = kMagicHalf - 2 * static_cast<u32>(kF32Bias) + (exponent >> 22);
  return min_u32(as_bits(add_up(shifted, as_float(base))), kMagicHalf + E2m1::kMaxCode);
}

// Eight codes of elements start .. start + 7, low nibble first.
template <class T, bool kCareful>
FP4KIT_HD u32 encode_stochastic_8(const Words<T>& x, int start, float factor,
                                  const Random& random) {
  u32 half[2];
  u32 signs = sign_nibbles<T>(x.word + start * T::kSize / 4);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    u32 code[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int e = start + 4 * i + k;
      const float y = mul_magnitude_rn(x.value(e), factor);
      code[k] = stochastic_magic<kCareful>(y, random.bits(e));
      if constexpr (kCareful) {
        // NaN has code 7 with a positive sign; the largest value is code 7 without any chance.
        if (is_nan(y)) signs &= ~(8u << (4 * (4 * i + k)));
      }
    }
    half[i] = e2m1_join4(code[0], code[1], code[2], code[3]);
  }
  return byte_perm(half[0], half[1], 0x5410u) | signs;
}

// A lane's codes; `raw` and `ordinary` as in encode_lane.
template <class T>
FP4KIT_HD void encode_lane_stochastic(const Words<T>& x, u32 raw, bool ordinary, float factor,
                                      const Random& random, u32 (&codes)[2]) {
  if (ordinary && raw < T::kInf) {
    codes[0] = encode_stochastic_8<T, false>(x, 0, factor, random);
    codes[1] = encode_stochastic_8<T, false>(x, 8, factor, random);
  } else {
    codes[0] = encode_stochastic_8<T, true>(x, 0, factor, random);
    codes[1] = encode_stochastic_8<T, true>(x, 8, factor, random);
  }
}

}  // namespace fp4kit
