// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Names of integers, numbers, formats and options that every other file uses.
//
// All numbers come as -D definitions from fp4kit.formats.cuda_defines(). No standard header is
// included: NVRTC alone finds neither <cstdint> nor <type_traits>. What is marked FP4KIT_HD
// compiles with a host compiler as well, so that tests can run it exhaustively without a GPU.
#pragma once

#if defined(__CUDACC__)
#define FP4KIT_DEVICE __device__ __forceinline__
#define FP4KIT_HD __host__ FP4KIT_DEVICE
#else
#define FP4KIT_HD inline
#endif

namespace fp4kit {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

// Options. Recipes are template parameters; MX rules, layouts and nibble orders are kernel
// arguments (uniform branches, once a block), which keeps the number of instances small.

constexpr int kRecipeNone = -1;  // MX formats have rules instead
constexpr int kRecipeTe = FP4KIT_RECIPE_TE;
constexpr int kRecipeNvfuser = FP4KIT_RECIPE_NVFUSER;
constexpr int kRecipeTorchao = FP4KIT_RECIPE_TORCHAO;
constexpr int kRecipeModelopt = FP4KIT_RECIPE_MODELOPT;
constexpr int kRecipeCompressedTensors = FP4KIT_RECIPE_COMPRESSED_TENSORS;
constexpr int kRecipeComfy = FP4KIT_RECIPE_COMFY;

constexpr int kRuleFloor = FP4KIT_RULE_FLOOR;
constexpr int kRuleCeil = FP4KIT_RULE_CEIL;
constexpr int kRuleEven = FP4KIT_RULE_EVEN;
constexpr int kRuleRceil = FP4KIT_RULE_RCEIL;

constexpr int kLayoutLinear = FP4KIT_LAYOUT_LINEAR;
constexpr int kLayoutSwizzled128x4 = FP4KIT_LAYOUT_SWIZZLED_128X4;
constexpr int kLayoutSwizzled8x4 = FP4KIT_LAYOUT_SWIZZLED_8X4;

// Directions of the second level, in the order of tensor.SECOND_LEVEL_DIRECTIONS.
constexpr int kDirectionAmax = 0, kDirectionDecode = 1, kDirectionEncode = 2;

// ---- Binary32 bit patterns ----

constexpr int kF32MantissaBits = 23;
constexpr int kF32Bias = 127;
constexpr u32 kSignBit = 0x80000000u;
constexpr u32 kMagnitudeMask = 0x7FFFFFFFu;
constexpr u32 kInfBits = 0x7F800000u;
constexpr u32 kMaxFiniteBits = 0x7F7FFFFFu;
constexpr u32 kQuietNanBits = 0x7FC00000u;

// Element types of input and output. Magnitudes above kInf are NaN.

template <class BitsType, u32 kInfinity>
struct FloatFacts {
  using Bits = BitsType;
  static constexpr int kSize = sizeof(Bits);
  static constexpr u32 kInf = kInfinity;
};

struct F32 : FloatFacts<u32, kInfBits> {};
struct F16 : FloatFacts<u16, 0x7C00u> {};
struct Bf16 : FloatFacts<u16, (kInfBits >> 16)> {};

template <bool kCondition, class A, class B>
struct Conditional {
  using Type = A;
};
template <class A, class B>
struct Conditional<false, A, B> {
  using Type = B;
};

// A number as a type.
template <int kNumber>
struct Number {
  static constexpr int kValue = kNumber;
};

template <class A, class B>
struct SameType {
  static constexpr bool kValue = false;
};
template <class A>
struct SameType<A, A> {
  static constexpr bool kValue = true;
};

// ---- Quantized element types and block formats ----

// kMaxCode: the largest finite magnitude; kNanCode: what NaN is encoded as.
template <int kBitCount, int kMantissa, int kExponentBias, int kLargestExponent, u32 kLargestCode,
    u32 kNan, bool kInfinity>
struct ElementFacts {
  static constexpr int kBits = kBitCount;
  static constexpr int kMantissaBits = kMantissa;
  static constexpr int kBias = kExponentBias;
  static constexpr int kMaxExponent = kLargestExponent;
  static constexpr u32 kMaxCode = kLargestCode;
  static constexpr u32 kNanCode = kNan;
  static constexpr bool kHasInfinity = kInfinity;
};

struct E2m1 : ElementFacts<4, FP4KIT_E2M1_MANTISSA_BITS, FP4KIT_E2M1_BIAS, FP4KIT_E2M1_MAX_EXPONENT,
                  FP4KIT_E2M1_MAX_CODE, FP4KIT_E2M1_NAN_CODE, false> {
  static constexpr float kMax = FP4KIT_E2M1_MAX;
};
struct E4m3 : ElementFacts<8, FP4KIT_E4M3_MANTISSA_BITS, FP4KIT_E4M3_BIAS, FP4KIT_E4M3_MAX_EXPONENT,
                  FP4KIT_E4M3_MAX_CODE, FP4KIT_E4M3_NAN_CODE, false> {
  static constexpr float kMax = FP4KIT_E4M3_MAX;
};
struct E5m2 : ElementFacts<8, FP4KIT_E5M2_MANTISSA_BITS, FP4KIT_E5M2_BIAS, FP4KIT_E5M2_MAX_EXPONENT,
                  FP4KIT_E5M2_MAX_CODE, FP4KIT_E5M2_NAN_CODE, true> {
  static constexpr float kMax = FP4KIT_E5M2_MAX;
};

constexpr int kThreads = FP4KIT_THREADS;

// A thread quantizes 16 elements; a block of 32 is shared by two neighbours.
constexpr int kGroupSize = 16;

// kGroups: groups of 16 in a block; kGroupWords: 32-bit words of the codes of a group.
template <class ElementType, int kSize, bool kMx>
struct BlockFormat {
  using Element = ElementType;
  static constexpr int kBlockSize = kSize;
  static constexpr bool kIsMx = kMx;
  static constexpr bool kIsFp4 = ElementType::kBits == 4;
  static constexpr int kGroups = kSize / kGroupSize;
  static constexpr int kGroupWords = kGroupSize * ElementType::kBits / 32;
};

using Nvfp4 = BlockFormat<E2m1, FP4KIT_NVFP4_BLOCK_SIZE, false>;
using Mxfp4 = BlockFormat<E2m1, FP4KIT_MXFP4_BLOCK_SIZE, true>;
using Mxfp8 = BlockFormat<E4m3, FP4KIT_MXFP8_BLOCK_SIZE, true>;
using Mxfp8E5m2 = BlockFormat<E5m2, FP4KIT_MXFP8_E5M2_BLOCK_SIZE, true>;

constexpr float kE2m1Max = E2m1::kMax;
constexpr float kSecondLevelRange = FP4KIT_SECOND_LEVEL_RANGE;
// Folded by the compiler's front end in binary32, round to nearest: scaling.RECIPROCAL_*.
constexpr float kReciprocalE2m1Max = 1.0f / kE2m1Max;
constexpr float kReciprocalRange = 1.0f / kSecondLevelRange;

constexpr u32 kE8m0Nan = FP4KIT_E8M0_NAN;
constexpr int kE8m0Bias = FP4KIT_E8M0_BIAS;

}  // namespace fp4kit
