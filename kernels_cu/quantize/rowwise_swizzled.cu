// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// quantize into swizzled_128x4 scales, the fast path of 16-element blocks: as quantize/rowwise.cu,
// and whole tiles across (a multiple of four blocks in a row).
//
// Launch: 256 threads, at most rowwise_blocks() blocks per multiprocessor.
#include "quantize/rowwise_swizzled.cuh"

namespace fp4kit {

// SeedWords: as Rounding takes them.
template <class Format, class T, int kRecipe, bool kSecond, class... SeedWords>
__global__ void __launch_bounds__(kThreads, rowwise_blocks<T>())
    quantize_rowwise_swizzled_kernel(const typename T::Bits* __restrict__ x,
        const float* __restrict__ second, u8* __restrict__ packed, u8* __restrict__ block_scale,
        SeedWords... seed, i64 strips, i64 rows, i64 blocks, i64 high_first, i64 rule) {
  __shared__ FactorTable table;
  quantize_strips<Format, T, kRecipe, kSecond, FullTiles>(x, packed, block_scale, second, table,
      Rounding<SeedWords...>{seed...}, blockIdx.x * kWarps, static_cast<u32>(strips),
      gridDim.x * kWarps, static_cast<u32>(rows), static_cast<u32>(blocks), static_cast<int>(rule),
      high_first != 0);
}

}  // namespace fp4kit
