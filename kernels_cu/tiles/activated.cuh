// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Tiles whose elements are activated before they are quantized, where they lie: what reaches the
// passes over rows and columns are results rounded to their type.
#pragma once

#include "activation/activations.cuh"
#include "tiles/config.cuh"

namespace fp4kit {

// A configuration with a function of its elements. The tile of factors takes the place of the one
// that would be on its way.
template <class C, int kFunctionNumber>
struct Activated : C {
  static_assert(C::kColumns == kWide && !C::kFull, "");
  static constexpr int kFunction = kFunctionNumber;
  static constexpr int kBuffers = has_factor(kFunction) ? 1 : C::kBuffers;
  static constexpr int kTiles = has_factor(kFunction) ? 2 : kBuffers;
};

// Where a task's inputs are: for swiglu rows of twice the length, whose halves are gate and factor.
template <class C>
__device__ __forceinline__ void load_activated(
    typename C::TileType* tiles, const Task<typename C::T>& task) {
  const i64 pitch = C::kFunction == kSwiglu ? 2 * task.cols : task.cols;
  const i64 start = task.row0 * pitch + task.col0;
  load_tile<C::kVector>(tiles[0], task.x + start, pitch, task.rows_left, task.cols_left);
  if constexpr (has_factor(C::kFunction)) {
    const typename C::T::Bits* factor = C::kFunction == kSwiglu ? task.x + task.cols : task.factor;
    load_tile<C::kVector>(tiles[1], factor + start, pitch, task.rows_left, task.cols_left);
  }
}

// A barrier must follow. What lies outside of the matrix stays +0.0.
template <class C>
__device__ __forceinline__ void activate_tile(typename C::TileType* tiles) {
  using T = typename C::T;
  constexpr u32 kVecs = C::TileType::kWords / 4;  // in a row
  const auto load = [](const u32* from) {
    const uint4 piece = *reinterpret_cast<const uint4*>(from);
    return Vec<T>{{piece.x, piece.y, piece.z, piece.w}};
  };
#pragma unroll 1
  for (u32 i = threadIdx.x; i < kTileRows * kVecs; i += kThreads) {
    u32* const own = &tiles[0].at(i / kVecs, i % kVecs * 4);
    Vec<T> factor{};
    if constexpr (has_factor(C::kFunction)) {
      factor = load(&tiles[1].at(i / kVecs, i % kVecs * 4));
    }
    const Vec<T> result = activate_all<T, C::kFunction>(load(own), factor);
    *reinterpret_cast<uint4*>(own) = pack_vec(result.word);
  }
}

}  // namespace fp4kit
