// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// dequantize of all members of a group at once, in one direction. Must equal
// ReferenceBackend.dequantize of each member.
//
// Launch: 256 threads, one block per tile of any member, which the table counts: of pieces for rows
// (dequantize/rowwise.cuh), of 128 x 64 elements for columns.
#include "dequantize/columnwise.cuh"
#include "grouped/member_output.cuh"

namespace fp4kit {

// A tile of pieces of a member, as the threads of a block share it.
struct MemberVecs {
  Member member;
  i64 base;
};

template <class Format, class Out, int kRecipe, bool kSecond, int kAccess, class Table>
__global__ void __launch_bounds__(kThreads)
    grouped_dequantize_rowwise_kernel(u8* packed, u8* block_scale, const float* second,
        typename Out::Bits* __restrict__ out, const __grid_constant__ Table table, i64 per_vector,
        i64 layout, i64 high_first, i64 range, i64 reciprocal) {
  constexpr int kCount = 16 / Out::kSize;
  __shared__ MemberVecs found;
  const i64 at = find_member(table, blockIdx.x);
  if (at >= 0) {
    const u32 number = static_cast<u32>(at);
    found = {table.member(number),
        (blockIdx.x - table.first(number)) * dequantize_tile_vecs<Format, Out, kAccess>()};
  }
  __syncthreads();
  const Member& member = found.member;
  const QuantizedView side = member_view<Format>(member.row, second, packed, block_scale,
      member.rows, member.cols, per_vector != 0, static_cast<int>(layout));
  const PlainDivide divide{(member.cols + kCount - 1) / kCount};
  const Rowwise<PlainDivide> source{side.packed, side.block_scale, side.second,
      member.rows * divide.divisor, member.cols, side.blocks, side.stored_cols, divide, side.scales,
      side.vectors_per_scale, static_cast<int>(layout), high_first != 0};
  dequantize_rowwise<Format, Out, kRecipe, kSecond, kAccess>(
      source, out + member.start, found.base, Range(range, reciprocal));
}

template <class Format, class Out, int kRecipe, bool kSecond, bool kOneLevel, class Table>
__global__ void __launch_bounds__(kThreads)
    grouped_dequantize_columnwise_kernel(u8* packed, u8* block_scale, const float* second,
        typename Out::Bits* __restrict__ out, const __grid_constant__ Table table, i64 per_vector,
        i64 layout, i64 high_first, i64 range, i64 reciprocal) {
  __shared__ MemberTile found;
  find_tile(table, found);
  __syncthreads();
  const Member& member = found.member;
  const QuantizedView side = member_view<Format>(member.col, second, packed, block_scale,
      member.cols, member.rows, per_vector != 0, static_cast<int>(layout));
  dequantize_columnwise<Format, Out, kRecipe, kSecond, kOneLevel>(side, out + member.start,
      member.rows, member.cols, found.row0, found.col0,
      {static_cast<int>(layout), high_first != 0, Range(range, reciprocal)});
}

}  // namespace fp4kit
