// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Operands of a product (fp4kit/backend/matmul.py) as values without their second level: groups of
// 16 along the depth, in float32. Must equal fp4kit/reference/matmul.py: values() and levels().
//
// A source says how an operand is stored. `fetch` loads a group and its scale into registers, so
// that a caller can do other things until they arrive; `expand` makes 16 numbers of them.
#pragma once

#include "common/elements.cuh"
#include "common/group16.cuh"
#include "common/scale_layout.cuh"

namespace fp4kit {

// One 64-bit word each, as fp4kit/cuda/matmul_words.py writes them.
struct MatmulOperand {
  const void* data;   // numbers, or codes
  const void* scale;  // bytes of blocks, or float32 of 128 x 128, or none
  const float* level;
  i64 rows;
  i64 flags;
  i64 rows_per_level;

  FP4KIT_HD int layout() const { return static_cast<int>(flags & 3); }
  FP4KIT_HD bool high_first() const { return (flags >> 2 & 1) != 0; }
  FP4KIT_HD bool transposed() const { return (flags >> 3 & 1) != 0; }
  FP4KIT_HD int direction() const { return static_cast<int>(flags >> 4 & 3); }
  // Whether the data and each of its rows begin where a whole group can be loaded at once.
  FP4KIT_HD bool vector() const { return (flags >> 6 & 1) != 0; }
};

FP4KIT_HD i64 ceil_div(i64 a, i64 b) { return (a + b - 1) / b; }

// What is not a positive finite number counts as 1 (scaling.usable).
FP4KIT_HD float usable_level(float level) {
  return as_bits(level) - 1 < kMaxFiniteBits ? level : 1.0f;
}

// matmul.levels: the factor of a row's second level.
FP4KIT_HD float level_factor(const MatmulOperand& operand, i64 row) {
  if (operand.level == nullptr) return 1.0f;
  const bool shared = operand.rows_per_level >= operand.rows;
  const float level = operand.level[shared ? 0 : row / operand.rows_per_level];
  if (operand.direction() == kDirectionAmax) return level;
  const float usable = usable_level(level);
  return operand.direction() == kDirectionDecode ? usable : div_rn(1.0f, usable);
}

// Elements of the group at k that are not padding.
FP4KIT_HD int group_size(i64 depth, i64 k) {
  return depth - k < kGroupSize ? static_cast<int>(depth - k) : kGroupSize;
}

FP4KIT_HD bool is_finite(float value) { return magnitude_bits(value) < kInfBits; }

#ifdef __CUDACC__

// ---- A matrix of numbers: (rows, depth) ----

// kParts: bfloat16 numbers that a value is the sum of, cut off one after the other.
template <class T>
struct Numbers {
  static constexpr int kParts = SameType<T, Bf16>::kValue ? 1 : SameType<T, F16>::kValue ? 2 : 3;
  static constexpr bool kHasGrid = false;
  using Group = Words<T>;

  static FP4KIT_DEVICE void fetch(const MatmulOperand& x, i64 depth, i64 row, i64 k, Group& group) {
    const auto* source = static_cast<const typename T::Bits*>(x.data) + row * depth + k;
    if (x.vector()) {
      load_elements<true, T>(source, depth - k, group);
    } else {
      load_elements<false, T>(source, depth - k, group);
    }
  }

  static FP4KIT_DEVICE void expand(const MatmulOperand&, const Group& group, float (&value)[16]) {
#pragma unroll
    for (int i = 0; i < kGroupSize; ++i) value[i] = group.value(i);
  }
};

// ---- Codes ----

template <class E>
struct Codes {
  static constexpr int kWords = kGroupSize * E::kBits / 32;
  u32 word[kWords];

  // The group of (row, k); a transposed operand has the codes of a row below each other.
  FP4KIT_DEVICE void fetch(const MatmulOperand& x, i64 row_bytes, int valid, i64 row, i64 k) {
    const u8* packed = static_cast<const u8*>(x.data);
    if (x.transposed()) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) word[i] = 0;
#pragma unroll
      for (int i = 0; i < 4 * kWords; ++i) {
        if (i >= valid) continue;
        word[i / 4] |= static_cast<u32>(__ldg(packed + (k + i) * x.rows + row)) << (8 * (i % 4));
      }
      return;
    }
    packed += row * row_bytes + k * E::kBits / 8;
    if (x.vector()) {
      if constexpr (kWords == 2) {
        const uint2 vec = __ldg(reinterpret_cast<const uint2*>(packed));
        word[0] = vec.x;
        word[1] = vec.y;
      } else {
        unpack_vec(__ldg(reinterpret_cast<const uint4*>(packed)), word);
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) word[i] = 0;
#pragma unroll
    for (int i = 0; i < 4 * kWords; ++i) {
      if (i * 8 >= valid * E::kBits) continue;
      word[i / 4] |= static_cast<u32>(__ldg(packed + i)) << (8 * (i % 4));
    }
  }

  FP4KIT_DEVICE void expand(const MatmulOperand& x, float (&value)[16]) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (E::kBits == 4) {
        e2m1_decode<8>(x.high_first() ? swap_nibbles(word[i]) : word[i], value + 8 * i);
      } else {
        decode_fp8_4<E>(word[i], value + 4 * i);
      }
    }
  }
};

template <class E>
struct CodesAndScale {
  Codes<E> codes;
  float scale;
  int valid;  // elements that are not padding, up to 16

  // Padding is zero whatever its codes and its block's scale are.
  FP4KIT_DEVICE void expand(const MatmulOperand& x, float (&value)[16]) const {
    codes.expand(x, value);
#pragma unroll
    for (int i = 0; i < kGroupSize; ++i) {
      value[i] = i < valid ? mul_rn(value[i], scale) : 0.0f;
    }
  }
};

// Blocks along the depth, a scale byte for each.
template <class Format>
struct Blocks {
  static constexpr int kParts = 1;
  static constexpr bool kHasGrid = false;
  using Element = typename Format::Element;
  using Group = CodesAndScale<Element>;

  static FP4KIT_DEVICE void fetch(const MatmulOperand& x, i64 depth, i64 row, i64 k, Group& group) {
    const i64 blocks = ceil_div(depth, Format::kBlockSize);
    group.valid = group_size(depth, k);
    group.codes.fetch(x, blocks * Format::kBlockSize * Element::kBits / 8, group.valid, row, k);
    const i64 block = k / Format::kBlockSize;
    const bool linear = x.layout() == kLayoutLinear;
    const i64 stored = linear ? blocks : ceil_div(blocks, kTileCols) * kTileCols;
    const i64 place = linear && x.transposed() ? block * x.rows + row
                                               : scale_offset(x.layout(), row, block, stored);
    const u32 byte = __ldg(static_cast<const u8*>(x.scale) + place);
    group.scale = Format::kIsMx ? decode_e8m0(byte) : decode_e4m3(byte);
  }

  static FP4KIT_DEVICE void expand(const MatmulOperand& x, const Group& group, float (&value)[16]) {
    group.expand(x, value);
  }
};

// 8-bit codes under float32 scales of 128 x 128, or without any scale.
template <class E>
struct Grid {
  static constexpr int kParts = 1;
  static constexpr bool kHasGrid = true;
  static constexpr int kSide = FP4KIT_GRID_BLOCK;
  using Element = E;
  using Group = CodesAndScale<E>;

  // The scale of an element.
  static FP4KIT_DEVICE float scale_of(const MatmulOperand& x, i64 depth, i64 row, i64 k) {
    if (x.scale == nullptr) return 1.0f;
    const i64 place = x.transposed() ? k / kSide * ceil_div(x.rows, kSide) + row / kSide
                                     : row / kSide * ceil_div(depth, kSide) + k / kSide;
    return __ldg(static_cast<const float*>(x.scale) + place);
  }

  static FP4KIT_DEVICE void fetch(const MatmulOperand& x, i64 depth, i64 row, i64 k, Group& group) {
    group.valid = group_size(depth, k);
    group.codes.fetch(x, depth, group.valid, row, k);
    group.scale = scale_of(x, depth, row, k);
  }

  static FP4KIT_DEVICE void expand(const MatmulOperand& x, const Group& group, float (&value)[16]) {
    group.expand(x, value);
  }
};

#endif  // __CUDACC__

}  // namespace fp4kit
