// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// From block amax to scale byte, element factor and decode factors: fp4kit/reference/scaling.py,
// operation by operation, with its symbols: a block amax, A tensor amax, S encode scale, P decode
// scale, q the stored block scale decoded to binary32.
#pragma once

#include "common/conversions.cuh"

namespace fp4kit {

// Smallest normal and smallest subnormal E4M3: the floors of torchao and of ModelOpt.
constexpr u32 kTorchaoScaleMinBits = static_cast<u32>(kF32Bias + 1 - E4m3::kBias)
                                     << kF32MantissaBits;
constexpr u32 kModeloptScaleMinBits =
    static_cast<u32>(kF32Bias + 1 - E4m3::kBias - E4m3::kMantissaBits) << kF32MantissaBits;
// compressed-tensors replaces a zero scale by 0.125.
constexpr u32 kCompressedTensorsZeroScale = 0x20;

FP4KIT_HD constexpr bool recipe_divides(int recipe) {
  return recipe == kRecipeModelopt || recipe == kRecipeCompressedTensors || recipe == kRecipeComfy;
}
FP4KIT_HD constexpr bool recipe_keeps_negative_zero(int recipe) {
  return recipe != kRecipeModelopt && recipe != kRecipeCompressedTensors;
}
FP4KIT_HD constexpr bool recipe_decodes_negative_zero(int recipe) {
  return recipe != kRecipeModelopt;
}
FP4KIT_HD constexpr bool recipe_rounds_factor(int recipe) { return recipe == kRecipeComfy; }
FP4KIT_HD constexpr int recipe_direction(int recipe) {
  if (recipe == kRecipeTe) return kDirectionAmax;
  return recipe == kRecipeNvfuser || recipe == kRecipeCompressedTensors ? kDirectionEncode
                                                                        : kDirectionDecode;
}

// ---- The second level ----

struct Range {
  float value;
  float reciprocal;

  FP4KIT_HD Range(i64 value_bits, i64 reciprocal_bits)
      : value(as_float(static_cast<u32>(value_bits))),
        reciprocal(as_float(static_cast<u32>(reciprocal_bits))) {}
};

// scaling.te_encode_scale: S of a second level that maps the amax onto a range, given range / amax.
FP4KIT_HD float te_encode_scale_from(float scale, float amax) {
  if (is_nan(scale)) return as_float(kMaxFiniteBits);
  // A of either zero gives an infinity; anything else that is not above 0 has a sign or is 0.
  const u32 bits = as_bits(scale);
  return is_zero(amax) || bits == 0 || bits >= kSignBit ? 1.0f : cap_finite(scale);
}

FP4KIT_HD float te_encode_scale(float amax) {
  return te_encode_scale_from(div_rn(kSecondLevelRange, amax), amax);
}

// scaling.usable: 0, negative, infinite and NaN count as 1.
FP4KIT_HD float usable(float scale) {
  const u32 bits = as_bits(scale);
  return bits - 1u < kMaxFiniteBits ? scale : 1.0f;
}

// scaling.second_level_from_amax for an input of type T.
template <class T>
FP4KIT_HD float second_level_from_amax(float amax, int recipe) {
  switch (recipe_direction(recipe)) {
    case kDirectionAmax:
      return amax;
    case kDirectionDecode:
      return usable(div_rn(amax, kSecondLevelRange));
    default:
      break;
  }
  if (recipe != kRecipeCompressedTensors) return te_encode_scale(amax);
  const float reciprocal = round_to<T>(div_rn(1.0f, amax));
  return usable(round_to<T>(mul_rn(reciprocal, kSecondLevelRange)));
}

FP4KIT_HD float convert_second_level(float value, int source, int target) {
  if (source == target) return value;
  if (source == kDirectionAmax) {
    return target == kDirectionEncode ? te_encode_scale(value)
                                      : usable(div_rn(value, kSecondLevelRange));
  }
  const float scale = usable(value);
  if (target == kDirectionAmax) {
    return source == kDirectionEncode ? div_rn(kSecondLevelRange, scale)
                                      : mul_rn(scale, kSecondLevelRange);
  }
  return usable(div_rn(1.0f, scale));
}

// What a block needs of its second-level value. The compiler drops what a recipe does not use.
struct Level {
  float second;      // as given
  float scale;       // S for te, else the usable value
  float inverse;     // 1 / scale
  float multiplier;  // te: S * (1/6); modelopt: 6 * P
  bool clamped;      // te: S is FLT_MAX instead of the infinity that the division gives
};

template <int kRecipe, bool kSecond>
FP4KIT_HD Level make_level(float second, float range = kSecondLevelRange) {
  Level level{second, 1.0f, 1.0f, 1.0f, false};
  if constexpr (kSecond) {
    if constexpr (kRecipe == kRecipeTe) {
      const float scale = div_rn(range, second);
      level.scale = te_encode_scale_from(scale, second);
      level.multiplier = mul_rn(level.scale, kReciprocalE2m1Max);
      level.clamped = as_bits(scale) == kInfBits && !is_zero(second);
    } else {
      level.scale = usable(second);
      level.multiplier = mul_rn(kE2m1Max, level.scale);
    }
    level.inverse = div_rn(1.0f, level.scale);
  }
  return level;
}

// ---- NVFP4 ----

// scaling.nvfp4_block_scale. The encoding saturates and keeps NaN, so that no caps are needed.
template <int kRecipe, bool kSecond, class T>
FP4KIT_HD u32 nvfp4_block_scale(float amax, const Level& level) {
  if constexpr (kRecipe == kRecipeTe) {
    return encode_e4m3(mul_rn(amax, level.multiplier));
  } else if constexpr (kRecipe == kRecipeModelopt) {
    float scale = div_rn(amax, level.multiplier);
    if (is_zero(scale)) scale = 1.0f;
    return encode_e4m3(at_least(scale, as_float(kModeloptScaleMinBits)));
  } else {
    float scale = div_rn(amax, kE2m1Max);
    if constexpr (kRecipe == kRecipeCompressedTensors) {
      const u32 byte = encode_e4m3(mul_rn(level.scale, round_to<T>(scale)));
      return byte == 0 ? kCompressedTensorsZeroScale : byte;
    }
    if constexpr (kSecond) {
      scale = kRecipe == kRecipeNvfuser ? mul_rn(scale, level.scale) : div_rn(scale, level.scale);
    }
    if constexpr (kRecipe == kRecipeTorchao)
      scale = at_least(scale, as_float(kTorchaoScaleMinBits));
    return encode_e4m3(scale);
  }
}

// scaling.nvfp4_element_factor: multiplied with each element, or its divisor.
template <int kRecipe, bool kSecond>
FP4KIT_HD float nvfp4_element_factor(u32 byte, const Level& level) {
  const float q = decode_e4m3(byte);
  if constexpr (!kSecond) {
    return cap_finite(div_rn(1.0f, q));
  } else if constexpr (kRecipe == kRecipeTe || kRecipe == kRecipeNvfuser) {
    return cap_finite(div_rn(1.0f, mul_rn(q, level.inverse)));
  } else if constexpr (kRecipe == kRecipeTorchao) {
    return cap_finite(div_rn(level.inverse, q));
  } else if constexpr (kRecipe == kRecipeCompressedTensors) {
    return div_rn(q, level.scale);
  } else {
    return mul_rn(q, level.scale);
  }
}

// scaling.per_token_factor.
FP4KIT_HD float per_token_factor(u32 byte, const Level& level) {
  const float q = decode_e4m3(byte);
  return is_zero(q) ? 0.0f : div_rn(level.scale, q);
}

// The pair (f, g) of scaling.nvfp4_decode_factors: element = fl(fl(value * f) * g).
struct DecodeFactors {
  float first;
  float last;  // 1 unless has_last_factor
};

FP4KIT_HD constexpr bool has_last_factor(int recipe, bool second) {
  return recipe == kRecipeNvfuser && second;
}

// scaling.te_decode_factor, given 1 / range.
FP4KIT_HD float te_decode_factor_by(float q, const Level& level, float reciprocal) {
  if (level.clamped) return div_rn(q, level.scale);
  return mul_rn(mul_rn(q, level.second), reciprocal);
}

template <int kRecipe, bool kSecond, class Out>
FP4KIT_HD DecodeFactors nvfp4_decode_factors(
    u32 byte, const Level& level, float reciprocal = kReciprocalRange) {
  const float q = decode_fp8<E4m3>(byte);
  if constexpr (!kSecond) {
    return {q, 1.0f};
  } else if constexpr (kRecipe == kRecipeTe) {
    return {te_decode_factor_by(q, level, reciprocal), 1.0f};
  } else if constexpr (kRecipe == kRecipeNvfuser) {
    return {q, level.inverse};
  } else if constexpr (recipe_rounds_factor(kRecipe)) {
    return {round_to<Out>(mul_rn(round_to<Out>(level.scale), q)), 1.0f};
  } else if constexpr (recipe_direction(kRecipe) == kDirectionEncode) {
    return {div_rn(q, level.scale), 1.0f};
  } else {
    return {mul_rn(level.scale, q), 1.0f};
  }
}

// ---- MX ----

template <class E>
FP4KIT_HD u32 mx_block_scale(float amax, int rule) {
  constexpr u32 kMantissaMask = (1u << kF32MantissaBits) - 1u;
  if (rule == kRuleRceil) {
    constexpr float kReciprocalMax = 1.0f / E::kMax;
    const u32 bits = as_bits(mul_rn(amax, kReciprocalMax));
    if (bits >= kInfBits) return bits == kInfBits ? 2 * kE8m0Bias : kE8m0Nan;
    const u32 exponent = bits >> kF32MantissaBits;
    const u32 mantissa = bits & kMantissaMask;
    const bool up = mantissa != 0 && exponent != 2 * kE8m0Bias &&
                    !(exponent == 0 && mantissa <= kTwoToMinus127);
    return exponent + (up ? 1u : 0u);
  }
  u32 bits = as_bits(amax);
  // Half a unit of the element's last mantissa bit carries into the exponent when it must.
  if (rule == kRuleEven) bits += 1u << (kF32MantissaBits - E::kMantissaBits - 1);
  int exponent = static_cast<int>(bits >> kF32MantissaBits) - E::kMaxExponent;
  if (rule == kRuleCeil) exponent += (bits & kMantissaMask) != 0 ? 1 : 0;
  if (exponent < 0) return 0;
  return min_u32(static_cast<u32>(exponent), 2 * kE8m0Bias);
}

// ---- One name for both kinds of format ----

template <class Format, class T, int kRecipe, bool kSecond>
FP4KIT_HD u32 block_scale_byte(float amax, const Level& level, int rule) {
  if constexpr (Format::kIsMx) {
    return mx_block_scale<typename Format::Element>(amax, rule);
  } else {
    return nvfp4_block_scale<kRecipe, kSecond, T>(amax, level);
  }
}

template <class Format, int kRecipe, bool kSecond>
FP4KIT_HD float element_factor(u32 byte, const Level& level) {
  if constexpr (Format::kIsMx) {
    return inverse_e8m0(byte);
  } else {
    return nvfp4_element_factor<kRecipe, kSecond>(byte, level);
  }
}

template <class Format, int kRecipe, bool kSecond, class Out>
FP4KIT_HD DecodeFactors decode_factors(
    u32 byte, const Level& level, float reciprocal = kReciprocalRange) {
  if constexpr (Format::kIsMx) {
    return {decode_e8m0(byte), 1.0f};
  } else {
    return nvfp4_decode_factors<kRecipe, kSecond, Out>(byte, level, reciprocal);
  }
}

}  // namespace fp4kit
