// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// E2M1 encode and decode, eight codes at a time, equal to fp4kit/reference/codecs.py for every bit
// pattern: by the hardware's conversion where the target has it, else by sums without a comparison.
#pragma once

#include "common/conversions.cuh"

// The E2M1 conversion exists only in the architecture- or family-specific targets of Blackwell.
#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM101_ALL) || \
    defined(__CUDA_ARCH_FEAT_SM103_ALL) || defined(__CUDA_ARCH_FEAT_SM110_ALL) || \
    defined(__CUDA_ARCH_FEAT_SM120_ALL) || defined(__CUDA_ARCH_FEAT_SM121_ALL)
#define FP4KIT_HARDWARE_E2M1 1
#elif defined(__CUDA_ARCH_FAMILY_SPECIFIC__)
#if __CUDA_ARCH_FAMILY_SPECIFIC__ >= 1000
#define FP4KIT_HARDWARE_E2M1 1
#endif
#endif

namespace fp4kit {

// 2^23 + k as bits: a sum that lands here holds its rounded integer in the last bits.
constexpr u32 kMagic23 = static_cast<u32>(kF32Bias + kF32MantissaBits) << kF32MantissaBits;

// kMagic23 + the magnitude code of y >= 0 (or NaN), round to nearest, ties to the even code.
//
// E2M1 is three fixed-point grids: steps of 1/2 below 2, of 1 below 4, of 2 above. On each the code
// is round(y / step) plus an even offset, too large outside its range, so the smallest of the three
// is the code; NaN and everything beyond the largest value is cut to the last code.
//
// Without kCapped y must be below 7, as it is wherever the block's scale was neither saturated nor
// subnormal (6.375 at most). Up to 9 it is cut to 8 instead of 7.
template <bool kCapped>
FP4KIT_HD u32 e2m1_magic(float y) {
  const u32 halves = as_bits(fma_rn(y, 2.0f, as_float(kMagic23)));
  const u32 ones = as_bits(add_rn(y, as_float(kMagic23 + 2)));
  const u32 twos = as_bits(fma_rn(y, 0.5f, as_float(kMagic23 + 4)));
  const u32 least = min_u32(min_u32(halves, ones), twos);
  return kCapped ? min_u32(least, kMagic23 + E2m1::kMaxCode) : least;
}

// The same for y of at most 4.5: above 3.5, where steps are of 1 no longer, they give 4 as well.
FP4KIT_HD u32 e2m1_magic_to_four(float y) {
  const u32 halves = as_bits(fma_rn(y, 2.0f, as_float(kMagic23)));
  const u32 ones = as_bits(add_rn(y, as_float(kMagic23 + 2)));
  return min_u32(halves, ones);
}

// The codes of four sums of e2m1_magic, the first lowest, in the low half of a word whose rest is
// anything: that of kMagic23 does not reach into the low half.
FP4KIT_HD u32 e2m1_join4(u32 a, u32 b, u32 c, u32 d) { return a + 16 * b + 256 * (c + 16 * d); }

template <bool kCapped>
FP4KIT_HD u32 e2m1_magnitudes8(const float (&y)[8]) {
  u32 half[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    half[i] = e2m1_join4(e2m1_magic<kCapped>(y[4 * i]), e2m1_magic<kCapped>(y[4 * i + 1]),
        e2m1_magic<kCapped>(y[4 * i + 2]), e2m1_magic<kCapped>(y[4 * i + 3]));
  }
  return byte_perm(half[0], half[1], 0x5410u);
}

#ifdef FP4KIT_HARDWARE_E2M1
// Eight codes of signed values by the hardware: satfinite, NaN -> +max.
FP4KIT_DEVICE u32 e2m1_hardware8(const float (&v)[8]) {
  u32 result;
  asm("{\n"
      ".reg .b8 b0, b1, b2, b3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b0, %2, %1;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b1, %4, %3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b2, %6, %5;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b3, %8, %7;\n"
      "mov.b32 %0, {b0, b1, b2, b3};\n"
      "}"
      : "=r"(result)
      : "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "f"(v[4]), "f"(v[5]), "f"(v[6]), "f"(v[7]));
  return result;
}
#endif

FP4KIT_HD u32 swap_nibbles(u32 word) {
  return ((word >> 4) & 0x0F0F0F0Fu) | ((word & 0x0F0F0F0Fu) << 4);
}

// Bits of the value of a magnitude code in a float type of this bias and these mantissa bits.
FP4KIT_HD constexpr u32 e2m1_bits_in(u32 code, int bias, int mantissa_bits) {
  const u32 zero_exponent = static_cast<u32>(bias - E2m1::kBias);
  if (code == 0) return 0;
  if (code == 1) return zero_exponent << mantissa_bits;
  return ((zero_exponent + (code >> 1)) << mantissa_bits) | ((code & 1) << (mantissa_bits - 1));
}
FP4KIT_HD constexpr u32 e2m1_float_bits(u32 code) {
  return e2m1_bits_in(code, kF32Bias, kF32MantissaBits);
}
// The high byte of the float16 pattern (the low one is 0).
FP4KIT_HD constexpr u32 e2m1_half_byte(u32 code) { return e2m1_bits_in(code, 15, 2); }
FP4KIT_HD constexpr u32 e2m1_half_bytes(u32 first) {
  return e2m1_half_byte(first) | (e2m1_half_byte(first + 1) << 8) |
         (e2m1_half_byte(first + 2) << 16) | (e2m1_half_byte(first + 3) << 24);
}

// float32 values of four codes, the first in the lowest nibble: a byte permutation is a table of
// eight entries. `signs` holds each code's sign in bit 7 of its byte.
FP4KIT_HD void e2m1_decode4(u32 codes, u32 signs, float* out) {
  constexpr u32 kLow = e2m1_half_bytes(0);
  constexpr u32 kHigh = e2m1_half_bytes(4);
  const u32 magnitude = byte_perm(kLow, kHigh, codes & 0x7777u);
  const u32 high = magnitude | (signs & 0x80808080u);
  halves_to_floats(byte_perm(high, 0u, 0x1404u), byte_perm(high, 0u, 0x3424u), out);
}

// The word with code 8 (-0.0) replaced by code 0.
FP4KIT_HD u32 e2m1_drop_negative_zero(u32 word) {
  // 7 + magnitude reaches the sign bit's place exactly if the magnitude is not 0.
  return word & (0x77777777u | ((word & 0x77777777u) + 0x77777777u));
}

// The word with the sign of every code but zeros changed.
FP4KIT_HD u32 e2m1_negate(u32 word) {
  return word ^ (((word & 0x77777777u) + 0x77777777u) & 0x88888888u);
}

template <int kCount>
FP4KIT_HD void e2m1_decode(u32 word, float* out) {
  const u32 even = word << 4;
  e2m1_decode4(word, byte_perm(even, word, 0x5140u), out);
  if constexpr (kCount == 8) e2m1_decode4(word >> 16, byte_perm(even, word, 0x7362u), out + 4);
}

// ---- Decode to 16-bit types by a table of finished results ----

// What the eight magnitude codes of a block decode to under its scale, as 16-bit patterns: the high
// bytes in the order of the codes, then the low ones, for two byte permutations.
struct alignas(16) E2m1Table {
  u32 high[2];
  u32 low[2];
};

// Eight results, two in a word, of eight codes. A code's sign inverts that of its entry.
FP4KIT_HD void e2m1_lookup8(const E2m1Table& table, u32 word, u32* out) {
  const u32 even = word << 4;
  const u32 magnitude = word & 0x77777777u;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const u32 selector = i == 0 ? magnitude : magnitude >> 16;
    const u32 signs = byte_perm(even, word, i == 0 ? 0x5140u : 0x7362u);
    const u32 high = byte_perm(table.high[0], table.high[1], selector) ^ (signs & 0x80808080u);
    const u32 low = byte_perm(table.low[0], table.low[1], selector);
    out[2 * i] = byte_perm(low, high, 0x5140u);
    out[2 * i + 1] = byte_perm(low, high, 0x7362u);
  }
}

}  // namespace fp4kit
