// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Residual channels: the arithmetic of a block (fp4kit/reference/residual_blocks.py), and where its
// parts lie. Symbols as there: g encode scale, y = x g, q a block's decoded scale.
#pragma once

#include "common/group16.cuh"
#include "common/scale_layout.cuh"

namespace fp4kit {

// ---- Encode ----

// No block scale is 0: residual_blocks.SCALE_MIN, the smallest E4M3 value.
constexpr u32 kSmallestScaleBits = kModeloptScaleMinBits;

// fl(amax / 6) without a division: the quotient by the rounded reciprocal, corrected by its exact
// remainder. Infinity and NaN count as FLT_MAX, whose scale saturates as well.
FP4KIT_HD float amax_by_six(float amax) {
  const float a = as_float(min_u32(as_bits(amax), kMaxFiniteBits));
  const float quotient = mul_rn(a, kReciprocalE2m1Max);
  return fma_rn(fma_rn(quotient, -kE2m1Max, a), kReciprocalE2m1Max, quotient);
}

FP4KIT_HD u32 residual_scale_byte(float amax) {
  return encode_e4m3(at_least(amax_by_six(amax), as_float(kSmallestScaleBits)));
}

// fl(1 / q), by scale byte; one for each thread to fill in.
struct ResidualFactors {
  float factor[1 << (E4m3::kBits - 1)];

  FP4KIT_HD void fill(u32 byte) { factor[byte] = div_rn(1.0f, decode_fp8<E4m3>(byte)); }
  FP4KIT_HD float operator()(u32 byte) const { return factor[byte]; }
};

// The largest magnitude of a block, NaN if there is one.
FP4KIT_HD float amax_or_nan(const float (&y)[kGroupSize]) {
  float part[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) part[i] = max_magnitude(y[i], y[i + 4]);
#pragma unroll
  for (int i = 8; i < kGroupSize; ++i) part[i % 4] = max_magnitude(part[i % 4], y[i]);
  return max_magnitude(max_magnitude(part[0], part[1]), max_magnitude(part[2], part[3]));
}

template <class T>
FP4KIT_HD float amax_or_nan(const Words<T>& x) {
  MaxBits<T> maximum;
#pragma unroll
  for (int i = 0; i < x.kWords; ++i) maximum.add(x.word[i]);
  return from_input_bits<T>(maximum.result());
}

template <bool kRounds>
FP4KIT_HD float round_if(float value) {
  return kRounds ? as_float(pack_pair<Bf16>(0.0f, value)) : value;
}

// The elements of a block, their signs as bit 3 of nibbles, and their largest magnitude or NaN.
struct BlockElements {
  float y[kGroupSize];
  u32 signs[2];
  float amax;

  FP4KIT_HD float amax_of_numbers() const {
    u32 result = 0;
#pragma unroll
    for (int i = 0; i < kGroupSize; ++i) {
      const u32 bits = magnitude_bits(y[i]);
      result = max_u32(result, bits > kInfBits ? 0 : bits);
    }
    return as_float(result);
  }
};

// y of elements as they lie in memory. g is positive, so that signs and order are those of x.
template <bool kRounds, class T>
FP4KIT_HD BlockElements scale_block(const Words<T>& x, float g) {
  BlockElements elements;
#pragma unroll
  for (int i = 0; i < kGroupSize; ++i) {
    elements.y[i] = round_if<kRounds>(mul_rn(x.value(i), g));
  }
  elements.signs[0] = sign_nibbles<T>(x.word);
  elements.signs[1] = sign_nibbles<T>(x.word + x.kWords / 2);
  elements.amax = round_if<kRounds>(mul_rn(amax_or_nan(x), g));
  return elements;
}

struct CodedBlock {
  u32 code[2];
  u32 byte;
};

template <bool kCareful>
FP4KIT_HD u32 encode_half(const float* y, u32 signs, float factor) {
  float scaled[8];
#ifdef FP4KIT_HARDWARE_E2M1
#pragma unroll
  for (int i = 0; i < 8; ++i) scaled[i] = mul_rn(y[i], factor);
  return e2m1_hardware8(scaled);
#else
#pragma unroll
  for (int i = 0; i < 8; ++i) scaled[i] = mul_magnitude_rn(y[i], factor);
  if constexpr (kCareful) {
#pragma unroll
    for (int i = 0; i < 8; ++i) signs &= is_nan(scaled[i]) ? ~(8u << (4 * i)) : ~0u;
  }
  return e2m1_magnitudes8<kCareful>(scaled) | (signs & 0x88888888u);
#endif
}

template <bool kCareful>
FP4KIT_HD void encode_under(const BlockElements& elements, float factor, CodedBlock& block) {
  block.code[0] = encode_half<kCareful>(elements.y, elements.signs[0], factor);
  block.code[1] = encode_half<kCareful>(elements.y + 8, elements.signs[1], factor);
}

// residual_blocks.encode_blocks.
template <class Factors>
FP4KIT_HD CodedBlock encode_elements(const BlockElements& elements, const Factors& factors) {
  CodedBlock block;
  block.byte = residual_scale_byte(elements.amax);
  // Infinity and NaN have given the last byte, which is not an ordinary one.
  if (is_ordinary_scale<Nvfp4>(block.byte, 0)) {
    encode_under<false>(elements, factors(block.byte), block);
  } else {
    if (is_nan(elements.amax)) block.byte = residual_scale_byte(elements.amax_of_numbers());
    encode_under<true>(elements, factors(block.byte), block);
  }
  return block;
}

// What the codes of `main` lose of y: value * q is exact, so that one fused sum rounds once.
template <bool kRounds>
FP4KIT_HD BlockElements loss_of(const BlockElements& elements, const CodedBlock& main) {
  const float minus_q = mul_rn(decode_e4m3(main.byte), -1.0f);
  BlockElements loss;
  Words<F32> bits;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float value[8];
    e2m1_decode<8>(main.code[half], value);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int k = 8 * half + i;
      loss.y[k] = round_if<kRounds>(fma_rn(value[i], minus_q, elements.y[k]));
      bits.word[k] = as_bits(loss.y[k]);
    }
    loss.signs[half] = sign_nibbles<F32>(bits.word + 8 * half);
  }
  loss.amax = amax_or_nan(loss.y);
  return loss;
}

constexpr u32 kHasExtra = 1;   // there is a residual block
constexpr u32 kCopies = 2;     // it is a copy of the main block: weight mode
constexpr u32 kEvenFirst = 4;  // both may be stored at once: interleaved, at an even place
constexpr u32 kHighFirst = 8;  // nibbles are swapped

FP4KIT_HD u32 block_tasks(bool interleaved, bool even_first, bool copies, bool high_first) {
  return (copies ? kCopies : 0) | (interleaved && even_first ? kEvenFirst : 0) |
         (high_first ? kHighFirst : 0);
}

template <bool kRounds, class Factors>
FP4KIT_HD void quantize_with_residual(const BlockElements& elements, u32 tasks,
    const Factors& factors, CodedBlock& main, CodedBlock& extra) {
  main = encode_elements(elements, factors);
  extra = main;
  if ((tasks & (kHasExtra | kCopies)) == kHasExtra) {
    extra = encode_elements(loss_of<kRounds>(elements, main), factors);
  }
  order_nibbles<Nvfp4>(main.code, (tasks & kHighFirst) != 0);
  order_nibbles<Nvfp4>(extra.code, (tasks & kHighFirst) != 0);
}

// ---- Decode ----

// Zero times infinity gives NaN.
FP4KIT_HD bool is_unusual_inverse(float inverse) { return as_bits(inverse) >= kInfBits; }

// What the codes of a block without a residual decode to: fl(fl(value q) inverse).
template <class Out>
FP4KIT_HD E2m1Table residual_table(float q, float inverse) {
  float value[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    value[i] = mul_rn(mul_rn(as_float(e2m1_float_bits(i)), q), inverse);
  }
  u32 word[4];
  pack_words<Out, true>(value, word);
  return pack_table(word);
}

// kCount elements of fl(m inverse), m = fl(value q + extra value * extra q); products are exact.
template <class Out, int kCount>
FP4KIT_HD Words<Out, kCount> decode_sum(
    const u32* codes, float q, const u32* extra_codes, float extra_q, float inverse) {
  constexpr int kEach = kCount == 4 ? 4 : 8;
  float value[kCount];
#pragma unroll
  for (int i = 0; i < kCount / kEach; ++i) {
    float extra[kEach];
    e2m1_decode<kEach>(codes[i], value + 8 * i);
    e2m1_decode<kEach>(extra_codes[i], extra);
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const float sum = fma_rn(value[8 * i + k], q, mul_rn(extra[k], extra_q));
      value[8 * i + k] = mul_rn(sum, inverse);
    }
  }
  Words<Out, kCount> out;
  pack_words<Out, false>(value, out.word);
  if (is_nan(q) || is_nan(extra_q) || is_unusual_inverse(inverse)) {
    pack_words<Out, true>(value, out.word);
  }
  return out;
}

// The same without an extra block, by a table of scale bytes where results have 16 bits.
template <class Out, int kCount>
FP4KIT_HD Words<Out, kCount> decode_alone(
    const u32* codes, u32 byte, const E2m1Table* table, float inverse) {
  Words<Out, kCount> out;
  if constexpr (Out::kSize == 2) {
    decode_words<Nvfp4, kRecipeTe, false>(codes, table[byte], out);
  } else {
    constexpr int kEach = kCount == 4 ? 4 : 8;
    const float q = decode_fp8<E4m3>(byte);
    float value[kCount];
#pragma unroll
    for (int i = 0; i < kCount / kEach; ++i) e2m1_decode<kEach>(codes[i], value + 8 * i);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      out.word[i] = to_output_bits<Out>(mul_rn(mul_rn(value[i], q), inverse));
    }
  }
  return out;
}

}  // namespace fp4kit
