// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Largest magnitudes of rows or columns (or of groups of them), NaN ignored: of columns as they
// are, or of either after the rotation. Must equal ReferenceBackend.plan_amax.
//
// Rows are rotated, and whole groups of 16 then. A team (thread block or warp) takes a chunk of one
// scale's groups. Columns: a thread takes two columns of 16-bit elements or one of 32-bit ones, and
// goes down `each` groups of 16 rows. Members of a group: a thread block takes a tile
// (tiles/tile.cuh).
//
// Maxima reach the results, zeroed before, as integer maxima of the bits of positive floats: their
// order does not matter. Threads that share a scale join theirs first, as atomics on one address
// are slow.
//
// Launch: 256 threads. Without kVector single elements are read; columns with kVector need an even
// number of columns.
#include "common/members.cuh"
#include "common/scale_layout.cuh"
#include "reduce/amax.cuh"
#include "rht/rht.cuh"
#include "tiles/tile.cuh"

namespace fp4kit {

// Raises a result by the maximum of a team: a block, a warp, or one thread; by all threads of the
// block.
FP4KIT_DEVICE void raise_result(u32* result, u32 bits, i64 team) {
  if (team == kThreads) {
    bits = block_max(bits);
  } else if (team == 32) {
    bits = max_across<16>(bits);
  }
  if ((threadIdx.x & static_cast<u32>(team - 1)) == 0 && bits != 0) atomicMax(result, bits);
}

// Scales have `span` groups, in `chunks` chunks of `rounds` groups a thread; `units` chunks in all.
template <class T, bool kVector>
__global__ void __launch_bounds__(kThreads)
    row_amax_kernel(const typename T::Bits* __restrict__ x, u32* __restrict__ result, i64 span,
        i64 chunks, i64 magic, i64 shift, i64 units, i64 rounds, i64 team, i64 mask, i64 to_bf16) {
  constexpr int kEach = 4 / T::kSize;
  const u32 size = static_cast<u32>(team);
  const u32 number = threadIdx.x / size;
  const i64 unit = static_cast<i64>(blockIdx.x) * (kThreads / size) + number;
  const FastDivide divide(chunks, magic, shift);
  const i64 scale = divide(unit);
  const i64 begin = (unit - scale * chunks) * (size * rounds);
  const i64 rest = unit < units ? span - begin : 0;
  const i64 groups = rest < size * rounds ? rest : size * rounds;
  const typename T::Bits* from = x + (scale * span + begin) * kGroupSize;
  float most = 0.0f;
#pragma unroll 1
  for (i64 at = threadIdx.x - number * size; at < groups; at += kEach * size) {
    Words<T> elements[kEach];
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      // The last group again, not nothing: loads without a condition stay together.
      const i64 group = at + k * size;
      const i64 there = group < groups ? group : groups - 1;
      load_elements<kVector>(from + there * kGroupSize, kGroupSize, elements[k]);
    }
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      most = group_butterfly_amax(most, elements[k], static_cast<u32>(mask));
    }
  }
  raise_result(result + scale, rotated_amax_bits(most, to_bf16 != 0), team);
}

// A team of more than one thread has columns of one scale. `plain`, if there, is for the amax of
// everything before the rotation.
template <class T, bool kRotate, bool kVector>
__global__ void __launch_bounds__(kThreads)
    column_amax_kernel(const typename T::Bits* __restrict__ x, u32* __restrict__ result,
        u32* __restrict__ plain, i64 rows, i64 cols, i64 magic, i64 shift, i64 total, i64 each,
        i64 vectors_per_scale, i64 team, i64 mask, i64 to_bf16) {
  constexpr int kAcross = kVector && T::kSize == 2 ? 2 : 1;
  const i64 index = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
  const i64 width = cols / kAcross;
  const FastDivide divide(width, magic, shift);
  const i64 slice = index < total ? divide(index) : 0;
  const i64 col = index < total ? (index - slice * width) * kAcross : 0;
  const i64 row = slice * each * kGroupSize;
  const i64 rest = index < total ? rows - row : 0;
  i64 left = rest < each * kGroupSize ? rest : each * kGroupSize;
  const typename T::Bits* from = x + row * cols + col;
  float most[kAcross] = {};
  MaxBits<T> maximum;
#pragma unroll 1
  for (; left >= kGroupSize; left -= kGroupSize, from += kGroupSize * cols) {
    ColumnGroup<T, kAcross> group;
    group.load(from, cols);
    if constexpr (kRotate) {
      if (plain != nullptr) {
#pragma unroll
        for (int i = 0; i < kGroupSize; ++i) maximum.add_careful(group.word[i][0]);
      }
      group.flip_signs(static_cast<u32>(mask));
#pragma unroll
      for (int c = 0; c < kAcross; ++c) {
        float v[kGroupSize];
        group.column(c, v);
        most[c] = butterfly_amax(most[c], v);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kGroupSize; ++i) maximum.add_careful(group.word[i][0]);
    }
  }
  if constexpr (!kRotate) {
#pragma unroll 1
    for (; left > 0; --left, from += cols) {
      ColumnGroup<T, kAcross> group;
      group.load_row(from, 0);
      maximum.add_careful(group.word[0][0]);
    }
  }
  if (kRotate && plain != nullptr) {
    raise_result(plain, as_bits(from_input_bits<T>(maximum.result())), kThreads);
  }
  u32 bits[kAcross];
#pragma unroll
  for (int c = 0; c < kAcross; ++c) {
    if constexpr (kRotate) {
      bits[c] = rotated_amax_bits(most[c], to_bf16 != 0);
    } else {
      bits[c] = as_bits(from_input_bits<T>(T::kSize == 4 ? maximum.result() : maximum.half(c)));
    }
  }
  if (team > 1) {
    const u32 both = kAcross == 2 ? max_u32(bits[0], bits[kAcross - 1]) : bits[0];
    raise_result(result + col / vectors_per_scale, both, team);
    return;
  }
#pragma unroll
  for (int c = 0; c < kAcross; ++c) {
    raise_result(result + (col + c) / vectors_per_scale, bits[c], team);
  }
}

// The amax of 16 elements, perhaps rotated to R first, as bits of a float.
template <class R, bool kRotate, class T>
FP4KIT_DEVICE u32 rotated_group_amax_bits(const Words<T>& x, u32 mask) {
  if constexpr (kRotate) {
    return rotated_amax_bits(group_butterfly_amax(0.0f, x, mask), SameType<R, Bf16>::kValue);
  } else {
    u32 raw;
    return as_bits(from_input_bits<T>(group_amax_bits<T>(x, raw)));
  }
}

// R is what the rotated elements are, else T. What lies outside of the member is zeros.
template <class T, class R, bool kColumns, bool kRotate, bool kVector, class Table>
__global__ void __launch_bounds__(kThreads)
    grouped_row_column_amax_kernel(const typename T::Bits* __restrict__ x,
        const __grid_constant__ Table table, u32* __restrict__ result, i64 per_vector, i64 mask) {
  __shared__ Tile<T> tile;
  __shared__ MemberTile found;
  __shared__ u32 column[kTileColumns];
  find_tile(table, found, kTileRows, [](const Member&) -> i64 { return kTileColumns; });
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
        bits = max_across<kAcross / 2>(bits);
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
