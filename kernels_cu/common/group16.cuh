// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Encodes a group of 16 elements under a known factor, or decodes 4, 8 or 16 of them.
#pragma once

#include "common/e2m1.cuh"
#include "common/elements.cuh"
#include "common/recipes.cuh"

namespace fp4kit {

// ---- Encode ----

// Signs of eight elements as bit 3 of eight nibbles: even elements apart from odd ones, masked
// together.
template <class T>
FP4KIT_HD u32 sign_nibbles(const u32* word) {
  u32 even, odd;  // of the first four and the last four elements: two bytes each
  if constexpr (T::kSize == 4) {
    even = byte_perm(
        sign_perm(word[0], word[2], 0xFBFBu), sign_perm(word[4], word[6], 0xFBFBu), 0x5410u);
    odd = byte_perm(
        sign_perm(word[1], word[3], 0xFBFBu), sign_perm(word[5], word[7], 0xFBFBu), 0x5410u);
  } else {
    const u32 first = sign_perm(word[0], word[1], 0xFBD9u);
    const u32 second = sign_perm(word[2], word[3], 0xFBD9u);
    even = byte_perm(first, second, 0x5410u);
    odd = byte_perm(first, second, 0x7632u);
  }
  return (even & 0x08080808u) | (odd & 0x80808080u);
}

template <int kRecipe>
FP4KIT_HD float scale_element(float value, float factor) {
  return recipe_divides(kRecipe) ? div_rn(value, factor) : mul_rn(value, factor);
}

template <int kRecipe>
FP4KIT_HD float scale_magnitude(float value, float factor) {
  return recipe_divides(kRecipe) ? div_rn(as_float(opaque(magnitude_bits(value))), factor)
                                 : mul_magnitude_rn(value, factor);
}

// Eight E2M1 codes, low nibble first. kCareful: some product may be NaN, or beyond what codes hold.
template <class T, int kRecipe, bool kCareful>
FP4KIT_HD u32 encode_e2m1_8(const Words<T>& x, int start, float factor) {
  float y[8];
#ifdef FP4KIT_HARDWARE_E2M1
#pragma unroll
  for (int i = 0; i < 8; ++i) y[i] = scale_element<kRecipe>(x.value(start + i), factor);
  u32 codes = e2m1_hardware8(y);
#else
  // The sign stays out of the arithmetic: |x| * factor rounds like x * factor.
#pragma unroll
  for (int i = 0; i < 8; ++i) y[i] = scale_magnitude<kRecipe>(x.value(start + i), factor);
  u32 signs = sign_nibbles<T>(x.word + start * T::kSize / 4);
  if constexpr (kCareful) {
    // NaN has code 7 with a positive sign, whatever its own sign was.
#pragma unroll
    for (int i = 0; i < 8; ++i) signs &= is_nan(y[i]) ? ~(8u << (4 * i)) : ~0u;
  }
  u32 codes = e2m1_magnitudes8<kCareful>(y) | signs;
#endif
  if constexpr (!recipe_keeps_negative_zero(kRecipe)) {
    // Only zeros proper: a negative value that rounds to zero keeps its sign.
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      codes &= is_zero(x.value(start + i)) ? ~(15u << (4 * i)) : ~0u;
    }
  }
  return codes;
}

template <class Format, class T, bool kCareful>
FP4KIT_HD void encode_fp8_group(
    const Words<T>& x, float factor, u32 (&codes)[Format::kGroupWords]) {
  using Element = typename Format::Element;
#pragma unroll
  for (int i = 0; i < Format::kGroupWords; ++i) {
    float y[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) y[k] = mul_rn(x.value(4 * i + k), factor);
    codes[i] = encode_fp8_pair<Element, kCareful>(y[0], y[1]) |
               (encode_fp8_pair<Element, kCareful>(y[2], y[3]) << 16);
  }
}

// Whether every element of a block lies below 7 once scaled, as e2m1_magic needs it: an E4M3 scale
// neither saturated nor subnormal; of the MX rules only floor lets elements reach 8.
template <class Format>
FP4KIT_HD bool is_ordinary_scale(u32 byte, int rule) {
  constexpr u32 kSmallestNormal = 1u << E4m3::kMantissaBits;
  if constexpr (Format::kIsMx) return rule != kRuleFloor;
  return byte - kSmallestNormal < E4m3::kMaxCode - kSmallestNormal;
}

// The same of recipes that keep P = amax / 2688: if it is subnormal, 1 / P can be infinite and q *
// P have few bits.
template <int kRecipe>
FP4KIT_HD bool is_ordinary_level(const Level& level) {
  constexpr u32 kSmallestNormal = 1u << kF32MantissaBits;
  return kRecipe == kRecipeNone || recipe_direction(kRecipe) != kDirectionDecode ||
         as_bits(level.scale) >= kSmallestNormal;
}

// The group's codes, low nibble first. `raw` is its largest magnitude, NaN included; `ordinary` as
// is_ordinary_scale and is_ordinary_level.
template <class Format, class T, int kRecipe>
FP4KIT_HD void encode_group(
    const Words<T>& x, u32 raw, bool ordinary, float factor, u32 (&codes)[Format::kGroupWords]) {
  if constexpr (Format::kIsFp4) {
    if (recipe_divides(kRecipe) && is_zero(factor)) {
      codes[0] = codes[1] = 0;
    } else if (ordinary && raw < T::kInf) {
      codes[0] = encode_e2m1_8<T, kRecipe, false>(x, 0, factor);
      codes[1] = encode_e2m1_8<T, kRecipe, false>(x, 8, factor);
    } else {
      codes[0] = encode_e2m1_8<T, kRecipe, true>(x, 0, factor);
      codes[1] = encode_e2m1_8<T, kRecipe, true>(x, 8, factor);
    }
  } else if (Format::Element::kHasInfinity && raw > T::kInf) {
    // Without NaN among the elements there is none among the products. Only E5M2 needs to know.
    encode_fp8_group<Format, T, true>(x, factor, codes);
  } else {
    encode_fp8_group<Format, T, false>(x, factor, codes);
  }
}

template <class Format, class T, int kRecipe>
FP4KIT_HD void encode_group(
    const Words<T>& x, u32 raw, float factor, u32 (&codes)[Format::kGroupWords]) {
  encode_group<Format, T, kRecipe>(x, raw, false, factor, codes);
}

// Changes low nibble first to the order that is asked for, or back.
template <class Format, int kWords>
FP4KIT_HD void order_nibbles(u32 (&codes)[kWords], bool high_first) {
  if (!Format::kIsFp4 || !high_first) return;
#pragma unroll
  for (int i = 0; i < kWords; ++i) codes[i] = swap_nibbles(codes[i]);
}

// ---- Decode ----

template <class E>
FP4KIT_HD void decode_fp8_4(u32 word, float* out) {
  if constexpr (SameType<E, E5m2>::kValue) {
    // E5M2 is the upper byte of a float16.
    halves_to_floats(byte_perm(word, 0u, 0x1404u), byte_perm(word, 0u, 0x3424u), out);
  } else {
#ifdef FP4KIT_HARDWARE_FP8
    u32 first, second;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(first) : "h"(static_cast<u16>(word)));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(second) : "h"(static_cast<u16>(word >> 16)));
    halves_to_floats(first, second, out);
#else
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = decode_fp8<E>((word >> (8 * i)) & 0xFFu);
#endif
  }
}

// Whether some FP8 code is NaN: adding what the first NaN code lacks to 128 reaches its byte's top
// bit.
template <class E>
FP4KIT_HD bool has_fp8_nan(u32 word) {
  constexpr u32 kFirstNan = E::kMaxCode + (E::kHasInfinity ? 2 : 1);
  return (((word & 0x7F7F7F7Fu) + (0x80u - kFirstNan) * 0x01010101u) & 0x80808080u) != 0;
}

// Words of codes that hold kCount elements; four E2M1 codes lie in the low half of one.
template <class Format, int kCount>
FP4KIT_HD constexpr int code_words() {
  return (kCount * Format::Element::kBits + 31) / 32;
}

// Negative, infinite or NaN: the patterns from infinity's upwards. What is not has_last_factor is
// not looked at: it would be loaded for that alone.
template <int kRecipe, bool kSecond>
FP4KIT_HD bool is_unusual(const DecodeFactors& factors) {
  return as_bits(factors.first) >= kInfBits ||
         (has_last_factor(kRecipe, kSecond) && as_bits(factors.last) >= kInfBits);
}

template <int kRecipe, bool kSecond>
FP4KIT_HD bool has_nan(const DecodeFactors& factors) {
  return is_nan(factors.first) || (has_last_factor(kRecipe, kSecond) && is_nan(factors.last));
}

template <int kRecipe, bool kSecond>
FP4KIT_HD float apply_factors(float value, const DecodeFactors& factors) {
  const float result = mul_rn(value, factors.first);
  return has_last_factor(kRecipe, kSecond) ? mul_rn(result, factors.last) : result;
}

// A zero code stays zero under every factor that is a number.
template <class Format, int kRecipe, bool kSecond>
FP4KIT_HD float apply_unusual_factors(float value, const DecodeFactors& factors) {
  if (!Format::kIsMx && is_zero(value) && !has_nan<kRecipe, kSecond>(factors)) return value;
  return apply_factors<kRecipe, kSecond>(value, factors);
}

// Values of kCount codes before any scale. Returns whether some are NaN.
template <class Format, int kRecipe, int kCount>
FP4KIT_HD bool decode_codes(const u32* codes, float (&value)[kCount]) {
  bool nan = false;
#pragma unroll
  for (int i = 0; i < code_words<Format, kCount>(); ++i) {
    if constexpr (Format::kIsFp4) {
      const u32 word =
          recipe_decodes_negative_zero(kRecipe) ? codes[i] : e2m1_drop_negative_zero(codes[i]);
      e2m1_decode<kCount == 4 ? 4 : 8>(word, value + 8 * i);
    } else {
      decode_fp8_4<typename Format::Element>(codes[i], value + 4 * i);
      nan |= has_fp8_nan<typename Format::Element>(codes[i]);
    }
  }
  return nan;
}

// kCount dequantized values, under any factors.
template <class Format, int kRecipe, bool kSecond, int kCount>
FP4KIT_HD void decode_group(const u32* codes, const DecodeFactors& factors, float (&out)[kCount]) {
  decode_codes<Format, kRecipe>(codes, out);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    out[i] = apply_unusual_factors<Format, kRecipe, kSecond>(out[i], factors);
  }
}

// What a block's scale comes to: its factors, or all results that its codes can have.
template <class Format, class Out>
using DecoderOf =
    typename Conditional<Format::kIsFp4 && Out::kSize == 2, E2m1Table, DecodeFactors>::Type;

FP4KIT_HD E2m1Table pack_table(const u32 (&word)[4]) {
  return {{byte_perm(word[0], word[1], 0x7531u), byte_perm(word[2], word[3], 0x7531u)},
      {byte_perm(word[0], word[1], 0x6420u), byte_perm(word[2], word[3], 0x6420u)}};
}

template <class Out, int kRecipe, bool kSecond>
FP4KIT_HD E2m1Table e2m1_table(const DecodeFactors& factors) {
  float value[8];
  value[0] = 0.0f;
#pragma unroll
  for (int i = 1; i < 8; ++i) {
    value[i] = apply_factors<kRecipe, kSecond>(as_float(e2m1_float_bits(i)), factors);
  }
  u32 word[4];
  pack_words<Out, false>(value, word);
  if (is_unusual<kRecipe, kSecond>(factors)) {
    if (has_nan<kRecipe, kSecond>(factors)) value[0] = as_float(kQuietNanBits);
    pack_words<Out, true>(value, word);
  }
  return pack_table(word);
}

template <class Format, class Out, int kRecipe, bool kSecond>
FP4KIT_HD DecoderOf<Format, Out> make_decoder(
    u32 byte, const Level& level, float reciprocal = kReciprocalRange) {
  const DecodeFactors factors =
      decode_factors<Format, kRecipe, kSecond, Out>(byte, level, reciprocal);
  if constexpr (SameType<DecoderOf<Format, Out>, E2m1Table>::kValue) {
    return e2m1_table<Out, kRecipe, kSecond>(factors);
  } else {
    return factors;
  }
}

// Both 16-bit halves, NaN without its sign.
template <class Out>
FP4KIT_HD u32 positive_nan16(u32 word) {
  const u32 first = (word & 0x7FFFu) > Out::kInf ? 0x8000u : 0u;
  const u32 second = (word & 0x7FFF0000u) > (Out::kInf << 16 | 0xFFFFu) ? kSignBit : 0u;
  return word & ~(first | second);
}

template <class Format, int kRecipe, bool kSecond, class Out, int kCount>
FP4KIT_HD void decode_words(
    const u32* codes, const DecoderOf<Format, Out>& decoder, Words<Out, kCount>& out) {
  if constexpr (SameType<DecoderOf<Format, Out>, E2m1Table>::kValue) {
#pragma unroll
    for (int i = 0; i < code_words<Format, kCount>(); ++i) {
      const u32 word =
          recipe_decodes_negative_zero(kRecipe) ? codes[i] : e2m1_drop_negative_zero(codes[i]);
      e2m1_lookup8(decoder, word, out.word + 4 * i);
    }
    // If any code is NaN, the largest is; huge and negative values are looked at as well.
    if (decoder.high[1] >= Out::kInf >> 8 << 24) {
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) out.word[i] = positive_nan16<Out>(out.word[i]);
    }
  } else {
    float value[kCount], scaled[kCount];
    const bool nan_codes = decode_codes<Format, kRecipe>(codes, value);
#pragma unroll
    for (int i = 0; i < kCount; ++i) scaled[i] = apply_factors<kRecipe, kSecond>(value[i], decoder);
    pack_words<Out, false>(scaled, out.word);
    // Rare, so all that it takes is kept in one place.
    if (nan_codes || is_unusual<kRecipe, kSecond>(decoder)) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        scaled[i] = apply_unusual_factors<Format, kRecipe, kSecond>(value[i], decoder);
      }
      pack_words<Out, true>(scaled, out.word);
    }
  }
}

// ---- What the groups of a block share ----

#ifdef __CUDACC__

// Block amax with NaN ignored. Every thread of the warp must call it.
template <class Format, class T>
FP4KIT_DEVICE float block_amax(const Words<T>& x, u32& raw) {
  u32 bits = group_amax_bits<T>(x, raw);
  if constexpr (Format::kGroups == 2) bits = max_u32(bits, __shfl_xor_sync(0xFFFFFFFFu, bits, 1));
  return from_input_bits<T>(bits);
}

// The second-level values: one for the whole tensor is worked out once a thread.
template <int kRecipe, bool kSecond>
struct Levels {
  const float* second;
  i64 scales;
  i64 rows_per_scale;
  float range = kSecondLevelRange;
  Level shared = make_level<kRecipe, kSecond>(kSecond ? __ldg(second) : 1.0f, range);

  FP4KIT_DEVICE Level at(i64 row) const {
    if constexpr (kSecond) {
      if (scales != 1) {
        // A 32-bit division where it will do: the 64-bit one is a subroutine.
        const i64 index =
            ((row | rows_per_scale) >> 32) == 0
                ? static_cast<i64>(static_cast<u32>(row) / static_cast<u32>(rows_per_scale))
                : row / rows_per_scale;
        return make_level<kRecipe, kSecond>(__ldg(second + index), range);
      }
    }
    return shared;
  }
};

#endif  // __CUDACC__

}  // namespace fp4kit
