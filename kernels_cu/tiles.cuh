// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// A tile of 128 rows and 64 columns in shared memory, which is read along rows and along columns.
//
// A row takes one word more than it needs, and 16 rows 20 words more. So a warp that takes blocks
// of the same columns below one another, or of the same rows side by side, meets every bank once.
#pragma once

#include "block_io.cuh"

namespace fp4kit {

constexpr int kTileRows = 128;
constexpr int kTileColumns = 64;
constexpr int kRowGroup = 16;
constexpr int kGroupPadding = 20;

template <class T>
struct Tile {
  static constexpr int kWords = kTileColumns * T::kSize / 4;
  static constexpr int kStride = kWords + 1;
  static constexpr int kGroups = kTileRows / kRowGroup;
  static constexpr int kPerWord = 4 / T::kSize;
  u32 word[kGroups * (kRowGroup * kStride + kGroupPadding)];

  FP4KIT_HD u32& at(int row, int w) {
    return word[row * kStride + row / kRowGroup * kGroupPadding + w];
  }

  FP4KIT_HD typename T::Bits get(int row, int col) {
    return reinterpret_cast<typename T::Bits*>(&at(row, col / kPerWord))[col % kPerWord];
  }

  FP4KIT_HD void set(int row, int col, typename T::Bits bits) {
    reinterpret_cast<typename T::Bits*>(&at(row, col / kPerWord))[col % kPerWord] = bits;
  }
};

}  // namespace fp4kit
