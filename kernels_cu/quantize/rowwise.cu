// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// quantize, the fast path: whole blocks, 16-byte alignment, at most one second-level value, fewer
// than 2^31 groups. The bytes are those of quantize/rowwise_any.cu, which serves everything else;
// rounded stochastically, those of tiles/quantize_tiles.cu.
//
// What makes it fast, beside what quantize/rowwise_any.cu does already:
//   1. blocks of a tensor are one flat sequence, so a linear layout needs no rows and columns
//   2. what follows from the second level is worked out once per thread block instead of once per
//      block of elements (quantize/factor_table.cuh)
//   3. a grid that just fills the device, each thread striding over groups; the elements of its
//   next
//      group are on their way while it works on one
//
// Memory layout: as in quantize/rowwise_any.cu. In a swizzled layout the padding is written 0 by a
// second, short loop (skipped where there is none).
//
// Launch: 256 threads; at most rowwise_blocks() blocks per multiprocessor.
#include "quantize/rowwise.cuh"

namespace fp4kit {

// SeedWords: as Rounding takes them.
template <class Format, class T, int kRecipe, bool kSecond, int kLayout, class... SeedWords>
__global__ void __launch_bounds__(kThreads, rowwise_blocks<T>())
    quantize_rowwise_kernel(const typename T::Bits* __restrict__ x,
        const float* __restrict__ second, u8* __restrict__ packed, u8* __restrict__ block_scale,
        SeedWords... seed, i64 groups, i64 rows, i64 blocks, i64 stored_rows, i64 stored_cols,
        i64 magic, i64 shift, i64 high_first, i64 rule, i64 has_padding) {
  __shared__ FactorTable table;
  // Groups are fewer than 2^31, so that no sum with a stride exceeds 32 bits.
  const RowShape shape{static_cast<u32>(blocks), static_cast<u32>(magic), static_cast<u32>(shift),
      static_cast<u32>(stored_cols)};
  quantize_groups<Format, kRecipe, kSecond, kLayout>(PlainSource<T>{x}, packed, block_scale, second,
      table, Rounding<SeedWords...>{seed...}, blockIdx.x * kThreads, static_cast<u32>(groups),
      gridDim.x * kThreads, shape, static_cast<int>(rule), high_first != 0);
  if (kLayout != kLayoutLinear && has_padding) {
    clear_padding(block_scale, kLayout, rows, blocks, stored_rows, stored_cols);
  }
}

}  // namespace fp4kit
