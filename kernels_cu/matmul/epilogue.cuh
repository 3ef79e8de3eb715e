// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// What follows the sums of a product: reference.matmul.factors and the rest of its matmul, in
// float32, rounded once.
#pragma once

#include "common/async_copy.cuh"
#include "common/conversions.cuh"

namespace fp4kit {

#ifdef __CUDACC__

// Element types as numbers: cuda/matmul_small.py has the same order.
constexpr int kTypeF32 = 0, kTypeF16 = 1, kTypeBf16 = 2;

// Second-level values, one for so many consecutive rows; or none.
struct Levels {
  const float* values;
  u32 rows_per_value;
  int direction;

  // Whether all of so many rows have one factor.
  FP4KIT_DEVICE bool is_one(i64 rows) const { return values == nullptr || rows_per_value >= rows; }

  FP4KIT_DEVICE float load(u32 row) const {
    return values == nullptr ? 0.0f
                             : __ldg(values + (rows_per_value == 1 ? row : row / rows_per_value));
  }

  // A factor times that of a row, whose value `load` has found.
  FP4KIT_DEVICE float times(float factor, float value) const {
    if (values == nullptr) return factor;
    if (direction != kDirectionAmax) {
      // scaling.usable: what is no positive finite number counts as 1.
      if (as_bits(value) - 1u >= kInfBits - 1u) value = 1.0f;
      if (direction == kDirectionEncode) value = div_rn(1.0f, value);
    }
    return mul_rn(factor, value);
  }
};

// Not through the read-only cache: it may be what is written.
FP4KIT_DEVICE float load_as_float(const void* values, int type, i64 place) {
  if (type == kTypeF32) return static_cast<const float*>(values)[place];
  const u32 bits = static_cast<const u16*>(values)[place];
  return type == kTypeF16 ? half_to_float(bits) : as_float(bits << 16);
}

struct Epilogue {
  void* out;
  const void* bias;
  const void* c;
  Levels of_a, of_b;
  float divisor, alpha;
  int out_type, bias_type, c_type;
  i64 cols;  // of the product: rows of b

  // What `prepare` finds out: whether results are pairs of bfloat16 to which nothing is added, and
  // whether all have one factor. Then `settle` works it out of the values that `prepare` loads.
  bool stores_pairs = false, has_one_factor = false;
  float value_a = 0.0f, value_b = 0.0f, one_factor = 1.0f;

  FP4KIT_DEVICE bool can_store_pairs() const {
    return bias == nullptr && c == nullptr && out_type == kTypeBf16 && cols % 2 == 0 &&
           reinterpret_cast<u64>(out) % sizeof(u32) == 0;
  }

  FP4KIT_DEVICE void prepare(u32 rows) {
    stores_pairs = can_store_pairs();
    has_one_factor = of_a.is_one(rows) && of_b.is_one(cols);
    // Not for uniform registers, for which the warp would wait here.
    const u32 first = kept(threadIdx.x % 32) / 32;  // 0
    value_a = of_a.load(first);
    value_b = of_b.load(first);
  }

  FP4KIT_DEVICE void settle() { one_factor = join(value_a, value_b); }

  FP4KIT_DEVICE float join(float a, float b) const {
    float result = of_b.times(of_a.times(1.0f, a), b);
    // Most divisors are 1.
    if (as_bits(divisor) != as_bits(1.0f)) result = div_rn(result, divisor);
    return mul_rn(result, alpha);
  }

  // Rows and columns are fewer than 2^32.
  FP4KIT_DEVICE float factor(u32 row, u32 col) const {
    return join(of_a.load(row), of_b.load(col));
  }

  // Stores the results of a column and the next, the first an even one, if stores_pairs.
  FP4KIT_DEVICE void store_pair(u32 row, u32 col, float first, float second) const {
    float factors[2] = {one_factor, one_factor};
    if (!has_one_factor) {
#pragma unroll
      for (u32 i = 0; i < 2; ++i) factors[i] = factor(row, col + i);
    }
    store_pair(row, col, first, second, factors);
  }
  FP4KIT_DEVICE void store_pair(
      u32 row, u32 col, float first, float second, const float (&factors)[2]) const {
    const float value[2] = {mul_rn(factors[0], first), mul_rn(factors[1], second)};
    u32 word = pack_pair<Bf16>(value[0], value[1]);
    // Its NaNs are others than ours.
    if (is_nan(add_rn(value[0], value[1]))) {
      word = to_output_bits<Bf16>(value[0]) | to_output_bits<Bf16>(value[1]) << 16;
    }
    *reinterpret_cast<u32*>(static_cast<u16*>(out) + (row * cols + col)) = word;
  }

  FP4KIT_DEVICE void store(u32 row, u32 col, float sum) const {
    store(row, col, sum, factor(row, col));
  }
  FP4KIT_DEVICE void store(u32 row, u32 col, float sum, float factor) const {
    float value = mul_rn(factor, sum);
    const i64 place = row * cols + col;
    if (bias != nullptr) value = add_rn(value, load_as_float(bias, bias_type, col));
    if (c != nullptr) value = add_rn(value, load_as_float(c, c_type, place));
    if (out_type == kTypeF32) {
      static_cast<u32*>(out)[place] = to_output_bits<F32>(value);
    } else {
      const u32 bits =
          out_type == kTypeF16 ? to_output_bits<F16>(value) : to_output_bits<Bf16>(value);
      static_cast<u16*>(out)[place] = static_cast<u16>(bits);
    }
  }
};

#endif  // __CUDACC__

}  // namespace fp4kit
