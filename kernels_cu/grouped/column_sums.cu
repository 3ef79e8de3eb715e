// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// reduce/column_sums.cu for all members of a group at once: activated, summed and measured in one
// pass.
//
// Memory layout: of a member, `row.packed` is the element where its results begin, `row.second`
// where its sums do, and `row.block_scale` how many threads of a tile sit side by side. The
// launcher repeats with the sums as members until each has one row. Launch: 256 threads, one block
// per tile of any member, which the table counts.
#include "grouped/members.cuh"
#include "reduce/column_sums.cuh"

namespace fp4kit {

// A null pointer `sums` or `measured` asks for none; `measured` has a place for each member of the
// group.
template <class T, int kFunction, bool kVector, class Table>
__global__ void __launch_bounds__(kThreads, 3) grouped_column_sums_kernel(
    const typename T::Bits* __restrict__ gates, const typename T::Bits* __restrict__ factors,
    const __grid_constant__ Table table, typename T::Bits* __restrict__ out,
    float* __restrict__ sums, u32* __restrict__ measured, u32* __restrict__ nonfinite) {
  constexpr int kRows = kSumRows * kSumRows;
  __shared__ PartialSums<VecOf<T>::kElements> partial;
  __shared__ MemberTile found;
  const auto columns_of = [](const Member& m) { return m.row.block_scale * VecOf<T>::kElements; };
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
