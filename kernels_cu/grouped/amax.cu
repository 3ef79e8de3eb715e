// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// amaxes of all members of a group at once, NaN ignored: one each, or one for each row or column,
// also after the rotation. Must equal ReferenceBackend.plan_amax of each member.
//
// Algorithm: reduce/amax.cu's for one value without a rotation; else a thread block takes a tile
// (tiles/tile.cuh) and each thread groups of 16 elements of it.
//
// Launch: 256 threads, one block per chunk of chunk_size elements (grouped_amax_kernel) or per tile
// (grouped_row_column_amax_kernel) of any member, which the table counts. Results are raised from
// zero by integer maxima of the bits of positive floats: their order does not matter.
#include "grouped/members.cuh"
#include "reduce/amax.cuh"
#include "tiles/columns.cuh"

namespace fp4kit {

template <class T, class Table>
__global__ void __launch_bounds__(kThreads)
    grouped_amax_kernel(const typename T::Bits* __restrict__ x, const __grid_constant__ Table table,
        u32* __restrict__ result, i64 columns, i64 chunk_size) {
  __shared__ i64 start;
  __shared__ i64 size;
  __shared__ i64 place;
  const i64 at = find_member(table, blockIdx.x);
  if (at >= 0) {
    const Member member = table.member(static_cast<u32>(at));
    const i64 skipped = (blockIdx.x - table.first(static_cast<u32>(at))) * chunk_size;
    const i64 rest = member.rows * member.cols - skipped;
    start = member.start + skipped;
    size = rest < chunk_size ? rest : chunk_size;
    place = columns ? member.col.second : member.row.second;
  }
  __syncthreads();
  bool finite;
  const u32 maximum = stretch_max<T>(x + start, size, finite);
  if (threadIdx.x == 0 && maximum != 0) {
    atomicMax(result + place, as_bits(from_input_bits<T>(maximum)));
  }
}

// The amax of 16 elements, perhaps rotated to R first, as bits of a float.
template <class R, bool kRotate, class T>
__device__ __forceinline__ u32 rotated_group_amax_bits(const Words<T>& x, u32 mask) {
  if constexpr (kRotate) {
    return rotated_amax_bits(group_butterfly_amax(0.0f, x, mask), SameType<R, Bf16>::kValue);
  } else {
    u32 raw;
    return as_bits(from_input_bits<T>(group_amax_bits<T>(x, raw)));
  }
}

// R is what the rotated elements are; without kRotate it is T. What a tile holds outside of the
// member is zeros, also rotated: it raises nothing.
template <class T, class R, bool kColumns, bool kRotate, bool kVector, class Table>
__global__ void __launch_bounds__(kThreads)
    grouped_row_column_amax_kernel(const typename T::Bits* __restrict__ x,
        const __grid_constant__ Table table, u32* __restrict__ result, i64 per_vector, i64 mask) {
  __shared__ Tile<T> tile;
  __shared__ MemberTile found;
  __shared__ u32 column[kTileColumns];
  find_tile(table, found);
  if (threadIdx.x < kTileColumns) column[threadIdx.x] = 0;
  __syncthreads();
  const Member& member = found.member;
  load_tile<kVector, T>(tile, x + (member.start + found.row0 * member.cols + found.col0),
      member.cols, tile_rest(member.rows, found.row0, kTileRows),
      tile_rest(member.cols, found.col0, kTileColumns));
  end_copies();
  u32* const out = result + (kColumns ? member.col.second : member.row.second) +
                   (per_vector ? (kColumns ? found.col0 : found.row0) : 0);
  await_copies();
  __syncthreads();

  u32 most = 0;
  if constexpr (kColumns) {
    constexpr u32 kWords = Tile<T>::kWords;
    constexpr u32 kHalves = Tile<T>::kPerWord;
#pragma unroll 1
    for (u32 index = threadIdx.x; index < kWords * (kTileRows / kGroupSize); index += kThreads) {
      const u32 w = index % kWords;
      u32 word[kGroupSize];
#pragma unroll
      for (int i = 0; i < kGroupSize; ++i) {
        word[i] = tile.at(index / kWords * kGroupSize + i, w);
      }
#pragma unroll
      for (u32 half = 0; half < kHalves; ++half) {
        Words<T> elements[1];
        gather_column<T>(word, half, elements);
        const u32 bits = rotated_group_amax_bits<R, kRotate>(elements[0], static_cast<u32>(mask));
        most = max_u32(most, bits);
        if (per_vector && bits != 0) atomicMax(column + w * kHalves + half, bits);
      }
    }
    __syncthreads();
    if (per_vector && threadIdx.x < kTileColumns && column[threadIdx.x] != 0) {
      atomicMax(out + threadIdx.x, column[threadIdx.x]);
    }
  } else {
    constexpr u32 kAcross = kTileColumns / kGroupSize;
#pragma unroll 1
    for (u32 index = threadIdx.x; index < kTileRows * kAcross; index += kThreads) {
      const u32 row = index / kAcross;
      constexpr u32 kWords = Words<T>::kWords;
      const Words<T> elements = tile_group<T>(&tile.at(row, index % kAcross * kWords));
      u32 bits = rotated_group_amax_bits<R, kRotate>(elements, static_cast<u32>(mask));
      most = max_u32(most, bits);
      if (per_vector) {
        // The groups of a row sit in neighbouring lanes.
#pragma unroll
        for (u32 distance = kAcross / 2; distance > 0; distance /= 2) {
          bits = max_u32(bits, __shfl_xor_sync(0xFFFFFFFFu, bits, distance));
        }
        if (index % kAcross == 0 && bits != 0) atomicMax(out + row, bits);
      }
    }
  }
  if (!per_vector) {
    most = block_max(most);
    if (threadIdx.x == 0 && most != 0) atomicMax(out, most);
  }
}

}  // namespace fp4kit
