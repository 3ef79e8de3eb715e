// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// quantize/rowwise.cu and quantize/rowwise_swizzled.cu for all members of a group at once: rowwise
// without a variant, whole, aligned blocks and one second-level value a member. The bytes are those
// of grouped/quantize_tiles.cu, which serves everything else.
//
// The work on all members is one sequence, of which each thread block takes one stretch: rounds of
// a group for each thread, or of a strip for each warp. A stretch mostly lies in one member, so
// that a block looks for a member, waits for its second level and fills its table of factors once.
//
// Launch: 256 threads, one block for every `stretch` rounds; the table counts the rounds of
// members.
#include "activation/activations.cuh"
#include "grouped/members.cuh"
#include "quantize/rowwise.cuh"
#include "quantize/rowwise_swizzled.cuh"

namespace fp4kit {

// Thread blocks per multiprocessor.
template <class T, int kFunction>
FP4KIT_HD constexpr int grouped_blocks() {
  return kFunction == kNoFunction ? rowwise_blocks<T>() : activated_blocks<T, kFunction>();
}

// Calls a function for every member that a thread block has rounds of, with the first of them and
// the end. All threads must call this.
template <class Table, class Function>
__device__ __forceinline__ void for_members(
    const Table& table, i64 stretch, const Function& function) {
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

// The groups of a member, from one of them on.
template <class ElementType, int kFunction>
struct MemberSource {
  using T = ElementType;
  using Loaded = ActivatedGroup<T, kFunction>;
  const typename T::Bits* __restrict__ gate;
  const typename T::Bits* __restrict__ factor;
  u32 row_groups;  // of the result; for swiglu, whose other half of each row lies between
  u32 offset;      // of the first group in its row

  __device__ __forceinline__ MemberSource(const typename T::Bits* gates,
      const typename T::Bits* factors, const Member& member, i64 first)
      : row_groups(static_cast<u32>(member.cols / kGroupSize)), offset(0) {
    i64 start = member.start + first * kGroupSize;
    if constexpr (kFunction == kSwiglu) {
      const i64 row = first / row_groups;
      offset = static_cast<u32>(first - row * row_groups);
      start = 2 * (member.start + row * member.cols);
    }
    gate = gates + start;
    factor = kFunction == kSwiglu ? gate + member.cols : factors + start;
  }

  __device__ __forceinline__ void load(u32 group, bool inside, Loaded& loaded) const {
    u64 source = group;
    if constexpr (kFunction == kSwiglu) {
      const u32 place = offset + group;
      source = place + static_cast<u64>(place / row_groups) * row_groups;
    }
    loaded.load(gate, factor, source, inside);
  }
  __device__ __forceinline__ Words<T> elements(const Loaded& loaded) const {
    return loaded.elements();
  }
};

// Linear scales, of the members or of their activations; gate and factor as for
// activation/activate.cu, but that for swiglu there is no factor, and the input of a member begins
// at twice its place in the table.
template <class Format, class T, int kRecipe, bool kSecond, int kFunction, class Table>
__global__ void __launch_bounds__(kThreads, grouped_blocks<T, kFunction>())
    grouped_quantize_rowwise_kernel(const typename T::Bits* __restrict__ gate,
        const typename T::Bits* __restrict__ factor, const float* __restrict__ second,
        u8* __restrict__ packed, u8* __restrict__ block_scale, const __grid_constant__ Table table,
        i64 stretch, i64 high_first, i64 rule) {
  __shared__ FactorTable factors;
  for_members(table, stretch, [&](const Member& member, i64 first_round, i64 end_round) {
    const i64 first = first_round * kThreads;
    const i64 groups = member.rows * member.cols / kGroupSize;
    const i64 end = end_round * kThreads < groups ? end_round * kThreads : groups;
    // Groups are counted from the first: their shape is not asked for.
    quantize_groups<Format, kRecipe, kSecond, kLayoutLinear>(
        MemberSource<T, kFunction>(gate, factor, member, first),
        packed + member.row.packed + first * (4 * Format::kGroupWords),
        block_scale + member.row.block_scale + first / Format::kGroups, second + member.row.second,
        factors, Rounding<>(), 0, static_cast<u32>(end - first), kThreads, RowShape{0, 0, 0, 0},
        static_cast<int>(rule), high_first != 0);
  });
}

// swizzled_128x4 scales of 16-element blocks, whole tiles across. Rounds are first those of whole
// tiles, then those of the last tile row if it is not.
template <class Format, class T, int kRecipe, bool kSecond, class Table>
__global__ void __launch_bounds__(kThreads, rowwise_blocks<T>())
    grouped_quantize_rowwise_swizzled_kernel(const typename T::Bits* __restrict__ x,
        const float* __restrict__ second, u8* __restrict__ packed, u8* __restrict__ block_scale,
        const __grid_constant__ Table table, i64 stretch, i64 high_first, i64 rule) {
  __shared__ FactorTable factors;
  for_members(table, stretch, [&](const Member& member, i64 first_round, i64 end_round) {
    const u32 blocks = static_cast<u32>(member.cols / kGroupSize);
    const u32 across = blocks / kTileCols;
    const u32 whole = static_cast<u32>(member.rows / kTileRows128);
    const u32 rest = static_cast<u32>(member.rows % kTileRows128);
    const u32 rounds = whole * across * (kStripsDown / kWarps);
    const u32 first = static_cast<u32>(first_round);
    const u32 end = static_cast<u32>(end_round);
    const auto quantize = [&](auto strips, i64 row, u32 strip, u32 count, u32 rows) {
      quantize_strips<Format, T, kRecipe, kSecond, decltype(strips)>(
          x + member.start + row * member.cols,
          packed + member.row.packed + row * blocks * (4 * Format::kGroupWords),
          block_scale + member.row.block_scale + row * blocks, second + member.row.second, factors,
          Rounding<>(), strip, count, kWarps, rows, blocks, static_cast<int>(rule),
          high_first != 0);
    };
    if (first < rounds) {
      const u32 stop = end < rounds ? end : rounds;
      quantize(FullTiles(), 0, first * kWarps, stop * kWarps, whole * kTileRows128);
    }
    if (end > rounds) {
      if (first < rounds) __syncthreads();
      const u32 begin = first < rounds ? 0 : (first - rounds) * kWarps;
      const u32 strips = partial_tile_strips(rest) * across;
      const u32 stop = (end - rounds) * kWarps;
      quantize(PartialTiles(), static_cast<i64>(whole) * kTileRows128, begin,
          stop < strips ? stop : strips, rest);
    }
  });
}

}  // namespace fp4kit
