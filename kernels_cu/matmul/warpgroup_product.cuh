// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// What a thread block of multiply_warpgroup_kernel (warpgroup.cu) does: one warpgroup fills stages,
// the others multiply and store results (warpgroup_results.cuh).
#pragma once

#include "common/launch_order.cuh"
#include "common/warpgroup_mma.cuh"
#include "matmul/warpgroup_results.cuh"

namespace fp4kit {

#ifdef __CUDACC__
#ifdef FP4KIT_HAS_WARPGROUP_MMA

template <class Format, int kForm, class Shape>
struct WarpgroupProduct : WarpgroupResults<Format, kForm, Shape> {
  using Base = WarpgroupResults<Format, kForm, Shape>;
  using Sums = typename Base::Sums;
  using Stage = WeightStage<Format, kForm, Shape::kChunks>;
  using View = LaneView<Stage, kForm>;
  using Columns = ProductColumns<Shape::kColumns>;
  static constexpr u32 kStages = Shape::kStages, kChunks = Shape::kChunks;
  // A stage: activations, then weights.
  static constexpr u32 kStageBytes =
      (Shape::kColumnBytes + Shape::kRowTiles * Stage::kBytes + Columns::kAlignment - 1) /
      Columns::kAlignment * Columns::kAlignment;
  static constexpr bool kBulk = kForm == kFormPrepared;
  // Four warps fill: to begin a copy of a stretch takes a warp some hundred cycles.
  static constexpr u32 kFillers = 128;
  static constexpr u32 kFillerWarps = kFillers / 32, kFillerTiles = Shape::kRowTiles / kFillerWarps;
  static constexpr u32 kMultipliers = Base::kMultipliers;
  // Registers of a thread: those that each gets at first, those that a filling thread needs, and
  // what that leaves for the others.
  static constexpr u32 kRegisters = 65536 / (kMultipliers + kFillers) / 8 * 8;
  static constexpr u32 kFillerRegisters = kBulk ? 24 : 56;
  static constexpr u32 kMultiplierRegisters =
      ((kMultipliers + kFillers) * kRegisters - kFillers * kFillerRegisters) / kMultipliers / 8 * 8;
  static constexpr bool kMovesRegisters = kRegisters < 240;
  // Arrivals at a stage that is filled: those of the stretches' bytes, and of the pieces.
  static constexpr u32 kArrivals = kBulk ? kFillerWarps : 1 + kFillers;

  const u8* image;  // of the activations: arrange_columns_kernel
  StageBarriers<Shape::kStages> barriers;
  SharedPlace memory;

  using Turn = StageTurn<Shape::kStages>;

  // ---- Filling ----

  // Pieces of 128 of the depth that a step has.
  FP4KIT_DEVICE u32 chunks_of(u32 step) const {
    return min_u32(this->weights.depth_tiles - step * kChunks, kChunks);
  }
  // How many tiles a warp that fills has.
  FP4KIT_DEVICE u32 filled_tiles(u32 warp) const {
    const u32 first = warp * kFillerTiles, count = this->tile_count();
    return first < count ? min_u32(count - first, kFillerTiles) : 0;
  }

  // Begins to copy a step's stretches: weights by each warp that fills, a lane for each of its
  // `tiles`; activations by the first warp.
  FP4KIT_DEVICE void fill_stretches(
      u32 step, u32 warp, u32 tiles, u32 stage, SharedPlace place, u64 policy) const {
    const u32 lane = threadIdx.x % 32, chunks = chunks_of(step), first_chunk = step * kChunks;
    const u32 tile_bytes = kBulk ? chunks * Stage::Tile::kBytes : 0;
    const u32 column_bytes = warp == 0 ? chunks * Columns::kBytes : 0;
    if (lane == 0) expect_bytes(barriers.filled(stage), tiles * tile_bytes + column_bytes);
    __syncwarp();
    if (kBulk && lane < tiles) {
      const u32 inside = warp * kFillerTiles + lane;
      const i64 line = this->first_tile() + inside;
      const i64 number = line * this->weights.depth_tiles + first_chunk;
      copy_bulk(place.at(Shape::kColumnBytes + inside * Stage::kBytes),
          this->weights.codes + number * Stage::Tile::kBytes, tile_bytes, barriers.filled(stage),
          policy);
    }
    if (warp != 0) return;
    if (step == this->first_step()) wait_for_kernel_before();
    if (lane != 0) return;
    const i64 number = static_cast<i64>(this->column_block) * this->weights.depth_tiles;
    copy_bulk(place, image + (number + first_chunk) * Columns::kBytes, column_bytes,
        barriers.filled(stage), keep_policy());
  }

  // Where a warp that fills is in its tiles of rows.
  struct RowCursors {
    TileCursor<Stage, kForm> each[kFillerTiles];

    FP4KIT_DEVICE void start(const WarpgroupProduct& product, u32 warp) {
      const u32 chunk = product.first_step() * kChunks;
#pragma unroll
      for (u32 i = 0; i < kFillerTiles; ++i) {
        const u32 tile = product.first_tile() + warp * kFillerTiles + i;
        each[i].start(product.weights, min_u32(tile, product.weights.row_tiles - 1), chunk);
      }
    }

    // Begins to copy a step's pieces, and goes to the next step.
    FP4KIT_DEVICE void copy(
        const WarpgroupProduct& product, u32 step, u32 warp, SharedPlace place) {
#pragma unroll
      for (u32 i = 0; i < kFillerTiles; ++i) {
        const u32 inside = warp * kFillerTiles + i;
        if (inside < product.tile_count()) {
          const LaneTarget<Stage, kForm> target(
              place.at(Shape::kColumnBytes + inside * Stage::kBytes));
          each[i].copy(target, 0, product.weights, product.chunks_of(step));
        }
        each[i].advance(product.weights, kChunks);
      }
    }
  };

  FP4KIT_DEVICE void fill(u32 thread) const {
    const u32 warp = thread / 32, end = this->end_step(), tiles = filled_tiles(warp);
    const u64 policy = read_once_policy();
    [[maybe_unused]] RowCursors rows_of;
    if constexpr (!kBulk) rows_of.start(*this, warp);
    Turn turn;
#pragma unroll 1
    for (u32 step = this->first_step(); step < end; ++step, turn.next()) {
      wait_bytes(barriers.emptied(turn.stage), turn.phase ^ 1);
      __syncwarp();
      const SharedPlace place = memory.at(turn.stage * kStageBytes);
      if (kBulk || warp == 0) fill_stretches(step, warp, tiles, turn.stage, place, policy);
      if constexpr (!kBulk) {
        rows_of.copy(*this, step, warp, place);
        arrive_copies(barriers.filled(turn.stage));
      }
    }
    __syncwarp();
  }

  // ---- Multiplying ----

  // Adds the products of a piece of 128 of the depth. `before`: the barrier of the step before,
  // whose products are over when two more have begun; or none.
  FP4KIT_DEVICE void multiply_chunk(Sums& result, u32 (&a)[2][2][4], const View& view, u32 c,
      Columns columns, u32 (&odd)[Shape::kTiles], SharedPlace before, bool gives_back) const {
    constexpr int kTiles = Shape::kTiles;
    uint4 codes[kTiles][2];
    u32 scale[kTiles][2][2];
#pragma unroll
    for (u32 i = 0; i < kTiles; ++i) {
      const u32 piece = i * Stage::kBytes + c * Stage::kChunkBytes;
#pragma unroll
      for (u32 r = 0; r < 2; ++r) {
        codes[i][r] = view.load_codes(piece, r, c);
        load_scales<Format, kForm>(view.scales.at(piece), r, view.selector, scale[i][r], odd[i]);
        find_lost<Format, kForm>(codes[i][r], scale[i][r], odd[i]);
      }
    }
#pragma unroll
    for (int w = 0; w < 4; ++w) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        u32 pair[2][4];
        scaled_pairs<kForm>(codes[i], scale[i], w, pair);
        wait_products<1>();  // those of the word before the last one, which read these registers
        if (w * kTiles + i == 1 && gives_back) arrive(before);
        u32(&own)[2][4] = a[(w * kTiles + i) % 2];
        join_rows(pair[0], pair[1], own);
        fence_products();
        multiply_warpgroup(result[i], own[0], columns.step(2 * w));
        multiply_warpgroup(result[i], own[1], columns.step(2 * w + 1));
        commit_products();
      }
    }
  }

  // Returns what has_odd_scale asks for.
  FP4KIT_DEVICE u32 multiply(Sums& result) const {
    const u32 first_inside = threadIdx.x / 32 * Shape::kTiles;
    const u32 first = this->first_step(), end = this->end_step();
    const bool is_first = threadIdx.x % 32 == 0;
    const View view(kept(memory.at(Shape::kColumnBytes + first_inside * Stage::kBytes)), false);
    u32 a[2][2][4];
    u32 odd[Shape::kTiles] = {};
    Turn turn;
    SharedPlace before = barriers.emptied(0);
#pragma unroll 1
    for (u32 step = first; step < end; ++step, turn.next()) {
      wait_bytes(barriers.filled(turn.stage), turn.phase);
      __syncwarp();
      const View here(view, turn.stage * kStageBytes);
      const Columns columns(memory.at(turn.stage * kStageBytes));
      const bool gives_back = is_first && step != first;
#pragma unroll
      for (u32 c = 0; c < kChunks; ++c) {
        if (c != 0 && step * kChunks + c >= this->weights.depth_tiles) break;
        multiply_chunk(
            result, a, here, c, columns.at(c * Columns::kBytes), odd, before, c == 0 && gives_back);
      }
      before = barriers.emptied(turn.stage);
    }
    wait_products<0>();
    u32 all = 0;
#pragma unroll
    for (u32 i = 0; i < Shape::kTiles; ++i) {
      // What lies where there is no tile is nobody's.
      if (first_inside + i < this->tile_count()) all |= odd[i];
    }
    return all;
  }

  FP4KIT_DEVICE void run() const {
    barriers.begin(kArrivals, Shape::kWarps);
    if (threadIdx.x >= kMultipliers) {
      if constexpr (kMovesRegisters) give_registers_back<kFillerRegisters>();
      fill(threadIdx.x - kMultipliers);
      return;
    }
    if constexpr (kMovesRegisters) take_registers<kMultiplierRegisters>();
    Sums result = {};
    const u32 odd = multiply(result);
    this->finish(result, odd);
  }
};

#endif  // FP4KIT_HAS_WARPGROUP_MMA
#endif  // __CUDACC__

}  // namespace fp4kit
