// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Activations and their derivatives: fp4kit/reference/activations.py operation by operation.
//
// Each function has two forms. The one for any value (kAny) is the reference's text. The other
// gives the same bits for numbers of moderate size in a third fewer instructions, and is taken if
// all elements of a thread allow it.
#pragma once

#include "common/elements.cuh"

namespace fp4kit {

// In the order of activations.ACTIVATIONS.
constexpr int kGelu = 0, kSilu = 1, kRelu = 2, kSwiglu = 3, kDgelu = 4, kDsilu = 5, kDrelu = 6;

// These multiply the activated gate with a factor: swiglu's other half, or the incoming gradient.
constexpr bool has_factor(int function) { return function >= kSwiglu; }
constexpr bool is_gelu(int function) { return function == kGelu || function == kDgelu; }
constexpr bool is_relu(int function) { return function == kRelu || function == kDrelu; }

// ---- The logistic function ----

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kRound = 12582912.0f;
constexpr float kLn2High = 0.693359375f;
constexpr float kLn2Low = -2.12194440e-4f;
constexpr float kPolynomial[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
    4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
constexpr float kExpLimit = 150.0f;
constexpr float kGeluA = 1.5957691216057308f;
constexpr float kGeluB = 0.07135481282718f;
constexpr float kGelu3B = 0.21406443848154f;
constexpr float kGeluLimit = 20.0f;

// A value cut off at plus or minus a limit; NaN stays.
FP4KIT_HD float hold_within(float value, float limit) {
  const u32 size = magnitude_bits(value);
  if (size <= as_bits(limit) || size > kInfBits) return value;
  return as_float(as_bits(limit) | (as_bits(value) & kSignBit));
}

// activations.exponential of -t; without kAny for |t| <= 80. With q = -r every operation gives the
// reference's result or its negative, as rounding does not look at signs: no negation is needed.
template <bool kAny>
FP4KIT_HD float exponential_of_minus(float t) {
  if constexpr (kAny) t = hold_within(t, kExpLimit);
  const float shifted = add_rn(mul_rn(t, -kLog2E), kRound);
  const float n = sub_rn(shifted, kRound);
  // The product is exact, so that one rounding or two are the same.
  float q = fma_rn(n, kLn2High, t);
  q = add_rn(q, mul_rn(n, kLn2Low));
  float p = kPolynomial[0];
#pragma unroll
  for (int i = 1; i < 6; ++i) p = sub_rn(kPolynomial[i], mul_rn(p, q));
  p = mul_rn(p, mul_rn(q, q));
  p = sub_rn(p, q);
  p = add_rn(p, 1.0f);
  if constexpr (kAny) {
    const int whole = static_cast<int>(as_bits(shifted) - as_bits(kRound));
    const int half = whole >> 1;
    p = mul_rn(p, as_float(static_cast<u32>(half + 127) << 23));
    return mul_rn(p, as_float(static_cast<u32>(whole - half + 127) << 23));
  } else {
    // The exponents that occur are far from their limits; kRound's bits are all shifted out.
    return as_float(as_bits(p) + (as_bits(shifted) << 23));
  }
}

// The hardware's guess at 1 / x: at most one unit in the last place away.
FP4KIT_HD float guess_reciprocal(float x) {
#ifdef __CUDA_ARCH__
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  return 1.0f / x;
#endif
}

// 1 / x, exactly rounded, for 1 <= x < 2^125: what compilers make of a division, less their test
// whether x lies in this range.
FP4KIT_HD float refine_reciprocal(float x, float guess) {
  const float excess = fma_rn(x, guess, -1.0f);
#ifdef __CUDA_ARCH__
  float result;
  asm("{\n\t.reg .f32 error;\n\tneg.f32 error, %1;\n\tfma.rn.f32 %0, %2, error, %2;\n\t}"
      : "=f"(result)
      : "f"(excess), "f"(guess));
  return result;
#else
  return fma_rn(guess, -excess, guess);
#endif
}

template <bool kAny>
FP4KIT_HD float logistic(float t) {
  const float divisor = add_rn(1.0f, exponential_of_minus<kAny>(t));
  if constexpr (kAny) return div_rn(1.0f, divisor);
  return refine_reciprocal(divisor, guess_reciprocal(divisor));
}

// ---- One value ----

// activations.gelu_argument, and the square that it contains.
template <bool kAny>
FP4KIT_HD float gelu_argument(float x, float& held, float& square) {
  held = kAny ? hold_within(x, kGeluLimit) : x;
  square = mul_rn(held, held);
  return mul_rn(held, add_rn(kGeluA, mul_rn(kGeluB, square)));
}

template <bool kAny>
FP4KIT_HD float gelu_slope(float z) {
  float held, square;
  const float s = logistic<kAny>(gelu_argument<kAny>(z, held, square));
  const float bend = mul_rn(held, mul_rn(s, sub_rn(1.0f, s)));
  return add_rn(s, mul_rn(bend, add_rn(kGeluA, mul_rn(kGelu3B, square))));
}

template <bool kAny>
FP4KIT_HD float silu_slope(float z) {
  const float s = logistic<kAny>(z);
  return mul_rn(s, add_rn(1.0f, mul_rn(z, sub_rn(1.0f, s))));
}

// activations.activation. Without kAny: gate and factor within gate_limit() and factor_limit().
template <int kFunction, bool kAny>
FP4KIT_HD float activation(float gate, float factor) {
  if constexpr (kFunction == kRelu) {
    if (kAny && is_nan(gate)) return gate;
    return as_bits(gate) >= kSignBit ? 0.0f : gate;
  } else if constexpr (kFunction == kDrelu) {
    // Positive numbers and infinity, neither 0 nor NaN.
    return as_bits(gate) - 1u < kInfBits ? factor : 0.0f;
  } else if constexpr (kFunction == kDgelu) {
    return mul_rn(gelu_slope<kAny>(gate), factor);
  } else if constexpr (kFunction == kDsilu) {
    return mul_rn(silu_slope<kAny>(gate), factor);
  } else if constexpr (kFunction == kGelu) {
    float held, square;
    return mul_rn(gate, logistic<kAny>(gelu_argument<kAny>(gate, held, square)));
  } else {
    const float result = mul_rn(gate, logistic<kAny>(gate));
    return kFunction == kSwiglu ? mul_rn(result, factor) : result;
  }
}

// ---- The elements of a thread ----

// 16 bytes of elements.
template <class T>
using Vec = Words<T, 16 / T::kSize>;

// A magnitude given as binary32, exact in T, as bits of T.
template <class T>
constexpr u32 limit_bits(u32 bits) {
  if (SameType<T, F32>::kValue) return bits;
  return SameType<T, Bf16>::kValue ? bits >> 16 : (bits >> 13) - ((kF32Bias - 15u) << 10);
}

// Largest gate that the form for moderate numbers takes: the argument of its exponential must be
// within 80. NaN is none, but as a gate of drelu, where nothing depends on it.
template <class T, int kFunction>
constexpr u32 gate_limit() {
  if (kFunction == kDrelu) return ~0u;
  if (kFunction == kRelu) return T::kInf;
  return limit_bits<T>(is_gelu(kFunction) ? 0x41180000u : 0x42A00000u);  // 9.5 and 80
}

// The same of a factor: no product may become NaN.
template <class T, int kFunction>
constexpr u32 factor_limit() {
  return is_relu(kFunction) ? T::kInf : T::kInf - 1u;
}

template <class T, int kElements>
FP4KIT_HD bool is_within(const Words<T, kElements>& x, u32 limit) {
  return maximum_of<T>(x.word).result() <= limit;
}

// Activations of some elements, rounded to T; NaN canonical. Without kAny no result is NaN.
template <class T, int kFunction, bool kAny, int kElements>
FP4KIT_HD Words<T, kElements> activate_words(
    const Words<T, kElements>& gate, const Words<T, kElements>& factor) {
  const auto one = [&](int i) {
    return activation<kFunction, kAny>(gate.value(i), has_factor(kFunction) ? factor.value(i) : 0);
  };
  float value[kElements];
#pragma unroll
  for (int i = 0; i < kElements; ++i) value[i] = one(i);
  Words<T, kElements> result;
  pack_words<T, kAny>(value, result.word);
  return result;
}

template <class T, int kFunction, int kElements>
FP4KIT_HD Words<T, kElements> activate_all(
    const Words<T, kElements>& gate, const Words<T, kElements>& factor) {
  bool moderate = is_within(gate, gate_limit<T, kFunction>());
  if constexpr (has_factor(kFunction)) {
    moderate = moderate && is_within(factor, factor_limit<T, kFunction>());
  }
  if (moderate) return activate_words<T, kFunction, false>(gate, factor);
  return activate_words<T, kFunction, true>(gate, factor);
}

#ifdef __CUDACC__

// To an aligned address; kept in the cache for the kernel that quantizes it.
template <class T>
FP4KIT_DEVICE void store_vec(typename T::Bits* __restrict__ out, const Vec<T>& x) {
  *reinterpret_cast<uint4*>(out) = pack_vec(x.word);
}

// Thread blocks per multiprocessor of kernels whose threads hold what two groups are made of.
template <class T, int kFunction>
FP4KIT_HD constexpr int activated_blocks() {
  constexpr int kWords = Words<T>::kWords * (has_factor(kFunction) ? 2 : 1);
  return kWords > 16 ? 2 : (kWords > 8 ? 3 : 4);
}

// What a group's elements are made of, as it lies in memory.
template <class T, int kFunction>
struct ActivatedGroup {
  Words<T> gate;
  Words<T> factor;

  // `source`: where the group begins, in groups.
  FP4KIT_DEVICE void load(const typename T::Bits* __restrict__ gates,
      const typename T::Bits* __restrict__ factors, u64 source, bool inside) {
    const i64 valid = inside ? kGroupSize : 0;
    load_elements<true, T>(gates + source * kGroupSize, valid, gate);
    if constexpr (has_factor(kFunction)) {
      load_elements<true, T>(factors + source * kGroupSize, valid, factor);
    }
  }

  FP4KIT_DEVICE Words<T> elements() const {
    if constexpr (kFunction == kNoFunction) {
      return gate;
    } else {
      return activate_all<T, kFunction>(gate, factor);
    }
  }
};

#endif  // __CUDACC__

}  // namespace fp4kit
