// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// quantize_residual of reordered channels: rows are staged in shared memory, where each channel is
// written to its place in the order, so that a block lies there as it is read. A thread block reads
// the order once.
#include "residual/staging.cuh"

namespace fp4kit {

constexpr u32 kStagedThreads = FP4KIT_RESIDUAL_STAGED_THREADS;

// Scales of a finished group, which are staged as rows.
FP4KIT_DEVICE void store_group_scales(const u8* scales, u8* __restrict__ block_scale,
    const GroupRows& group_rows, int layout, u32 group, u32 rows, u32 stored_cols) {
  if (layout == kLayoutLinear) {
    const u32 left = rows - group * kGroupRows;
    const u32 bytes = min_u32(left, kGroupRows) * stored_cols;
    u8* const out = block_scale + static_cast<u64>(group) * kGroupRows * stored_cols;
#pragma unroll 1
    for (u32 i = threadIdx.x * 8; i < bytes; i += blockDim.x * 8) {
      if (i + 8 <= bytes) {
        *reinterpret_cast<uint2*>(out + i) = *reinterpret_cast<const uint2*>(scales + i);
      } else {
#pragma unroll 1
        for (u32 k = i; k < bytes; ++k) out[k] = scales[k];
      }
    }
    return;
  }
  const u32 across = stored_cols / kTileCols;
#pragma unroll 1
  for (u32 i = threadIdx.x; i < across * 2; i += blockDim.x) {
    const u32 inside = i % 2 * 16;
    u32 word[4];
#pragma unroll
    for (u32 k = 0; k < 4; ++k) {
      const u32 row = group_rows.local(inside + 4 * k);
      word[k] = *reinterpret_cast<const u32*>(scales + row * stored_cols + i / 2 * kTileCols);
    }
    store_words(block_scale + sector_offset(layout, group, i / 2, across, inside), word);
  }
}

// A thread block takes groups of eight rows, in steps of kTogether rows (or pairs of rows of a
// 16-bit type), which pass through a buffer of a ring. In a turn a warp writes its part of a step
// and reads blocks of the one before (kPrefetches), or of the same if there is one buffer; with
// three it may be a whole step ahead of others, as blocks with residuals are more work. Of an order
// that is no permutation nothing outside is read.
//
// Launch: whole warps, at most kStagedThreads threads (registers count more: there is hardly a
// first-level cache beside the staged rows), as many blocks as run at once; shared memory as in
// Stage. A group's scales are stored some steps after they are worked out: `scale_sets` of them, a
// power of two of at least 1 + (buffers - 1) / steps of a group. Fewer than 2^31 rows and 2^16
// columns.
template <class T, bool kRounds, u32 kTogether, bool kPrefetches>
__global__ void __launch_bounds__(kStagedThreads)
    quantize_residual_reordered_kernel(const typename T::Bits* __restrict__ x,
        const float* __restrict__ encode_scale, const i64* __restrict__ order,
        u8* __restrict__ packed, u8* __restrict__ block_scale, i64 group_count, i64 row_count,
        i64 main_count, i64 first, i64 block_count, i64 stored_cols, i64 buffer_count,
        i64 scale_sets, i64 layout_number, i64 interleaved, i64 copies, i64 high_first) {
  using S = Staged<T, kTogether>;
  constexpr u32 kShared = S::kShared;
  extern __shared__ uint4 memory[];
  const u32 groups = static_cast<u32>(group_count);
  const u32 rows = static_cast<u32>(row_count);
  const u32 buffers = static_cast<u32>(buffer_count);
  const int layout = static_cast<int>(layout_number);
  const BlockPlaces<u32> places(main_count, first, block_count, interleaved);
  const u32 cols = places.main_blocks * kGroupSize;
  const u32 chunks = cols / S::kChannels;
  const u32 items = kTogether * places.main_blocks;
  const u32 buffer_words = kTogether * (cols + kStagedGap);
  const u32 scale_bytes = (static_cast<u32>(stored_cols) + 3) / 4 * kSectorBytes;
  const Stage stage(memory, buffers * buffer_words, cols);
  const u32 all_tasks =
      opaque(block_tasks(interleaved != 0, first % 2 == 0, copies != 0, high_first != 0));
  GroupRows group_rows(layout);
  group_rows.hide();

  // All steps of this thread block, numbered: whose group it is, and its first row.
  const u32 all_steps = (groups - blockIdx.x + gridDim.x - 1) / gridDim.x * S::kSteps;
  const auto group_of = [&](u32 number) { return blockIdx.x + number / S::kSteps * gridDim.x; };
  const auto row_of = [&](u32 number) {
    return group_rows.row(group_of(number), 0) + group_rows.down(number % S::kSteps * S::kRows);
  };
  // A vec of a row; rows past the last one are that.
  const u32 row_bytes = cols * T::kSize;
  const auto address = [&](u32 row, u32 piece) {
    return reinterpret_cast<const u8*>(x) + piece * 16 +
           static_cast<u64>(min_u32(row, rows - 1)) * row_bytes;
  };
  // Brings vecs of a step to L2: of two threads that read the same 32 bytes of some rows each takes
  // half.
  const auto prefetch = [&](u32 row, u32 piece) {
    if constexpr (S::kRows == 1) {
      if (piece % 2 == 0) prefetch_sector(address(row, piece));
    } else {
#pragma unroll
      for (u32 k = 0; k < S::kRows; k += 2) {
        prefetch_sector(address(row + piece % 2 + group_rows.down(k), piece));
      }
    }
  };
  const auto channel = [&](u32 j) { return channel_inside(__ldg(order + j), cols); };

  u32 row_written = row_of(0);
  for (u32 piece = threadIdx.x; piece < chunks; piece += blockDim.x) prefetch(row_written, piece);
  if (threadIdx.x < 2 * kMostBuffers) stage.full[threadIdx.x].begin(blockDim.x / 32);
  for (u32 i = threadIdx.x; i < sizeof(ResidualFactors) / sizeof(float); i += blockDim.x) {
    stage.factors->fill(i);
  }
#pragma unroll 4
  for (u32 j = threadIdx.x; j < cols; j += blockDim.x) {
    stage.place[j] = static_cast<u16>(kTogether * cols);
  }
  // Columns beside the blocks stay 0.
  for (u32 i = threadIdx.x; i < static_cast<u32>(scale_sets) * scale_bytes / 4; i += blockDim.x) {
    reinterpret_cast<u32*>(stage.scales)[i] = 0;
  }
  __syncthreads();
#pragma unroll 4
  for (u32 j = threadIdx.x; j < cols; j += blockDim.x) {
    stage.place[channel(j)] = static_cast<u16>(S::place(j, places.main_blocks));
  }
  __syncthreads();
  // Of no permutation some channels stand at several places, and have one of them.
  int lost = 0;
#pragma unroll 4
  for (u32 j = threadIdx.x; j < cols; j += blockDim.x) {
    lost |= stage.place[channel(j)] != S::place(j, places.main_blocks);
  }
  const bool repeats = __syncthreads_count(lost) != 0;
  const float scale = usable(__ldg(encode_scale));
  const ResidualFactors& factors = *stage.factors;
  const u32 code_step = places.blocks * 8;
  const u32 gap = opaque(interleaved != 0 ? 1 : places.main_blocks - places.first);

  const auto scales_at = [&](u32 number) {
    return (number / S::kSteps & static_cast<u32>(scale_sets - 1)) * scale_bytes;
  };
  const auto store_scales = [&](u32 number) {
    const u32 last = opaque(number - 1);
    store_group_scales(stage.scales + scales_at(last), block_scale, group_rows, layout,
        group_of(last), rows, static_cast<u32>(stored_cols));
  };
  constexpr u32 kLead = kPrefetches ? 1 : 0;  // steps that writing is prefetched of reading
  // Moves a warp's blocks along from step to step: those with residuals are more work.
  const u32 all_turned = items / 32 * 32;
  const u32 rotation_step = items > 96 ? 96 : 0;
  u32 rotation = 0;
  RingPlace written{0, 0}, before{0, 0};
  u32 row_before = row_written;
  // What is left of a step goes to the first warps, and the next step begins with those after
  // these.
  const u32 uneven = (items + 31) / 32 * 32 % blockDim.x;
  u32 mine = threadIdx.x, mine_before = mine;
#pragma unroll 1
  for (u32 turn = 0; turn < all_steps + kLead; ++turn) {
    u32* const words_written = stage.word + written.buffer * buffer_words;
    const u32 row_next = opaque(row_of(turn + 1));
    const u32 parts = turn < all_steps ? items : 0;
#pragma unroll 1
    for (u32 part = mine;; part += blockDim.x) {
#pragma unroll 1
      for (u32 k = 0; k < S::kVecs; ++k) {
        const u32 piece = k * items + part;
        uint4 loaded[S::kRows];
        if (part < parts) {
#pragma unroll
          for (u32 r = 0; r < S::kRows; ++r) {
            loaded[r] = __ldg(
                reinterpret_cast<const uint4*>(address(row_written + group_rows.down(r), piece)));
          }
          prefetch(row_next, piece);
        }
        if (part == mine && k == 0) {
          // The first pieces are on their way while the buffer becomes free.
          stage.empty[written.buffer].wait(written.parity ^ 1);
          const u32 done = turn + 1 - buffers;
          if (turn >= buffers && done % S::kSteps == 0) store_scales(done);
        }
        if (part < parts) {
          u32 kept[S::kChannels / 2];
          load_places(stage.place + piece * S::kChannels, kept);
          S::scatter(loaded, kept, stage.word, written.buffer * buffer_words * 4);
        }
      }
      if (part >= parts) break;
    }
    if (repeats) {
      __syncthreads();
      for (u32 j = threadIdx.x; j < cols; j += blockDim.x) {
        const u32 from = stage.place[channel(j)];
        const u32 to = S::place(j, places.main_blocks);
        if (from == to) continue;
        for (u32 set = 0; set < kTogether; ++set) {
          words_written[to ^ (set * 4)] = words_written[from ^ (set * 4)];
        }
      }
    }
    stage.full[written.buffer].arrive();
    const RingPlace read = kPrefetches ? before : written;
    const u32 first_row = kPrefetches ? row_before : row_written;
    before = written;
    row_before = row_written;
    written.advance(buffers);
    row_written = row_next;
    const u32 first_item = kPrefetches ? mine_before : mine;
    mine_before = mine;
    mine = mine < uneven ? mine + blockDim.x - uneven : mine - uneven;
    if (turn < kLead) continue;

    const u32 number = turn - kLead;
    const u32 step_scales =
        opaque(scales_at(number) + number % S::kSteps * S::kRows * static_cast<u32>(stored_cols));
    stage.full[read.buffer].wait(read.parity);
    const u32 words = opaque(read.buffer * buffer_words);
#pragma unroll 1
    for (u32 item = first_item; item < items; item += blockDim.x) {
      const u32 turned = item + rotation < items ? item + rotation : item + rotation - items;
      const u32 block = turned / kTogether;
      const u32 local = (turned % kTogether ^ S::first(block)) * kShared;
      const StagedBlock<T> staged(stage.word + words + turned * 4, items * 4);
      const u32 tasks = opaque(all_tasks | (block >= places.first ? kHasExtra : 0));
      const u32 main_place = places.main(block);
      const u32 row = first_row + group_rows.down(local);
      u8* const codes = packed + (static_cast<u64>(row) * places.blocks + main_place) * 8;
      u8* const scales =
          stage.scales + (step_scales + local * static_cast<u32>(stored_cols) + main_place);
#pragma unroll
      for (u32 r = 0; r < kShared; ++r) {
        CodedBlock main{}, extra{};
        if (row + r < rows) {
          quantize_with_residual<kRounds>(
              staged.template scale<kRounds>(static_cast<int>(r), scale), tasks, factors, main,
              extra);
          store_both(codes + r * code_step, gap, tasks, main, extra);
        }
        u8* const row_scales = scales + r * static_cast<u32>(stored_cols);
        row_scales[0] = static_cast<u8>(main.byte);
        if (tasks & kHasExtra) row_scales[gap] = static_cast<u8>(extra.byte);
      }
    }
    stage.empty[read.buffer].arrive();
    rotation += rotation_step;
    if (rotation >= all_turned) rotation -= all_turned;
  }
  __syncthreads();
  const u32 turns = all_steps + kLead;
  const u32 done = turns > buffers ? (turns - buffers) / S::kSteps * S::kSteps : 0;
  for (u32 number = done + S::kSteps; number <= all_steps; number += S::kSteps) {
    store_scales(number);
  }
}

}  // namespace fp4kit
