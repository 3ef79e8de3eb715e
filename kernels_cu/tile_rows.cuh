// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// The rows of a tile: a whole block per thread. Squares find their scale here.
#pragma once

#include "tile_config.cuh"

namespace fp4kit {

template <class C>
__device__ __forceinline__ void quantize_rows(TileShared<C>& shared,
                                              const Task<typename C::T>& task,
                                              const Options& options) {
  using Format = typename C::Format;
  using R = typename C::RowR;
  constexpr int kLanes = Format::kLanes;
  constexpr int kBlock = C::kBlock;
  constexpr int kAcross = C::kAcross;
  constexpr int kEach = kTileRows * kAcross / kThreads;
  const Side& side = C::kRows ? task.row : task.col;
  const bool one_level = !C::kHasLevels || side.scales == 1;
  const Scales<C, kTileRows> row_scales{shared.rows, one_level};
  const Scales<C, kTileColumns> col_scales{shared.cols, one_level};
  const i64 block0 = task.col0 / kBlock;
  const ScalePlace place(side, options.layout, task.row0, block0);
  const i64 blocks_left = side.blocks - block0;
  const int rows_left =
      static_cast<int>(task.rows - task.row0 < kTileRows ? task.rows - task.row0 : kTileRows);
  // What costs much is not repeated in the code.
#pragma unroll(C::V::kStochastic || C::kSearches || C::kRotateRows ? 1 : kEach)
  for (int k = 0; k < kEach; ++k) {
    const int index = k * kThreads + static_cast<int>(threadIdx.x);
    int r, b;
    if constexpr (C::V::kSquare) {
      b = index / kBlock % kAcross;
      r = index / (kBlock * kAcross) * kBlock + index % kBlock;
    } else {
      b = index % kAcross;
      r = index / kAcross;
    }
    Words<typename C::T> elements[kLanes];
#pragma unroll
    for (int l = 0; l < kLanes; ++l) {
      elements[l] = tile_lane(shared.tile, r, b * kBlock + l * kLaneElements);
    }
    Words<R> x[kLanes];
    const int left = task.cols - task.col0 < kTileColumns
                         ? static_cast<int>(task.cols - task.col0) - b * kBlock
                         : kBlock;
    maybe_rotate<C::kRotateRows>(elements, options.row_mask, left, x);
    u32 raw[kLanes];
    float amax = lanes_amax<Format, R>(x, raw);
    if constexpr (C::V::kSquare) {
      u32 bits = as_bits(amax);
#pragma unroll
      for (int distance = kBlock / 2; distance > 0; distance /= 2) {
        bits = max_u32(bits, __shfl_xor_sync(0xFFFFFFFFu, bits, distance));
      }
      amax = as_float(bits);
    }
    const i64 piece = (task.row0 + r) * side.blocks + block0 + b;
    const u64 group = static_cast<u64>(piece) * kLanes;
    Coded<Format> coded;
    if constexpr (C::kRows) {
      encode_block<C>(shared, x, amax, raw, row_scales.level(r), row_scales, options, group, 0,
                      task.stream, coded);
    } else {
      // The group of a row that is not asked for: as if it were.
      const i64 across = (task.cols + kBlock - 1) / kBlock;
      const u64 own = static_cast<u64>((task.row0 + r) * across + block0 + b) * kLanes;
      encode_block<C>(shared, x, amax, raw, col_scales.level(0), col_scales, options, own, 0,
                      task.stream, coded);
    }
    if constexpr (C::V::kSquare) {
      if (r % kBlock == 0) shared.square_byte[r / kBlock][b] = static_cast<u8>(coded.byte);
    }
    if constexpr (C::kTurns) {
#pragma unroll
      for (int l = 0; l < kLanes; ++l) {
#pragma unroll
        for (int i = 0; i < Format::kLaneWords; ++i) {
          shared.codes.at(r, (b * kLanes + l) * Format::kLaneWords + i) = coded.code[l][i];
        }
      }
    }
    if constexpr (C::kRows) {
      if (r < rows_left && b < blocks_left) {
        u8* out = side.packed + group * (4 * Format::kLaneWords);
#pragma unroll
        for (int l = 0; l < kLanes; ++l) {
          store_lane<C>(out + l * (4 * Format::kLaneWords), coded.code[l], options);
        }
        *place.at(r, b) = static_cast<u8>(coded.byte);
      }
    }
  }
}

}  // namespace fp4kit
