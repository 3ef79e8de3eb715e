// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Random bits and stochastic rounding to E2M1 (fp4kit/reference/philox.py), equal bit by bit.
#pragma once

#include "common/group16.cuh"

namespace fp4kit {

struct Random {
  u32 word[4];

  // The 24 bits of element e, a constant after unrolling: the upper three bytes of a turned word.
  FP4KIT_HD u32 bits(int e) const {
    constexpr u32 kSelectors[4] = {0x4321u, 0x4032u, 0x4103u, 0x4210u};
    return byte_perm(word[e / 4], 0u, kSelectors[e % 4]);
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

constexpr int kPhiloxRounds = 10;

// The stream, and the key as each round takes it: as arguments they stay in uniform registers, and
// are not worked out for every group.
struct Seed {
  i64 stream;
  i64 key[kPhiloxRounds];
};

// Philox4x32-10 of the counter (group, direction, stream).
FP4KIT_HD Random philox(u64 group, u32 direction, u32 stream, const Seed& seed) {
  u32 c0 = static_cast<u32>(group);
  u32 c1 = static_cast<u32>(group >> 32);
  u32 c2 = direction;
  u32 c3 = stream;
#pragma unroll
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const i64 key = seed.key[round];
    u32 high0, low0, high1, low1;
    multiply_wide(0xD2511F53u, c0, high0, low0);
    multiply_wide(0xCD9E8D57u, c2, high1, low1);
    c0 = high1 ^ c1 ^ static_cast<u32>(key);
    c1 = low1;
    c2 = high0 ^ c3 ^ static_cast<u32>(key >> 32);
    c3 = low0;
  }
  return {{c0, c1, c2, c3}};
}

// The magnitude code of y >= 0 in bits 24 to 27, and nothing above: one of the two codes next to y,
// each with a probability of how near y is. `random`: 24 bits. 8 may come out for 7. Without
// kCapped y must be below 8.
template <bool kCapped>
FP4KIT_HD u32 stochastic_sum(float y, u32 random) {
  if constexpr (kCapped) y = as_float(opaque(min_u32(as_bits(y), as_bits(kE2m1Max))));
  // Times the smallest normal number, the leading bits are the code rounded down (subnormals are
  // equal steps, as in E2M1), the last 22 how far y is on the way to the next one.
  constexpr u32 kSmallestNormal = 1u << kF32MantissaBits;
  const u32 code_and_rest = as_bits(mul_rn(y, as_float(kSmallestNormal)));
  return 4 * code_and_rest + random;
}

FP4KIT_HD u32 stochastic_join8(const u32 (&sum)[8]) {
  u32 byte[2];  // the codes of even elements, and of odd ones
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    byte[i] = byte_perm(
        byte_perm(sum[i], sum[i + 2], 0x73u), byte_perm(sum[i + 4], sum[i + 6], 0x73u), 0x5410u);
  }
  const u32 codes = byte[0] + 16 * byte[1];
  return codes - ((codes >> 3) & 0x11111111u);
}

template <class T, bool kCareful>
FP4KIT_HD u32 encode_stochastic_8(
    const Words<T>& x, int start, float factor, const Random& random) {
  u32 sum[8];
  u32 signs = sign_nibbles<T>(x.word + start * T::kSize / 4);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float y = mul_magnitude_rn(x.value(start + i), factor);
    sum[i] = stochastic_sum<kCareful>(y, random.bits(start + i));
    // NaN has code 7 with a positive sign; the largest value is code 7 without any chance.
    if (kCareful && is_nan(y)) signs &= ~(8u << (4 * i));
  }
  return stochastic_join8(sum) | signs;
}

template <class T>
FP4KIT_HD void encode_group_stochastic(const Words<T>& x, u32 raw, bool ordinary, float factor,
    const Random& random, u32 (&codes)[2]) {
  if (ordinary && raw < T::kInf) {
    codes[0] = encode_stochastic_8<T, false>(x, 0, factor, random);
    codes[1] = encode_stochastic_8<T, false>(x, 8, factor, random);
  } else {
    codes[0] = encode_stochastic_8<T, true>(x, 0, factor, random);
    codes[1] = encode_stochastic_8<T, true>(x, 8, factor, random);
  }
}

// How a kernel of rows rounds: to nearest, or with all that Seed holds.
template <class... SeedWords>
struct Rounding;

template <>
struct Rounding<> {
  template <class Format, int kRecipe, class T>
  FP4KIT_HD void encode(const Words<T>& x, u32 raw, bool ordinary, float factor, u32,
      u32 (&codes)[Format::kGroupWords]) const {
    encode_group<Format, T, kRecipe>(x, raw, ordinary, factor, codes);
  }
};

template <class Stream, class... Keys>
struct Rounding<Stream, Keys...> {
  static_assert(sizeof...(Keys) == kPhiloxRounds, "a key for each round");
  Seed seed;

  template <class Format, int kRecipe, class T>
  FP4KIT_HD void encode(const Words<T>& x, u32 raw, bool ordinary, float factor, u32 group,
      u32 (&codes)[Format::kGroupWords]) const {
    const Random random = philox(group, 0, static_cast<u32>(seed.stream), seed);
    encode_group_stochastic(x, raw, ordinary, factor, random, codes);
  }
};

}  // namespace fp4kit
