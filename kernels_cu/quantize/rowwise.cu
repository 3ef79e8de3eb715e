// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// quantize rows, the fast path: whole blocks, 16-byte alignment, at most one second-level value,
// fewer than 2^31 groups of 16. The bytes are those of quantize/rowwise_any.cu, which serves
// everything else; rounded stochastically, those of tiles/quantize_tiles.cu.
//
//   quantize_rowwise_kernel            a matrix, perhaps rounded stochastically
//   quantize_rowwise_activated_kernel  its activation, whose elements never reach memory
//   grouped_quantize_rowwise_kernel    the members of a group, or their activations; linear scales
//
// Blocks are one flat sequence, so that a linear layout needs no rows and columns, under a
// persistent grid-stride loop. In a swizzled layout the padding is written 0 by a second, short
// loop. gate and factor are what activation/activate.cu takes: for swiglu the halves of rows of
// twice the length.
//
// Launch: 256 threads; at most as many blocks as the device holds at once.
#include "common/members.cuh"
#include "quantize/rowwise.cuh"

namespace fp4kit {

template <class Format, class T, int kRecipe, bool kSecond, int kLayout, class... SeedWords>
__global__ void __launch_bounds__(kThreads, rowwise_blocks<T>())
    quantize_rowwise_kernel(const typename T::Bits* __restrict__ x,
        const float* __restrict__ second, u8* __restrict__ packed, u8* __restrict__ block_scale,
        SeedWords... seed, i64 groups, i64 rows, i64 blocks, i64 stored_rows, i64 stored_cols,
        i64 magic, i64 shift, i64 high_first, i64 rule, i64 has_padding) {
  __shared__ FactorTable table;
  const RowShape shape(blocks, magic, shift, stored_cols);
  const auto no_row = [](u32) { return 0u; };
  quantize_groups<Format, kRecipe, kSecond, kLayout>(
      GroupSource<T, kNoFunction, decltype(no_row)>{x, nullptr, 0, 0, no_row}, packed, block_scale,
      second, table, Rounding<SeedWords...>{seed...}, blockIdx.x * kThreads,
      static_cast<u32>(groups), gridDim.x * kThreads, shape, static_cast<int>(rule),
      high_first != 0);
  if (kLayout != kLayoutLinear && has_padding) {
    clear_padding(block_scale, kLayout, rows, blocks, stored_rows, stored_cols);
  }
}

template <class Format, class T, int kRecipe, bool kSecond, int kLayout, int kFunction>
__global__ void __launch_bounds__(kThreads, activated_blocks<T, kFunction>())
    quantize_rowwise_activated_kernel(const typename T::Bits* __restrict__ gate,
        const typename T::Bits* __restrict__ factor, const float* __restrict__ second,
        u8* __restrict__ packed, u8* __restrict__ block_scale, i64 groups, i64 rows, i64 blocks,
        i64 stored_rows, i64 stored_cols, i64 magic, i64 shift, i64 high_first, i64 rule,
        i64 has_padding) {
  __shared__ FactorTable table;
  const RowShape shape(blocks, magic, shift, stored_cols);
  const auto row_of = [&](u32 group) { return shape.row_of(group / Format::kGroups); };
  const GroupSource<T, kFunction, decltype(row_of)> source{
      gate, factor, shape.blocks * Format::kGroups, 0, row_of};
  quantize_groups<Format, kRecipe, kSecond, kLayout>(source, packed, block_scale, second, table,
      Rounding<>(), blockIdx.x * kThreads, static_cast<u32>(groups), gridDim.x * kThreads, shape,
      static_cast<int>(rule), high_first != 0);
  if (kLayout != kLayoutLinear && has_padding) {
    clear_padding(block_scale, kLayout, rows, blocks, stored_rows, stored_cols);
  }
}

template <class T, int kFunction>
FP4KIT_HD constexpr int grouped_blocks() {
  return kFunction == kNoFunction ? rowwise_blocks<T>() : activated_blocks<T, kFunction>();
}

// All members are one sequence, of which each thread block takes one stretch, mostly within one
// member, whose table it fills once. For swiglu there is no factor, and the input of a member
// begins at twice its place in the table.
template <class Format, class T, int kRecipe, bool kSecond, int kFunction, class Table>
__global__ void __launch_bounds__(kThreads, grouped_blocks<T, kFunction>())
    grouped_quantize_rowwise_kernel(const typename T::Bits* __restrict__ gates,
        const typename T::Bits* __restrict__ factors, const float* __restrict__ second,
        u8* __restrict__ packed, u8* __restrict__ block_scale, const __grid_constant__ Table table,
        i64 stretch, i64 high_first, i64 rule) {
  __shared__ FactorTable factor_table;
  for_members(table, stretch, [&](const Member& member, i64 first_round, i64 end_round) {
    const i64 first = first_round * kThreads;
    const i64 groups = member.rows * member.cols / kGroupSize;
    const i64 end = end_round * kThreads < groups ? end_round * kThreads : groups;
    const u32 row_groups = static_cast<u32>(member.cols / kGroupSize);
    i64 start = member.start + first * kGroupSize;
    u32 offset = 0;
    if constexpr (kFunction == kSwiglu) {
      const i64 row = first / row_groups;
      offset = static_cast<u32>(first - row * row_groups);
      start = 2 * (member.start + row * member.cols);
    }
    const auto row_of = [&](u32 group) { return group / row_groups; };
    const GroupSource<T, kFunction, decltype(row_of)> source{gates + start,
        kFunction == kSwiglu ? gates + start + member.cols : factors + start, row_groups, offset,
        row_of};
    // Groups are counted from the first: their shape is not asked for.
    quantize_groups<Format, kRecipe, kSecond, kLayoutLinear>(source,
        packed + member.row.packed + first * (4 * Format::kGroupWords),
        block_scale + member.row.block_scale + first / Format::kGroups, second + member.row.second,
        factor_table, Rounding<>(), 0, static_cast<u32>(end - first), kThreads,
        RowShape(0, 0, 0, 0), static_cast<int>(rule), high_first != 0);
  });
}

}  // namespace fp4kit
