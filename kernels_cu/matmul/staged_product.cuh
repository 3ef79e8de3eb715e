// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Products whose activations come step by step: what a thread block does.
#pragma once

#include "matmul/small_product.cuh"
#include "matmul/step_pieces.cuh"

namespace fp4kit {

#ifdef __CUDACC__
#ifdef FP4KIT_HAS_MMA

template <class Format, int kForm, class Shape>
struct StagedProduct : SmallProduct<Format, kForm, Shape> {
  using Base = SmallProduct<Format, kForm, Shape>;
  using WarpRing = Ring<Format, kForm, Shape>;
  using View = LaneView<typename WarpRing::Stage, kForm>;
  using Walk = typename Base::Walk;

  // To the first tile from there on whose member has tokens.
  FP4KIT_DEVICE void enter_tile(Walk& at) const {
    at.step = 0;
    at.first = 0;
    at.end = this->activations.columns;
    if (at.tile >= this->tiles) at.end = 0;
    if (this->has_members()) {
      for (; at.tile < this->tiles; at.tile += gridDim.x) {
        constexpr u32 parts = Shape::kParts;
        this->members.range(
            this->member_of(at.tile), this->activations.columns / parts, at.first, at.end);
        at.first *= parts;
        at.end *= parts;
        if (at.first != at.end) return;
      }
    }
  }

  // Whether another tile, or the next tokens of the same one, begins.
  FP4KIT_DEVICE bool next_step(Walk& at) const {
    if (++at.step != this->steps) return false;
    if (at.end - at.first > Shape::kRoom) {
      at.step = 0;
      at.first += Shape::kRoom;
    } else {
      at.tile += gridDim.x;
      enter_tile(at);
    }
    return true;
  }

  // `ahead`: where a warp is in its copies, kStages - 1 steps ahead of its products.
  FP4KIT_DEVICE void start_tile(WarpRing& ring, const Walk& ahead) const {
    if (ahead.tile >= this->tiles) return;
    const u32 warp = threadIdx.x / 32, member = this->member_of(ahead.tile);
    const u32 block = ahead.tile - member * this->row_blocks;
    const u32 row_tile = (block * Shape::kGroups + warp / Shape::kSlices) * Shape::kTiles;
    WeightSource source = this->weights;
    if (this->has_members()) this->members.table[member].join(source);
    ring.start(source, row_tile, warp % Shape::kSlices * Shape::kChunks);
  }

  FP4KIT_DEVICE void copy_next(
      WarpRing& ring, Walk& ahead, u32& stage, u32 first_chunk, bool is_first) const {
    if (ahead.tile < this->tiles) {
      ring.copy(this->weights, stage, ahead.step * Shape::kStepChunks + first_chunk, is_first);
      if (next_step(ahead)) {
        start_tile(ring, ahead);
      } else {
        ring.advance(this->weights);
      }
      stage = stage + 1 == Shape::kStages ? 0 : stage + 1;
    }
    ring.commit();
  }

  FP4KIT_DEVICE void run(WarpRing& ring) {
    const u32 lane = threadIdx.x % 32;
    const u32 first_chunk = kept(threadIdx.x / 32 % Shape::kSlices * Shape::kChunks);
    const bool is_first = kept(lane) == 0;
    Walk at{blockIdx.x, 0, 0, 0};
    enter_tile(at);
    Walk ahead = at;
    u32 ahead_stage = 0;
    start_tile(ring, ahead);
#pragma unroll
    for (u32 i = 0; i + 1 < Shape::kStages; ++i) {
      copy_next(ring, ahead, ahead_stage, first_chunk, is_first);
    }
    StepPieces<kForm, Shape> pieces;
    pieces.place(this->image);
    pieces.enter(this->activations, at.first, at.end);
    pieces.load(this->activations, at.step);
    pieces.store(this->activations, 0);

    // What a lane takes of a word's activations.
    constexpr u32 kChunkImage = 4 * Shape::kSlots * 16;
    const u32 slot = lane % Shape::kSlots;
    const SharedPlace lane_image = kept(this->image.at(slot * 16 + first_chunk * kChunkImage));
    View view(ring.memory, false);

    float sums[Shape::kTiles][Shape::kColumns][Shape::kSums] = {};
    u32 stage = 0, phase = 0, buffer = 0;
    while (at.tile < this->tiles) {
      const Walk tile = at;
      u32 chunk = first_chunk, odd = 0;
      bool is_last_step;
      do {
        is_last_step = next_step(at);
        __syncthreads();  // the image of this step is there, that of the one before is free
        if (is_last_step) pieces.enter(this->activations, at.first, at.end);
        pieces.load(this->activations, at.step);
        if constexpr (WarpRing::kBulk) {
          copy_next(ring, ahead, ahead_stage, first_chunk, is_first);
          ring.wait(stage, phase);
        } else {
          ring.wait(stage, phase);
          copy_next(ring, ahead, ahead_stage, first_chunk, is_first);
        }
        __syncwarp();  // mma.sync wants all lanes at once
        const View here(view, stage * WarpRing::kStageBytes);
        const SharedPlace step_image = lane_image.at(buffer * Shape::kStepChunks * kChunkImage);
#pragma unroll
        for (u32 c = 0; c < Shape::kChunks; ++c) {
          if (chunk + c >= this->weights.depth_tiles) break;
          multiply_chunk<Format, kForm, Shape>(sums, here, c, step_image.at(c * kChunkImage), odd);
        }
        pieces.store(this->activations, buffer ^ 1);
        buffer ^= 1;
        chunk += Shape::kStepChunks;
        stage = stage + 1 == Shape::kStages ? 0 : stage + 1;
        phase ^= stage == 0;
      } while (!is_last_step);
      this->finish_tile(tile, sums, odd, this->sums_memory);
    }
  }
};

#endif  // FP4KIT_HAS_MMA
#endif  // __CUDACC__

}  // namespace fp4kit
