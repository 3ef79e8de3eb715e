// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Arithmetic on binary32 that is exact to the last bit everywhere. CuPy compiles with -ftz=true and
// nothing can undo it: `a * b`, `a / b`, `a < b` and fminf() would flush subnormals. So every float
// operation is PTX without .ftz, and every comparison works on bit patterns.
#pragma once

#include "common/types.cuh"

namespace fp4kit {

// ---- Bits ----

// The move is free, and hides that the bits are a float's: the optimizer would turn `(bits & mask)
// == 0` back into a comparison of floats, which flushes subnormals.
FP4KIT_HD u32 as_bits(float value) {
  u32 bits;
#ifdef __CUDA_ARCH__
  asm("mov.b32 %0, %1;" : "=r"(bits) : "f"(value));
#else
  __builtin_memcpy(&bits, &value, sizeof(bits));
#endif
  return bits;
}

FP4KIT_HD float as_float(u32 bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}

FP4KIT_HD u32 magnitude_bits(float value) { return as_bits(value) & kMagnitudeMask; }
FP4KIT_HD bool is_nan(float value) { return magnitude_bits(value) > kInfBits; }
FP4KIT_HD bool is_zero(float value) { return magnitude_bits(value) == 0; }
FP4KIT_HD u32 min_u32(u32 a, u32 b) { return a < b ? a : b; }
FP4KIT_HD u32 max_u32(u32 a, u32 b) { return a > b ? a : b; }

// Four bytes chosen from the eight of (low, high); a nibble of `selector` names one.
FP4KIT_HD u32 byte_perm(u32 low, u32 high, u32 selector) {
#ifdef __CUDA_ARCH__
  return __byte_perm(low, high, selector);
#else
  const u64 bytes = (static_cast<u64>(high) << 32) | low;
  u32 result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= static_cast<u32>((bytes >> (8 * ((selector >> (4 * i)) & 7))) & 0xFF) << (8 * i);
  }
  return result;
#endif
}

// byte_perm in which bit 3 of a selector's nibble asks for the byte's top bit, eight times.
FP4KIT_HD u32 sign_perm(u32 low, u32 high, u32 selector) {
#ifdef __CUDA_ARCH__
  u32 result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "r"(selector));
  return result;
#else
  u32 result = 0;
  for (int i = 0; i < 4; ++i) {
    const u32 nibble = (selector >> (4 * i)) & 15;
    const u32 byte = byte_perm(low, high, nibble) & 0xFF;
    result |= (nibble < 8 ? byte : byte < 0x80 ? 0u : 0xFFu) << (8 * i);
  }
  return result;
#endif
}

// A value the compiler must take as it is: it can neither recompute nor merge it.
FP4KIT_HD u32 opaque(u32 value) {
#ifdef __CUDA_ARCH__
  asm("" : "+r"(value));
#endif
  return value;
}

// ---- Binary32 operations: round to nearest even, subnormals kept ----

// Defines name(a, b): `ptx` makes %0 of %1 and %2; on the host it is `value`.
#ifdef __CUDA_ARCH__
#define FP4KIT_OPERATION(name, ptx, value)    \
  FP4KIT_HD float name(float a, float b) {    \
    float result;                             \
    asm(ptx : "=f"(result) : "f"(a), "f"(b)); \
    return result;                            \
  }
#else
#define FP4KIT_OPERATION(name, ptx, value) \
  FP4KIT_HD float name(float a, float b) { return value; }
#endif

FP4KIT_OPERATION(mul_rn, "mul.rn.f32 %0, %1, %2;", (a * b))
FP4KIT_OPERATION(div_rn, "div.rn.f32 %0, %1, %2;", (a / b))
FP4KIT_OPERATION(add_rn, "add.rn.f32 %0, %1, %2;", (a + b))
FP4KIT_OPERATION(sub_rn, "sub.rn.f32 %0, %1, %2;", (a - b))
// |a| * b, a - |b|, a + |b|, |a| + |b|: a magnitude costs nothing there.
FP4KIT_OPERATION(mul_magnitude_rn, "{.reg .f32 x; abs.f32 x, %1; mul.rn.f32 %0, x, %2;}",
    (as_float(magnitude_bits(a)) * b))
FP4KIT_OPERATION(sub_magnitude_rn, "{.reg .f32 x; abs.f32 x, %2; sub.rn.f32 %0, %1, x;}",
    (a - as_float(magnitude_bits(b))))
FP4KIT_OPERATION(add_magnitude_rn, "{.reg .f32 x; abs.f32 x, %2; add.rn.f32 %0, %1, x;}",
    (a + as_float(magnitude_bits(b))))
FP4KIT_OPERATION(add_magnitudes_rn,
    "{.reg .f32 x, y; abs.f32 x, %1; abs.f32 y, %2; add.rn.f32 %0, x, y;}",
    (as_float(magnitude_bits(a)) + as_float(magnitude_bits(b))))
// The larger of two numbers that are no less than +0.0; a NaN is ignored if the other is a number.
FP4KIT_OPERATION(max_number, "max.f32 %0, %1, %2;",
    (is_nan(a) || (!is_nan(b) && as_bits(a) <= as_bits(b)) ? b : a))
// The larger of two magnitudes, NaN being larger than all else.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
FP4KIT_OPERATION(max_magnitude,
    "{.reg .f32 x, y; abs.f32 x, %1; abs.f32 y, %2; max.NaN.f32 %0, x, y;}",
    (as_float(max_u32(magnitude_bits(a), magnitude_bits(b)))))
#else
FP4KIT_HD float max_magnitude(float a, float b) {
  return as_float(max_u32(magnitude_bits(a), magnitude_bits(b)));
}
#endif
#undef FP4KIT_OPERATION

FP4KIT_HD float fma_rn(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  float result;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(result) : "f"(a), "f"(b), "f"(c));
  return result;
#else
  return __builtin_fmaf(a, b, c);
#endif
}

// Exact; the plain conversion would flush subnormals first.
FP4KIT_HD double widen(float value) {
#ifdef __CUDA_ARCH__
  double result;
  asm("cvt.f64.f32 %0, %1;" : "=d"(result) : "f"(value));
  return result;
#else
  return value;
#endif
}

// np.minimum(value, FLT_MAX): only +inf changes, NaN stays.
FP4KIT_HD float cap_finite(float value) {
  return as_bits(value) == kInfBits ? as_float(kMaxFiniteBits) : value;
}

// np.maximum(value, floor) for value >= 0 or NaN, floor > 0: such floats order as their bits do.
FP4KIT_HD float at_least(float value, float floor) {
  return as_bits(value) < as_bits(floor) ? floor : value;
}

}  // namespace fp4kit
