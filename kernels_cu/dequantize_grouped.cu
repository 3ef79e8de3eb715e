// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// dequantize of all members of a group at once, in one direction. Must equal
// ReferenceBackend.dequantize of each member.
//
// Launch: 256 threads, one block per tile of any member; `first` counts their tiles.
#include "dequantize_tile.cuh"
#include "member_side.cuh"

namespace fp4kit {

template <class Format, class Out, int kRecipe, bool kSecond, bool kColumns>
__global__ void __launch_bounds__(kThreads)
    dequantize_grouped_kernel(u8* packed, u8* block_scale, const float* second,
                              typename Out::Bits* __restrict__ out, const i64* __restrict__ first,
                              const Member* __restrict__ members, i64 count, i64 per_vector,
                              i64 layout, i64 high_first, i64 range) {
  __shared__ Tile<Out> tile;
  __shared__ MemberTile found;
  find_tile(first, members, count, found);
  __syncthreads();
  const Member& member = found.member;
  const Side side =
      side_of<Format>(kColumns ? member.col : member.row, second, packed, block_scale,
                      kColumns ? member.cols : member.rows, kColumns ? member.rows : member.cols,
                      per_vector != 0, static_cast<int>(layout));
  dequantize_tile<Format, Out, kRecipe, kSecond, kColumns>(
      tile, side, out + member.start, member.rows, member.cols, found.row0, found.col0,
      static_cast<int>(layout), high_first != 0, static_cast<float>(range));
}

}  // namespace fp4kit
