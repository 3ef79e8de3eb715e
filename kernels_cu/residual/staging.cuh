// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Residual channels: how reordered rows are written to shared memory and read from it.
#pragma once

#include "residual/places.cuh"

namespace fp4kit {

// ---- Split arrive/wait barriers: warps that arrive early go on with what comes next ----

// Where the hardware does not count arrivals, `wait` is a barrier of all threads, called equally
// often.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
constexpr bool kCountsArrivals = true;
#if __CUDA_ARCH__ >= 900
#define FP4KIT_WAIT "try_wait"  // gives way for a while
#else
#define FP4KIT_WAIT "test_wait"
#endif
#else
constexpr bool kCountsArrivals = false;
#endif

// In shared memory. A phase ends when every warp of the thread block has arrived.
struct SplitBarrier {
  u64 state;

  FP4KIT_DEVICE u32 address() const {
#ifdef __CUDA_ARCH__
    return static_cast<u32>(__cvta_generic_to_shared(&state));
#else
    return 0;
#endif
  }

  // By one thread; all must meet after it.
  FP4KIT_DEVICE void begin(u32 warps) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" : : "r"(address()), "r"(warps) : "memory");
#else
    static_cast<void>(warps);
#endif
  }

  // By whole warps.
  FP4KIT_DEVICE void arrive() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      asm volatile("{.reg .b64 token; mbarrier.arrive.shared.b64 token, [%0];}" ::"r"(address())
          : "memory");
    }
#endif
  }

  // Waits for the end of a phase of this parity: the first one's is 0, the one before it counts as
  // over.
  FP4KIT_DEVICE void wait(u32 parity) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    u32 over;
    do {
      asm volatile("{.reg .pred over; mbarrier." FP4KIT_WAIT
                   ".parity.shared.b64 over, [%1], %2; selp.u32 %0, 1, 0, over;}"
          : "=r"(over)
          : "r"(address()), "r"(parity)
          : "memory");
    } while (over == 0);
#else
    static_cast<void>(parity);
    __syncthreads();
#endif
  }
};

// ---- Stages ----

constexpr u32 kMostBuffers = 3;
// Words at the end of a buffer, of each row (or pair) of a step, for channels that stand nowhere.
constexpr u32 kStagedGap = 4;

// Shared memory, all of it whole 16-byte vecs.
struct Stage {
  ResidualFactors* factors;
  SplitBarrier* full;   // of each buffer: all is written
  SplitBarrier* empty;  // all is read
  u32* word;            // buffers of kTogether rows or pairs of rows
  u16* place;           // of each channel, in words
  u8* scales;           // of some groups

  FP4KIT_DEVICE Stage(uint4* memory, u32 words, u32 cols) {
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

  // Where channel j of the order stands in a buffer, in words. 16 bytes of the rows of a step lie
  // side by side, as do those of neighbouring blocks; which of them is which row's differs by
  // block: who reads blocks and who writes rows meets every bank once.
  FP4KIT_HD static u32 place(u32 j, u32 main_blocks) {
    const u32 block = j / kGroupSize;
    return (j % kGroupSize / 4 * main_blocks + block) * (4 * kTogether) + 4 * first(block) + j % 4;
  }

  // The row (or pair) of a block that lies first. The others are found by exclusive or.
  FP4KIT_HD static u32 first(u32 block) { return block / (8 / kTogether) % kTogether; }

  // Writes a vec of each row to the places of its channels; the buffer begins at byte `base`.
  static FP4KIT_DEVICE void scatter(
      const uint4 (&piece)[kRows], const u32 (&kept)[kChannels / 2], u32* word, u32 base) {
    u32 places[kChannels];
#pragma unroll
    for (u32 i = 0; i < kChannels / 2; ++i) {
      places[2 * i] = place_in<false>(kept[i], base);
      places[2 * i + 1] = place_in<true>(kept[i], base);
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

template <class T>
struct StagedBlock {
  static constexpr int kRows = 4 / static_cast<int>(T::kSize);
  Words<T, kRows * kGroupSize> found;  // a word for each channel
  u32 signs[kRows][2];
  MaxBits<T> maximum;

  FP4KIT_DEVICE StagedBlock(const u32* first, u32 step) {
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

  // The low nibbles of one word and the high ones of another.
  static FP4KIT_DEVICE u32 join_signs(u32 even, u32 odd) {
#ifdef __CUDA_ARCH__
    u32 result;  // the compiler takes two instructions
    asm("lop3.b32 %0, %1, %2, 0x0F0F0F0F, 0xE4;" : "=r"(result) : "r"(even), "r"(odd));
    return result;
#else
    return (even & 0x0F0F0F0Fu) | (odd & 0xF0F0F0F0u);
#endif
  }

  template <bool kRounds>
  FP4KIT_DEVICE BlockElements scale(int r, float g) const {
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

FP4KIT_DEVICE void load_places(const u16* from, u32 (&kept)[2]) {
  const uint2 four = *reinterpret_cast<const uint2*>(from);
  kept[0] = four.x;
  kept[1] = four.y;
}
FP4KIT_DEVICE void load_places(const u16* from, u32 (&kept)[4]) {
  const uint4 eight = *reinterpret_cast<const uint4*>(from);
  unpack_vec(eight, kept);
}

// A place in a ring of buffers, and the parity of the phase that it is used in.
struct RingPlace {
  u32 buffer;
  u32 parity;

  FP4KIT_DEVICE void advance(u32 buffers) {
    if (++buffer == buffers) {
      buffer = 0;
      parity ^= 1;
    }
  }
};

}  // namespace fp4kit
