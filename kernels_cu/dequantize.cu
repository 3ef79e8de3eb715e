// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// dequantize: codes and scales to elements. Must equal ReferenceBackend.dequantize, with every NaN
// written as the canonical positive one.
//
// Algorithm, for each piece of 16 output bytes (8 elements of 16 bits, 4 of 32):
//   1. load its codes (2, 4 or 8 bytes) and the scale byte of its block; all loads of a thread are
//      in flight before the first is used
//   2. decode factors under the recipe (recipes.cuh), values by a byte permutation or shift
//   3. one or two multiplications, one rounding to the output type
//   4. one 16-byte store: neighbouring lanes write neighbouring pieces, so every store is whole
//
// Memory layout: as in quantize.cu; a row of `out` ends at cols, within its last block.
// Launch: 256 threads, ceil(pieces / (256 * unroll)) blocks, pieces = rows * ceil(cols / piece).
#include "lane.cuh"
#include "swizzle.cuh"

namespace fp4kit {

// The code bytes of a piece, as words.
template <bool kVector, int kBytes, int kWords>
__device__ __forceinline__ void load_codes(const u8* __restrict__ packed, u32 (&word)[kWords]) {
  if constexpr (kVector && kBytes == 8) {
    const uint2 both = __ldg(reinterpret_cast<const uint2*>(packed));
    word[0] = both.x;
    word[1] = both.y;
  } else if constexpr (kVector && kBytes == 4) {
    word[0] = __ldg(reinterpret_cast<const unsigned int*>(packed));
  } else if constexpr (kVector && kBytes == 2) {
    word[0] = __ldg(reinterpret_cast<const unsigned short*>(packed));
  } else {
#pragma unroll
    for (int i = 0; i < kWords; ++i) word[i] = 0;
#pragma unroll
    for (int i = 0; i < kBytes; ++i) {
      word[i / 4] |= static_cast<u32>(__ldg(packed + i)) << (8 * (i % 4));
    }
  }
}

template <class Format, class Out, int kRecipe, bool kSecond, bool kVector>
__global__ void __launch_bounds__(kThreads)
    dequantize_kernel(const u8* __restrict__ packed, const u8* __restrict__ block_scale,
                      const float* __restrict__ second, typename Out::Bits* __restrict__ out,
                      i64 rows, i64 cols, i64 blocks, i64 stored_cols, i64 row_pieces, i64 magic,
                      i64 shift, i64 scales, i64 rows_per_scale, i64 layout, i64 high_first) {
  constexpr int kUnroll = kVector ? FP4KIT_DEQUANTIZE_UNROLL : 1;
  constexpr int kCount = 16 / Out::kSize;
  constexpr int kWords = code_words<Format, kCount>();
  constexpr int kBytes = kCount * Format::Element::kBits / 8;
  const FastDivide divide{row_pieces, static_cast<u32>(magic), static_cast<u32>(shift)};
  const i64 first = static_cast<i64>(blockIdx.x) * (kThreads * kUnroll) + threadIdx.x;
  const i64 packed_cols = blocks * (Format::kBlockSize * Format::Element::kBits / 8);

  u32 codes[kUnroll][kWords];
  u32 byte[kUnroll];
  i64 row[kUnroll];
  i64 col[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const i64 piece = first + u * kThreads;
    row[u] = divide(piece);
    const i64 chunk = piece - row[u] * row_pieces;
    col[u] = chunk * kCount;
    byte[u] = 0;
    if (row[u] < rows) {
      load_codes<kVector, kBytes>(packed + row[u] * packed_cols + chunk * kBytes, codes[u]);
      const i64 block = col[u] / Format::kBlockSize;
      byte[u] =
          __ldg(block_scale + scale_offset(static_cast<int>(layout), row[u], block, stored_cols));
    }
  }

  const Levels<kRecipe, kSecond> levels(second, scales, rows_per_scale);
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (row[u] >= rows) continue;
    if (Format::kIsFp4 && high_first) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) codes[u][i] = swap_nibbles(codes[u][i]);
    }
    const DecodeFactors factors =
        decode_factors<Format, kRecipe, kSecond, Out>(byte[u], levels.at(row[u]));
    float values[kCount];
    const bool special = decode_lane<Format, kRecipe, kSecond, kCount>(codes[u], factors, values);
    Words<Out, kCount> result;
    pack_outputs<Out>(values, special, result);
    store_elements<kVector, Out>(out + row[u] * cols + col[u], cols - col[u], result);
  }
}

}  // namespace fp4kit
