// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// quantize_residual of channels in another order: as quantize_residual.cu, but rows are staged in
// shared memory, from where the channels of a block are gathered. An order is read once a thread
// block, which keeps it as places in that memory.
#include "residual_places.cuh"

namespace fp4kit {

// What lies in shared memory, one after the other, all of it whole 16-byte pieces.
template <class T>
struct Stage {
  static constexpr u32 kRows = 4 / T::kSize;       // rows that a word holds a channel of
  static constexpr u32 kChannels = 16 / T::kSize;  // of a 16-byte piece of a row
  static constexpr u32 kAhead = 4 / kRows;         // pieces a thread fetches before it needs them

  FactorTable* factors;
  u32* word;   // `together` rows or pairs of rows
  u16* index;  // the staged places of the channels of each block
  u8* scales;  // of a group

  __device__ __forceinline__ Stage(uint4* memory, u32 together, u32 cols) {
    factors = reinterpret_cast<FactorTable*>(memory);
    word = reinterpret_cast<u32*>(factors + 1);
    index = reinterpret_cast<u16*>(word + together * cols);
    scales = reinterpret_cast<u8*>(index + cols);
  }
};

// A piece of each of the rows that share words.
template <class T>
struct Piece {
  u32 row[Stage<T>::kRows][4];

  __device__ __forceinline__ void load(u32 r, const typename T::Bits* __restrict__ from) {
    const uint4 four = __ldg(reinterpret_cast<const uint4*>(from));
    row[r][0] = four.x;
    row[r][1] = four.y;
    row[r][2] = four.z;
    row[r][3] = four.w;
  }

  __device__ __forceinline__ void put(u32* staged, u32 half) const {
    uint4* const low = reinterpret_cast<uint4*>(staged);
    if constexpr (Stage<T>::kRows == 1) {
      *low = make_uint4(row[0][0], row[0][1], row[0][2], row[0][3]);
    } else {
      u32 w[8];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        w[2 * i] = byte_perm(row[0][i], row[1][i], 0x5410u);
        w[2 * i + 1] = byte_perm(row[0][i], row[1][i], 0x7632u);
      }
      *low = make_uint4(w[0], w[1], w[2], w[3]);
      *reinterpret_cast<uint4*>(staged + half) = make_uint4(w[4], w[5], w[6], w[7]);
    }
  }
};

// The sixteen channels of a block, of each of the rows that share words.
template <class T, bool kFar>
__device__ __forceinline__ void gather(u32* staged, const u16* index, u32 block, u32 main_blocks,
                                       Words<T> (&rows)[Stage<T>::kRows]) {
  u32 found[kLaneElements];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint4 eight =
        *reinterpret_cast<const uint4*>(index + index_place(block, half * 8, main_blocks));
    const u32 kept[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      found[8 * half + 2 * i] = staged_word<kFar>(staged, kept[i] & 0xFFFFu);
      found[8 * half + 2 * i + 1] = staged_word<kFar>(staged, kept[i] >> 16);
    }
  }
#pragma unroll
  for (int i = 0; i < Words<T>::kWords; ++i) {
    if constexpr (Stage<T>::kRows == 1) {
      rows[0].word[i] = found[i];
    } else {
      rows[0].word[i] = byte_perm(found[2 * i], found[2 * i + 1], 0x5410u);
      rows[1].word[i] = byte_perm(found[2 * i], found[2 * i + 1], 0x7632u);
    }
  }
}

// Scales of a finished group. Linear ones are contiguous, and end with the tensor's last row.
__device__ __forceinline__ void store_group_scales(const u8* scales, u8* __restrict__ block_scale,
                                                   int layout, u32 group, u32 rows, u32 blocks,
                                                   u32 stored_cols) {
  if (layout == kLayoutLinear) {
    const u32 left = rows - group * kGroupRows;
    const u32 bytes = min_u32(left, kGroupRows) * blocks;
    u8* const out = block_scale + static_cast<u64>(group) * kGroupRows * blocks;
    for (u32 i = threadIdx.x * 8; i < bytes; i += kThreads * 8) {
      if (i + 8 <= bytes) {
        *reinterpret_cast<uint2*>(out + i) = *reinterpret_cast<const uint2*>(scales + i);
      } else {
        for (u32 k = i; k < bytes; ++k) out[k] = scales[k];
      }
    }
    return;
  }
  const u32 across = stored_cols / kTileCols;
  for (u32 i = threadIdx.x; i < across * 2; i += kThreads) {
    const u64 offset = sector_offset(layout, group, i / 2, across, i % 2 * 16);
    *reinterpret_cast<uint4*>(block_scale + offset) =
        *reinterpret_cast<const uint4*>(scales + i * 16);
  }
}

// A thread block takes groups of eight rows; a step of it are `together` rows (or pairs of rows of
// a 16-bit type), as many as shared memory holds well. Pieces of the next step are on their way
// while blocks of this one are worked on.
//
// Launch: 256 threads, as many blocks as run at once; shared memory as in Stage, the scales being
// 8 * stored_cols bytes, rounded up to 32. Fewer than 2^31 rows, and cols at most 2^16.
template <class T, bool kRounds, bool kFar>
__global__ void __launch_bounds__(kThreads, FP4KIT_RESIDUAL_QUANTIZE_STAGED)
    quantize_residual_ordered_kernel(const typename T::Bits* __restrict__ x,
                                     const float* __restrict__ encode_scale,
                                     const i64* __restrict__ order, u8* __restrict__ packed,
                                     u8* __restrict__ block_scale, i64 group_count, i64 row_count,
                                     i64 main_count, i64 first, i64 block_count, i64 stored_cols,
                                     i64 together_count, i64 magic, i64 shift, i64 layout_number,
                                     i64 interleaved, i64 copies, i64 high_first) {
  using S = Stage<T>;
  extern __shared__ uint4 memory[];
  const u32 groups = static_cast<u32>(group_count);
  const u32 rows = static_cast<u32>(row_count);
  const u32 together = static_cast<u32>(together_count);
  const int layout = static_cast<int>(layout_number);
  const BlockPlaces<u32> places{static_cast<u32>(main_count), static_cast<u32>(first),
                                static_cast<u32>(block_count), interleaved != 0};
  const u32 cols = places.main_blocks * kLaneElements;
  const u32 chunks = cols / S::kChannels;
  const u32 half = together * (cols / 2);
  const u32 steps = kGroupRows / S::kRows / together;
  const FastDivide divide{main_count, static_cast<u32>(magic), static_cast<u32>(shift)};
  const S stage(memory, together, cols);
  const u32 all_tasks = block_tasks(interleaved != 0, first % 2 == 0, copies != 0, high_first != 0);

  const GroupRows group_rows(layout, places.blocks);
  // A turn is what all threads fetch of a row (or pair) at once, a piece each; this is where a
  // thread's next one comes from and goes to.
  const u32 row_turns = (chunks + kThreads - 1) / kThreads;
  struct Turn {
    u32 group, step, set, number;
    u32 row, chunk;
    const typename T::Bits* from;
    u32* to;
  };
  const auto begin_row = [&](Turn& turn) {
    turn.number = 0;
    turn.row = group_rows.row(turn.group, (turn.step * together + turn.set) * S::kRows);
    turn.chunk = threadIdx.x;
    turn.from = x + static_cast<u64>(turn.row) * cols + threadIdx.x * S::kChannels;
    turn.to = stage.word + (turn.set * chunks + threadIdx.x) * 4;
  };
  const auto begin_step = [&](u32 group, u32 step) {
    Turn turn{group, step, 0, 0, 0, 0, nullptr, nullptr};
    begin_row(turn);
    return turn;
  };
  const auto advance = [&](Turn& turn) {
    turn.chunk += kThreads;
    turn.from += kThreads * S::kChannels;
    turn.to += kThreads * 4;
    if (++turn.number == row_turns) {
      ++turn.set;
      begin_row(turn);
    }
  };
  Piece<T> ahead[S::kAhead]{};
  // Rows past the last stay what they were: their blocks are not looked at.
  const auto fetch = [&](Turn turn) {
#pragma unroll
    for (u32 a = 0; a < S::kAhead; ++a) {
      if (turn.set < together && turn.chunk < chunks) {
#pragma unroll
        for (u32 r = 0; r < S::kRows; ++r) {
          if (turn.row + r < rows) ahead[a].load(r, turn.from + r * cols);
        }
      }
      advance(turn);
    }
  };
  const auto put = [&](Turn turn) {
#pragma unroll
    for (u32 a = 0; a < S::kAhead; ++a) {
      if (turn.set < together && turn.chunk < chunks) ahead[a].put(turn.to, half);
      advance(turn);
    }
    return turn;
  };

  u32 group = blockIdx.x;
  u32 step = 0;
  fetch(begin_step(group, step));
  if (threadIdx.x < sizeof(FactorTable) / sizeof(float)) stage.factors->fill(threadIdx.x);
#pragma unroll 4
  for (u32 j = threadIdx.x; j < cols; j += kThreads) {
    const u32 channel = static_cast<u32>(__ldg(order + j));
    stage.index[index_place(j / kLaneElements, j % kLaneElements, places.main_blocks)] =
        static_cast<u16>(kept_place<kFar>(staged_place<T>(channel, half)));
  }
  // Columns beside the blocks stay 0.
  for (u32 i = threadIdx.x; i < (static_cast<u32>(stored_cols) + 3) / 4 * 8; i += kThreads) {
    reinterpret_cast<u32*>(stage.scales)[i] = 0;
  }
  const float scale = usable(__ldg(encode_scale));
  const FactorTable& factors = *stage.factors;
  const u32 code_step = places.blocks * 8;

#pragma unroll 1
  while (group < groups) {
    __syncthreads();  // nobody reads the rows and scales of the step before any more
    Turn turn = put(begin_step(group, step));
#pragma unroll 1
    while (turn.set < together) {
      fetch(turn);
      turn = put(turn);
    }
    const bool last = step + 1 == steps;
    const u32 next_group = last ? group + gridDim.x : group;
    const u32 next_step = last ? 0 : step + 1;
    fetch(begin_step(next_group, next_step));
    __syncthreads();

#pragma unroll 1
    for (u32 item = threadIdx.x; item < together * places.main_blocks; item += kThreads) {
      const u32 set = small_quotient(item, divide);
      const u32 block = item - set * places.main_blocks;
      Words<T> elements[S::kRows];
      gather<T, kFar>(stage.word + set * staged_row<T>(cols), stage.index, block,
                      places.main_blocks, elements);
      const u32 tasks = opaque(all_tasks | (block >= places.first ? kHasExtra : 0));
      const u32 main_place = places.main(block);
      const u32 local = (step * together + set) * S::kRows;
      const u32 row = group_rows.row(group, local);
      u8* const codes = packed + (static_cast<u64>(row) * places.blocks + main_place) * 8;
      u8* const scales = stage.scales + group_rows.scale(local, main_place);
#pragma unroll
      for (u32 r = 0; r < S::kRows; ++r) {
        CodedBlock main{}, extra{};
        const u32 extra_place = places.extra(block);
        if (row + r < rows) {
          quantize_with_residual<kRounds>(scale_block<kRounds>(elements[r], scale), tasks, factors,
                                          main, extra);
          store_both(codes + r * code_step, extra_place - main_place, tasks, main, extra);
        }
        scales[r * group_rows.scale_rows] = static_cast<u8>(main.byte);
        if (tasks & kHasExtra) {
          stage.scales[group_rows.scale(local + r, extra_place)] = static_cast<u8>(extra.byte);
        }
      }
    }
    if (last) {
      __syncthreads();
      store_group_scales(stage.scales, block_scale, layout, group, rows, places.blocks,
                         static_cast<u32>(stored_cols));
    }
    group = next_group;
    step = next_step;
  }
}

}  // namespace fp4kit
