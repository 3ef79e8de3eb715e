// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// What a thread block does to one tile: quantize it along rows, along columns, or both. Must equal
// ReferenceBackend.quantize.
//
// Algorithm: the tile lies in shared memory (tiles.cuh). Each thread takes blocks of a row
// (tile_rows.cuh), then of columns (tile_columns.cuh). What follows from the second level is worked
// out before: once for all scale bytes, or once per row and column if they have levels of their
// own. Squares need their scale first: a square's rows sit in neighbouring lanes, which share it by
// shuffles; their columns have the codes of the rows, turned in shared memory.
#pragma once

#include "tile_columns.cuh"
#include "tile_rows.cuh"

namespace fp4kit {

// What the scale bytes come to as candidates, if all vectors share one second level.
template <class C>
__device__ __forceinline__ void fill_candidates(TileShared<C>& shared, const Side& side,
                                                float range) {
  if (side.scales == 1 && threadIdx.x < kScaleBytes) {
    const Level level = level_of<C>(__ldg(side.second), range);
    shared.decoded.candidate[threadIdx.x] =
        make_candidate<C::V::kSearch>(threadIdx.x, level, range, C::V::kError);
  }
}

template <class C>
__device__ __forceinline__ void quantize_tile(TileShared<C>& shared,
                                              const Task<typename C::T>& task,
                                              const Options& options) {
  load_tile<C::kVector>(shared.tile, task.x, task.row0, task.col0, task.rows, task.cols);
  if constexpr (!C::Format::kIsMx) {
    // The halves of the thread block take a direction each.
    const u32 half = threadIdx.x / (kThreads / 2);
    const u32 thread = threadIdx.x % (kThreads / 2);
    if (C::kRows && half == 0) {
      fill_levels(shared.rows, task.row, task.row0, task.rows, options.range, thread);
    }
    if (C::kCols && half == 1) {
      fill_levels(shared.cols, task.col, task.col0, task.cols, options.range, thread);
    }
  }
  if constexpr (C::kSearches)
    fill_candidates(shared, C::kRows ? task.row : task.col, options.range);
  __syncthreads();
  if constexpr (C::kRows || C::V::kSquare) quantize_rows<C>(shared, task, options);
  if constexpr (C::kCols) {
    if constexpr (C::V::kSquare) {
      __syncthreads();
    } else if constexpr (C::kSearches && C::kRows) {
      __syncthreads();
      fill_candidates(shared, task.col, options.range);
      __syncthreads();
    }
    quantize_columns<C>(shared, task, options);
  }
}

}  // namespace fp4kit
