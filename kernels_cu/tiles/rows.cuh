// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// The rows of a tile: a whole block per thread. Squares find their scale here.
#pragma once

#include "tiles/block.cuh"

namespace fp4kit {

// The blocks that a thread takes, kStep rows apart: a warp takes whole rows of codes. Each eight
// lanes take as many blocks of a row as meet other banks, and the same of rows below. A search
// wants the rows of a square in the lanes of half a warp.
template <class C>
struct RowBlocks {
  static constexpr u32 kBlockWords = C::kBlock * C::T::kSize / 4;
  static constexpr u32 kFit = kBlockWords < 32 ? 32 / kBlockWords : 1;
  static constexpr u32 kLow = kFit < C::kAcross ? kFit : C::kAcross;  // blocks of eight lanes
  static constexpr u32 kRowsLow = 8 / kLow;
  static constexpr u32 kHigh = C::kAcross / kLow;  // such groups of blocks in a row
  static constexpr u32 kStep = kThreads / C::kAcross;
  static_assert(kStep % 32 == 0, "so that offsets of rows add up, in tiles and in scales");
  u32 row;
  u32 block;

  FP4KIT_DEVICE RowBlocks() {
    const u32 index = threadIdx.x;
    if constexpr (C::V::kSquare && C::kSearches) {
      block = index / C::kBlock % C::kAcross;
      row = index / (C::kBlock * C::kAcross) * C::kBlock + index % C::kBlock;
    } else {
      const u32 lane = index % 32;
      block = lane / 8 % kHigh * kLow + lane % kLow;
      row = index / 32 * (32 / C::kAcross) + lane / (8 * kHigh) * kRowsLow + lane / kLow % kRowsLow;
    }
  }

  template <int kGroups>
  FP4KIT_DEVICE void load(
      typename C::TileType& tile, u32 k, Words<typename C::T> (&x)[kGroups]) const {
    const u32* first = &tile.at(row, block * kBlockWords) + C::TileType::offset(k * kStep, 0);
#pragma unroll
    for (u32 l = 0; l < kGroups; ++l)
      x[l] = tile_group<typename C::T>(first + l * kBlockWords / kGroups);
  }

  template <int kGroups, int kGroupWords>
  FP4KIT_DEVICE void store_codes(
      typename C::TileType& tile, u32 k, const u32 (&code)[kGroups][kGroupWords]) const {
    u32* first = &tile.at(row, block * kBlockWords) + C::TileType::offset(k * kStep, 0);
#pragma unroll
    for (u32 l = 0; l < kGroups; ++l) {
#pragma unroll
      for (u32 i = 0; i < kGroupWords; ++i) first[l * kGroupWords + i] = code[l][i];
    }
  }
};

template <class C>
FP4KIT_DEVICE void gather_squares(TileShared<C>& shared, typename C::TileType& tile, u32 parity) {
  using Format = typename C::Format;
  using T = typename C::T;
  using Place = RowBlocks<C>;
  const Place place;
#pragma unroll
  for (u32 k = 0; k < C::kEach; ++k) {
    Words<T> x[Format::kGroups];
    place.load(tile, k, x);
    u32 raw[Format::kGroups];
    u32 bits = as_bits(block_amax_of<Format, T>(x, raw));
    // A warp holds rows of one square, in lanes that differ by these distances.
    bits = max_across<16, 8 * Place::kHigh>(max_across<4, Place::kLow>(bits));
    const u32 lane = threadIdx.x % 32;
    if (lane % 8 < Place::kLow && lane < 8 * Place::kHigh) {
      const u32 down = (place.row + k * Place::kStep) / C::kBlock;
      atomicMax(&shared.square_amax[parity][down][place.block], bits);
    }
  }
  __syncthreads();
}

template <class C>
FP4KIT_DEVICE void quantize_rows(TileShared<C>& shared, typename C::TileType& tile,
    const Task<typename C::T>& task, const Options& options, u32 parity) {
  using Format = typename C::Format;
  using R = typename C::RowR;
  constexpr u32 kGroups = Format::kGroups;
  constexpr u32 kBlock = C::kBlock;
  constexpr u32 kGroupBytes = 4 * Format::kGroupWords;
  const QuantizedView& side = C::kRows ? task.row : task.col;
  constexpr u32 kStep = RowBlocks<C>::kStep;
  const i64 block0 = task.col0 / kBlock;
  const i64 across = C::kRows ? side.blocks : (task.cols + kBlock - 1) / kBlock;
  const RowBlocks<C> at;
  const u32 b = at.block;
  u64 piece = static_cast<u64>((task.row0 + at.row) * across + block0 + b);
  u8* out = side.packed + piece * (kGroups * kGroupBytes);
  const ScalePlace<C::kLayout> place(side, task.row0, block0);
  u8* scale = place.at(at.row, b);
  const u32 blocks_left = (task.cols_left + kBlock - 1) / kBlock;
  if constexpr (C::kGathers) gather_squares(shared, tile, parity);
  u32 scales = 0;  // of a whole matrix, one byte each
#pragma unroll(C::V::kStochastic || C::kSearches || C::kRotateRows || C::kFull ? 1 : C::kEach)
  for (u32 k = 0; k < C::kEach; ++k) {
    const u32 r = at.row + k * kStep;
    Words<typename C::T> elements[kGroups];
    at.load(tile, k, elements);
    Words<R> x[kGroups];
    const u32 left = task.cols_left > b * kBlock ? task.cols_left - b * kBlock : 0;
    maybe_rotate<C::kRotateRows>(elements, options.row_mask, left, x);
    u32 raw[kGroups];
    float amax = block_amax_of<Format, R>(x, raw);
    if constexpr (C::kGathers) {
      amax = as_float(shared.square_amax[parity][r / kBlock][b]);
    } else if constexpr (C::V::kSquare) {
      amax = as_float(max_across<kBlock / 2>(as_bits(amax)));
    }
    Coded<Format> coded;
    if constexpr (C::kRows) {
      encode_block(
          shared, x, amax, raw, shared.rows, r, options, piece * kGroups, 0, task.stream, coded);
    } else {
      encode_block(
          shared, x, amax, raw, shared.cols, 0, options, piece * kGroups, 0, task.stream, coded);
    }
    if constexpr (C::V::kSquare) {
      if (r % kBlock == 0) {
        if constexpr (C::kFull) {
          shared.squares.set(r / kBlock, b, coded.byte);
        } else {
          shared.square_byte[r / kBlock][b] = static_cast<u8>(coded.byte);
        }
      }
    }
    if constexpr (C::kTransposes) at.store_codes(tile, k, coded.code);
    if constexpr (C::kRows) {
      if (C::kFull || (r < task.rows_left && b < blocks_left)) {
#pragma unroll
        for (u32 l = 0; l < kGroups; ++l) {
          store_group<C>(out + l * kGroupBytes, coded.code[l], options);
        }
        if constexpr (C::kFull) {
          scales |= coded.byte << (8 * k);
        } else {
          *scale = static_cast<u8>(coded.byte);
        }
      }
    }
    piece += kStep * static_cast<u64>(across);
    out += kStep * static_cast<u64>(across) * (kGroups * kGroupBytes);
    scale += place.step(kStep);
  }
  if constexpr (C::kFull && C::kRows && !C::V::kSquare) {
    static_assert(C::kEach == 4 && RowBlocks<C>::kLow == 4, "four bytes of four lanes");
    *reinterpret_cast<u32*>(place.at(at.row + b % 4 * kStep, b / 4 * 4)) = transpose_scales(scales);
  }
}

}  // namespace fp4kit
