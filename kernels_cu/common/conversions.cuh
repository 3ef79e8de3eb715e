// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// float16, bfloat16, FP8 and E8M0 from and to binary32: fp4kit/reference/codecs.py for every
// pattern.
#pragma once

#include "common/numerics.cuh"

#if defined(__CUDA_ARCH__)
#if __CUDA_ARCH__ >= 890
#define FP4KIT_HARDWARE_FP8 1
#endif
#endif

namespace fp4kit {

// ---- float16 and bfloat16, as bits in the low half of a word ----

FP4KIT_HD float half_to_float(u32 bits) {
#ifdef __CUDA_ARCH__
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(static_cast<u16>(bits)));
  return result;
#else
  const u32 sign = (bits & 0x8000u) << 16;
  const u32 magnitude = bits & 0x7FFFu;
  if (magnitude >= F16::kInf) return as_float(sign | kInfBits | ((magnitude & 0x3FFu) << 13));
  // The exponent is 112 too small; the product is exact.
  return as_float(sign | as_bits(as_float(magnitude << 13) * as_float((kF32Bias + 112u) << 23)));
#endif
}

// The four halves of two words.
FP4KIT_HD void halves_to_floats(u32 first, u32 second, float* out) {
  out[0] = half_to_float(first & 0xFFFFu);
  out[1] = half_to_float(first >> 16);
  out[2] = half_to_float(second & 0xFFFFu);
  out[3] = half_to_float(second >> 16);
}

FP4KIT_HD u32 float_to_half(float value) {
#ifdef __CUDA_ARCH__
  u16 result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result) : "f"(value));
  return is_nan(value) ? 0x7E00u : result;
#else
  const u32 bits = as_bits(value);
  const u32 sign = (bits >> 16) & 0x8000u;
  const u32 magnitude = bits & kMagnitudeMask;
  if (magnitude > kInfBits) return 0x7E00u;
  if (magnitude < ((kF32Bias - 14u) << 23)) {
    // Subnormal: the sum's last bit is the smallest float16.
    const float magic = as_float((kF32Bias - 1u) << 23);
    return sign | (as_bits(add_rn(as_float(magnitude), magic)) - as_bits(magic));
  }
  const u32 rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1u);
  return sign | min_u32((rounded >> 13) - ((kF32Bias - 15u) << 10), F16::kInf);
#endif
}

FP4KIT_HD u32 float_to_bfloat16(float value) {
  const u32 bits = as_bits(value);
  const u32 rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return is_nan(value) ? (kQuietNanBits >> 16) : rounded;
}

// codecs.from_float32: bits of `value` rounded once to Out, NaN canonical and positive.
template <class Out>
FP4KIT_HD u32 to_output_bits(float value) {
  if constexpr (SameType<Out, F32>::kValue) {
    return is_nan(value) ? kQuietNanBits : as_bits(value);
  } else if constexpr (SameType<Out, F16>::kValue) {
    return float_to_half(value);
  } else {
    return float_to_bfloat16(value);
  }
}

// Two values of a 16-bit type in one word, the first in the low half. NaN may come out as any NaN.
template <class Out>
FP4KIT_HD u32 pack_pair(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  u32 result;
  if constexpr (SameType<Out, Bf16>::kValue) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(second), "f"(first));
  }
  return result;
#else
  return to_output_bits<Out>(first) | (to_output_bits<Out>(second) << 16);
#endif
}

template <class In>
FP4KIT_HD float from_input_bits(u32 bits) {
  if constexpr (SameType<In, F32>::kValue) {
    return as_float(bits);
  } else if constexpr (SameType<In, F16>::kValue) {
    return half_to_float(bits);
  } else {
    return as_float(bits << 16);
  }
}

template <class T>
FP4KIT_HD float round_to(float value) {
  if constexpr (SameType<T, F32>::kValue) return value;
  return from_input_bits<T>(to_output_bits<T>(value));
}

// ---- FP8: E4M3 and E5M2 ----

// codecs.encode: nearest even, saturating, sign kept, NaN -> kNanCode.
template <class E>
FP4KIT_HD u32 encode_fp8(float value) {
  constexpr int kShift = kF32MantissaBits - E::kMantissaBits;
  constexpr u32 kMinNormal = static_cast<u32>(kF32Bias + 1 - E::kBias) << kF32MantissaBits;
  // 2^23 times the smallest subnormal: adding it leaves the rounded code in the last bits.
  constexpr u32 kMagic =
      static_cast<u32>(kF32Bias + kF32MantissaBits + 1 - E::kBias - E::kMantissaBits)
      << kF32MantissaBits;
  const u32 bits = as_bits(value);
  const u32 magnitude = bits & kMagnitudeMask;
  if (magnitude > kInfBits) return E::kNanCode;
  u32 code;
  if (magnitude < kMinNormal) {
    code = as_bits(add_rn(as_float(magnitude), as_float(kMagic))) - kMagic;
  } else {
    const u32 rounded = magnitude + ((1u << (kShift - 1)) - 1u) + ((magnitude >> kShift) & 1u);
    code = (rounded >> kShift) - (static_cast<u32>(kF32Bias - E::kBias) << E::kMantissaBits);
    code = min_u32(code, E::kMaxCode);
  }
  return code | ((bits >> 24) & 0x80u);
}

// Two codes in the low bytes, the first lowest. Without kCareful neither value may be NaN.
template <class E, bool kCareful>
FP4KIT_HD u32 encode_fp8_pair(float first, float second) {
#ifdef FP4KIT_HARDWARE_FP8
  u16 result;
  if constexpr (SameType<E, E4m3>::kValue) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(result) : "f"(second), "f"(first));
    return result;
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(result) : "f"(second), "f"(first));
    u32 codes = result;
    if constexpr (kCareful) {
      // The payload that the hardware gives an E5M2 NaN is not specified.
      if (is_nan(first)) codes = (codes & 0xFF00u) | E::kNanCode;
      if (is_nan(second)) codes = (codes & 0x00FFu) | (E::kNanCode << 8);
    }
    return codes;
  }
#else
  return encode_fp8<E>(first) | (encode_fp8<E>(second) << 8);
#endif
}

FP4KIT_HD u32 encode_e4m3(float value) {
#ifdef FP4KIT_HARDWARE_FP8
  return encode_fp8_pair<E4m3, true>(value, 0.0f);
#else
  return encode_fp8<E4m3>(value);
#endif
}

// codecs.decode. Codes past the largest are NaN, but the first of them is E5M2's infinity.
template <class E>
FP4KIT_HD float decode_fp8(u32 code) {
  constexpr int kShift = kF32MantissaBits - E::kMantissaBits;
  // The exponent is too small by the difference of the biases; the product is exact.
  constexpr u32 kRebias = static_cast<u32>(2 * kF32Bias - E::kBias) << kF32MantissaBits;
  const u32 magnitude = code & 0x7Fu;
  u32 bits = as_bits(mul_rn(as_float(magnitude << kShift), as_float(kRebias)));
  if (magnitude > E::kMaxCode) {
    bits = E::kHasInfinity && magnitude == E::kMaxCode + 1 ? kInfBits : kQuietNanBits;
  }
  return as_float(bits | ((code & 0x80u) << 24));
}

// encode_e4m3's inverse; NaN may come out as any NaN.
FP4KIT_HD float decode_e4m3(u32 byte) {
#ifdef FP4KIT_HARDWARE_FP8
  u32 pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<u16>(byte)));
  return half_to_float(pair & 0xFFFFu);
#else
  return decode_fp8<E4m3>(byte);
#endif
}

// ---- E8M0 ----

constexpr u32 kTwoToMinus127 = 0x00400000u;  // a binary32 subnormal

// codecs.decode_e8m0: 2^(byte - 127).
FP4KIT_HD float decode_e8m0(u32 byte) {
  const u32 bits = byte == 0 ? kTwoToMinus127 : byte << kF32MantissaBits;
  return as_float(byte == kE8m0Nan ? kQuietNanBits : bits);
}

// scaling.mx_element_factor: 2^(127 - byte).
FP4KIT_HD float inverse_e8m0(u32 byte) {
  constexpr u32 kTop = 2 * kE8m0Bias;
  const u32 bits = byte == kTop ? kTwoToMinus127 : (kTop - byte) << kF32MantissaBits;
  return as_float(byte == kE8m0Nan ? kQuietNanBits : bits);
}

}  // namespace fp4kit
