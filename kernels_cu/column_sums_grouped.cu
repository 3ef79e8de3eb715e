// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// column_sums.cu for all members of a group at once.
//
// Memory layout: the sums of a member begin at its `row.second`. The launcher repeats with these as
// members until each has one row.
// Launch: 256 threads, one block per tile of any member, which the table counts.
#include "column_sums.cuh"
#include "members.cuh"

namespace fp4kit {

template <class T, bool kVector, class Table>
__global__ void __launch_bounds__(kThreads, 3)
    grouped_column_sums_kernel(const typename T::Bits* __restrict__ x,
                               const __grid_constant__ Table table, float* __restrict__ sums) {
  constexpr int kRows = kSumRows * kSumRows;
  __shared__ PartialSums<PieceOf<T>::kElements> partial;
  __shared__ MemberTile found;
  find_tile<kRows, sum_columns<T>()>(table, found);
  __syncthreads();
  const Member& member = found.member;
  sum_tile<T, kNoFunction, kVector>(partial, x + member.start, nullptr, nullptr,
                                    sums + member.row.second, nullptr, member.rows, member.cols,
                                    member.cols, found.row0 / kRows, found.col0);
}

}  // namespace fp4kit
