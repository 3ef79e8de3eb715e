// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// The rows of a tile: a whole block per thread. Squares find their scale here.
#pragma once

#include "tile_config.cuh"

namespace fp4kit {

// The block that a thread takes at step k. The blocks of a row lie together in the result, so that
// a warp takes whole rows. Each eight lanes take as many blocks of a row as meet other banks, and
// the same of rows below. A search wants the rows of a square in the lanes of half a warp instead.
template <class C>
struct RowBlock {
  static constexpr u32 kBlockWords = C::kBlock * C::T::kSize / 4;
  static constexpr u32 kFit = kBlockWords < 32 ? 32 / kBlockWords : 1;
  static constexpr u32 kLow = kFit < C::kAcross ? kFit : C::kAcross;  // blocks of eight lanes
  static constexpr u32 kRowsLow = 8 / kLow;
  static constexpr u32 kHigh = C::kAcross / kLow;  // such groups of blocks in a row
  u32 row;
  u32 block;

  __device__ __forceinline__ explicit RowBlock(u32 k) {
    const u32 index = k * kThreads + threadIdx.x;
    if constexpr (C::V::kSquare && C::kSearches) {
      block = index / C::kBlock % C::kAcross;
      row = index / (C::kBlock * C::kAcross) * C::kBlock + index % C::kBlock;
    } else {
      const u32 lane = index % 32;
      block = lane / 8 % kHigh * kLow + lane % kLow;
      row = index / 32 * (32 / C::kAcross) + lane / (8 * kHigh) * kRowsLow + lane / kLow % kRowsLow;
    }
  }

  template <int kLanes>
  __device__ __forceinline__ void load(typename C::TileType& tile,
                                       Words<typename C::T> (&x)[kLanes]) const {
#pragma unroll
    for (u32 l = 0; l < kLanes; ++l) {
      x[l] = tile_lane(tile, row, block * C::kBlock + l * kLaneElements);
    }
  }
};

// The amax of every square, from those of its rows.
template <class C>
__device__ __forceinline__ void gather_squares(TileShared<C>& shared, typename C::TileType& tile,
                                               u32 parity) {
  using Format = typename C::Format;
  using T = typename C::T;
#pragma unroll
  for (u32 k = 0; k < C::kEach; ++k) {
    const RowBlock<C> place(k);
    Words<T> x[Format::kLanes];
    place.load(tile, x);
    u32 raw[Format::kLanes];
    u32 bits = as_bits(lanes_amax<Format, T>(x, raw));
    // A warp holds rows of one square, in lanes that differ by these distances.
    using Place = RowBlock<C>;
#pragma unroll
    for (u32 distance = Place::kLow; distance < 8; distance *= 2) {
      bits = max_u32(bits, __shfl_xor_sync(0xFFFFFFFFu, bits, distance));
    }
#pragma unroll
    for (u32 distance = 8 * Place::kHigh; distance < 32; distance *= 2) {
      bits = max_u32(bits, __shfl_xor_sync(0xFFFFFFFFu, bits, distance));
    }
    const u32 lane = threadIdx.x % 32;
    if (lane % 8 < Place::kLow && lane < 8 * Place::kHigh) {
      atomicMax(&shared.square_amax[parity][place.row / C::kBlock][place.block], bits);
    }
  }
  __syncthreads();
}

template <class C>
__device__ __forceinline__ void quantize_rows(TileShared<C>& shared, typename C::TileType& tile,
                                              const Task<typename C::T>& task,
                                              const Options& options, u32 parity) {
  using Format = typename C::Format;
  using R = typename C::RowR;
  constexpr u32 kLanes = Format::kLanes;
  constexpr u32 kBlock = C::kBlock;
  constexpr u32 kLaneBytes = 4 * Format::kLaneWords;
  const Side& side = C::kRows ? task.row : task.col;
  const i64 block0 = task.col0 / kBlock;
  const i64 across = C::kRows ? side.blocks : (task.cols + kBlock - 1) / kBlock;
  // Of the first block in the tile, also where the columns alone are asked for.
  const u64 piece0 = static_cast<u64>(task.row0 * across + block0);
  const ScalePlace<C::kLayout> place(side, task.row0, block0);
  u32 blocks_left = (task.cols_left + kBlock - 1) / kBlock;
  u32 rows_left = task.rows_left;
  if constexpr (C::V::kStochastic) {
    // Held, where they would be worked out anew for every block.
    blocks_left = opaque(blocks_left);
    rows_left = opaque(rows_left);
  }
  if constexpr (C::kGathers) gather_squares(shared, tile, parity);
  // What costs much is not repeated in the code.
#pragma unroll(C::V::kStochastic || C::kSearches || C::kRotateRows ? 1 : C::kEach)
  for (u32 k = 0; k < C::kEach; ++k) {
    const RowBlock<C> at(k);
    const u32 r = at.row;
    const u32 b = at.block;
    Words<typename C::T> elements[kLanes];
    at.load(tile, elements);
    Words<R> x[kLanes];
    const u32 left = task.cols_left > b * kBlock ? task.cols_left - b * kBlock : 0;
    maybe_rotate<C::kRotateRows>(elements, options.row_mask, left, x);
    u32 raw[kLanes];
    float amax = lanes_amax<Format, R>(x, raw);
    if constexpr (C::kGathers) {
      amax = as_float(shared.square_amax[parity][r / kBlock][b]);
    } else if constexpr (C::V::kSquare) {
      u32 bits = as_bits(amax);
#pragma unroll
      for (u32 distance = kBlock / 2; distance > 0; distance /= 2) {
        bits = max_u32(bits, __shfl_xor_sync(0xFFFFFFFFu, bits, distance));
      }
      amax = as_float(bits);
    }
    const u64 piece = piece0 + r * static_cast<u64>(across) + b;
    Coded<Format> coded;
    if constexpr (C::kRows) {
      encode_block(shared, x, amax, raw, shared.rows, r, options, piece * kLanes, 0, task.stream,
                   coded);
    } else {
      encode_block(shared, x, amax, raw, shared.cols, 0, options, piece * kLanes, 0, task.stream,
                   coded);
    }
    if constexpr (C::V::kSquare) {
      if (r % kBlock == 0) shared.square_byte[r / kBlock][b] = static_cast<u8>(coded.byte);
    }
    if constexpr (C::kTurns) {
#pragma unroll
      for (u32 l = 0; l < kLanes; ++l) {
#pragma unroll
        for (u32 i = 0; i < Format::kLaneWords; ++i) {
          shared.codes.at(r, (b * kLanes + l) * Format::kLaneWords + i) = coded.code[l][i];
        }
      }
    }
    if constexpr (C::kRows) {
      if (r < rows_left && b < blocks_left) {
        u8* out = side.packed + piece * (kLanes * kLaneBytes);
#pragma unroll
        for (u32 l = 0; l < kLanes; ++l) {
          store_lane<C>(out + l * kLaneBytes, coded.code[l], options);
        }
        *place.at(r, b) = static_cast<u8>(coded.byte);
      }
    }
  }
}

}  // namespace fp4kit
