// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// quantize_flat.cu and quantize_tiled.cu for all members of a group at once: rowwise without a
// variant, whole, aligned blocks and one second-level value a member. The bytes are those of
// quantize_grouped.cu, which serves everything else.
//
// A thread block takes a chunk of a member, so that it still fills its table of factors once for
// many lanes.
//
// Launch: 256 threads, one block per chunk of any member; `first` counts their chunks.
#include "flat_lanes.cuh"
#include "members.cuh"
#include "tiled_strips.cuh"

namespace fp4kit {

// A chunk of a member, as the threads of a block share it.
struct MemberChunk {
  Member member;
  i64 begin;
};

constexpr i64 kFewMembers = 64;

__device__ __forceinline__ void find_chunk(const i64* __restrict__ first,
                                           const Member* __restrict__ members, i64 count,
                                           i64 chunk_size, MemberChunk& found) {
  // Where members are few each has a thread, which loads it before it knows that it is the one.
  const bool few = count <= kFewMembers;
  Member mine{};
  if (few && threadIdx.x < count) mine = load_member(members + threadIdx.x);
  const i64 at = find_member(first, count, blockIdx.x);
  if (at >= 0) {
    found.member = few ? mine : load_member(members + at);
    found.begin = (blockIdx.x - __ldg(first + at)) * chunk_size;
  }
  __syncthreads();
}

// Linear scales; a chunk is so many lanes, a multiple of those of a block.
template <class Format, class T, int kRecipe, bool kSecond>
__global__ void __launch_bounds__(kThreads, flat_blocks<T>())
    quantize_grouped_flat_kernel(const typename T::Bits* __restrict__ x,
                                 const float* __restrict__ second, u8* __restrict__ packed,
                                 u8* __restrict__ block_scale, const i64* __restrict__ first,
                                 const Member* __restrict__ members, i64 count, i64 chunk_size,
                                 i64 high_first, i64 rule) {
  __shared__ ScaleTable table;
  __shared__ MemberChunk found;
  find_chunk(first, members, count, chunk_size, found);
  const Member& member = found.member;
  const i64 rest = member.rows * member.cols / kLaneElements - found.begin;
  // Lanes are counted from the chunk's first: their shape is not asked for.
  quantize_lanes<Format, kRecipe, kSecond, kLayoutLinear>(
      PlainSource<T>{x + member.start + found.begin * kLaneElements},
      packed + member.row.packed + found.begin * (4 * Format::kLaneWords),
      block_scale + member.row.block_scale + found.begin / Format::kLanes,
      second + member.row.second, table, Rounding<>(), 0,
      static_cast<u32>(rest < chunk_size ? rest : chunk_size), kThreads, FlatShape{0, 0, 0, 0},
      static_cast<int>(rule), high_first != 0);
}

// swizzled_128x4 scales of 16-element blocks, whole tiles across; a chunk is so many strips.
template <class Format, class T, int kRecipe, bool kSecond>
__global__ void __launch_bounds__(kThreads, flat_blocks<T>())
    quantize_grouped_tiled_kernel(const typename T::Bits* __restrict__ x,
                                  const float* __restrict__ second, u8* __restrict__ packed,
                                  u8* __restrict__ block_scale, const i64* __restrict__ first,
                                  const Member* __restrict__ members, i64 count, i64 chunk_size,
                                  i64 high_first, i64 rule) {
  __shared__ ScaleTable table;
  __shared__ MemberChunk found;
  find_chunk(first, members, count, chunk_size, found);
  const Member& member = found.member;
  const u32 rows = static_cast<u32>(member.rows);
  const u32 blocks = static_cast<u32>(member.cols / kLaneElements);
  const u32 strips = (rows + kTileRows128 - 1) / kTileRows128 * kStripsDown * (blocks / kTileCols);
  const u32 begin = static_cast<u32>(found.begin);
  const u32 left = strips - begin;
  const u32 wanted = static_cast<u32>(chunk_size);
  quantize_strips<Format, T, kRecipe, kSecond>(
      x + member.start, packed + member.row.packed, block_scale + member.row.block_scale,
      second + member.row.second, table, Rounding<>(), begin,
      begin + (left < wanted ? left : wanted), kWarps, rows, blocks, static_cast<int>(rule),
      high_first != 0);
}

}  // namespace fp4kit
