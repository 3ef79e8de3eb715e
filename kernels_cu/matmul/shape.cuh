// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// How thread blocks of multiply_small_kernel divide a product: fp4kit/cuda/matmul_small.py chooses.
#pragma once

#include "matmul/prepared.cuh"

namespace fp4kit {

// How a thread block divides a product. It takes up to kRows = 16 kGroups kTiles rows of the
// weights at a time, and all of the depth. kGroups x kSlices warps: a warp has kTiles tiles of 16
// rows, and of every kSlices kChunks pieces of 128 of the depth its own kChunks, in a ring of
// kStages stages. kTokens: room for tokens, which are columns of products: 4, 8, 16, 32 or 64; or 1
// or 2, whose other columns are slices of the depth, so that scales multiply sums instead of codes.
// kStaged: activations come step by step, else all of them stay. kBulk: prepared weights are copied
// in stretches, where the architecture can. kFilled, or kStaged: other warps fill one ring of the
// thread block.
template <int kGroupsValue, int kTilesValue, int kSlicesValue, int kChunksValue, int kStagesValue,
    int kTokensValue, int kStagedValue, int kBulkValue, int kFilledValue, int kPartsValue>
struct SmallShape {
  static constexpr int kGroups = kGroupsValue, kTiles = kTilesValue, kSlices = kSlicesValue;
  static constexpr int kChunks = kChunksValue, kStages = kStagesValue, kTokens = kTokensValue;
  static constexpr bool kStaged = kStagedValue != 0;
  static constexpr bool kSliced = kTokens <= 2;
  static constexpr bool kBulk = kBulkValue != 0, kFilled = kFilledValue != 0;
  static constexpr int kParts = kPartsValue;
  // Columns of whole tokens.
  static constexpr int kRoom = kTokens / kParts * kParts;
  static constexpr int kWarps = kGroups * kSlices;
  static constexpr int kSmallThreads = 32 * kWarps;
  // Threads that fill the stages, beside those that multiply.
  static constexpr int kFillers = kStaged ? 64 : kFilled ? 128 : 0;
  static constexpr int kWarpRows = kPreparedRows * kTiles;
  static constexpr int kRows = kGroups * kWarpRows;
  static constexpr int kStepChunks = kSlices * kChunks;
  static constexpr int kColumns = kTokens < 8 ? 1 : kTokens / 8;  // B fragments of a word
  static constexpr int kSums = kSliced ? 2 : 4;                   // of a lane and tile
  // Places of an image for a word of a lane: see activations.cuh.
  static constexpr int kSlots = 4 * kTokens;
  // Sums of warps: of both halves of memory in turn, unless they are many or stages want the place.
  static constexpr int kSumRow = kRows + 8;
  static constexpr int kSumFloats = kSlices * kTokens * kSumRow;
  static constexpr int kSumBuffers = kStaged || kTokens > (kSlices > 8 ? 2 : 8) ? 1 : 2;
  // Barriers of the rings, and two numbers.
  static constexpr int kControlBytes = (8 * kWarps * kStages + 8 + 127) / 128 * 128;
};

// How a thread block of multiply_warpgroup_kernel divides a product. kGroups warpgroups multiply: a
// warp has kTiles tiles of 16 rows of the weights. A step is kChunks pieces of 128 of the depth.
// Other warps fill a ring of kStages stages. kColumns: columns at once, which are tokens times
// their parts.
template <int kGroupsValue, int kTilesValue, int kChunksValue, int kStagesValue, int kColumnsValue,
    int kPartsValue>
struct WarpgroupShape {
  static constexpr int kGroups = kGroupsValue, kTiles = kTilesValue, kChunks = kChunksValue;
  static constexpr int kStages = kStagesValue, kColumns = kColumnsValue, kParts = kPartsValue;
  static constexpr int kRoom = kColumns / kParts * kParts;  // columns of whole tokens
  static constexpr int kWarps = 4 * kGroups;                // that multiply
  static constexpr int kRowTiles = kTiles * kWarps;
  static constexpr int kColumnBytes = kChunks * kPreparedDepth * 2 * kColumns;  // of a stage
  // Sums in shared memory: columns of rows, in banks of their own.
  static constexpr int kSumRow = kRowTiles * kPreparedRows + 8;
  static constexpr int kControlBytes = 1024;  // two barriers of each stage, and a word
};

}  // namespace fp4kit
