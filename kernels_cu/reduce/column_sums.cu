// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// column_sums: float32 sums over the rows, in the order of activations.column_sums; and activate
// with the sums of its rounded results, in one pass. Must equal ReferenceBackend.column_sums and
// .activate.
//
// A launch does two levels (column_sums.cuh): sums is float32 (ceil(rows / 1024), cols); the
// launcher repeats until one row is left. Rows of the input begin `pitch` elements apart. Of a
// member, `row.packed` is the element where its results begin, `row.second` where its sums do, and
// `row.block_scale` how many threads of a tile sit side by side.
//
// Launch: 256 threads, one block per tile; groups: of any member, which the table counts.
#include "common/members.cuh"
#include "reduce/column_sums.cuh"

namespace fp4kit {

template <class T, int kFunction, bool kVector>
__global__ void __launch_bounds__(kThreads, 3) column_sums_kernel(
    const typename T::Bits* __restrict__ gate, const typename T::Bits* __restrict__ factor,
    typename T::Bits* __restrict__ out, float* __restrict__ sums, u32* __restrict__ measured,
    i64 rows, i64 cols, i64 pitch, i64 tiles_across) {
  __shared__ PartialSums<Vec<T>::kCount> partial;
  const i64 down = blockIdx.x / tiles_across;
  const i64 first_col = (blockIdx.x - down * tiles_across) * sum_columns<T>();
  sum_tile<T, kFunction, kVector>(
      partial, gate, factor, out, sums, measured, measured + 1, rows, cols, pitch, down, first_col);
}

// A null `sums` or `measured` asks for none.
template <class T, int kFunction, bool kVector, class Table>
__global__ void __launch_bounds__(kThreads, 3) grouped_column_sums_kernel(
    const typename T::Bits* __restrict__ gates, const typename T::Bits* __restrict__ factors,
    const __grid_constant__ Table table, typename T::Bits* __restrict__ out,
    float* __restrict__ sums, u32* __restrict__ measured, u32* __restrict__ nonfinite) {
  constexpr int kRows = kSumRows * kSumRows;
  __shared__ PartialSums<Vec<T>::kCount> partial;
  __shared__ MemberTile found;
  const auto columns_of = [](const Member& m) { return m.row.block_scale * Vec<T>::kCount; };
  find_tile(table, found, kRows, columns_of);
  __syncthreads();
  const Member& member = found.member;
  const typename T::Bits* gate = gates + member.start;
  constexpr bool kHalves = kFunction == kSwiglu;
  sum_tile<T, kFunction, kVector>(partial, gate,
      kHalves ? gate + member.cols : factors + member.start, out + member.row.packed,
      sums == nullptr ? nullptr : sums + member.row.second,
      measured == nullptr ? nullptr : measured + member.number, nonfinite, member.rows, member.cols,
      kHalves ? 2 * member.cols : member.cols, found.row0 / kRows, found.col0,
      static_cast<int>(member.row.block_scale));
}

}  // namespace fp4kit
