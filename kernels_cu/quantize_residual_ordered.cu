// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// quantize_residual of channels in another order: as quantize_residual.cu, but rows are staged in
// shared memory, from where the channels of a block are gathered. An order is read once a thread
// block, which keeps it as places in that memory.
#include "residual_places.cuh"
#include "tiles.cuh"

namespace fp4kit {

constexpr u32 kStagedThreads = FP4KIT_RESIDUAL_STAGED_THREADS;

// What lies in shared memory, one after the other, all of it whole 16-byte pieces.
template <class T>
struct Stage {
  static constexpr u32 kRows = 4 / T::kSize;       // rows that a word holds a channel of
  static constexpr u32 kChannels = 16 / T::kSize;  // of a 16-byte piece of a row
  static constexpr u32 kPieces = kLaneElements / kChannels;
  static constexpr u32 kSlot = kStagedThreads * kRows * 4;  // words of a slot

  FactorTable* factors;
  u32* own;    // this thread's part of the first slot
  u32* word;   // `together` rows or pairs of rows
  u16* index;  // the staged places of the channels of each block
  u8* scales;  // of a group

  __device__ __forceinline__ Stage(uint4* memory, u32 slots, u32 together, u32 cols) {
    factors = reinterpret_cast<FactorTable*>(memory);
    u32* const first_slot = reinterpret_cast<u32*>(factors + 1);
    own = first_slot + threadIdx.x * 4;
    word = first_slot + slots * kSlot;
    index = reinterpret_cast<u16*>(word + together * cols);
    scales = reinterpret_cast<u8*>(index + cols);
  }
};

// From a slot to words: a piece of each of the rows that share these.
template <class T>
__device__ __forceinline__ void put_piece(const u32* slot, u32* staged, u32 half) {
  const uint4 first = *reinterpret_cast<const uint4*>(slot);
  if constexpr (Stage<T>::kRows == 1) {
    *reinterpret_cast<uint4*>(staged) = first;
  } else {
    const uint4 second = *reinterpret_cast<const uint4*>(slot + kStagedThreads * 4);
    *reinterpret_cast<uint4*>(staged) =
        make_uint4(byte_perm(first.x, second.x, 0x5410u), byte_perm(first.x, second.x, 0x7632u),
                   byte_perm(first.y, second.y, 0x5410u), byte_perm(first.y, second.y, 0x7632u));
    *reinterpret_cast<uint4*>(staged + half) =
        make_uint4(byte_perm(first.z, second.z, 0x5410u), byte_perm(first.z, second.z, 0x7632u),
                   byte_perm(first.w, second.w, 0x5410u), byte_perm(first.w, second.w, 0x7632u));
  }
}

// The sixteen channels of a block, of each of the rows that share words.
template <class T>
struct StagedBlock {
  static constexpr int kRows = static_cast<int>(Stage<T>::kRows);
  Words<T, kRows * kLaneElements> found;  // a word for each channel
  u32 signs[kRows][2];
  MaxBits<T> maximum;

  __device__ __forceinline__ void gather(u32* word, u32 base, const u16* index, u32 block,
                                         u32 main_blocks) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 eight =
          *reinterpret_cast<const uint4*>(index + index_place(block, half * 8, main_blocks));
      const u32 kept[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        found.word[8 * half + 2 * i] = word_at(word, low_place(kept[i], base));
        found.word[8 * half + 2 * i + 1] = word_at(word, high_place(kept[i], base));
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const u32* const w = found.word + 8 * half;
      if constexpr (kRows == 1) {
        signs[0][half] = sign_nibbles<T>(w);
      } else {
        // As sign_nibbles, the row's elements being the halves of neighbouring words.
        const u32 even[2] = {sign_perm(w[0], w[2], 0xFBD9u), sign_perm(w[4], w[6], 0xFBD9u)};
        const u32 odd[2] = {sign_perm(w[1], w[3], 0xFBD9u), sign_perm(w[5], w[7], 0xFBD9u)};
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const u32 selector = r == 0 ? 0x5410u : 0x7632u;
          signs[r][half] = (byte_perm(even[0], even[1], selector) & 0x08080808u) |
                           (byte_perm(odd[0], odd[1], selector) & 0x80808080u);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) maximum.add(found.word[i]);
  }

  // scale_block of one of the rows.
  template <bool kRounds>
  __device__ __forceinline__ BlockElements scale(int r, float g) const {
    BlockElements elements;
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) {
      elements.y[i] = round_if<kRounds>(mul_rn(found.value(kRows * i + r), g));
    }
    elements.signs[0] = signs[r][0];
    elements.signs[1] = signs[r][1];
    const u32 largest = kRows == 1 ? maximum.result() : maximum.half(r);
    elements.amax = round_if<kRounds>(mul_rn(from_input_bits<T>(largest), g));
    return elements;
  }
};

// Scales of a finished group. Linear ones are contiguous, and end with the tensor's last row.
__device__ __forceinline__ void store_group_scales(const u8* scales, u8* __restrict__ block_scale,
                                                   int layout, u32 group, u32 rows, u32 blocks,
                                                   u32 stored_cols) {
  if (layout == kLayoutLinear) {
    const u32 left = rows - group * kGroupRows;
    const u32 bytes = min_u32(left, kGroupRows) * blocks;
    u8* const out = block_scale + static_cast<u64>(group) * kGroupRows * blocks;
    for (u32 i = threadIdx.x * 8; i < bytes; i += kStagedThreads * 8) {
      if (i + 8 <= bytes) {
        *reinterpret_cast<uint2*>(out + i) = *reinterpret_cast<const uint2*>(scales + i);
      } else {
        for (u32 k = i; k < bytes; ++k) out[k] = scales[k];
      }
    }
    return;
  }
  const u32 across = stored_cols / kTileCols;
  for (u32 i = threadIdx.x; i < across * 2; i += kStagedThreads) {
    const u64 offset = sector_offset(layout, group, i / 2, across, i % 2 * 16);
    *reinterpret_cast<uint4*>(block_scale + offset) =
        *reinterpret_cast<const uint4*>(scales + i * 16);
  }
}

// A thread block takes groups of eight rows; a step of it are `together` rows (or pairs of rows of
// a 16-bit type), as many as shared memory holds well. Rows come into slots, which only the thread
// that copies there reads, without a register: those of the next step are on their way while blocks
// of this one are worked on. A step with more pieces than slots loads the rest when it begins.
//
// An order that is no permutation gives some result, but nothing outside is read.
//
// Launch: kStagedThreads threads, as many blocks as run at once; shared memory as in Stage, the
// scales being 8 * stored_cols bytes, rounded up to 32. Fewer than 2^31
// rows, and cols at most 2^16.
template <class T, bool kRounds>
__global__ void __launch_bounds__(kStagedThreads, FP4KIT_RESIDUAL_QUANTIZE_STAGED)
    quantize_residual_ordered_kernel(const typename T::Bits* __restrict__ x,
                                     const float* __restrict__ encode_scale,
                                     const i64* __restrict__ order, u8* __restrict__ packed,
                                     u8* __restrict__ block_scale, i64 group_count, i64 row_count,
                                     i64 main_count, i64 first, i64 block_count, i64 stored_cols,
                                     i64 together_count, i64 slot_count, i64 magic, i64 shift,
                                     i64 layout_number, i64 interleaved, i64 copies,
                                     i64 high_first) {
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
  const u32 pieces = together * chunks;
  const u32 items = together * places.main_blocks;
  const u32 slots = static_cast<u32>(slot_count);
  const u32 at_once = slots * kStagedThreads;  // pieces that have slots
  const u32 scale_words = (static_cast<u32>(stored_cols) + 3) / 4 * 8;
  const FastDivide divide{main_count, static_cast<u32>(magic), static_cast<u32>(shift)};
  const S stage(memory, slots, together, cols);
  // Hidden, or it is worked out anew in each step.
  const u32 all_tasks =
      opaque(block_tasks(interleaved != 0, first % 2 == 0, copies != 0, high_first != 0));
  const GroupRows group_rows(layout, places.blocks);

  // Begins to copy a step's pieces from `begin` on, as many as there are slots.
  const auto copy_to = [&](u32* to, const typename T::Bits* from, u32 row) {
#pragma unroll
    for (u32 r = 0; r < S::kRows; ++r) {
      copy_piece(to + r * (kStagedThreads * 4), from + r * cols, row + r < rows);
    }
  };
  const auto copy = [&](u32 group, u32 step, u32 begin) {
    const u32 end = group < groups ? min_u32(begin + at_once, pieces) : 0;
    u32* to = stage.own;
    u32 piece = begin + threadIdx.x;
    if (together == 1) {  // where a row comes from is the same for all threads
      const u32 row = group_rows.row(group, step * S::kRows);
      const typename T::Bits* from = x + static_cast<u64>(row) * cols + piece * S::kChannels;
#pragma unroll 2
      for (; piece < end; piece += kStagedThreads) {
        copy_to(to, from, row);
        from += kStagedThreads * S::kChannels;
        to += S::kSlot;
      }
    } else {
#pragma unroll 1
      for (; piece < end; piece += kStagedThreads) {
        const u32 set = small_quotient(piece / S::kPieces, divide);
        const u32 row = group_rows.row(group, (step * together + set) * S::kRows);
        const u32 chunk = piece - set * chunks;
        copy_to(to, x + static_cast<u64>(row) * cols + chunk * S::kChannels, row);
        to += S::kSlot;
      }
    }
    end_copies();
  };
  const auto put = [&](u32 begin) {
    const u32 end = min_u32(begin + at_once, pieces);
    const u32* slot = stage.own;
#pragma unroll 2
    for (u32 piece = begin + threadIdx.x; piece < end; piece += kStagedThreads) {
      put_piece<T>(slot, stage.word + piece * 4, half);
      slot += S::kSlot;
    }
  };

  u32 group = blockIdx.x;
  u32 step = 0;
  copy(group, step, 0);
  if (threadIdx.x < sizeof(FactorTable) / sizeof(float)) stage.factors->fill(threadIdx.x);
#pragma unroll 4
  for (u32 j = threadIdx.x; j < cols; j += kStagedThreads) {
    const u32 channel = static_cast<u32>(channel_inside(__ldg(order + j), cols));
    stage.index[index_place(j / kLaneElements, j % kLaneElements, places.main_blocks)] =
        static_cast<u16>(staged_place<T>(channel, half));
  }
  // Columns beside the blocks stay 0.
  for (u32 i = threadIdx.x; i < scale_words; i += kStagedThreads) {
    reinterpret_cast<u32*>(stage.scales)[i] = 0;
  }
  const float scale = usable(__ldg(encode_scale));
  const FactorTable& factors = *stage.factors;
  const u32 code_step = places.blocks * 8;
  // Moves a warp's blocks along from step to step: those with residuals are more work.
  u32 rotation = 0;

#pragma unroll 1
  while (group < groups) {
    await_copies();
    __syncthreads();  // nobody reads the rows and scales of the step before any more
    put(0);
#pragma unroll 1
    for (u32 begin = at_once; begin < pieces; begin += at_once) {
      copy(group, step, begin);
      await_copies();
      put(begin);
    }
    const bool last = step + 1 == steps;
    const u32 next_group = last ? group + gridDim.x : group;
    const u32 next_step = last ? 0 : step + 1;
    copy(next_group, next_step, 0);
    __syncthreads();

#pragma unroll 1
    for (u32 item = threadIdx.x; item < items; item += kStagedThreads) {
      const u32 turned = item + rotation < items ? item + rotation : item + rotation - items;
      const u32 set = small_quotient(turned, divide);
      const u32 block = turned - set * places.main_blocks;
      StagedBlock<T> staged;
      staged.gather(stage.word, set * staged_row<T>(cols) * 4, stage.index, block,
                    places.main_blocks);
      const u32 tasks = opaque(all_tasks | (block >= places.first ? kHasExtra : 0));
      const u32 main_place = places.main(block);
      const u32 extra_place = places.extra(block);
      const u32 local = (step * together + set) * S::kRows;
      const u32 row = group_rows.row(group, local);
      u8* const codes = packed + (static_cast<u64>(row) * places.blocks + main_place) * 8;
      u8* const scales = stage.scales + group_rows.scale_row(local);
#pragma unroll
      for (u32 r = 0; r < S::kRows; ++r) {
        CodedBlock main{}, extra{};
        if (row + r < rows) {
          quantize_with_residual<kRounds>(
              staged.template scale<kRounds>(static_cast<int>(r), scale), tasks, factors, main,
              extra);
          store_both(codes + r * code_step, extra_place - main_place, tasks, main, extra);
        }
        u8* const row_scales = scales + r * group_rows.scale_rows;
        row_scales[group_rows.scale_col(main_place)] = static_cast<u8>(main.byte);
        if (tasks & kHasExtra) {
          row_scales[group_rows.scale_col(extra_place)] = static_cast<u8>(extra.byte);
        }
      }
    }
    if (last) {
      __syncthreads();
      store_group_scales(stage.scales, block_scale, layout, group, rows, places.blocks,
                         static_cast<u32>(stored_cols));
    }
    rotation = rotation + 32 < items ? rotation + 32 : 0;
    group = next_group;
    step = next_step;
  }
}

}  // namespace fp4kit
