// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Products whose activations stay in shared memory: what a thread block does.
//
// Each warp has a ring of its own, and puts those activations in order that it multiplies, step by
// step of its first tile of rows: nobody waits for all of them. (Warps of several groups that
// multiply the same ones each write them, the same bytes.) Warps meet once a tile.
#pragma once

#include "matmul/small_product.cuh"

namespace fp4kit {

#ifdef __CUDACC__
#ifdef FP4KIT_HAS_MMA

template <class Format, int kForm, class Shape>
struct ResidentProduct : SmallProduct<Format, kForm, Shape> {
  using Base = SmallProduct<Format, kForm, Shape>;
  using WarpRing = Ring<Format, kForm, Shape>;
  using View = LaneView<typename WarpRing::Stage, kForm>;
  using Walk = typename Base::Walk;
  static constexpr u32 kChunkImage = 4 * Shape::kSlots * 16;
  // Lines of pieces of a step (piece_place), as many of them at once; of one token those of two
  // chunks are beside each other.
  static constexpr bool kSingle = Shape::kTokens == 1;
  static constexpr u32 kPairs = (Shape::kTokens + 1) / 2;
  static constexpr u32 kLines =
      kSingle ? (Shape::kChunks + 1) / 2 : Shape::kChunks * Shape::kTokens / 2;
  static constexpr u32 kLinesAtOnce = kLines < 8 ? kLines : 8;

  // ---- Weights ----

  // What a warp copies next: the step of a tile whose first own chunk this is.
  struct Ahead {
    u32 tile, chunk;
  };

  FP4KIT_DEVICE void start_tile(WarpRing& ring, u32 tile, u32 first_chunk) const {
    const u32 group = threadIdx.x / 32 / Shape::kSlices;
    ring.start(this->weights, (tile * Shape::kGroups + group) * Shape::kTiles, first_chunk);
  }

  FP4KIT_DEVICE void copy_next(
      WarpRing& ring, Ahead& ahead, u32 stage, u32 first_chunk, bool is_first) const {
    if (ahead.tile < this->tiles) {
      ring.copy(this->weights, stage, ahead.chunk, is_first);
      ahead.chunk += Shape::kStepChunks;
      if (ahead.chunk < this->steps * Shape::kStepChunks) {
        ring.advance(this->weights);
      } else {
        ahead = {ahead.tile + gridDim.x, first_chunk};
        if (ahead.tile < this->tiles) start_tile(ring, ahead.tile, first_chunk);
      }
    }
    ring.commit();
  }

  // ---- Activations ----

  // Puts those of a warp's step in order. `found`: the largest magnitude of a lane (sliced).
  FP4KIT_DEVICE void stage_step(u32 chunk, u32& found) const {
    const u32 lane = threadIdx.x % 32, half = lane / 4 % 2;
    const u32 token = kSingle ? 0 : half;
    chunk += kSingle ? half : 0;
    const u32 k = chunk * kPreparedDepth + 32 * (lane % 4) + lane / 8 * 8;
    const SharedPlace target = this->image.at(
        chunk * kChunkImage + (lane / 8 * Shape::kSlots + 4 * token + lane % 4) * 16);
    const auto& from = this->activations;
#pragma unroll
    for (u32 first = 0; first < kLines; first += kLinesAtOnce) {
      uint4 piece[kLinesAtOnce];
      bool is_there[kLinesAtOnce];
#pragma unroll
      for (u32 j = 0; j < kLinesAtOnce; ++j) {
        const u32 c = (first + j) / kPairs * (kSingle ? 2 : 1), pair = (first + j) % kPairs;
        is_there[j] = token + 2 * pair < from.columns && chunk + c < this->weights.depth_tiles &&
                      (!kSingle || half + c < Shape::kChunks);
        piece[j] = make_uint4(0, 0, 0, 0);
        if (is_there[j] && k + c * kPreparedDepth < from.depth) {
          const u32 column = token + 2 * pair;
          piece[j] = load_piece<Shape::kParts>(from.place(column, k + c * kPreparedDepth), column);
        }
      }
#pragma unroll
      for (u32 j = 0; j < kLinesAtOnce; ++j) {
        const u32 c = (first + j) / kPairs * (kSingle ? 2 : 1), pair = (first + j) % kPairs;
        if (!is_there[j]) continue;
        piece[j] = finish_piece<Shape::kParts>(token + 2 * pair, piece[j]);
        if constexpr (Shape::kSliced) {
          found = larger_magnitude(found, piece[j]);
          piece[j] = raise_piece(piece[j]);
        }
        target.at(c * kChunkImage + pair * (8 * 16))
            .store_vec(arrange_piece<kForm>(piece[j], from.high_first));
      }
    }
    __syncwarp();
  }

  // Finds whether each token can be raised (sliced), once all are in their place.
  FP4KIT_DEVICE void find_largest(u32 found) {
    const u32 lane = threadIdx.x % 32;
    // Lanes of one token meet.
    found = max_across<16, 8>(max_across<2>(found));
    if constexpr (kSingle) found = max_across<4, 4>(found);
    if (lane == 0 || (!kSingle && lane == 4)) atomicMax(this->largest + lane / 4, found);
    this->synchronize();
    // Later parts are smaller than the first.
#pragma unroll
    for (u32 i = 0; i < Shape::kTokens; i += Shape::kParts) {
      this->raises = this->raises && can_be_raised(this->largest[i]);
    }
  }

  // ---- Products ----

  FP4KIT_DEVICE void run(WarpRing& ring) {
    const u32 lane = threadIdx.x % 32;
    const u32 first_chunk = kept(threadIdx.x / 32 % Shape::kSlices * Shape::kChunks);
    const bool is_first = kept(lane) == 0;
    Ahead ahead{blockIdx.x, first_chunk};
    start_tile(ring, ahead.tile, first_chunk);
#pragma unroll
    for (u32 i = 0; i < Shape::kStages; ++i) copy_next(ring, ahead, i, first_chunk, is_first);
    this->epilogue.prepare(this->activations.columns / Shape::kParts);
    if constexpr (Shape::kSliced) {
      if (threadIdx.x < 2) this->largest[threadIdx.x] = 0;
      this->synchronize();
    }

    // What a lane takes of a word's activations.
    u32 slot = lane % Shape::kSlots;
    if constexpr (Shape::kSliced) slot = (Shape::kTokens == 2 ? lane / 16 * 4 : 0) + lane % 4;
    const SharedPlace lane_image = kept(this->image.at(slot * 16));
    const View view(ring.memory, Shape::kSliced);

    float sums[Shape::kTiles][Shape::kColumns][Shape::kSums] = {};
    [[maybe_unused]] uint4 x[2] = {};  // see multiply_chunk_sliced
    StageTurn<Shape::kStages> turn;
    u32 parity = 0, found = 0;
    bool is_first_tile = true;
#pragma unroll 1
    for (u32 tile = blockIdx.x; tile < this->tiles; tile += gridDim.x) {
      u32 chunk = first_chunk, odd = 0;
#pragma unroll 1
      for (u32 step = 0; step < this->steps; ++step, turn.next()) {
        if (is_first_tile) stage_step(chunk, found);
        ring.template wait<Shape::kStages>(turn.stage, turn.phase);
        __syncwarp();  // mma.sync wants all lanes at once
        const View here(view, turn.stage * WarpRing::kStageBytes);
        const SharedPlace step_image = lane_image.at(chunk * kChunkImage);
        const auto multiply = [&](u32 c) {
          const SharedPlace piece = step_image.at(c * kChunkImage);
          if constexpr (Shape::kSliced) {
            multiply_chunk_sliced<Format, kForm, Shape>(sums, here, c, piece, x, odd);
          } else {
            multiply_chunk<Format, kForm, Shape>(sums, here, c, piece, odd);
          }
        };
        // Without branches, so that a piece's loads begin while the one before is multiplied.
        if (chunk + Shape::kChunks <= this->weights.depth_tiles) {
#pragma unroll
          for (u32 c = 0; c < Shape::kChunks; ++c) multiply(c);
        } else {
#pragma unroll
          for (u32 c = 0; c + 1 < Shape::kChunks; ++c) {
            if (chunk + c < this->weights.depth_tiles) multiply(c);
          }
        }
        __syncwarp();  // all have read their weights
        copy_next(ring, ahead, turn.stage, first_chunk, is_first);
        chunk += Shape::kStepChunks;
      }
      if (is_first_tile) {
        this->epilogue.settle();
        if constexpr (Shape::kSliced) find_largest(found);
      }
      is_first_tile = false;
      const Walk at{tile, 0, 0, this->activations.columns};
      this->finish_tile(at, sums, odd, this->sums_memory + parity * Shape::kSumFloats);
      if constexpr (Shape::kSumBuffers == 2) parity ^= 1;
    }
  }
};

#endif  // FP4KIT_HAS_MMA
#endif  // __CUDACC__

}  // namespace fp4kit
