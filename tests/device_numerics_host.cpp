// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// The kernels' headers as a host library, for tests/test_device_numerics.py: plain loops around the
// functions that the kernels call for each value or block.
#include "common/group16.cuh"
#include "common/scale_layout.cuh"
#include "residual/block.cuh"

using namespace fp4kit;

namespace {

template <class Format, class T, int kRecipe, bool kSecond>
void run_blocks(i64 blocks, const void* input, const float* second, int rule, u8* byte,
    float* factor, u32* codes, float* first, float* last, float* decoded) {
  const auto* x = static_cast<const u32*>(input);
  for (i64 b = 0; b < blocks; ++b) {
    const Level level = make_level<kRecipe, kSecond>(kSecond ? second[b] : 1.0f);
    Words<T> group[Format::kGroups];
    u32 raw[Format::kGroups];
    u32 bits = 0;
    for (int k = 0; k < Format::kGroups; ++k) {
      for (u32& word : group[k].word) word = *x++;
      bits = max_u32(bits, group_amax_bits<T>(group[k], raw[k]));
    }
    const float amax = from_input_bits<T>(bits);
    byte[b] = static_cast<u8>(block_scale_byte<Format, T, kRecipe, kSecond>(amax, level, rule));
    factor[b] = element_factor<Format, kRecipe, kSecond>(byte[b], level);
    const DecodeFactors factors = decode_factors<Format, kRecipe, kSecond, T>(byte[b], level);
    first[b] = factors.first;
    last[b] = factors.last;
    for (int k = 0; k < Format::kGroups; ++k) {
      u32 words[Format::kGroupWords];
      encode_group<Format, T, kRecipe>(group[k], raw[k], factor[b], words);
      for (const u32 word : words) *codes++ = word;
      Words<T> packed;
      decode_words<Format, kRecipe, kSecond>(
          words, make_decoder<Format, T, kRecipe, kSecond>(byte[b], level), packed);
      for (int i = 0; i < kGroupSize; ++i) *decoded++ = from_input_bits<T>(packed.bits(i));
    }
  }
}

// Given codes and scale bytes, a second-level value for each block: as in dequantize/rowwise.cu.
template <class Format, class T, int kRecipe, bool kSecond>
void decode_blocks(
    i64 blocks, const float* second, const u8* byte, const u32* codes, typename T::Bits* out) {
  constexpr int kCount = 16 / T::kSize;
  for (i64 b = 0; b < blocks; ++b) {
    const Level level = make_level<kRecipe, kSecond>(kSecond ? second[b] : 1.0f);
    const auto decoder = make_decoder<Format, T, kRecipe, kSecond>(byte[b], level);
    for (int i = 0; i < Format::kBlockSize; i += kCount) {
      const int bit = i * Format::Element::kBits;
      u32 words[code_words<Format, kCount>()];
      for (int k = 0; k < code_words<Format, kCount>(); ++k) {
        words[k] = codes[bit / 32 + k] >> (bit % 32);
      }
      Words<T, kCount> result;
      decode_words<Format, kRecipe, kSecond>(words, decoder, result);
      for (int k = 0; k < kCount; ++k) *out++ = static_cast<typename T::Bits>(result.bits(k));
    }
    codes += Format::kBlockSize * Format::Element::kBits / 32;
  }
}

struct RunBlocks {
  template <class Format, class T, int kRecipe, bool kSecond, class... Args>
  static void call(Args... args) {
    run_blocks<Format, T, kRecipe, kSecond>(args...);
  }
};

struct DecodeBlocks {
  template <class Format, class T, int kRecipe, bool kSecond>
  static void call(i64 blocks, const float* second, const u8* byte, const u32* codes, void* out) {
    decode_blocks<Format, T, kRecipe, kSecond>(
        blocks, second, byte, codes, static_cast<typename T::Bits*>(out));
  }
};

template <class Function, class T, class... Args>
int dispatch(int format, int recipe, int second, Args... args) {
  if (format == 1) return Function::template call<Mxfp4, T, kRecipeNone, false>(args...), 0;
  if (format == 2) return Function::template call<Mxfp8, T, kRecipeNone, false>(args...), 0;
  if (format == 3) return Function::template call<Mxfp8E5m2, T, kRecipeNone, false>(args...), 0;
#define CASE(kRecipe, kSecond)                \
  if (recipe == kRecipe && second == kSecond) \
  return Function::template call<Nvfp4, T, kRecipe, kSecond>(args...), 0
  CASE(kRecipeTe, 1);
  CASE(kRecipeNvfuser, 1);
  CASE(kRecipeNvfuser, 0);
  CASE(kRecipeTorchao, 1);
  CASE(kRecipeTorchao, 0);
  CASE(kRecipeModelopt, 1);
  CASE(kRecipeCompressedTensors, 1);
  CASE(kRecipeComfy, 1);
#undef CASE
  return 1;
}

template <class Function, class... Args>
int dispatch_type(int dtype, Args... args) {
  if (dtype == 0) return dispatch<Function, F32>(args...);
  if (dtype == 1) return dispatch<Function, F16>(args...);
  return dispatch<Function, Bf16>(args...);
}

}  // namespace

extern "C" {

int run(int dtype, int format, int recipe, int has_second, i64 blocks, const void* x,
    const float* second, int rule, u8* byte, float* factor, u32* codes, float* first, float* last,
    float* decoded) {
  return dispatch_type<RunBlocks>(dtype, format, recipe, has_second, blocks, x, second, rule, byte,
      factor, codes, first, last, decoded);
}

int decode_given(int dtype, int format, int recipe, int has_second, i64 blocks, const float* second,
    const u8* byte, const u32* codes, void* out) {
  return dispatch_type<DecodeBlocks>(
      dtype, format, recipe, has_second, blocks, second, byte, codes, out);
}

// which: 0 e2m1, 1 e4m3, 2 e5m2
void encode(int which, i64 count, const float* value, u8* code) {
  for (i64 i = 0; i < count; ++i) {
    if (which == 1) code[i] = static_cast<u8>(encode_fp8<E4m3>(value[i]));
    if (which == 2) code[i] = static_cast<u8>(encode_fp8<E5m2>(value[i]));
    if (which == 0) {
      Words<F32> x{};
      x.word[i % kGroupSize] = as_bits(value[i]);
      u32 words[2];
      encode_group<Nvfp4, F32, kRecipeTe>(x, magnitude_bits(value[i]), 1.0f, words);
      const int at = static_cast<int>(i % kGroupSize);
      code[i] = (words[at / 8] >> (4 * (at % 8))) & 15;
    }
  }
}

// which: 0 e2m1, 1 e4m3, 2 e5m2, 3 e8m0, 4 2^(127 - e8m0)
void decode(int which, float* value) {
  for (u32 code = 0; code < 256; ++code) {
    float four[4];
    if (which == 0) {
      e2m1_decode<4>(code % 16 * 0x1111u, four);
      value[code] = four[code % 4];
    }
    if (which == 1) value[code] = decode_fp8<E4m3>(code);
    if (which == 2) {
      decode_fp8_4<E5m2>(code * 0x01010101u, four);
      value[code] = four[code % 4];
    }
    if (which == 3) value[code] = decode_e8m0(code);
    if (which == 4) value[code] = inverse_e8m0(code);
  }
}

// which: 0 e4m3, 1 e5m2
void words_with_nan(int which, i64 count, const u32* word, u8* found) {
  for (i64 i = 0; i < count; ++i) {
    found[i] = which == 0 ? has_fp8_nan<E4m3>(word[i]) : has_fp8_nan<E5m2>(word[i]);
  }
}

void half_to_floats(i64 count, const u16* bits, float* value) {
  for (i64 i = 0; i < count; ++i) value[i] = half_to_float(bits[i]);
}

void floats_to_16(int bfloat16, i64 count, const float* value, u16* bits) {
  for (i64 i = 0; i < count; ++i) {
    bits[i] = static_cast<u16>(bfloat16 ? float_to_bfloat16(value[i]) : float_to_half(value[i]));
  }
}

void block_scales_mx(int element, int rule, i64 count, const float* amax, u8* byte) {
  for (i64 i = 0; i < count; ++i) {
    const u32 result = element == 0   ? mx_block_scale<E2m1>(amax[i], rule)
                       : element == 1 ? mx_block_scale<E4m3>(amax[i], rule)
                                      : mx_block_scale<E5m2>(amax[i], rule);
    byte[i] = static_cast<u8>(result);
  }
}

void second_levels(int dtype, int recipe, i64 count, const float* amax, float* out) {
  for (i64 i = 0; i < count; ++i) {
    out[i] = dtype == 0   ? second_level_from_amax<F32>(amax[i], recipe)
             : dtype == 1 ? second_level_from_amax<F16>(amax[i], recipe)
                          : second_level_from_amax<Bf16>(amax[i], recipe);
  }
}

void convert_levels(int source, int target, i64 count, const float* value, float* out) {
  for (i64 i = 0; i < count; ++i) out[i] = convert_second_level(value[i], source, target);
}

void scale_offsets(int layout, i64 rows, i64 cols, i64 stored_cols, i64* out) {
  for (i64 i = 0; i < rows; ++i) {
    for (i64 j = 0; j < cols; ++j) *out++ = scale_offset(layout, i, j, stored_cols);
  }
}

i64 divide(i64 n, i64 divisor, i64 magic, i64 shift) {
  return FastDivide(divisor, magic, shift)(n);
}

int recipe_flags(int recipe) {
  return recipe_divides(recipe) + 2 * recipe_keeps_negative_zero(recipe) +
         4 * recipe_decodes_negative_zero(recipe) + 8 * recipe_rounds_factor(recipe) +
         16 * recipe_direction(recipe);
}

// Positive floats from `first` on whose quotient by 6 is not the rounded one.
i64 wrong_quotients(u32 first, u32 count) {
  i64 wrong = 0;
  for (u32 bits = first; bits < first + count; ++bits) {
    wrong += as_bits(amax_by_six(as_float(bits))) != as_bits(as_float(bits) / kE2m1Max);
  }
  return wrong;
}

}  // extern "C"
