// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// dequantize of rowwise codes. Must equal ReferenceBackend.dequantize.
//
// Launch: 256 threads, a block for each tile of 256 * unroll pieces, pieces = rows * ceil(cols /
// piece). Blocks that take several tiles would share a table, but were slower by 5 % (measured).
#include "dequantize/rowwise.cuh"

namespace fp4kit {

template <class Format, class Out, int kRecipe, bool kSecond, int kAccess>
__global__ void __launch_bounds__(kThreads)
    dequantize_rowwise_kernel(const u8* __restrict__ packed, const u8* __restrict__ block_scale,
        const float* __restrict__ second, typename Out::Bits* __restrict__ out, i64 vecs, i64 cols,
        i64 blocks, i64 stored_cols, i64 row_vecs, i64 magic, i64 shift, i64 scales,
        i64 rows_per_scale, i64 layout, i64 high_first, i64 range, i64 reciprocal) {
  const FastDivide divide{row_vecs, static_cast<u32>(magic), static_cast<u32>(shift)};
  const Rowwise<FastDivide> source{packed, block_scale, second, vecs, cols, blocks, stored_cols,
      divide, scales, rows_per_scale, static_cast<int>(layout), high_first != 0};
  const i64 base = static_cast<i64>(blockIdx.x) * dequantize_tile_vecs<Format, Out, kAccess>();
  dequantize_rowwise<Format, Out, kRecipe, kSecond, kAccess>(
      source, out, base, Range(range, reciprocal));
}

}  // namespace fp4kit
