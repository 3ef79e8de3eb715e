// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Two levels of column sums, of one tile of 1024 rows and 128 bytes of each:
//   1. a thread adds up 32 consecutive rows, in order, of the columns in a piece of 16 bytes; the
//      eight threads side by side read whole lines
//   2. the 32 sums of each column go through shared memory, and one thread adds them up in order
// Sums begin with -0.0, to which adding a value gives that value, whatever it is: rows and groups
// that do not exist need no case of their own in step 2.
#pragma once

#include "activations.cuh"
#include "amax.cuh"

namespace fp4kit {

constexpr int kSumRows = 32;  // activations.SUM_ROWS
constexpr int kSumLanes = kThreads / kSumRows;
static_assert(kSumLanes == 8, "a tile is 32 groups of rows, 128 bytes wide");

template <class T>
constexpr int sum_columns() {
  return kSumLanes * PieceOf<T>::kElements;
}

// Rows in flight of a thread: few where it has much to compute.
template <int kFunction, bool kVector>
constexpr int sum_batch() {
  return kVector && kFunction == kNoFunction ? 8 : 2;
}

// What step 1 leaves, of kEach columns a thread. A column's place in a row is such that neither
// side meets bank conflicts worth mentioning: neighbouring threads write neighbouring words.
template <int kEach>
struct PartialSums {
  static constexpr int kColumns = kSumLanes * kEach;
  float row[kSumRows][kColumns + kSumLanes];

  __device__ __forceinline__ void put(int group, int lane, int i, float value) {
    row[group][i * kSumLanes + lane] = value;
  }
  __device__ __forceinline__ float get(int group, int column) const {
    return row[group][column % kEach * kSumLanes + column / kEach];
  }

  // Step 2, of one column.
  __device__ __forceinline__ float sum(int column) const {
    float total = -0.0f;
#pragma unroll
    for (int g = 0; g < kSumRows; ++g) total = add_rn(total, get(g, column));
    return as_float(to_output_bits<F32>(total));
  }
};

// The tile that begins at row 1024 * down and at column first_col. With a function, `out`
// (rows, cols) gets its rounded results, and they are what is summed. What is summed is measured as
// well if `measured` is not null. Rows of the input begin `pitch` elements apart; sums is
// (ceil(rows / 1024), cols).
template <class T, int kFunction, bool kVector>
__device__ __forceinline__ void sum_tile(PartialSums<PieceOf<T>::kElements>& partial,
                                         const typename T::Bits* __restrict__ gate,
                                         const typename T::Bits* __restrict__ factor,
                                         typename T::Bits* __restrict__ out,
                                         float* __restrict__ sums, u32* __restrict__ measured,
                                         i64 rows, i64 cols, i64 pitch, i64 down, i64 first_col) {
  constexpr int kPiece = PieceOf<T>::kElements;
  constexpr int kColumns = sum_columns<T>();
  constexpr int kBatch = sum_batch<kFunction, kVector>();
  static_assert(kVector || kFunction == kNoFunction, "functions are for whole pieces");
  const int lane = threadIdx.x % kSumLanes;
  const int group = threadIdx.x / kSumLanes;
  const i64 col = first_col + lane * kPiece;
  const i64 row = (down * kSumRows + group) * kSumRows;
  const i64 valid = cols - col;
  const int count = static_cast<int>(rows - row < kSumRows ? rows - row : kSumRows);

  Scan<T> scan;
  float total[kPiece];
#pragma unroll
  for (int i = 0; i < kPiece; ++i) total[i] = -0.0f;
#pragma unroll 1
  for (int start = 0; start < count; start += kBatch) {
    Piece<T> gates[kBatch];
    Piece<T> factors[kBatch];
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
      Piece<T> values = gates[k];
      if constexpr (kFunction != kNoFunction) {
        values = activate_all<T, kFunction>(gates[k], factors[k]);
        if (valid > 0) store_piece<T>(out + (row + start + k) * cols + col, values);
      }
      if (measured != nullptr) scan.add(values);
#pragma unroll
      for (int i = 0; i < kPiece; ++i) total[i] = add_rn(total[i], values.value(i));
    }
  }
#pragma unroll
  for (int i = 0; i < kPiece; ++i) partial.put(group, lane, i, total[i]);
  __syncthreads();
  if (measured != nullptr) scan.store(measured);

  const int column = threadIdx.x;
  if (column >= kColumns || first_col + column >= cols) return;
  sums[down * cols + first_col + column] = partial.sum(column);
}

}  // namespace fp4kit
