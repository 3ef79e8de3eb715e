// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Two levels of column sums, of one tile of 1024 rows and 128 bytes of each:
//   1. a thread adds up 32 consecutive rows, in order, of the columns in a piece of 16 bytes; the
//      eight threads side by side read whole lines
//   2. the 32 sums of each column go through shared memory, and one thread adds them up in order
// Tiles of fewer rows can be as much wider: then there are more threads side by side.
// Sums begin with -0.0, to which adding a value gives that value, whatever it is: rows and groups
// that do not exist need no case of their own in step 2.
#pragma once

#include "activation/activations.cuh"
#include "reduce/amax.cuh"

namespace fp4kit {

constexpr int kSumRows = 32;  // activations.SUM_ROWS
constexpr int kSumThreads = kThreads / kSumRows;
static_assert(kSumThreads == 8, "a tile is 32 groups of rows, 128 bytes wide");

template <class T>
constexpr int sum_columns() {
  return kSumThreads * Vec<T>::kCount;
}

// Rows in flight of a thread: few where it has much to compute.
template <int kFunction, bool kVector>
constexpr int sum_batch() {
  return kVector && kFunction == kNoFunction ? 8 : 2;
}

// What step 1 leaves, of kEach columns a thread and `lanes` threads side by side, laid out against
// bank conflicts.
template <int kEach>
struct PartialSums {
  static constexpr int kColumns = kSumThreads * kEach;
  float word[kThreads * (kEach + 1)];

  FP4KIT_DEVICE void put(int group, int lane, int i, float value, int lanes = kSumThreads) {
    word[(group * (kEach + 1) + i) * lanes + lane] = value;
  }
  FP4KIT_DEVICE float get(int group, int column, int lanes) const {
    return word[(group * (kEach + 1) + column % kEach) * lanes + column / kEach];
  }

  FP4KIT_DEVICE float sum(int column, int lanes = kSumThreads) const {
    float total = -0.0f;
#pragma unroll
    for (int g = 0; g < kThreads / lanes; ++g) total = add_rn(total, get(g, column, lanes));
    return as_float(to_output_bits<F32>(total));
  }
};

// The tile that begins at row 1024 * down and at column first_col, `lanes` vecs wide (more than 8
// only for few rows). With a function, `out` (rows, cols) gets its rounded results, and they are
// what is summed, and measured if `measured` is not null. sums is (ceil(rows / 1024), cols), or
// null.
template <class T, int kFunction, bool kVector>
FP4KIT_DEVICE void sum_tile(PartialSums<Vec<T>::kCount>& partial,
    const typename T::Bits* __restrict__ gate, const typename T::Bits* __restrict__ factor,
    typename T::Bits* __restrict__ out, float* __restrict__ sums, u32* __restrict__ measured,
    u32* __restrict__ nonfinite, i64 rows, i64 cols, i64 pitch, i64 down, i64 first_col,
    int lanes = kSumThreads) {
  constexpr int kVec = Vec<T>::kCount;
  constexpr int kBatch = sum_batch<kFunction, kVector>();
  static_assert(kVector || kFunction == kNoFunction, "functions are for whole vecs");
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  const int group = static_cast<int>(threadIdx.x) / lanes;
  const i64 col = first_col + lane * kVec;
  const i64 row = (down * kSumRows + group) * kSumRows;
  const i64 valid = cols - col;
  const int count = static_cast<int>(rows - row < kSumRows ? rows - row : kSumRows);

  Scan<T> scan;
  float total[kVec];
#pragma unroll
  for (int i = 0; i < kVec; ++i) total[i] = -0.0f;
#pragma unroll 1
  for (int start = 0; start < count; start += kBatch) {
    Vec<T> gates[kBatch];
    Vec<T> factors[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const i64 source = (row + start + k) * pitch + col;
      const i64 there = start + k < count ? valid : 0;
      load_elements<kVector, T>(gate + source, there, gates[k]);
      if constexpr (has_factor(kFunction)) {
        load_elements<kVector, T>(factor + source, there, factors[k]);
      }
    }
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (start + k >= count) continue;
      Vec<T> values = gates[k];
      if constexpr (kFunction != kNoFunction) {
        values = activate_all<T, kFunction>(gates[k], factors[k]);
        if (valid > 0) store_vec<T>(out + (row + start + k) * cols + col, values);
      }
      if (measured != nullptr) scan.add(values);
      if (kFunction != kNoFunction && sums == nullptr) continue;
#pragma unroll
      for (int i = 0; i < kVec; ++i) total[i] = add_rn(total[i], values.value(i));
    }
  }
  if (measured != nullptr) scan.store(measured, nonfinite);
  if (sums == nullptr) return;
  if (group < kThreads / lanes) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) partial.put(group, lane, i, total[i], lanes);
  }
  __syncthreads();
#pragma unroll
  for (int column = threadIdx.x; column < lanes * kVec; column += kThreads) {
    if (first_col + column >= cols) continue;
    sums[down * cols + first_col + column] = partial.sum(column, lanes);
  }
}

}  // namespace fp4kit
