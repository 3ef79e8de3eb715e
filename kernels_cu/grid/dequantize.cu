// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// dequantize FP8 under float32 scales: the value of a code times its scale. Must equal
// fp4kit/reference/grid.py.
//
// Memory layout: as in grid/quantize.cu. Launch: 256 threads. Vectors: a thread makes kGridUnroll
// times 16 bytes of the result, 256 such pieces apart, so that a warp's stores are contiguous;
// otherwise 16 elements of a row.
#include "common/scale_layout.cuh"
#include "grid/scales.cuh"

namespace fp4kit {

// Four codes times their scales, as packed words.
template <class Out, class E, int kStep>
FP4KIT_HD void decode_under_grid(u32 codes, const float* scale, u32* words) {
  float value[4];
  decode_fp8_4<E>(codes, value);
#pragma unroll
  for (int k = 0; k < 4; ++k) value[k] = mul_rn(value[k], scale[k * kStep]);
  pack_words<Out, true>(value, words);
}

template <class Out, class E, int kSpan, bool kVector>
__global__ void __launch_bounds__(kThreads) dequantize_grid_kernel(const u8* __restrict__ packed,
    const float* __restrict__ scale, typename Out::Bits* __restrict__ out, i64 cols, i64 row_groups,
    i64 magic, i64 shift, i64 groups, i64 across, i64 row_shift) {
  using Scales = GridScales<kSpan>;
  const FastDivide divide(row_groups, magic, shift);
  if constexpr (kVector) {
    // Rows are whole groups of 16: elements lie one behind the other.
    constexpr int kQuads = 4 / Out::kSize;  // words of four codes that make 16 bytes
    constexpr int kPieces = 4 / kQuads;     // of a group of 16
    const i64 first = static_cast<i64>(blockIdx.x) * (kThreads * kGridUnroll) + threadIdx.x;
    const i64 pieces = groups * kPieces;
    const u32* source = reinterpret_cast<const u32*>(packed);
    u32 codes[kGridUnroll][kQuads] = {};
#pragma unroll
    for (int u = 0; u < kGridUnroll; ++u) {
      const i64 piece = first + u * kThreads;
      if (piece >= pieces) break;
      if constexpr (kQuads == 2) {
        const uint2 pair = __ldg(reinterpret_cast<const uint2*>(source) + piece);
        codes[u][0] = pair.x;
        codes[u][1] = pair.y;
      } else {
        codes[u][0] = __ldg(source + piece);
      }
    }
#pragma unroll
    for (int u = 0; u < kGridUnroll; ++u) {
      const i64 piece = first + u * kThreads;
      if (piece >= pieces) return;
      const i64 group = piece / kPieces;
      const i64 row = kSpan == kSpanAll ? 0 : divide(group);
      const i64 col = (group - row * row_groups) * kGroupSize;
      const Scales scales(scale, row, col, cols, across, row_shift);
      u32 words[4];
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
        const float* own = scales.value + (piece % kPieces * kQuads + i) * 4 * Scales::kStep;
        decode_under_grid<Out, E, Scales::kStep>(codes[u][i], own, words + i * Out::kSize);
      }
      reinterpret_cast<uint4*>(out)[piece] = uint4{words[0], words[1], words[2], words[3]};
    }
  } else {
    const i64 group = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
    if (group >= groups) return;
    const i64 row = divide(group);
    const i64 col = (group - row * row_groups) * kGroupSize;
    const u8* from = packed + row * cols + col;
    u32 codes[4] = {};
#pragma unroll
    for (int i = 0; i < kGroupSize; ++i) {
      if (i < cols - col) codes[i / 4] |= static_cast<u32>(__ldg(from + i)) << (8 * (i % 4));
    }
    const Scales scales(scale, row, col, cols, across, row_shift);
    Words<Out> result;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* own = scales.value + 4 * i * Scales::kStep;
      decode_under_grid<Out, E, Scales::kStep>(codes[i], own, result.word + i * Out::kSize);
    }
    store_elements<false>(out + row * cols + col, cols - col, result);
  }
}

}  // namespace fp4kit
