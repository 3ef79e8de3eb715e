// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// The parts of multiply_small_kernel (small.cu): the rings of the weights, the sums of a warp.
#pragma once

#include "matmul/activations.cuh"
#include "matmul/shape.cuh"
#include "matmul/weights.cuh"

namespace fp4kit {

#ifdef __CUDACC__
#ifdef FP4KIT_HAS_MMA

// Whether rings are filled by copies of stretches.
template <int kForm, class Shape>
constexpr bool uses_bulk() {
#ifdef FP4KIT_HAS_BULK_COPIES
  return kForm == kFormPrepared && Shape::kBulk;
#else
  return false;
#endif
}

// A warp's ring of weights.
template <class Format, int kForm, class Shape>
struct Ring {
  using Stage = WeightStage<Format, kForm, Shape::kChunks>;
  using Cursor = TileCursor<Stage, kForm>;
  static constexpr bool kBulk = uses_bulk<kForm, Shape>();
  static constexpr u32 kStageBytes = Shape::kTiles * Stage::kBytes;
  static constexpr u32 kBytes = Shape::kStages * kStageBytes;

  SharedPlace memory;
  SharedPlace barriers;
  LaneTarget<Stage, kForm> target;
  u64 policy;
  Cursor cursors[Shape::kTiles];

  // To tiles of rows from row_tile on, at a piece of 128 of the depth.
  FP4KIT_DEVICE void start(const WeightSource& from, u32 row_tile, u32 chunk) {
#pragma unroll
    for (u32 i = 0; i < Shape::kTiles; ++i) {
      cursors[i].start(from, min_u32(row_tile + i, from.row_tiles - 1), chunk);
    }
  }

  FP4KIT_DEVICE void advance(const WeightSource& from) {
#pragma unroll
    for (Cursor& each : cursors) each.advance(from, Shape::kStepChunks);
  }

  // Begins to copy a step's weights, as many pieces as there are from `chunk` on.
  FP4KIT_DEVICE void copy(const WeightSource& from, u32 stage, u32 chunk, bool is_first) const {
    const u32 offset = stage * kStageBytes;
    const u32 left = chunk < from.depth_tiles ? from.depth_tiles - chunk : 0;
    const u32 valid = min_u32(left, Shape::kChunks);
    if constexpr (kBulk) {
#ifdef FP4KIT_HAS_BULK_COPIES
      if (!is_first) return;
      const u32 bytes = valid * Stage::Tile::kBytes;
      const SharedPlace barrier = barriers.at(stage * kBarrierBytes);
      expect_bytes(barrier, bytes * Shape::kTiles);
      if (bytes == 0) return;
#pragma unroll
      for (u32 i = 0; i < Shape::kTiles; ++i) {
        copy_bulk(memory.at(offset + i * Stage::kBytes), cursors[i].codes, bytes, barrier, policy);
      }
#endif
    } else {
      if (valid == 0) return;
#pragma unroll
      for (u32 i = 0; i < Shape::kTiles; ++i) {
        cursors[i].copy(target, offset + i * Stage::kBytes, from, valid);
      }
    }
  }

  // Ends a step's copies of this thread, whether there were some or not.
  FP4KIT_DEVICE void commit() const {
    if constexpr (!kBulk) commit_copies();
  }

  // Waits for the oldest of kAhead steps on their way, and for the other lanes.
  template <u32 kAhead = Shape::kStages - 1>
  FP4KIT_DEVICE void wait(u32 stage, u32 phase) const {
    if constexpr (kBulk) {
#ifdef FP4KIT_HAS_BULK_COPIES
      wait_bytes(barriers.at(stage * kBarrierBytes), phase);
#endif
    } else {
      wait_copies<kAhead - 1>();
      __syncwarp();
    }
  }
};

// Both steps of a word: sums += weights times activations.
FP4KIT_DEVICE void multiply_word(float (&sums)[4], const u32 (&a)[2][4], const uint4& x) {
  const u32 first[2] = {x.x, x.y}, second[2] = {x.z, x.w};
  mma_16816<Bf16>(sums, a[0], first);
  mma_16816<Bf16>(sums, a[1], second);
}

// Adds the products of piece c of a stage. `image`: what a lane has of the activations of the
// piece.
template <class Format, int kForm, class Shape, class View, class Image>
FP4KIT_DEVICE void multiply_piece(float (&sums)[Shape::kTiles][Shape::kColumns][4],
    const View& view, u32 c, const Image& image, u32& odd) {
  using Stage = typename Ring<Format, kForm, Shape>::Stage;
  constexpr int kTiles = Shape::kTiles;
  uint4 codes[kTiles][2];
  u32 scale[kTiles][2][2];
#pragma unroll
  for (u32 i = 0; i < kTiles; ++i) {
    const u32 piece = i * Stage::kBytes + c * Stage::kChunkBytes;
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
      codes[i][r] = view.load_codes(piece, r, c);
      load_scales<Format, kForm>(view.scales.at(piece), r, view.selector, scale[i][r], odd);
      find_lost<Format, kForm>(codes[i][r], scale[i][r], odd);
    }
  }
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    uint4 x[Shape::kColumns];
#pragma unroll
    for (int m = 0; m < Shape::kColumns; ++m) {
      x[m] = image.load(w, m);
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      u32 pair[2][4], a[2][4];
      scaled_pairs<kForm>(codes[i], scale[i], w, pair);
      join_rows(pair[0], pair[1], a);
#pragma unroll
      for (int m = 0; m < Shape::kColumns; ++m) multiply_word(sums[i][m], a, x[m]);
    }
  }
}

// Of activations that lie in slots.
template <class Format, int kForm, class Shape, class View>
FP4KIT_DEVICE void multiply_chunk(float (&sums)[Shape::kTiles][Shape::kColumns][4],
    const View& view, u32 c, SharedPlace image, u32& odd) {
  struct Slots {
    SharedPlace place;
    FP4KIT_DEVICE uint4 load(u32 w, u32 m) const {
      return place.at((w * Shape::kSlots + 32 * m) * 16).load_vec();
    }
  };
  multiply_piece<Format, kForm, Shape>(sums, view, c, Slots{image}, odd);
}

// The same with columns that are slices: column n of one token is slice n % 4 (what lane t = n % 4
// of a row has) of the first (n < 4) or second block, of two tokens slice n % 4 of token n / 4.
// `x` holds activations of a block each (one token) or the first alone, 0 in all other lanes: there
// nothing is loaded. sums[tile][0][r]: of row 2 g + r.
template <class Format, int kForm, class Shape, class View>
FP4KIT_DEVICE void multiply_chunk_sliced(float (&sums)[Shape::kTiles][1][2], const View& view,
    u32 c, SharedPlace image, uint4 (&x)[2], u32& odd) {
  using Stage = typename Ring<Format, kForm, Shape>::Stage;
  constexpr int kTiles = Shape::kTiles;
  constexpr bool kPair = Shape::kTokens == 2;
  static_assert(kPair || !Format::kIsMx, "a scale of 32 is one of a slice");
  // Words after which sums meet their scale: a block's last.
  constexpr int kScaleEvery = kPair && !Format::kIsMx ? 2 : 4;
  const u32 g = view.lane / 4, t = view.lane % 4;
  uint4 codes[kTiles][2];
#pragma unroll
  for (u32 i = 0; i < kTiles; ++i) {
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
      codes[i][r] = view.load_codes(i * Stage::kBytes + c * Stage::kChunkBytes, r, c);
    }
  }
  const bool early = kPair ? g % 4 == t : g == t;
  const bool late = kPair ? early : g == t + 4;
  float part[kTiles][4];
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    uint4& loaded = x[w < 2 || kPair ? 0 : 1];
    if (w < 2 ? early : late) loaded = image.at(w * Shape::kSlots * 16).load_vec();
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      u32 pair[2][4], a[2][4];
#pragma unroll
      for (int r = 0; r < 2; ++r) raw_pairs<kForm>(word_of(codes[i][r], w), pair[r]);
      join_rows(pair[0], pair[1], a);
      if (w % kScaleEvery == 0) {
#pragma unroll
        for (float& each : part[i]) each = 0.0f;
      }
      multiply_word(part[i], a, loaded);
      if (w % kScaleEvery != kScaleEvery - 1) continue;
      const u32 block = kPair ? w / 2 : t / 2;
      const SharedPlace scales = view.scales.at(i * Stage::kBytes + c * Stage::kChunkBytes);
      float scale[2][2];
      load_slice_scales<Format, kForm>(scales, block, scale, odd);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        sums[i][0][r] = fma_rn(
            scale[r][0], part[i][2 * r], fma_rn(scale[r][1], part[i][2 * r + 1], sums[i][0][r]));
      }
    }
  }
}

#endif  // FP4KIT_HAS_MMA
#endif  // __CUDACC__

}  // namespace fp4kit
