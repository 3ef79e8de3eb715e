// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// quantize_tiles.cu for all members of a group at once. Must equal ReferenceBackend.quantize of
// each member.
//
// Launch: 256 threads, one block per tile of any member; `first` counts their tiles. The launcher
// clears the scales if some member's are padded.
#include "member_side.cuh"
#include "quantize_tile.cuh"

namespace fp4kit {

// Thread blocks per multiprocessor that registers are limited for.
template <class C>
FP4KIT_HD constexpr int tile_blocks() {
  return 4;
}

template <class C>
__global__ void __launch_bounds__(kThreads, tile_blocks<C>())
    quantize_grouped_kernel(const typename C::T::Bits* __restrict__ x,
                            const i64* __restrict__ first, const Member* __restrict__ members,
                            i64 count, const float* row_second, u8* row_packed, u8* row_scale,
                            i64 row_per_vector, const float* col_second, u8* col_packed,
                            u8* col_scale, i64 col_per_vector, i64 layout, i64 high_first, i64 rule,
                            i64 range, i64 row_mask, i64 col_mask, i64 key, i64 stream) {
  __shared__ TileShared<C> shared;
  __shared__ MemberTile found;
  find_tile(first, members, count, found);
  __syncthreads();
  const Member& member = found.member;
  const Task<typename C::T> task{
      x + member.start,
      member.rows,
      member.cols,
      found.row0,
      found.col0,
      side_of<typename C::Format>(member.row, row_second, row_packed, row_scale, member.rows,
                                  member.cols, row_per_vector != 0, static_cast<int>(layout)),
      side_of<typename C::Format>(member.col, col_second, col_packed, col_scale, member.cols,
                                  member.rows, col_per_vector != 0, static_cast<int>(layout)),
      static_cast<u32>(stream + member.number)};
  const Options options{
      static_cast<int>(layout),  static_cast<int>(rule),     high_first != 0,
      static_cast<float>(range), static_cast<u32>(row_mask), static_cast<u32>(col_mask),
      static_cast<u64>(key)};
  quantize_tile<C>(shared, task, options);
}

}  // namespace fp4kit
