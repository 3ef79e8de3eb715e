// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// What a product is, and what becomes of its sums: ((level of a * level of b) / divisor) * alpha,
// times the sum, plus the bias, plus c, one cast. Must equal fp4kit/reference/matmul.py.
#pragma once

#include "matmul/operands.cuh"

namespace fp4kit {

// One 64-bit word each, as fp4kit/cuda/matmul_words.py writes them.
struct MatmulProduct {
  MatmulOperand a, b;
  i64 depth;
  void* out;
  const void* bias;
  const void* c;       // may be out
  i64 types;           // of out, bias and c: two bits each
  i64 factors;         // bits of the divisor, and above them those of alpha
  i64 splits;          // pieces that the depth is cut into
  float* partial;      // float32 (splits, rows of a, rows of b), if there is more than one
  const u32* inexact;  // if this is given and 0, there is nothing to do

  FP4KIT_HD i64 rows() const { return a.rows; }
  FP4KIT_HD i64 cols() const { return b.rows; }
  FP4KIT_HD int type(int which) const { return static_cast<int>(types >> (2 * which) & 3); }
  FP4KIT_HD float divisor() const { return as_float(static_cast<u32>(factors)); }
  FP4KIT_HD float alpha() const { return as_float(static_cast<u32>(factors >> 32)); }
};

constexpr int kTypeOut = 0, kTypeBias = 1, kTypeC = 2;
// In the order of formats.DTYPES.
constexpr int kTypeF32 = 0, kTypeF16 = 1, kTypeBf16 = 2;

FP4KIT_HD float load_number(const void* numbers, int type, i64 index) {
  if (type == kTypeF32) return static_cast<const float*>(numbers)[index];
  const u32 bits = static_cast<const u16*>(numbers)[index];
  return type == kTypeF16 ? from_input_bits<F16>(bits) : from_input_bits<Bf16>(bits);
}

FP4KIT_HD void store_number(void* numbers, int type, i64 index, float value) {
  if (type == kTypeF32) {
    static_cast<u32*>(numbers)[index] = to_output_bits<F32>(value);
  } else {
    const u32 bits = type == kTypeF16 ? to_output_bits<F16>(value) : to_output_bits<Bf16>(value);
    static_cast<u16*>(numbers)[index] = static_cast<u16>(bits);
  }
}

// matmul.factors of an element.
FP4KIT_HD float product_factor(const MatmulProduct& product, i64 row, i64 col) {
  float factor = mul_rn(level_factor(product.a, row), level_factor(product.b, col));
  // Most divisors are 1, and a division is a subroutine.
  const float divisor = product.divisor();
  if (as_bits(divisor) != as_bits(1.0f)) factor = div_rn(factor, divisor);
  return mul_rn(factor, product.alpha());
}

// Stores an element of the product.
FP4KIT_HD void finish_element(const MatmulProduct& product, i64 row, i64 col, float sum) {
  float result = mul_rn(product_factor(product, row, col), sum);
  const i64 index = row * product.cols() + col;
  if (product.bias != nullptr) {
    result = add_rn(result, load_number(product.bias, product.type(kTypeBias), col));
  }
  if (product.c != nullptr) {
    result = add_rn(result, load_number(product.c, product.type(kTypeC), index));
  }
  store_number(product.out, product.type(kTypeOut), index, result);
}

#ifdef __CUDACC__

// Products of one launch, a parameter of the kernel: nothing is copied before it, and graphs hold
// it. `begins`: the first thread block of each, and the end. Must be declared __grid_constant__.
template <int kMost>
struct MatmulProducts {
  i64 count;
  i64 begins[kMost + 1];
  MatmulProduct products[kMost];

  // The product of a thread block. All threads must call this.
  FP4KIT_DEVICE int find(i64 block) const {
    if (count == 1) return 0;
    static_assert(kMost <= kThreads, "a thread looks at one of them");
    const int at = static_cast<int>(threadIdx.x);
    return __syncthreads_count(at < count && begins[at] <= block) - 1;
  }
};

#endif  // __CUDACC__

}  // namespace fp4kit
