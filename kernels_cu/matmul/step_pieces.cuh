// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Activations that come step by step: what a thread loads while a step is computed, and stores into
// the image of the next one.
#pragma once

#include "matmul/activations.cuh"
#include "matmul/shape.cuh"

namespace fp4kit {

#ifdef __CUDACC__
#ifdef FP4KIT_HAS_MMA

template <int kForm, class Shape>
struct StepPieces {
  using Source = ActivationSource<Shape::kParts>;
  static constexpr u32 kThreadCount = Shape::kSmallThreads;
  static constexpr u32 kPieces = Shape::kStepChunks * (Shape::kTokens / 2) * kPairPieces;
  static constexpr u32 kHeld = Shape::kStaged ? (kPieces + kThreadCount - 1) / kThreadCount : 1;
  static constexpr u32 kImageBytes = Shape::kStepChunks * 4 * Shape::kSlots * 16;
  static constexpr u32 kNowhere = 0x80000000u;  // beyond every depth

  // Source: in the tile's first step, or nothing. Column: of those that there is room for. Target:
  // in the first of two images.
  const u8* source[kHeld];
  u32 column[kHeld], k[kHeld];
  SharedPlace target[kHeld];
  uint4 held[kHeld];

  FP4KIT_DEVICE void place(SharedPlace image) {
#pragma unroll
    for (u32 i = 0; i < kHeld; ++i) {
      const u32 number = i * kThreadCount + threadIdx.x;
      const PiecePlace at = piece_place(number, Shape::kTokens / 2, Shape::kSlots);
      column[i] = kept(at.token);
      k[i] = kept(number < kPieces ? at.k : kNowhere);
      target[i] = kept(image.at(at.place * 16));
    }
  }

  // To columns first .. end - 1 of the activations.
  FP4KIT_DEVICE void enter(const Source& from, u32 first, u32 end) {
#pragma unroll
    for (u32 i = 0; i < kHeld; ++i) {
      const u32 own = first + column[i];
      source[i] = own < end ? from.place(own, k[i]) : nullptr;
    }
  }

  FP4KIT_DEVICE void load(const Source& from, u32 step) {
    const u32 first = step * (Shape::kStepChunks * kPreparedDepth);
#pragma unroll
    for (u32 i = 0; i < kHeld; ++i) {
      held[i] = make_uint4(0, 0, 0, 0);
      if (source[i] == nullptr || k[i] + first >= from.depth) continue;
      held[i] = load_piece<Shape::kParts>(source[i] + first * Source::kBytes, column[i]);
    }
  }

  FP4KIT_DEVICE void store(const Source& from, u32 buffer) const {
#pragma unroll
    for (u32 i = 0; i < kHeld; ++i) {
      if (kPieces % kThreadCount != 0 && k[i] >= kNowhere) continue;
      const uint4 piece = finish_piece<Shape::kParts>(column[i], held[i]);
      const SharedPlace place = target[i].at(buffer * kImageBytes);
      place.store_vec(arrange_piece<kForm>(piece, from.high_first));
    }
  }
};

#endif  // FP4KIT_HAS_MMA
#endif  // __CUDACC__

}  // namespace fp4kit
