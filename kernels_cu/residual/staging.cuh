// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Residual channels: rows staged in another order (residual/quantize_reordered.cu), how they are
// written to shared memory and read from it.
#pragma once

#include "residual/places.cuh"
#include "residual/split_barrier.cuh"

namespace fp4kit {

// Buffers of a ring, at most.
constexpr u32 kMostBuffers = 3;
// Words at the end of a buffer, of each row (or pair) of a step: of channels that stand nowhere.
constexpr u32 kStagedGap = 4;

// What lies in shared memory, one after the other, all of it whole 16-byte pieces.
struct Stage {
  ResidualFactors* factors;
  SplitBarrier* full;   // of each buffer: all is written
  SplitBarrier* empty;  // all is read
  u32* word;            // buffers of kTogether rows or pairs of rows
  u16* place;           // of each channel, in words
  u8* scales;           // of some groups

  __device__ __forceinline__ Stage(uint4* memory, u32 words, u32 cols) {
    factors = reinterpret_cast<ResidualFactors*>(memory);
    full = reinterpret_cast<SplitBarrier*>(factors + 1);
    empty = full + kMostBuffers;
    word = reinterpret_cast<u32*>(empty + kMostBuffers);
    place = reinterpret_cast<u16*>(word + words);
    scales = reinterpret_cast<u8*>(place + cols);
  }
};

// What a step is made of: kTogether rows, or pairs of rows of a 16-bit type.
template <class T, u32 kTogether>
struct Staged {
  static constexpr u32 kShared = 4 / T::kSize;  // rows that a word holds a channel of
  static constexpr u32 kRows = kTogether * kShared;
  static constexpr u32 kSteps = kGroupRows / kRows;  // of a group
  static constexpr u32 kChannels = 16 / T::kSize;    // of a 16-byte piece of a row
  static constexpr u32 kVecs = 4 / kRows;            // that make as many elements as a block

  // Where channel j of the order stands in a buffer, in words. Pieces of 16 bytes of the rows of a
  // step lie side by side, as do those of neighbouring blocks, so that who reads blocks meets every
  // bank once; which of them is which row's differs by block, so that who writes a row meets all
  // banks as well.
  FP4KIT_HD static u32 place(u32 j, u32 main_blocks) {
    const u32 block = j / kGroupSize;
    return (j % kGroupSize / 4 * main_blocks + block) * (4 * kTogether) + 4 * first(block) + j % 4;
  }

  // The row (or pair) of a block that lies first. The others are found by exclusive or.
  FP4KIT_HD static u32 first(u32 block) { return block / (8 / kTogether) % kTogether; }

  // Writes a piece of each row to the places of its channels, which are kept two in a word; the
  // buffer begins at byte `base`.
  static __device__ __forceinline__ void scatter(
      const uint4 (&piece)[kRows], const u32 (&kept)[kChannels / 2], u32* word, u32 base) {
    u32 places[kChannels];
#pragma unroll
    for (u32 i = 0; i < kChannels / 2; ++i) {
      places[2 * i] = low_place(kept[i], base);
      places[2 * i + 1] = high_place(kept[i], base);
    }
#pragma unroll
    for (u32 set = 0; set < kTogether; ++set) {
      const uint4 a = piece[set * kShared];
      const u32 low[4] = {a.x, a.y, a.z, a.w};
      if constexpr (kShared == 1) {
#pragma unroll
        for (int i = 0; i < 4; ++i) word_at(word, places[i] ^ (set * 16)) = low[i];
      } else {
        const uint4 b = piece[set * kShared + 1];
        const u32 high[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          word_at(word, places[2 * i] ^ (set * 16)) = byte_perm(low[i], high[i], 0x5410u);
          word_at(word, places[2 * i + 1] ^ (set * 16)) = byte_perm(low[i], high[i], 0x7632u);
        }
      }
    }
  }
};

// The sixteen channels of a block, of each of the rows that share words.
template <class T>
struct StagedBlock {
  static constexpr int kRows = 4 / static_cast<int>(T::kSize);
  Words<T, kRows * kGroupSize> found;  // a word for each channel
  u32 signs[kRows][2];
  MaxBits<T> maximum;

  // From the block's first piece on; `step` words to the next.
  __device__ __forceinline__ StagedBlock(const u32* first, u32 step) {
#pragma unroll
    for (int i = 0; i < kGroupSize / 4; ++i) {
      const uint4 piece = *reinterpret_cast<const uint4*>(first + static_cast<u32>(i) * step);
      unpack_vec(piece, found.word + 4 * i);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const u32* const w = found.word + 8 * half;
      if constexpr (kRows == 1) {
        signs[0][half] = sign_nibbles<T>(w);
      } else {
        // As sign_nibbles, the row's elements being the halves of neighbouring words.
        const u32 first4 =
            join_signs(sign_perm(w[0], w[2], 0xFBD9u), sign_perm(w[1], w[3], 0xFBD9u));
        const u32 last4 =
            join_signs(sign_perm(w[4], w[6], 0xFBD9u), sign_perm(w[5], w[7], 0xFBD9u));
        signs[0][half] = byte_perm(first4, last4, 0x5410u);
        signs[kRows - 1][half] = byte_perm(first4, last4, 0x7632u);
      }
    }
#pragma unroll
    for (int i = 0; i < kGroupSize; ++i) maximum.add(found.word[i]);
  }

  // Of bytes that are full of a sign's bit the low nibbles of one word and the high ones of
  // another.
  static __device__ __forceinline__ u32 join_signs(u32 even, u32 odd) {
#ifdef __CUDA_ARCH__
    u32 result;  // the compiler takes two instructions
    asm("lop3.b32 %0, %1, %2, 0x0F0F0F0F, 0xE4;" : "=r"(result) : "r"(even), "r"(odd));
    return result;
#else
    return (even & 0x0F0F0F0Fu) | (odd & 0xF0F0F0F0u);
#endif
  }

  // scale_block of one of the rows.
  template <bool kRounds>
  __device__ __forceinline__ BlockElements scale(int r, float g) const {
    BlockElements elements;
#pragma unroll
    for (int i = 0; i < kGroupSize; ++i) {
      elements.y[i] = round_if<kRounds>(mul_rn(found.value(kRows * i + r), g));
    }
    elements.signs[0] = signs[r][0];
    elements.signs[1] = signs[r][1];
    const u32 largest = kRows == 1 ? maximum.result() : maximum.half(r);
    elements.amax = round_if<kRounds>(mul_rn(from_input_bits<T>(largest), g));
    return elements;
  }
};

// Two places of channels in a word each.
__device__ __forceinline__ void load_places(const u16* from, u32 (&kept)[2]) {
  const uint2 four = *reinterpret_cast<const uint2*>(from);
  kept[0] = four.x;
  kept[1] = four.y;
}
__device__ __forceinline__ void load_places(const u16* from, u32 (&kept)[4]) {
  const uint4 eight = *reinterpret_cast<const uint4*>(from);
  unpack_vec(eight, kept);
}

// A place in a ring of buffers, and the parity of the phase that it is used in.
struct RingPlace {
  u32 buffer;
  u32 parity;

  __device__ __forceinline__ void advance(u32 buffers) {
    if (++buffer == buffers) {
      buffer = 0;
      parity ^= 1;
    }
  }
};

}  // namespace fp4kit
