// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// What a thread block of multiply_warpgroup_kernel (warpgroup.cu) does: one warpgroup fills stages,
// the others multiply and store results.
#pragma once

#include "common/thread_group.cuh"
#include "common/warpgroup_mma.cuh"
#include "matmul/activations.cuh"
#include "matmul/epilogue.cuh"
#include "matmul/shape.cuh"
#include "matmul/weights.cuh"

namespace fp4kit {

#ifdef __CUDACC__
#ifdef FP4KIT_HAS_WARPGROUP_MMA

template <class Format, int kForm, class Shape>
struct WarpgroupProduct {
  using Stage = WeightStage<Format, kForm, Shape::kChunks>;
  using View = LaneView<Stage, kForm>;
  using Columns = ProductColumns<Shape::kColumns>;
  static constexpr u32 kStages = Shape::kStages, kChunks = Shape::kChunks;
  static constexpr u32 kStepChunks = Shape::kStepChunks;
  // A stage: activations, then weights.
  static constexpr u32 kStageBytes = (Shape::kColumnBytes + Shape::kUnits * Stage::kBytes +
                                         Columns::kAlignment - 1) /
                                     Columns::kAlignment * Columns::kAlignment;
  static constexpr bool kBulk = kForm == kFormPrepared;
  // Four warps fill: to begin a copy of a stretch takes a warp some hundred cycles.
  static constexpr u32 kFillers = 128;
  static constexpr u32 kFillerWarps = kFillers / 32, kFillerUnits = Shape::kUnits / kFillerWarps;
  static constexpr u32 kMultipliers = 32 * Shape::kWarps;
  // Registers of a thread: those that each gets at first, those that a filling thread needs, and
  // what that leaves for the others.
  static constexpr u32 kRegisters = 65536 / (kMultipliers + kFillers) / 8 * 8;
  static constexpr u32 kFillerRegisters = kBulk ? 24 : 56;
  static constexpr u32 kMultiplierRegisters =
      ((kMultipliers + kFillers) * kRegisters - kFillers * kFillerRegisters) / kMultipliers / 8 * 8;
  static constexpr bool kMovesRegisters = kRegisters < 240;
  // Results can go from registers to memory: nothing has to be added to them before.
  static constexpr bool kDirect = Shape::kSlices == 1 && Shape::kParts == 1;
  // Arrivals at a stage that is filled: those of the stretches' bytes, and of the pieces.
  static constexpr u32 kArrivals = kBulk ? kFillerWarps : 1 + kFillers;

  WeightSource weights;
  ActivationSource<Shape::kParts> activations;
  const u8* image;  // of them: arrange_columns_kernel
  Epilogue epilogue;
  u32 rows;                     // of the weights
  u32 span;                     // tiles of 16 rows of a thread block
  u32 row_block, column_block;  // of this one
  SharedPlace control, memory;
  float* sums;  // where the stages are

  // ---- Where ----

  FP4KIT_DEVICE SharedPlace filled(u32 stage) const { return control.at(stage * kBarrierBytes); }
  FP4KIT_DEVICE SharedPlace emptied(u32 stage) const {
    return control.at((kStages + stage) * kBarrierBytes);
  }
  FP4KIT_DEVICE u32 first_tile() const { return row_block * span; }
  FP4KIT_DEVICE u32 tile_count() const { return min_u32(span, weights.row_tiles - first_tile()); }
  FP4KIT_DEVICE u32 first_column() const { return column_block * Shape::kRoom; }
  FP4KIT_DEVICE u32 column_count() const {
    return min_u32(activations.columns - first_column(), Shape::kRoom);
  }
  FP4KIT_DEVICE u32 steps() const { return (weights.depth_tiles + kStepChunks - 1) / kStepChunks; }
  // Of a step's pieces of the depth, those that a slice has.
  FP4KIT_DEVICE u32 slice_chunk(u32 step, u32 slice) const {
    return step * kStepChunks + slice * kChunks;
  }

  using Turn = StageTurn<Shape::kStages>;

  // ---- Filling ----

  // Units are the tiles of a step: those of the first warp, then those of the next.
  FP4KIT_DEVICE static u32 tile_of(u32 unit) {
    const u32 warp = unit / Shape::kTiles;
    return (warp / 4 / Shape::kSlices * 4 + warp % 4) * Shape::kTiles + unit % Shape::kTiles;
  }
  FP4KIT_DEVICE static u32 slice_of(u32 unit) { return unit / Shape::kTiles / 4 % Shape::kSlices; }
  FP4KIT_DEVICE u32 chunks_of(u32 step, u32 unit) const {
    const u32 chunk = slice_chunk(step, slice_of(unit));
    const u32 left = chunk < weights.depth_tiles ? weights.depth_tiles - chunk : 0;
    return tile_of(unit) < tile_count() ? min_u32(left, kChunks) : 0;
  }

  // By each warp that fills: what is copied in stretches, a lane for each.
  FP4KIT_DEVICE void fill_stretches(
      u32 step, u32 warp, u32 stage, SharedPlace place, u64 policy) const {
    const u32 lane = threadIdx.x % 32, first_chunk = step * kStepChunks;
    const u32 unit = warp * kFillerUnits + lane;
    const bool is_image = lane == kFillerUnits && warp == 0;
    u32 bytes = 0;
    if (is_image) {
      bytes = min_u32(weights.depth_tiles - first_chunk, kStepChunks) * Columns::kBytes;
    } else if (kBulk && lane < kFillerUnits) {
      bytes = chunks_of(step, unit) * Stage::Tile::kBytes;
    }
    const u32 all = sum_across(bytes);
    if (lane == 0) expect_bytes(filled(stage), all);
    __syncwarp();
    if (bytes == 0) return;
    const i64 image_chunk = static_cast<i64>(column_block) * weights.depth_tiles + first_chunk;
    const i64 tile = static_cast<i64>(first_tile() + tile_of(unit)) * weights.depth_tiles +
                     slice_chunk(step, slice_of(unit));
    const u8* source = is_image ? image + image_chunk * Columns::kBytes
                                : weights.codes + tile * Stage::Tile::kBytes;
    copy_bulk(place.at(is_image ? 0 : Shape::kColumnBytes + unit * Stage::kBytes), source, bytes,
        filled(stage), is_image ? keep_policy() : policy);
  }

  // Where a warp that fills is in its tiles of rows.
  struct RowCursors {
    TileCursor<Stage, kForm> each[kFillerUnits];

    FP4KIT_DEVICE void start(const WarpgroupProduct& product, u32 warp) {
#pragma unroll
      for (u32 i = 0; i < kFillerUnits; ++i) {
        const u32 unit = warp * kFillerUnits + i;
        const u32 tile =
            min_u32(product.first_tile() + tile_of(unit), product.weights.row_tiles - 1);
        each[i].start(product.weights, tile, slice_of(unit) * kChunks);
      }
    }

    // Begins to copy a step's pieces, and goes to the next step.
    FP4KIT_DEVICE void copy(
        const WarpgroupProduct& product, u32 step, u32 warp, SharedPlace place) {
#pragma unroll
      for (u32 i = 0; i < kFillerUnits; ++i) {
        const u32 unit = warp * kFillerUnits + i;
        const u32 valid = product.chunks_of(step, unit);
        if (valid != 0) {
          const LaneTarget<Stage, kForm> target(
              place.at(Shape::kColumnBytes + unit * Stage::kBytes));
          each[i].copy(target, 0, product.weights, valid);
        }
        each[i].advance(product.weights, kStepChunks);
      }
    }
  };

  FP4KIT_DEVICE void fill(u32 thread) const {
    const u32 warp = thread / 32, all_steps = steps();
    const u64 policy = read_once_policy();
    [[maybe_unused]] RowCursors rows_of;
    if constexpr (!kBulk) rows_of.start(*this, warp);
    Turn turn;
#pragma unroll 1
    for (u32 step = 0; step < all_steps; ++step, turn.next()) {
      wait_bytes(emptied(turn.stage), turn.phase ^ 1);
      __syncwarp();
      const SharedPlace place = memory.at(turn.stage * kStageBytes);
      if (kBulk || warp == 0) fill_stretches(step, warp, turn.stage, place, policy);
      if constexpr (!kBulk) {
        rows_of.copy(*this, step, warp, place);
        arrive_copies(filled(turn.stage));
      }
    }
    __syncwarp();
  }

  // ---- Multiplying ----

  using Sums = float[Shape::kTiles][Shape::kColumns / 2];

  // Adds the products of a piece of 128 of the depth. `before`: the barrier of the step before, whose
  // products are over when two more have begun; or none.
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
    const u32 unit = threadIdx.x / 32 * Shape::kTiles, slice = slice_of(unit), all_steps = steps();
    const bool is_first = threadIdx.x % 32 == 0;
    const View view(kept(memory.at(Shape::kColumnBytes + unit * Stage::kBytes)), false);
    const SharedPlace columns = memory.at(slice * kChunks * Columns::kBytes);
    u32 a[2][2][4];
    u32 odd[Shape::kTiles] = {};
    Turn turn;
    SharedPlace before = emptied(0);
#pragma unroll 1
    for (u32 step = 0; step < all_steps; ++step, turn.next()) {
      wait_bytes(filled(turn.stage), turn.phase);
      __syncwarp();
      const View here(view, turn.stage * kStageBytes);
      const Columns there(columns.at(turn.stage * kStageBytes));
      const u32 chunk = slice_chunk(step, slice);
      const bool gives_back = is_first && step != 0;
      if (chunk >= weights.depth_tiles) {
        // Nothing of the last step is this slice's.
        if (gives_back) arrive(before);
        break;
      }
#pragma unroll
      for (u32 c = 0; c < kChunks; ++c) {
        if (chunk + c >= weights.depth_tiles) break;
        multiply_chunk(result, a, here, c, there.at(c * Columns::kBytes), odd, before,
            c == 0 && gives_back);
      }
      before = emptied(turn.stage);
    }
    wait_products<0>();
    u32 all = 0;
#pragma unroll
    for (u32 i = 0; i < Shape::kTiles; ++i) {
      // What lies where there is no tile is nobody's.
      if (tile_of(unit + i) < tile_count()) all |= odd[i];
    }
    return all;
  }

  // ---- Results ----

  // Codes are 2^-126 times what they stand for, scales 2^119.
  FP4KIT_DEVICE static float raised(float sum) {
    return mul_rn(sum, as_float(static_cast<u32>(kF32Bias + 7) << kF32MantissaBits));
  }

  // Results of one token and two rows beside each other, the first an even one.
  FP4KIT_DEVICE void store_word(
      u32 token, u32 row, const float (&factor)[2], float first, float second) const {
    epilogue.store_word(
        token, row, mul_rn(factor[0], raised(first)), mul_rn(factor[1], raised(second)));
  }

  FP4KIT_DEVICE void load_factors(u32 row, float (&factor)[2]) const {
    factor[0] = epilogue.factor(row);
    factor[1] = row + 1 < rows ? epilogue.factor(row + 1) : 0.0f;
  }

  // From registers, where stores_words() is true.
  FP4KIT_DEVICE void store_directly(const Sums& result) const {
    const u32 unit = threadIdx.x / 32 * Shape::kTiles, lane = threadIdx.x % 32;
    const u32 g = lane / 4, t = lane % 4, tokens = column_count();
#pragma unroll
    for (u32 i = 0; i < Shape::kTiles; ++i) {
      const u32 tile = tile_of(unit + i), row = (first_tile() + tile) * kPreparedRows + 2 * g;
      if (tile >= tile_count() || row >= rows) continue;
      float factor[2];
      load_factors(row, factor);
#pragma unroll
      for (u32 j = 0; j < Shape::kColumns / 8; ++j) {
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
          const u32 token = 8 * j + 2 * t + h;
          if (token >= tokens) continue;
          store_word(first_column() + token, row, factor, result[i][4 * j + h],
              result[i][4 * j + 2 + h]);
        }
      }
    }
  }

  FP4KIT_DEVICE static void emit(float* memory, const Sums& result) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (u32 i = 0; i < Shape::kTiles; ++i) {
      const u32 unit = warp * Shape::kTiles + i;
      float* own = memory + slice_of(unit) * (Shape::kColumns * Shape::kSumRow) +
                   tile_of(unit) * kPreparedRows + 2 * g;
#pragma unroll
      for (u32 j = 0; j < Shape::kColumns / 8; ++j) {
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
          *reinterpret_cast<uint2*>(own + (8 * j + 2 * t + h) * Shape::kSumRow) =
              make_uint2(as_bits(result[i][4 * j + h]), as_bits(result[i][4 * j + 2 + h]));
        }
      }
    }
  }

  // From sums in shared memory: a thread has two rows.
  FP4KIT_DEVICE void store_sums() const {
    constexpr u32 kPairs = Shape::kRowTiles * kPreparedRows / 2;
    static_assert(kMultipliers % kPairs == 0, "as many tokens at once for all rows");
    const u32 inside = threadIdx.x % kPairs * 2, row = first_tile() * kPreparedRows + inside;
    if (inside >= tile_count() * kPreparedRows || row >= rows) return;
    const u32 tokens = column_count() / Shape::kParts;
    const u32 first_token = first_column() / Shape::kParts;
    const bool words = epilogue.stores_words();
    float factor[2];
    load_factors(row, factor);
#pragma unroll 1
    for (u32 token = threadIdx.x / kPairs; token < tokens; token += kMultipliers / kPairs) {
      float first = 0.0f, second = 0.0f;
#pragma unroll
      for (u32 part = 0; part < Shape::kParts; ++part) {
        const float* own = sums + (token * Shape::kParts + part) * Shape::kSumRow + inside;
#pragma unroll
        for (u32 slice = 0; slice < Shape::kSlices; ++slice) {
          const uint2 both = *reinterpret_cast<const uint2*>(
              own + slice * (Shape::kColumns * Shape::kSumRow));
          first = add_rn(first, as_float(both.x));
          second = add_rn(second, as_float(both.y));
        }
      }
      if (words) {
        store_word(first_token + token, row, factor, first, second);
      } else {
        epilogue.store(first_token + token, row, raised(first), factor[0]);
        if (row + 1 < rows) epilogue.store(first_token + token, row + 1, raised(second), factor[1]);
      }
    }
  }

  // One by one: where some scale is odd.
  FP4KIT_DEVICE void multiply_slowly() const {
    const u32 first_row = first_tile() * kPreparedRows, count = tile_count() * kPreparedRows;
    const u32 tokens = column_count() / Shape::kParts;
    const u32 first_token = first_column() / Shape::kParts;
    for (u32 i = threadIdx.x; i < tokens * count; i += kMultipliers) {
      const u32 token = first_token + i / count, row = first_row + i % count;
      if (row >= rows) continue;
      float sum = 0.0f;
#pragma unroll 1
      for (u32 k = 0; k < activations.depth; ++k) {
        const float value = weight_value<Format, kForm>(weights, activations.high_first, row, k);
        sum = fma_rn(activations.value(token, k), value, sum);
      }
      epilogue.store(token, row, sum);
    }
  }

  FP4KIT_DEVICE void run() const {
    if (threadIdx.x < kStages) {
      init_barrier(filled(threadIdx.x), kArrivals);
      init_barrier(emptied(threadIdx.x), Shape::kWarps);
    }
    fence_barriers();
    __syncthreads();
    if (threadIdx.x >= kMultipliers) {
      if constexpr (kMovesRegisters) give_registers_back<kFillerRegisters>();
      fill(threadIdx.x - kMultipliers);
      return;
    }
    if constexpr (kMovesRegisters) take_registers<kMultiplierRegisters>();
    Sums result = {};
    const u32 odd = multiply(result);
    if constexpr (kForm == kFormRows) {
      if (count_in_group<kMultipliers>(has_odd_scale<Format>(odd)) != 0) {
        multiply_slowly();
        return;
      }
    }
    if (kDirect && epilogue.stores_words()) {
      store_directly(result);
      return;
    }
    synchronize_group<kMultipliers>();  // all stages have been read
    emit(sums, result);
    synchronize_group<kMultipliers>();
    store_sums();
  }
};

#endif  // FP4KIT_HAS_WARPGROUP_MMA
#endif  // __CUDACC__

}  // namespace fp4kit
