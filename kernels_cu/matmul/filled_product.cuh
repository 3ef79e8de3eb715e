// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Products whose activations lie in shared memory from the first step on, where some warps fill one
// ring of the thread block with rows of weights and the others multiply: what a thread block does.
#pragma once

#include "matmul/small_product.cuh"

namespace fp4kit {

#ifdef __CUDACC__
#ifdef FP4KIT_HAS_MMA

template <class Format, int kForm, class Shape>
struct FilledProduct : SmallProduct<Format, kForm, Shape> {
  static_assert(kForm == kFormRows && Shape::kTiles == 1, "what lanes copy, a tile for each warp");
  using Base = SmallProduct<Format, kForm, Shape>;
  using Stage = WeightStage<Format, kForm, Shape::kChunks>;
  using View = LaneView<Stage, kForm>;
  using Walk = typename Base::Walk;
  static constexpr u32 kStageBytes = Shape::kWarps * Stage::kBytes;
  static constexpr u32 kFillerWarps = Shape::kFillers / 32;
  static constexpr u32 kFillerUnits = Shape::kWarps / kFillerWarps;  // warps that it fills for
  static_assert(kFillerUnits * kFillerWarps == Shape::kWarps, "as many for each");
  static constexpr u32 kArrivals = Shape::kFillers;

  StageBarriers<Shape::kStages> barriers;
  SharedPlace stages;

  using Turn = StageTurn<Shape::kStages>;

  FP4KIT_DEVICE u32 row_tile(u32 tile, u32 group) const {
    return min_u32(tile * Shape::kGroups + group, this->weights.row_tiles - 1);
  }

  // By each warp that fills, with the pieces of some of those that multiply.
  FP4KIT_DEVICE void fill(u32 warp) const {
    TileCursor<Stage, kForm> cursors[kFillerUnits];
    Turn turn;
#pragma unroll 1
    for (u32 tile = blockIdx.x; tile < this->tiles; tile += gridDim.x) {
#pragma unroll
      for (u32 i = 0; i < kFillerUnits; ++i) {
        const u32 unit = warp * kFillerUnits + i;
        cursors[i].start(this->weights, row_tile(tile, unit / Shape::kSlices),
            unit % Shape::kSlices * Shape::kChunks);
      }
#pragma unroll 1
      for (u32 step = 0; step < this->steps; ++step, turn.next()) {
        wait_bytes(barriers.emptied(turn.stage), turn.phase ^ 1);
        __syncwarp();
#pragma unroll
        for (u32 i = 0; i < kFillerUnits; ++i) {
          const u32 unit = warp * kFillerUnits + i, first = unit % Shape::kSlices * Shape::kChunks;
          const u32 valid = this->left_of(step, first, Shape::kChunks);
          const SharedPlace place = stages.at(turn.stage * kStageBytes + unit * Stage::kBytes);
          if (valid != 0) {
            cursors[i].copy(LaneTarget<Stage, kForm>(place), 0, this->weights, valid);
          }
          cursors[i].advance(this->weights, Shape::kStepChunks);
        }
        arrive_copies(barriers.filled(turn.stage));
      }
    }
  }

  // All of them. Returns whether each token can be raised (sliced).
  FP4KIT_DEVICE void stage_all() {
    const u32 pairs = (this->activations.columns + 1) / 2;
    const u32 pieces = this->weights.depth_tiles * pairs * kPairPieces;
    u32 found[2] = {0, 0};
    constexpr u32 kAtOnce = Shape::kSliced ? 2 : 4;  // on their way
    for (u32 first = threadIdx.x; first < pieces; first += kAtOnce * Base::kThreadCount) {
      uint4 piece[kAtOnce];
#pragma unroll
      for (u32 j = 0; j < kAtOnce; ++j) {
        const PiecePlace at = piece_place(first + j * Base::kThreadCount, pairs, Shape::kSlots);
        piece[j] = make_uint4(0, 0, 0, 0);
        if (at.token < this->activations.columns && at.k < this->activations.depth) {
          piece[j] = load_piece<Shape::kParts>(this->activations.place(at.token, at.k), at.token);
        }
      }
#pragma unroll
      for (u32 j = 0; j < kAtOnce; ++j) {
        const u32 i = first + j * Base::kThreadCount;
        if (i >= pieces) break;
        const PiecePlace at = piece_place(i, pairs, Shape::kSlots);
        if (Shape::kTokens == 1 && at.token != 0) continue;
        piece[j] = finish_piece<Shape::kParts>(at.token, piece[j]);
        if constexpr (Shape::kSliced) {
          const u32 larger = larger_magnitude(at.token == 0 ? found[0] : found[1], piece[j]);
          if (at.token == 0) {
            found[0] = larger;
          } else {
            found[1] = larger;
          }
          piece[j] = raise_piece(piece[j]);
        }
        this->image.at(at.place * 16)
            .store_vec(arrange_piece<kForm>(piece[j], this->activations.high_first));
      }
    }
    if constexpr (Shape::kSliced) {
#pragma unroll
      for (u32 i = 0; i < Shape::kTokens; ++i) {
        const u32 value = max_across<16>(found[i]);
        if (threadIdx.x % 32 == 0) atomicMax(this->largest + i, value);
      }
    }
    this->synchronize();
    this->raises = true;
    if constexpr (Shape::kSliced) {
      // Later parts are smaller than the first.
      for (u32 i = 0; i < Shape::kTokens; i += Shape::kParts) {
        this->raises = this->raises && can_be_raised(this->largest[i]);
      }
    }
  }

  FP4KIT_DEVICE void multiply() {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    this->epilogue.prepare(this->activations.columns / Shape::kParts);
    this->epilogue.settle();
    const u32 first_chunk = kept(warp % Shape::kSlices * Shape::kChunks);
    if (threadIdx.x < 2) this->largest[threadIdx.x] = 0;
    if constexpr (Shape::kSliced) this->synchronize();
    this->stage_all();

    // What a lane takes of a word's activations.
    u32 slot = lane % Shape::kSlots;
    if constexpr (Shape::kSliced) slot = (Shape::kTokens == 2 ? lane / 16 * 4 : 0) + lane % 4;
    constexpr u32 kChunkImage = 4 * Shape::kSlots * 16;
    const SharedPlace lane_image = kept(this->image.at(slot * 16));
    const View view(kept(stages.at(warp * Stage::kBytes)), Shape::kSliced);

    float sums[1][Shape::kColumns][Shape::kSums] = {};
    [[maybe_unused]] uint4 x[2] = {};  // see multiply_chunk_sliced
    Turn turn;
    u32 parity = 0;
#pragma unroll 1
    for (u32 tile = blockIdx.x; tile < this->tiles; tile += gridDim.x) {
      u32 chunk = first_chunk, odd = 0;
#pragma unroll 1
      for (u32 step = 0; step < this->steps; ++step, turn.next()) {
        wait_bytes(barriers.filled(turn.stage), turn.phase);
        __syncwarp();  // mma.sync wants all lanes at once
        const View here(view, turn.stage * kStageBytes);
        const SharedPlace step_image = lane_image.at(chunk * kChunkImage);
#pragma unroll
        for (u32 c = 0; c < Shape::kChunks; ++c) {
          if (chunk + c >= this->weights.depth_tiles) break;
          const SharedPlace piece = step_image.at(c * kChunkImage);
          if constexpr (Shape::kSliced) {
            multiply_chunk_sliced<Format, kForm, Shape>(sums, here, c, piece, x, odd);
          } else {
            multiply_chunk<Format, kForm, Shape>(sums, here, c, piece, odd);
          }
        }
        __syncwarp();
        if (lane == 0) arrive(barriers.emptied(turn.stage));
        chunk += Shape::kStepChunks;
      }
      const Walk at{tile, 0, 0, this->activations.columns};
      this->finish_tile(at, sums, odd, this->sums_memory + parity * Shape::kSumFloats);
      if constexpr (Shape::kSumBuffers == 2) parity ^= 1;
    }
  }

  FP4KIT_DEVICE void run() {
    barriers.begin(kArrivals, Shape::kWarps);
    if (threadIdx.x >= Base::kThreadCount) {
      fill((threadIdx.x - Base::kThreadCount) / 32);
    } else {
      multiply();
    }
  }
};

#endif  // FP4KIT_HAS_MMA
#endif  // __CUDACC__

}  // namespace fp4kit
