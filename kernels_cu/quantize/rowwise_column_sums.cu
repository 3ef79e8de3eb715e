// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// quantize rows and sum up their columns in one read, of an array or of its activation. Must equal
// reduce/column_sums.cu (which also activates) and quantize/rowwise_any.cu one after the other.
//
// Tiles are those of reduce/column_sums.cuh, 1024 rows and 128 columns: a thread takes a group of
// 16 columns through 32 rows, adds up its elements and quantizes them.
//
// Memory layout: as in quantize/rowwise.cu, whose conditions hold; rows of the input begin `pitch`
// groups apart. sums is float32 (ceil(rows / 1024), cols), as for reduce/column_sums.cu.
// Launch: 256 threads, one block per tile.
#include "quantize/rowwise.cuh"
#include "reduce/column_sums.cuh"

namespace fp4kit {

// Thread blocks per multiprocessor: a thread holds its sums and what two groups are made of.
template <class T, int kFunction>
FP4KIT_HD constexpr int sums_blocks() {
  return Words<T>::kWords * (has_factor(kFunction) ? 2 : 1) > 8 ? 2 : 3;
}

template <class Format, class T, int kRecipe, bool kSecond, int kLayout, int kFunction>
__global__ void __launch_bounds__(kThreads, sums_blocks<T, kFunction>())
    quantize_rowwise_column_sums_kernel(const typename T::Bits* __restrict__ gate,
        const typename T::Bits* __restrict__ factor, const float* __restrict__ second,
        u8* __restrict__ packed, u8* __restrict__ block_scale, float* __restrict__ sums, i64 rows,
        i64 blocks, i64 stored_rows, i64 stored_cols, i64 pitch, i64 tiles_across, i64 high_first,
        i64 rule, i64 has_padding) {
  __shared__ FactorTable table;
  __shared__ PartialSums<kGroupSize> partial;
  constexpr int kCodeBytes = 4 * Format::kGroupWords;
  const i64 groups = blocks * Format::kGroups;
  const i64 down = blockIdx.x / tiles_across;
  const i64 first_group = (blockIdx.x - down * tiles_across) * kSumThreads;
  const int row_set = threadIdx.x / kSumThreads;
  const i64 group = first_group + threadIdx.x % kSumThreads;
  const i64 first = (down * kSumRows + row_set) * kSumRows;
  const i64 count = group < groups ? rows - first : 0;
  // The threads of a warp go on together: they share the amaxes of blocks.
  const i64 together = rows - (first - threadIdx.x % 32 / kSumThreads * kSumRows);
  const int steps = static_cast<int>(together < kSumRows ? together : kSumRows);

  ActivatedGroup<T, kFunction> prefetched;
  const auto load = [&](int step) {
    prefetched.load(gate, factor, static_cast<u64>((first + step) * pitch + group),
        step < kSumRows && step < count);
  };
  load(0);
  const Level level = fill_factor_table<Format, kRecipe, kSecond>(table, second);
  float total[kGroupSize];
#pragma unroll
  for (int i = 0; i < kGroupSize; ++i) total[i] = -0.0f;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const ActivatedGroup<T, kFunction> loaded = prefetched;
    load(step + 1);
    const Words<T> elements = loaded.elements();
    u32 codes[Format::kGroupWords];
    const u32 byte = quantize_group<Format, T, kRecipe, kSecond>(
        elements, table, level, Rounding<>(), 0, static_cast<int>(rule), high_first != 0, codes);
    if (step >= count) continue;
#pragma unroll
    for (int i = 0; i < kGroupSize; ++i) total[i] = add_rn(total[i], elements.value(i));
    const i64 row = first + step;
    store_codes<true>(packed + (row * groups + group) * kCodeBytes, codes);
    if (group % Format::kGroups == 0) {
      const i64 block = group / Format::kGroups;
      block_scale[kLayout == kLayoutLinear ? row * blocks + block
                                           : scale_offset(kLayout, row, block, stored_cols)] =
          static_cast<u8>(byte);
    }
  }
#pragma unroll
  for (int i = 0; i < kGroupSize; ++i) {
    partial.put(row_set, threadIdx.x % kSumThreads, i, total[i]);
  }
  __syncthreads();

  const i64 column = first_group * kGroupSize + threadIdx.x;
  const i64 cols = groups * kGroupSize;
  if (threadIdx.x < partial.kColumns && column < cols) {
    sums[down * cols + column] = partial.sum(threadIdx.x);
  }
  if (kLayout != kLayoutLinear && has_padding) {
    clear_padding(block_scale, kLayout, rows, blocks, stored_rows, stored_cols);
  }
}

}  // namespace fp4kit
