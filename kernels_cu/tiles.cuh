// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// A tile of 128 rows and 64 columns in shared memory, which is read along rows and along columns.
//
// Rows stay on 16 bytes. A row takes four words more than it needs, and 16 rows four more again: a
// warp that takes blocks of the same columns below one another meets every bank once, as does a
// quarter of one that takes 16 bytes of several rows.
#pragma once

#include "block_io.cuh"

namespace fp4kit {

constexpr int kTileRows = 128;
constexpr int kTileColumns = 64;
constexpr int kRowGroup = 16;
constexpr int kPadding = 4;

template <class T>
struct alignas(16) Tile {
  static constexpr int kWords = kTileColumns * T::kSize / 4;
  static constexpr int kStride = kWords + kPadding;
  static constexpr int kGroups = kTileRows / kRowGroup;
  static constexpr int kPerWord = 4 / T::kSize;
  u32 word[kGroups * (kRowGroup * kStride + kPadding)];

  FP4KIT_HD static int offset(int row, int w) {
    return row * kStride + row / kRowGroup * kPadding + w;
  }

  FP4KIT_HD u32& at(int row, int w) { return word[offset(row, w)]; }

  FP4KIT_HD typename T::Bits get(int row, int col) {
    return reinterpret_cast<typename T::Bits*>(&at(row, col / kPerWord))[col % kPerWord];
  }

  FP4KIT_HD void set(int row, int col, typename T::Bits bits) {
    reinterpret_cast<typename T::Bits*>(&at(row, col / kPerWord))[col % kPerWord] = bits;
  }
};

#ifdef __CUDACC__

// The tile that begins at (row0, col0) of x (rows, cols); what lies outside is +0.0.
template <bool kVector, class T>
__device__ __forceinline__ void load_tile(Tile<T>& tile, const typename T::Bits* __restrict__ x,
                                          i64 row0, i64 col0, i64 rows, i64 cols) {
  constexpr int kWords = Tile<T>::kWords;
  const int rows_left = static_cast<int>(rows - row0 < kTileRows ? rows - row0 : kTileRows);
  const int cols_left = static_cast<int>(cols - col0 < kTileColumns ? cols - col0 : kTileColumns);
  x += row0 * cols + col0;
  if constexpr (kVector) {
    constexpr int kPieces = kWords / 4;  // of 16 bytes in a row
    constexpr int kRowsAtOnce = kThreads / kPieces;
    constexpr int kEach = kTileRows / kRowsAtOnce;
    constexpr int kElements = 16 / T::kSize;
    const int first = static_cast<int>(threadIdx.x) / kPieces;
    const int place = static_cast<int>(threadIdx.x) % kPieces;
    const bool inside = place * kElements < cols_left;
    const typename T::Bits* source = x + first * cols + place * kElements;
    uint4 piece[kEach];
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      piece[k] = make_uint4(0, 0, 0, 0);
      if (inside && first + k * kRowsAtOnce < rows_left) {
        piece[k] = __ldg(reinterpret_cast<const uint4*>(source));
      }
      source += kRowsAtOnce * cols;
    }
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      *reinterpret_cast<uint4*>(&tile.at(first + k * kRowsAtOnce, 4 * place)) = piece[k];
    }
  } else {
    constexpr int kPerWord = Tile<T>::kPerWord;
    for (int index = threadIdx.x; index < kTileRows * kWords; index += kThreads) {
      const int row = index / kWords;
      u32 word = 0;
#pragma unroll
      for (int k = 0; k < kPerWord; ++k) {
        const int col = index % kWords * kPerWord + k;
        if (row < rows_left && col < cols_left) {
          word |= static_cast<u32>(__ldg(x + row * cols + col)) << (16 * k);
        }
      }
      tile.at(row, index % kWords) = word;
    }
  }
}

// Elements start .. start + 15 of a row, start a multiple of 16.
template <class T>
__device__ __forceinline__ Words<T> tile_lane(Tile<T>& tile, int row, int start) {
  Words<T> result;
  const uint4* source = reinterpret_cast<const uint4*>(&tile.at(row, start / Tile<T>::kPerWord));
#pragma unroll
  for (int i = 0; i < Words<T>::kWords / 4; ++i) {
    const uint4 piece = source[i];
    result.word[4 * i] = piece.x;
    result.word[4 * i + 1] = piece.y;
    result.word[4 * i + 2] = piece.z;
    result.word[4 * i + 3] = piece.w;
  }
  return result;
}

#endif  // __CUDACC__

}  // namespace fp4kit
