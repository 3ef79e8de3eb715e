// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// dequantize FP8 under float32 scales: the value of a code times its scale. Must equal
// fp4kit/reference/grid.py.
//
// Memory layout: as in grid/quantize.cu. Launch: 256 threads; each takes kGridUnroll times 16
// elements of a row, 256 groups apart, so that enough reads are in flight.
#include "common/scale_layout.cuh"
#include "grid/scales.cuh"

namespace fp4kit {

template <class Out, class E, int kSpan, bool kVector>
__global__ void __launch_bounds__(kThreads) dequantize_grid_kernel(const u8* __restrict__ packed,
    const float* __restrict__ scale, typename Out::Bits* __restrict__ out, i64 cols, i64 row_groups,
    i64 magic, i64 shift, i64 groups, i64 across, i64 row_shift) {
  const i64 first = static_cast<i64>(blockIdx.x) * (kThreads * kGridUnroll) + threadIdx.x;
  const FastDivide divide(row_groups, magic, shift);
  u32 codes[kGridUnroll][4] = {};
#pragma unroll
  for (int u = 0; u < kGridUnroll; ++u) {
    const i64 group = first + u * kThreads;
    if (group >= groups) break;
    const i64 row = divide(group);
    const i64 col = (group - row * row_groups) * kGroupSize;
    const u8* from = packed + row * cols + col;
    if constexpr (kVector) {
      unpack_vec(__ldg(reinterpret_cast<const uint4*>(from)), codes[u]);
    } else {
#pragma unroll
      for (int i = 0; i < kGroupSize; ++i) {
        if (i < cols - col) codes[u][i / 4] |= static_cast<u32>(__ldg(from + i)) << (8 * (i % 4));
      }
    }
  }
#pragma unroll
  for (int u = 0; u < kGridUnroll; ++u) {
    const i64 group = first + u * kThreads;
    if (group >= groups) return;
    const i64 row = divide(group);
    const i64 col = (group - row * row_groups) * kGroupSize;
    const GridScales<kSpan> scales(scale, row, col, cols, across, row_shift);
    Words<Out> result;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float value[4];
      decode_fp8_4<E>(codes[u][i], value);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        value[k] = mul_rn(value[k], scales.value[(4 * i + k) * GridScales<kSpan>::kStep]);
      }
      pack_words<Out, true>(value, result.word + i * Out::kSize);
    }
    store_elements<kVector>(out + row * cols + col, cols - col, result);
  }
}

}  // namespace fp4kit
