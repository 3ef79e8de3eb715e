// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// What one lane does to its elements: encode 16 of them under a known factor, or decode 4, 8 or 16.
// Quantize, dequantize, the fused kernel and the error statistics all call these.
#pragma once

#include "block_io.cuh"
#include "e2m1.cuh"
#include "recipes.cuh"

namespace fp4kit {

// ---------------------------------------------------------------------------------------------
// Encode
// ---------------------------------------------------------------------------------------------

// Signs of eight elements as bit 3 of eight nibbles: the bytes that hold signs are gathered, even
// elements apart from odd ones, and masked together.
template <class T>
FP4KIT_HD u32 sign_nibbles(const u32* word) {
  u32 first, second;  // sign bytes of elements 0..3 and 4..7
  if constexpr (T::kSize == 4) {
    first =
        byte_perm(byte_perm(word[0], word[1], 0x73u), byte_perm(word[2], word[3], 0x73u), 0x5410u);
    second =
        byte_perm(byte_perm(word[4], word[5], 0x73u), byte_perm(word[6], word[7], 0x73u), 0x5410u);
  } else {
    first = byte_perm(word[0], word[1], 0x7531u);
    second = byte_perm(word[2], word[3], 0x7531u);
  }
  const u32 even = byte_perm(first, second, 0x6420u);
  const u32 odd = byte_perm(first, second, 0x7531u);
  return ((even >> 4) & 0x08080808u) | (odd & 0x80808080u);
}

template <int kRecipe>
FP4KIT_HD float scale_element(float value, float factor) {
  return recipe_divides(kRecipe) ? div_rn(value, factor) : mul_rn(value, factor);
}

// Eight E2M1 codes, low nibble first. `special` says that some product may be NaN.
template <class T, int kRecipe>
FP4KIT_HD u32 encode_e2m1_8(const Words<T>& x, const Words<T>& magnitude, int start, float factor,
                            bool special) {
  float y[8];
#ifdef FP4KIT_HARDWARE_E2M1
#pragma unroll
  for (int i = 0; i < 8; ++i) y[i] = scale_element<kRecipe>(x.value(start + i), factor);
  u32 codes = e2m1_hardware8(y);
#else
  // The sign stays out of the arithmetic: |x| * factor rounds like x * factor.
#pragma unroll
  for (int i = 0; i < 8; ++i) y[i] = scale_element<kRecipe>(magnitude.value(start + i), factor);
  u32 signs = sign_nibbles<T>(x.word + start * T::kSize / 4);
  if (special) {
    // NaN has code 7 with a positive sign, whatever its own sign was.
#pragma unroll
    for (int i = 0; i < 8; ++i) signs &= is_nan(y[i]) ? ~(8u << (4 * i)) : ~0u;
  }
  u32 codes = e2m1_magnitudes8(y) | signs;
#endif
  if constexpr (!recipe_keeps_negative_zero(kRecipe)) {
    // Only zeros proper: a negative value that rounds to zero keeps its sign.
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      codes &= magnitude.bits(start + i) == 0 ? ~(15u << (4 * i)) : ~0u;
    }
  }
  return codes;
}

// The lane's codes in memory order, low nibble first. `raw` is the lane's largest magnitude, NaN
// included.
template <class Format, class T, int kRecipe>
FP4KIT_HD void encode_lane(const Words<T>& x, u32 raw, float factor,
                           u32 (&codes)[Format::kLaneWords]) {
  if constexpr (Format::kIsFp4) {
    if (recipe_divides(kRecipe) && is_zero(factor)) {
      codes[0] = codes[1] = 0;
      return;
    }
    const bool special = raw >= T::kInf || !is_finite(factor);
    const Words<T> magnitude = x.magnitudes();
    codes[0] = encode_e2m1_8<T, kRecipe>(x, magnitude, 0, factor, special);
    codes[1] = encode_e2m1_8<T, kRecipe>(x, magnitude, 8, factor, special);
  } else {
    using Element = typename Format::Element;
#pragma unroll
    for (int i = 0; i < Format::kLaneWords; ++i) {
      float y[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) y[k] = mul_rn(x.value(4 * i + k), factor);
      codes[i] =
          encode_fp8_pair<Element>(y[0], y[1]) | (encode_fp8_pair<Element>(y[2], y[3]) << 16);
    }
  }
}

// ---------------------------------------------------------------------------------------------
// Decode
// ---------------------------------------------------------------------------------------------

// float32 values of four FP8 codes, before any scale.
template <class E>
FP4KIT_HD void decode_fp8_4(u32 word, float* out) {
  if constexpr (SameType<E, E5m2>::kValue) {
    // E5M2 is the upper byte of a float16.
    const u32 first = byte_perm(word, 0u, 0x1404u);
    const u32 second = byte_perm(word, 0u, 0x3424u);
    out[0] = half_to_float(first & 0xFFFFu);
    out[1] = half_to_float(first >> 16);
    out[2] = half_to_float(second & 0xFFFFu);
    out[3] = half_to_float(second >> 16);
  } else {
#ifdef FP4KIT_HARDWARE_FP8
    u32 first, second;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(first) : "h"(static_cast<u16>(word)));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(second) : "h"(static_cast<u16>(word >> 16)));
    out[0] = half_to_float(first & 0xFFFFu);
    out[1] = half_to_float(first >> 16);
    out[2] = half_to_float(second & 0xFFFFu);
    out[3] = half_to_float(second >> 16);
#else
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = decode_fp8<E>((word >> (8 * i)) & 0xFFu);
#endif
  }
}

// Whether some FP8 code of the word is a NaN: adding what the first NaN code lacks to 128 reaches
// the top bit of its byte.
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

// kCount dequantized values: fl(fl(code * first) * last). Returns whether some may be NaN, which
// the caller then makes canonical.
template <class Format, int kRecipe, bool kSecond, int kCount>
FP4KIT_HD bool decode_lane(const u32* codes, const DecodeFactors& factors, float (&out)[kCount]) {
  // Negative, infinite or NaN: exactly the patterns from infinity's upwards.
  const bool unusual = as_bits(factors.first) >= kInfBits || as_bits(factors.last) >= kInfBits;
  bool special = unusual;
  if constexpr (Format::kIsFp4) {
#pragma unroll
    for (int i = 0; i < code_words<Format, kCount>(); ++i) {
      const u32 word =
          recipe_decodes_negative_zero(kRecipe) ? codes[i] : e2m1_drop_negative_zero(codes[i]);
      e2m1_decode<kCount == 4 ? 4 : 8>(word, out + 8 * i);
    }
  } else {
#pragma unroll
    for (int i = 0; i < code_words<Format, kCount>(); ++i) {
      decode_fp8_4<typename Format::Element>(codes[i], out + 4 * i);
      special |= has_fp8_nan<typename Format::Element>(codes[i]);
    }
  }
  // A zero code stays the zero it is under every factor that is a number (an MX factor cannot be
  // anything else than positive and finite, or NaN).
  const bool zero_stays =
      !Format::kIsMx && unusual && !is_nan(factors.first) && !is_nan(factors.last);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float value = out[i];
    float result = mul_rn(value, factors.first);
    if constexpr (has_last_factor(kRecipe, kSecond)) result = mul_rn(result, factors.last);
    out[i] = zero_stays && is_zero(value) ? value : result;
  }
  return special;
}

// Rounds once to Out. Conversions of pairs leave NaN as they like, so it is replaced if it can be.
template <class Out, int kCount>
FP4KIT_HD void pack_outputs(const float (&value)[kCount], bool special, Words<Out, kCount>& out) {
  if constexpr (Out::kSize == 4) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      out.word[i] = special ? to_output_bits<Out>(value[i]) : as_bits(value[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      out.word[i] = pack_pair<Out>(value[2 * i], value[2 * i + 1]);
      if (special) {
        out.word[i] =
            to_output_bits<Out>(value[2 * i]) | (to_output_bits<Out>(value[2 * i + 1]) << 16);
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------
// What the lanes of a block share
// ---------------------------------------------------------------------------------------------

#ifdef __CUDACC__

// Block amax with NaN ignored. Every thread of the warp must call it.
template <class Format, class T>
__device__ __forceinline__ float block_amax(const Words<T>& x, u32& raw) {
  u32 bits = lane_amax_bits<T>(x, raw);
  if constexpr (Format::kLanes == 2) bits = max_u32(bits, __shfl_xor_sync(0xFFFFFFFFu, bits, 1));
  return from_input_bits<T>(bits);
}

// The second-level values on the device: one for the whole tensor is worked out once a thread.
template <int kRecipe, bool kSecond>
struct Levels {
  const float* second;
  i64 scales;
  i64 rows_per_scale;
  Level shared;

  __device__ __forceinline__ Levels(const float* values, i64 count, i64 rows_each)
      : second(values),
        scales(count),
        rows_per_scale(rows_each),
        shared(make_level<kRecipe, kSecond>(kSecond ? __ldg(values) : 1.0f)) {}

  __device__ __forceinline__ Level at(i64 row) const {
    if constexpr (kSecond) {
      if (scales != 1) {
        // A 32-bit division where it will do: the 64-bit one is a subroutine.
        const i64 index =
            ((row | rows_per_scale) >> 32) == 0
                ? static_cast<i64>(static_cast<u32>(row) / static_cast<u32>(rows_per_scale))
                : row / rows_per_scale;
        return make_level<kRecipe, kSecond>(__ldg(second + index));
      }
    }
    return shared;
  }
};

#endif  // __CUDACC__

}  // namespace fp4kit
