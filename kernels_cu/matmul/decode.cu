// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Rows of an operand as a matrix of numbers for a GEMM: codes times block scales, without the
// second level (values() of fp4kit/reference/matmul.py). Rows are `stride` elements long, a
// multiple of 8; what is behind the depth is 0.
//
// If some value is not one of the 16-bit type, *inexact becomes 1, and the caller's product is made
// anew by matmul_any_kernel.
//
// Launch: 256 threads, a group of 16 each.
#include "matmul/operands.cuh"

namespace fp4kit {

template <class Source, class Out>
__global__ void __launch_bounds__(kThreads) matmul_decode_kernel(const void* data,
    const void* scale, i64 operand_rows, i64 flags, i64 depth, i64 first, i64 rows, i64 stride,
    typename Out::Bits* __restrict__ out, u32* __restrict__ inexact) {
  const MatmulOperand operand{data, scale, nullptr, operand_rows, flags, operand_rows};
  const i64 thread = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
  // Neighbours read what lies side by side.
  const i64 inner = operand.transposed() ? rows : ceil_div(stride, kGroupSize);
  i64 outer;
  if (thread < (i64{1} << 32) && inner < (i64{1} << 32)) {  // a division of 64 bits takes longer
    outer = static_cast<u32>(thread) / static_cast<u32>(inner);
  } else {
    outer = thread / inner;
  }
  const i64 rest = thread - outer * inner;
  const i64 row = operand.transposed() ? rest : outer;
  const i64 k = (operand.transposed() ? outer : rest) * kGroupSize;
  if (row >= rows || k >= stride) return;
  float value[kGroupSize] = {};
  if (k < depth) {
    typename Source::Group group;
    Source::fetch(operand, depth, first + row, k, group);
    Source::expand(operand, group, value);
  }
  Words<Out> words;
  pack_words<Out, true>(value, words.word);
  if (Out::kSize == 2 && inexact != nullptr) {
    bool exact = true;
#pragma unroll
    for (int i = 0; i < kGroupSize; ++i) {
      const float back = words.value(i);
      exact = exact && (as_bits(back) == as_bits(value[i]) || (is_nan(back) && is_nan(value[i])));
    }
    if (!exact) *inexact = 1;
  }
  store_elements<true>(out + row * stride + k, stride - k, words);
}

}  // namespace fp4kit
