// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// quantize rows: elements to codes and block scales, for any matrix. Must equal
// ReferenceBackend.quantize.
//
// For each block: load 16 elements a thread (the two of a 32-block share their maximum by a
// shuffle), block amax as an integer maximum of magnitude bits, scale byte under the recipe or MX
// rule, factor, codes, 8 bytes (FP4) or 16 (FP8) a thread.
//
// Memory layout: x is (rows, cols), packed (rows, blocks * block bytes) with whole blocks (elements
// past cols count as +0.0), block_scale is stored_rows x stored_cols in the order of `layout`. The
// grid covers the stored scales, so that padding bytes are written, as 0, by the same launch.
// Launch: 256 threads, ceil(groups / (256 * unroll)) blocks, groups = stored scales * block / 16.
// second holds `scales` float32 values as the recipe keeps them, read here and never on the host.
#include "common/group16.cuh"
#include "common/scale_layout.cuh"

namespace fp4kit {

// Groups in flight per thread; the path without vector accesses is for rare pointers.
template <class T, bool kVector>
FP4KIT_HD constexpr int quantize_unroll() {
  if (!kVector) return 1;
  return T::kSize == 4 ? FP4KIT_QUANTIZE_UNROLL_4 : FP4KIT_QUANTIZE_UNROLL_2;
}

template <class Format, class T, int kRecipe, bool kSecond, bool kVector>
__global__ void __launch_bounds__(kThreads)
    quantize_rowwise_any_kernel(const typename T::Bits* __restrict__ x,
        const float* __restrict__ second, u8* __restrict__ packed, u8* __restrict__ block_scale,
        i64 rows, i64 cols, i64 blocks, i64 stored_cols, i64 groups, i64 magic, i64 shift,
        i64 scales, i64 rows_per_scale, i64 layout, i64 high_first, i64 rule) {
  constexpr int kUnroll = quantize_unroll<T, kVector>();
  constexpr int kCodeBytes = 4 * Format::kGroupWords;
  const FastDivide divide(stored_cols, magic, shift);
  const i64 first = static_cast<i64>(blockIdx.x) * (kThreads * kUnroll) + threadIdx.x;

  Words<T> elements[kUnroll];
  i64 row[kUnroll];
  i64 block[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const i64 group = first + u * kThreads;
    const i64 scale = group / Format::kGroups;
    row[u] = divide(scale);
    block[u] = scale - row[u] * stored_cols;
    const i64 col = block[u] * Format::kBlockSize + group % Format::kGroups * kGroupSize;
    const i64 valid = row[u] < rows ? cols - col : 0;
    load_elements<kVector, T>(x + row[u] * cols + col, valid, elements[u]);
  }

  const Levels<kRecipe, kSecond> levels{second, scales, rows_per_scale};
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const i64 group = first + u * kThreads;
    const bool inside = row[u] < rows && block[u] < blocks;
    u32 raw;
    const float amax = block_amax<Format, T>(elements[u], raw);
    if (group >= groups) continue;
    u32 byte = 0;
    if (inside) {
      const Level level = levels.at(row[u]);
      byte = block_scale_byte<Format, T, kRecipe, kSecond>(amax, level, static_cast<int>(rule));
      const float factor = element_factor<Format, kRecipe, kSecond>(byte, level);
      u32 codes[Format::kGroupWords];
      encode_group<Format, T, kRecipe>(elements[u], raw, factor, codes);
      order_nibbles<Format>(codes, high_first != 0);
      const i64 piece = (row[u] * blocks + block[u]) * Format::kGroups + group % Format::kGroups;
      store_codes<kVector>(packed + piece * kCodeBytes, codes);
    }
    if (group % Format::kGroups == 0) {
      block_scale[scale_offset(static_cast<int>(layout), row[u], block[u], stored_cols)] =
          static_cast<u8>(byte);
    }
  }
}

}  // namespace fp4kit
