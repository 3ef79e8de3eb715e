// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// A tile of 128 rows and 64 or 128 columns in shared memory, read along rows and along columns.
//
// Rows stay on 16 bytes. A row takes four words more than it needs, and 16 rows four more again: a
// warp that takes blocks of the same columns below one another meets every bank once, as does a
// quarter of one that takes 16 bytes of several rows.
#pragma once

#include "common/elements.cuh"

namespace fp4kit {

// Unsigned, so that divisions by powers of two are shifts.
constexpr u32 kTileRows = 128;
constexpr u32 kTileColumns = 64;  // where nothing else is said
constexpr int kNarrow = 64;
constexpr int kWide = 128;  // elements of 16 bits: vecs of 64 bytes of a row of codes
constexpr u32 kRowGroup = 16;
constexpr u32 kPadding = 4;

template <class T, u32 kWidth = kTileColumns, u32 kHeight = kTileRows, u32 kRowPadding = kPadding>
struct alignas(16) Tile {
  static constexpr u32 kColumns = kWidth;
  static constexpr u32 kWords = kColumns * T::kSize / 4;
  static constexpr u32 kStride = kWords + kRowPadding;
  static constexpr u32 kGroups = kHeight / kRowGroup;
  static constexpr u32 kPerWord = 4 / T::kSize;
  u32 word[kGroups * (kRowGroup * kStride + kPadding)];

  // Offsets of rows add up within a multiple of kRowGroup.
  FP4KIT_HD static constexpr u32 offset(u32 row, u32 w) {
    return row * kStride + row / kRowGroup * kPadding + w;
  }

  FP4KIT_HD u32& at(u32 row, u32 w) { return word[offset(row, w)]; }

  FP4KIT_HD typename T::Bits get(u32 row, u32 col) {
    return reinterpret_cast<typename T::Bits*>(&at(row, col / kPerWord))[col % kPerWord];
  }

  FP4KIT_HD void set(u32 row, u32 col, typename T::Bits bits) {
    reinterpret_cast<typename T::Bits*>(&at(row, col / kPerWord))[col % kPerWord] = bits;
  }
};

// How much of a tile's extent lies inside of a matrix.
FP4KIT_DEVICE u32 tile_rest(i64 size, i64 start, u32 extent) {
  const u64 rest = static_cast<u64>(size - start);
  return rest < extent ? static_cast<u32>(rest) : extent;
}

// Whether pieces of 16 bytes go to shared memory without passing through registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
constexpr bool kCopiesAsync = true;
#else
constexpr bool kCopiesAsync = false;
#endif

// Copies 16 bytes, or writes zeros without looking at the source.
FP4KIT_DEVICE void copy_vec(u32* target, const void* source, bool inside) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
      :
      : "r"(static_cast<u32>(__cvta_generic_to_shared(target))), "l"(source), "r"(inside ? 16 : 0)
      : "memory");
#else
  uint4 piece = make_uint4(0, 0, 0, 0);
  if (inside) piece = __ldg(static_cast<const uint4*>(source));
  *reinterpret_cast<uint4*>(target) = piece;
#endif
}

FP4KIT_DEVICE void end_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

FP4KIT_DEVICE void await_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group 0;" ::: "memory");
#endif
}

// Begins to load the tile at x, of a matrix of `cols` columns; what lies outside becomes +0.0.
template <bool kVector, class T, u32 kWidth>
FP4KIT_DEVICE void load_tile(Tile<T, kWidth>& tile, const typename T::Bits* __restrict__ x,
    i64 cols, u32 rows_left, u32 cols_left) {
  constexpr u32 kWords = Tile<T, kWidth>::kWords;
  if constexpr (kVector) {
    constexpr u32 kVecs = kWords / 4;  // of 16 bytes in a row
    constexpr u32 kRowsAtOnce = kThreads / kVecs;
    constexpr u32 kElements = 16 / T::kSize;
    const u32 first = threadIdx.x / kVecs;
    const u32 place = threadIdx.x % kVecs;
    const bool inside = place * kElements < cols_left;
    const typename T::Bits* source = x + first * cols + place * kElements;
    u32* target = &tile.at(first, 4 * place);
    const auto copy = [&](const auto is_inside) {
#pragma unroll
      for (u32 k = 0; k < kTileRows / kRowsAtOnce; ++k) {
        copy_vec(target + Tile<T, kWidth>::offset(k * kRowsAtOnce, 0), source,
            is_inside(first + k * kRowsAtOnce));
        source += kRowsAtOnce * cols;
      }
    };
    if (rows_left == kTileRows && cols_left == kWidth) {
      copy([](u32) { return true; });
    } else {
      copy([&](u32 row) { return inside && row < rows_left; });
    }
  } else {
    constexpr u32 kPerWord = Tile<T, kWidth>::kPerWord;
    for (u32 index = threadIdx.x; index < kTileRows * kWords; index += kThreads) {
      const u32 row = index / kWords;
      u32 word = 0;
#pragma unroll
      for (u32 k = 0; k < kPerWord; ++k) {
        const u32 col = index % kWords * kPerWord + k;
        if (row < rows_left && col < cols_left) {
          word |= static_cast<u32>(__ldg(x + row * cols + col)) << (16 * k);
        }
      }
      tile.at(row, index % kWords) = word;
    }
  }
}

// The 16 elements that begin at a word of a tile, on 16 bytes.
template <class T>
FP4KIT_DEVICE Words<T> tile_group(const u32* first) {
  Words<T> result;
  const uint4* source = reinterpret_cast<const uint4*>(first);
#pragma unroll
  for (int i = 0; i < Words<T>::kWords / 4; ++i) {
    const uint4 piece = source[i];
    unpack_vec(piece, result.word + 4 * i);
  }
  return result;
}

template <class T>
FP4KIT_DEVICE float half_value(u32 word, u32 half) {
  Words<T, 4 / T::kSize> one{{word}};
  return one.value(half);
}

template <class T, u32 kGroups>
FP4KIT_DEVICE void gather_column(
    const u32 (&word)[kGroups * kGroupSize], u32 half, Words<T> (&result)[kGroups]) {
  const u32 selector = half == 0 ? 0x5410u : 0x7632u;
#pragma unroll
  for (u32 l = 0; l < kGroups; ++l) {
#pragma unroll
    for (u32 i = 0; i < Words<T>::kWords; ++i) {
      if constexpr (T::kSize == 4) {
        result[l].word[i] = word[l * kGroupSize + i];
      } else {
        const u32 at = l * kGroupSize + 2 * i;
        result[l].word[i] = byte_perm(word[at], word[at + 1], selector);
      }
    }
  }
}

}  // namespace fp4kit
