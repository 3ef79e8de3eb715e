// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// quantize_flat.cu and quantize_tiled.cu for all members of a group at once: rowwise without a
// variant, whole, aligned blocks and one second-level value a member. The bytes are those of
// quantize_grouped.cu, which serves everything else.
//
// All members are one sequence of pieces, of which each thread block takes a stretch: it fills a
// table of factors for each member that it meets, most often one.
//
// Launch: 256 threads; at most as many blocks as the device holds at once, and no more than pieces,
// which `first` counts.
#include "flat_lanes.cuh"
#include "members.cuh"
#include "tiled_strips.cuh"

namespace fp4kit {

// Calls quantize(member, table, level, begin, end) for the pieces begin .. end - 1 of each member
// that the stretch of this thread block meets.
template <class Format, int kRecipe, bool kSecond, class Quantize>
__device__ __forceinline__ void for_stretch(const float* __restrict__ second,
                                            const i64* __restrict__ first,
                                            const Member* __restrict__ members, i64 count,
                                            const Quantize& quantize) {
  __shared__ ScaleTable table;
  __shared__ u32 first_member;
  const i64 total = __ldg(first + count);
  const i64 end = (blockIdx.x + 1ll) * total / gridDim.x;
  i64 piece = blockIdx.x * total / gridDim.x;
  const i64 found = find_member(first, count, piece);
  if (found >= 0) first_member = static_cast<u32>(found);
  __syncthreads();
#pragma unroll 1
  for (u32 at = first_member; piece < end; ++at) {
    const i64 begin = __ldg(first + at);
    const i64 next = __ldg(first + at + 1);
    const Member member = load_member(members + at);
    const Level level =
        fill_scale_table<Format, kRecipe, kSecond>(table, second + member.row.second);
    const i64 stop = next < end ? next : end;
    quantize(member, table, level, static_cast<u32>(piece - begin), static_cast<u32>(stop - begin));
    piece = stop;
    // The table is still in use.
    __syncthreads();
  }
}

// Linear scales; a piece is 256 lanes.
template <class Format, class T, int kRecipe, bool kSecond>
__global__ void __launch_bounds__(kThreads, flat_blocks<T>())
    quantize_grouped_flat_kernel(const typename T::Bits* __restrict__ x,
                                 const float* __restrict__ second, u8* __restrict__ packed,
                                 u8* __restrict__ block_scale, const i64* __restrict__ first,
                                 const Member* __restrict__ members, i64 count, i64 high_first,
                                 i64 rule) {
  for_stretch<Format, kRecipe, kSecond>(
      second, first, members, count,
      [&](const Member& member, const ScaleTable& table, const Level& level, u32 begin, u32 end) {
        // Lanes are counted from the stretch's first: their shape is not asked for.
        const i64 skipped = static_cast<i64>(begin) * kThreads;
        const i64 rest = member.rows * member.cols / kLaneElements - skipped;
        const i64 wanted = static_cast<i64>(end - begin) * kThreads;
        quantize_lanes<Format, T, kRecipe, kSecond, kLayoutLinear>(
            x + member.start + skipped * kLaneElements,
            packed + member.row.packed + skipped * (4 * Format::kLaneWords),
            block_scale + member.row.block_scale + skipped / Format::kLanes, table, level, 0,
            static_cast<u32>(rest < wanted ? rest : wanted), kThreads, FlatShape{0, 0, 0, 0},
            static_cast<int>(rule), high_first != 0);
      });
}

// swizzled_128x4 scales of 16-element blocks, whole tiles across; a piece is a strip for each warp.
template <class Format, class T, int kRecipe, bool kSecond>
__global__ void __launch_bounds__(kThreads, flat_blocks<T>())
    quantize_grouped_tiled_kernel(const typename T::Bits* __restrict__ x,
                                  const float* __restrict__ second, u8* __restrict__ packed,
                                  u8* __restrict__ block_scale, const i64* __restrict__ first,
                                  const Member* __restrict__ members, i64 count, i64 high_first,
                                  i64 rule) {
  for_stretch<Format, kRecipe, kSecond>(
      second, first, members, count,
      [&](const Member& member, const ScaleTable& table, const Level& level, u32 begin, u32 end) {
        const u32 rows = static_cast<u32>(member.rows);
        const u32 blocks = static_cast<u32>(member.cols / kLaneElements);
        const u32 strips =
            (rows + kTileRows128 - 1) / kTileRows128 * kStripsDown * (blocks / kTileCols);
        const u32 stop = end * kWarps;
        quantize_strips<Format, T, kRecipe, kSecond>(
            x + member.start, packed + member.row.packed, block_scale + member.row.block_scale,
            table, level, begin * kWarps, stop < strips ? stop : strips, kWarps, rows, blocks,
            static_cast<int>(rule), high_first != 0);
      });
}

}  // namespace fp4kit
