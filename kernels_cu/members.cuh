// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// The members of a group, as the kernels that take all of them at once find them: a table on the
// device (fp4kit/backends/cuda_member_tables.py) of those that have elements.
#pragma once

#include "tiles.cuh"

namespace fp4kit {

// Where the parts of a member lie in one direction: the first byte of its codes and of its scales,
// and its first second-level value.
struct Places {
  i64 packed;
  i64 block_scale;
  i64 second;
};

struct alignas(16) Member {
  i64 start;  // element of the buffer where it begins
  i64 rows;
  i64 cols;
  i64 number;  // among all members of the group
  Places row;
  Places col;
};

#ifdef __CUDACC__

// The member that holds a piece of work: `first` says at which piece each of `count` members
// begins, and where the last one ends. Only one thread of the block gets it, the others get -1; all
// must call this. Up to 256 members take one load, which every thread makes for a member of its
// own; more are narrowed down to so many by rounds of 256.
__device__ __forceinline__ i64 find_member(const i64* __restrict__ first, i64 count, i64 piece) {
  i64 begin = 0;
  i64 end = count;
  while (end - begin > kThreads) {
    const i64 step = (end - begin + kThreads - 1) / kThreads;
    const i64 at = begin + threadIdx.x * step;
    const int starts = at < end && __ldg(first + at) <= piece;
    begin += (__syncthreads_count(starts) - 1) * step;
    end = begin + step < end ? begin + step : end;
  }
  const i64 at = begin + threadIdx.x;
  const bool found = at < end && __ldg(first + at) <= piece && piece < __ldg(first + at + 1);
  return found ? at : -1;
}

__device__ __forceinline__ i64 join_words(u32 low, u32 high) {
  return static_cast<i64>(static_cast<u64>(high) << 32 | low);
}

// A member by as few loads as possible; parts that nobody looks at are not loaded.
__device__ __forceinline__ Member load_member(const Member* __restrict__ member) {
  const uint4* pieces = reinterpret_cast<const uint4*>(member);
  i64 word[sizeof(Member) / 8];
#pragma unroll
  for (u32 i = 0; i < sizeof(Member) / 16; ++i) {
    const uint4 piece = __ldg(pieces + i);
    word[2 * i] = join_words(piece.x, piece.y);
    word[2 * i + 1] = join_words(piece.z, piece.w);
  }
  return {
      word[0], word[1], word[2], word[3], {word[4], word[5], word[6]}, {word[7], word[8], word[9]}};
}

// A tile of a member, as the threads of a block share it.
struct MemberTile {
  Member member;
  i64 row0;
  i64 col0;
};

// The tile that a thread block is for, where `first` counts the tiles of members. A barrier must
// follow.
template <int kRows = kTileRows, int kColumns = kTileColumns>
__device__ __forceinline__ void find_tile(const i64* __restrict__ first,
                                          const Member* __restrict__ members, i64 count,
                                          MemberTile& found) {
  const i64 at = find_member(first, count, blockIdx.x);
  if (at < 0) return;
  const Member member = load_member(members + at);
  // A grid has fewer than 2^31 blocks: within a member 32 bits do.
  const u32 tile = static_cast<u32>(blockIdx.x - __ldg(first + at));
  const u32 across = static_cast<u32>((member.cols + kColumns - 1) / kColumns);
  const u32 down = tile / across;
  found = {member, static_cast<i64>(down) * kRows,
           static_cast<i64>(tile - down * across) * kColumns};
}

#endif  // __CUDACC__

}  // namespace fp4kit
