// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// The members of a group that have elements, in a table (fp4kit/cuda/member_tables.py), as the
// kernels that take all of them at once find them.
#pragma once

#include "common/scale_layout.cuh"

namespace fp4kit {

// Where a member's codes, scales and second-level values begin in one direction.
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

constexpr u32 kMemberWords = sizeof(Member) / 8;

FP4KIT_DEVICE Member member_of(const i64 (&word)[kMemberWords]) {
  return {
      word[0], word[1], word[2], word[3], {word[4], word[5], word[6]}, {word[7], word[8], word[9]}};
}

FP4KIT_DEVICE i64 join_words(u32 low, u32 high) {
  return static_cast<i64>(static_cast<u64>(high) << 32 | low);
}

// A table in memory. As all kinds of tables: `first` says at which work item each of `count`
// members begins, and where the last one ends.
struct ManyMembers {
  const i64* begins;
  const Member* members;
  i64 number;

  FP4KIT_DEVICE u32 count() const { return static_cast<u32>(number); }

  FP4KIT_DEVICE i64 first(u32 at) const { return __ldg(begins + at); }

  FP4KIT_DEVICE Member member(u32 at) const {
    const uint4* vecs = reinterpret_cast<const uint4*>(members + at);
    i64 word[kMemberWords];
#pragma unroll
    for (u32 i = 0; i < kMemberWords / 2; ++i) {
      const uint4 piece = __ldg(vecs + i);
      word[2 * i] = join_words(piece.x, piece.y);
      word[2 * i + 1] = join_words(piece.z, piece.w);
    }
    return member_of(word);
  }
};

// A table that is a parameter of the kernel, so that nothing is copied before it; numbers of 32
// bits. Must be declared __grid_constant__, or the compiler may copy it for each thread.
template <u32 kWords>
struct FewMembers {
  u32 number;
  u32 words[kWords];  // of the members, then the beginnings

  FP4KIT_DEVICE u32 count() const { return number; }

  FP4KIT_DEVICE i64 first(u32 at) const { return words[number * kMemberWords + at]; }

  FP4KIT_DEVICE Member member(u32 at) const {
    i64 word[kMemberWords];
#pragma unroll
    for (u32 i = 0; i < kMemberWords; ++i) word[i] = words[at * kMemberWords + i];
    return member_of(word);
  }
};

// The member that holds a work item. One thread of the block gets it, the others get -1; all must
// call this. Up to 256 members take one load; more are narrowed down by rounds of 256.
template <class Table>
FP4KIT_DEVICE i64 find_member(const Table& table, i64 piece) {
  u32 begin = 0;
  u32 end = table.count();
  while (end - begin > kThreads) {
    const u32 step = (end - begin + kThreads - 1) / kThreads;
    const u32 at = begin + threadIdx.x * step;
    const int starts = at < end && table.first(at) <= piece;
    begin += (__syncthreads_count(starts) - 1) * step;
    end = begin + step < end ? begin + step : end;
  }
  const u32 at = begin + threadIdx.x;
  const bool found = at < end && table.first(at) <= piece && piece < table.first(at + 1);
  return found ? static_cast<i64>(at) : -1;
}

// Calls a function for every member that a thread block has rounds of, `stretch` in all, with the
// first of them and the end. All threads must call this.
template <class Table, class Function>
FP4KIT_DEVICE void for_members(const Table& table, i64 stretch, const Function& function) {
  __shared__ u32 found;
  const i64 total = table.first(table.count());
  i64 round = blockIdx.x * stretch;
  const i64 end = round + stretch < total ? round + stretch : total;
  const i64 mine = find_member(table, round);
  if (mine >= 0) found = static_cast<u32>(mine);
  __syncthreads();
  for (u32 at = found;; ++at) {
    const i64 start = table.first(at);
    const i64 next = table.first(at + 1);
    const i64 stop = next < end ? next : end;
    function(table.member(at), round - start, stop - start);
    if (stop == end) return;
    round = stop;
    __syncthreads();  // everyone is done with the factors
  }
}

// One direction of a member; per_vector: it has a second level for each vector.
template <class Format>
FP4KIT_DEVICE QuantizedView member_view(const Places& places, const float* second, u8* packed,
    u8* block_scale, i64 vectors, i64 length, bool per_vector, int layout) {
  const i64 blocks = (length + Format::kBlockSize - 1) / Format::kBlockSize;
  const i64 padded = (blocks + kTileCols - 1) / kTileCols * kTileCols;
  return {second + places.second, packed + places.packed, block_scale + places.block_scale, blocks,
      layout == kLayoutLinear ? blocks : padded, per_vector ? vectors : 1, 1};
}

// A tile of a member, as the threads of a block share it.
struct MemberTile {
  Member member;
  i64 row0;
  i64 col0;
};

// The tile that a thread block is for: `rows` rows and columns_of(member) columns. A barrier must
// follow.
template <class Table, class Columns>
FP4KIT_DEVICE void find_tile(
    const Table& table, MemberTile& found, u32 rows, const Columns& columns_of) {
  const i64 at = find_member(table, blockIdx.x);
  if (at < 0) return;
  const Member member = table.member(static_cast<u32>(at));
  const i64 columns = columns_of(member);
  const u32 tile = static_cast<u32>(blockIdx.x - table.first(static_cast<u32>(at)));
  const u32 across = static_cast<u32>((member.cols + columns - 1) / columns);
  const u32 down = tile / across;
  found = {member, static_cast<i64>(down) * rows, (tile - down * across) * columns};
}

}  // namespace fp4kit
