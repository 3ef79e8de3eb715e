// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Products whose activations come step by step: what a thread block does. Some warps fill a ring of
// stages, the others multiply. Activations come from where they lie, if that is in the order of the
// fragments but for whole pieces, else from the image that arrange_tokens_kernel makes (small.cu,
// activations.cuh). Prepared weights come in stretches, where the architecture can; else the warps
// that multiply copy their own weights.
#pragma once

#include "matmul/small_product.cuh"

namespace fp4kit {

#ifdef __CUDACC__
#ifdef FP4KIT_HAS_MMA

template <class Format, int kForm, class Shape>
struct StagedProduct : SmallProduct<Format, kForm, Shape> {
  using Base = SmallProduct<Format, kForm, Shape>;
  using WarpRing = Ring<Format, kForm, Shape>;
  using Stage = typename WarpRing::Stage;
  using View = LaneView<Stage, kForm>;
  using Walk = typename Base::Walk;
  using Turn = StageTurn<Shape::kStages>;
  static constexpr bool kBulk = WarpRing::kBulk;                     // weights come in stretches
  static constexpr u32 kPieceBytes = Shape::kTokens * kColumnBytes;  // of 128 of the depth
  static constexpr u32 kImageBytes = Shape::kStepChunks * kPieceBytes;
  // Units are the tiles of the warps, those of the first one first.
  static constexpr u32 kUnits = Shape::kWarps * Shape::kTiles;
  // Several warps fill: to begin a copy of a stretch takes a warp some hundred cycles.
  static constexpr u32 kFillerWarps = Shape::kFillers / 32;
  static constexpr u32 kFillerUnits = (kUnits + kFillerWarps - 1) / kFillerWarps;
  static_assert(kFillerUnits <= 32, "a lane for each stretch");
  // Columns whose pieces all threads that fill copy at once, an even number.
  static constexpr u32 kColumnsAtOnce = Shape::kFillers / 16;
  static constexpr u32 kArrivals = Shape::kFillers + (kBulk ? kFillerWarps : 0);

  const u8* arranged;  // the image, or nothing
  StageBarriers<Shape::kStages> barriers;
  SharedPlace rings;

  FP4KIT_DEVICE SharedPlace ring_of(u32 warp) const { return rings.at(warp * WarpRing::kBytes); }

  // ---- Where a thread block is ----

  // To the first tile from there on whose member has tokens.
  FP4KIT_DEVICE void enter_tile(Walk& at) const {
    at.first = 0;
    at.end = this->activations.columns;
    if (!this->has_members()) return;
    for (; at.tile < this->tiles; at.tile += gridDim.x) {
      constexpr u32 parts = Shape::kParts;
      this->members.range(
          this->member_of(at.tile), this->activations.columns / parts, at.first, at.end);
      at.first *= parts;
      at.end *= parts;
      if (at.first != at.end) return;
    }
  }

  FP4KIT_DEVICE Walk begin() const {
    Walk at{blockIdx.x, 0, 0, 0};
    enter_tile(at);
    return at;
  }

  // To the next tokens of the same tile, or to another tile.
  FP4KIT_DEVICE void advance(Walk& at) const {
    at.step = 0;
    if (at.end - at.first > Shape::kRoom) {
      at.first += Shape::kRoom;
    } else {
      at.tile += gridDim.x;
      enter_tile(at);
    }
  }

  FP4KIT_DEVICE WeightSource source_of(u32 tile) const {
    WeightSource source = this->weights;
    if (this->has_members()) this->members.table[this->member_of(tile)].join(source);
    return source;
  }
  // Of a tile's 16 rows, the number of the first.
  FP4KIT_DEVICE u32 first_row_tile(u32 tile) const {
    return (tile - this->member_of(tile) * this->row_blocks) * this->span;
  }
  // How many of them there are.
  FP4KIT_DEVICE u32 row_tile_count(u32 tile) const {
    return min_u32(this->span, this->weights.row_tiles - first_row_tile(tile));
  }

  // ---- Filling ----

  // What a thread copies of a tile's activations: place 4 w + t of some columns.
  struct Pieces {
    const u8* from;
    SharedPlace target;               // in the first stage
    u32 column_stride, chunk_stride;  // of memory, from one to the next
    u32 count;                        // columns

    FP4KIT_DEVICE void copy(const StagedProduct& product, u32 step, u32 stage) {
      const u32 chunks = product.left_of(step, 0, Shape::kStepChunks);
      const SharedPlace place = kept(target.at(stage * kImageBytes));
#pragma unroll
      for (u32 c = 0; c < Shape::kStepChunks; ++c) {
        if (c >= chunks) break;
        const u8* source = from;
#pragma unroll
        for (u32 j = 0; j < Shape::kTokens; j += kColumnsAtOnce) {
          if (j < count) copy_async<16>(place.at(c * kPieceBytes + j * kColumnBytes), source);
          source += kColumnsAtOnce * column_stride;
        }
        from += chunk_stride;
      }
      arrive_copies(product.barriers.filled(stage));
    }
  };

  FP4KIT_DEVICE Pieces pieces_of(const Walk& at, u32 thread) const {
    const u32 inside = thread / 16, piece = thread % 16, column = at.first + inside;
    const u32 count = this->columns_of(at);
    const SharedPlace target = this->image.at(inside * kColumnBytes);
    const u32 columns = count > inside ? count - inside : 0;
    if (arranged != nullptr) {
      return {arranged + column * kColumnBytes + piece * 16, target.at(piece * 16), kColumnBytes,
          this->activations.columns * kColumnBytes, columns};
    }
    return {this->activations.place(column, piece * 8),
        target.at(column_place(column, piece % 4, piece / 4)), this->activations.depth * 2,
        kColumnBytes, columns};
  }

  // What a lane copies of a tile's weights in stretches.
  struct Stretch {
    const u8* from;
    SharedPlace target;  // in the first stage
    u32 piece, pieces;   // of the depth, in a step: the first, and how many
    u32 bytes, all;      // of a step: of this lane, of the warp

    FP4KIT_DEVICE void count(const StagedProduct& product, u32 step) {
      bytes = pieces == 0 ? 0 : product.left_of(step, piece, pieces) * Stage::Tile::kBytes;
      all = sum_across(bytes);
    }

    FP4KIT_DEVICE void copy(const StagedProduct& product, u32 step, u32 stage, u64 policy) {
#ifdef FP4KIT_HAS_BULK_COPIES
      // All steps but the last are whole.
      if (step == 0 || step + 1 == product.steps) count(product, step);
      const SharedPlace barrier = product.barriers.filled(stage);
      if (threadIdx.x % 32 == 0) expect_bytes(barrier, all);
      __syncwarp();
      if (bytes != 0) {
        copy_bulk(target.at(stage * WarpRing::kStageBytes), from, bytes, barrier, policy);
      }
      from += Shape::kStepChunks * Stage::Tile::kBytes;
#endif
    }
  };

  FP4KIT_DEVICE Stretch stretch_of(const Walk& at, u32 warp) const {
    const WeightSource source = source_of(at.tile);
    const u32 unit = warp * kFillerUnits + threadIdx.x % 32, owner = unit / Shape::kTiles;
    const u32 tile = owner / Shape::kSlices * Shape::kTiles + unit % Shape::kTiles;
    const u32 piece = owner % Shape::kSlices * Shape::kChunks;
    const i64 line = first_row_tile(at.tile) + tile;
    const bool is_own = threadIdx.x % 32 < kFillerUnits && unit < kUnits;
    const u32 pieces = is_own && tile < row_tile_count(at.tile) ? Shape::kChunks : 0;
    return {source.codes + (line * source.depth_tiles + piece) * Stage::Tile::kBytes,
        ring_of(owner).at(unit % Shape::kTiles * Stage::kBytes), piece, pieces, 0, 0};
  }

  FP4KIT_DEVICE void fill(u32 thread) const {
    [[maybe_unused]] const u64 policy = read_once_policy();
    [[maybe_unused]] Stretch stretch{}, next_stretch{};
    Pieces pieces{}, next_pieces{};
    Walk at = begin();
    if (at.tile < this->tiles) {
      pieces = pieces_of(at, thread);
      if constexpr (kBulk) stretch = stretch_of(at, thread / 32);
    }
    Turn turn;
#pragma unroll 1
    while (at.tile < this->tiles) {
#pragma unroll 1
      for (u32 step = 0; step < this->steps; ++step, turn.next()) {
        wait_bytes(barriers.emptied(turn.stage), turn.phase ^ 1);
        __syncwarp();
        if constexpr (kBulk) stretch.copy(*this, step, turn.stage, policy);
        pieces.copy(*this, step, turn.stage);
        if (step != 0) continue;
        // While nothing else is to be done: what is to be read for the next tile takes long.
        advance(at);
        if (at.tile >= this->tiles) continue;
        next_pieces = pieces_of(at, thread);
        if constexpr (kBulk) next_stretch = stretch_of(at, thread / 32);
      }
      pieces = next_pieces;
      stretch = next_stretch;
    }
  }

  // ---- Weights that the warps that multiply copy themselves ----

  // Where a warp is in its copies, kStages - 1 steps ahead of its products.
  struct Copies {
    WarpRing ring;
    Walk at;
    u32 stage, first_chunk;
    bool works;  // there are rows for this warp

    FP4KIT_DEVICE void enter(const StagedProduct& product) {
      if (at.tile >= product.tiles) return;
      const u32 group = threadIdx.x / 32 / Shape::kSlices;
      const u32 first = group * Shape::kTiles;
      works = first < product.row_tile_count(at.tile);
      ring.start(product.source_of(at.tile), product.first_row_tile(at.tile) + first, first_chunk);
    }

    FP4KIT_DEVICE void copy_next(const StagedProduct& product) {
      if (at.tile < product.tiles) {
        const u32 chunk = at.step * Shape::kStepChunks + first_chunk;
        if (works) ring.copy(product.weights, stage, chunk, false);
        if (++at.step == product.steps) {
          product.advance(at);
          enter(product);
        } else {
          ring.advance(product.weights);
        }
        stage = stage + 1 == Shape::kStages ? 0 : stage + 1;
      }
      ring.commit();
    }
  };

  // ---- Multiplying ----

  FP4KIT_DEVICE void multiply() const {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 first_tile = kept(warp / Shape::kSlices * Shape::kTiles);
    const u32 first_chunk = kept(warp % Shape::kSlices * Shape::kChunks);
    const SharedPlace own = kept(ring_of(warp));
    const SharedPlace own_image = kept(this->image.at(first_chunk * kPieceBytes));
    const View view(own, false);
    Walk at = begin();
    Copies copies{{own, own, LaneTarget<Stage, kForm>(own), 0, {}}, at, 0, first_chunk, false};
    if constexpr (!kBulk) {
      copies.enter(*this);
#pragma unroll
      for (u32 i = 0; i + 1 < Shape::kStages; ++i) copies.copy_next(*this);
    }
    float sums[Shape::kTiles][Shape::kColumns][Shape::kSums] = {};
    Turn turn;
#pragma unroll 1
    for (; at.tile < this->tiles; advance(at)) {
      const ColumnWords columns(own_image, at.first, lane);
      const bool works = first_tile < row_tile_count(at.tile);
      // What is to be read for it is on its way while there is something to multiply.
      typename Base::Target target = this->target_of(at);
      u32 chunk = first_chunk, odd = 0;
#pragma unroll 1
      for (u32 step = 0; step < this->steps; ++step, turn.next()) {
        if constexpr (!kBulk) {
          copies.ring.wait(turn.stage, turn.phase);
          copies.copy_next(*this);
        }
        wait_bytes(barriers.filled(turn.stage), turn.phase);
        __syncwarp();  // mma.sync wants all lanes at once
        const View here(view, turn.stage * WarpRing::kStageBytes);
        const ColumnWords there = columns.at(turn.stage * kImageBytes);
        if (works) {
#pragma unroll
          for (u32 c = 0; c < Shape::kChunks; ++c) {
            if (chunk + c >= this->weights.depth_tiles) break;
            multiply_piece<Format, kForm, Shape>(sums, here, c, there.at(c * kPieceBytes), odd);
          }
        }
        __syncwarp();
        if (lane == 0) arrive(barriers.emptied(turn.stage));
        chunk += Shape::kStepChunks;
        if (step == 0) target.epilogue.prepare(this->activations.columns / Shape::kParts);
      }
      target.epilogue.settle();
      this->finish_tile(at, target, sums, odd, this->sums_memory);
    }
  }

  FP4KIT_DEVICE void run() const {
    barriers.begin(kArrivals, Shape::kWarps);
    if (threadIdx.x >= Base::kThreadCount) {
      fill(threadIdx.x - Base::kThreadCount);
    } else {
      multiply();
    }
  }
};

#endif  // FP4KIT_HAS_MMA
#endif  // __CUDACC__

}  // namespace fp4kit
