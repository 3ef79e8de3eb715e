// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Random bits and stochastic rounding to E2M1 (fp4kit/philox.py), equal bit by bit.
#pragma once

#include "lane.cuh"

namespace fp4kit {

// 192 as bits. Between 128 and 256 the last bit of a float is worth 2^-16, so that this | r is
// 192 + r * 2^-16.
constexpr u32 kMagic16 = 0x43400000u;

// The random bits of 16 elements.
struct Random {
  u32 word[4];
  u32 magic;  // kMagic16 in a register: a permutation has room for one constant, its selector

  // kMagic16 | the 16 bits of element e, a constant after unrolling: the upper half of a turned
  // word.
  FP4KIT_HD u32 bits(int e) const {
    constexpr u32 kSelectors[4] = {0x7632u, 0x7603u, 0x7610u, 0x7621u};
    return byte_perm(word[e / 4], magic, kSelectors[e % 4]);
  }
};

FP4KIT_HD void multiply_wide(u32 a, u32 b, u32& high, u32& low) {
#ifdef __CUDA_ARCH__
  // Written out, as the compiler adds the product of the upper halves, 0, to that of 64 bits.
  u64 product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
#else
  const u64 product = static_cast<u64>(a) * b;
#endif
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
  // There are no 2^63 groups, but the compiler cannot know and keeps the register.
  return {{c0, c1, c2, c3}, kMagic16 | static_cast<u32>(group >> 63)};
}

// The magnitude code of y >= 0 in bits 16 to 19, below those of kMagic16: one of the two codes next
// to y, each with a probability of how near y is. `random` as Random::bits gives it. 8 may come out
// for 7.
//
// On the grid of y's range the code is base + floor(t + r * 2^-16), t = y / step. A sum with 192 is
// rounded down to a multiple of 2^-16, which does not change the integer below it. Grids that are
// not y's give larger codes, as in e2m1_magic.
//
// Without kCapped y must be below 8.
template <bool kCapped>
FP4KIT_HD u32 stochastic_magic(float y, u32 random) {
  if constexpr (kCapped) y = as_float(opaque(min_u32(as_bits(y), as_bits(kE2m1Max))));
  const float start = as_float(random);
  const u32 halves = as_bits(fma_down(y, 2.0f, start));
  const u32 ones = as_bits(fma_down(y, 1.0f, add_rn(start, 2.0f)));
  const u32 twos = as_bits(fma_down(y, 0.5f, add_rn(start, 4.0f)));
  return min_u32(min_u32(halves, ones), twos);
}

// Eight codes, low nibble first, of what stochastic_magic gives.
FP4KIT_HD u32 stochastic_join8(const u32 (&sum)[8]) {
  u32 byte[2];  // the codes of even elements, and of odd ones
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    byte[i] = byte_perm(byte_perm(sum[i], sum[i + 2], 0x62u),
                        byte_perm(sum[i + 4], sum[i + 6], 0x62u), 0x5410u);
  }
  const u32 codes = (byte[0] & 0x0F0F0F0Fu) | ((byte[1] << 4) & 0xF0F0F0F0u);
  return codes - ((codes >> 3) & 0x11111111u);
}

// Eight codes of elements start .. start + 7, low nibble first.
template <class T, bool kCareful>
FP4KIT_HD u32 encode_stochastic_8(const Words<T>& x, int start, float factor,
                                  const Random& random) {
  u32 sum[8];
  u32 signs = sign_nibbles<T>(x.word + start * T::kSize / 4);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float y = mul_magnitude_rn(x.value(start + i), factor);
    sum[i] = stochastic_magic<kCareful>(y, random.bits(start + i));
    // NaN has code 7 with a positive sign; the largest value is code 7 without any chance.
    if (kCareful && is_nan(y)) signs &= ~(8u << (4 * i));
  }
  return stochastic_join8(sum) | signs;
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
