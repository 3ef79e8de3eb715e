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
  // A stage: activations, then weights.
  static constexpr u32 kStageBytes = (Shape::kColumnBytes + Shape::kRowTiles * Stage::kBytes +
                                         Columns::kAlignment - 1) /
                                     Columns::kAlignment * Columns::kAlignment;
  static constexpr bool kBulk = kForm == kFormPrepared;
  // Four warps fill: to begin a copy of a stretch takes a warp some hundred cycles.
  static constexpr u32 kFillers = 128;
  static constexpr u32 kFillerWarps = kFillers / 32, kFillerTiles = Shape::kRowTiles / kFillerWarps;
  static constexpr u32 kMultipliers = 32 * Shape::kWarps;
  // Registers of a thread: those that each gets at first, those that a filling thread needs, and
  // what that leaves for the others.
  static constexpr u32 kRegisters = 65536 / (kMultipliers + kFillers) / 8 * 8;
  static constexpr u32 kFillerRegisters = kBulk ? 24 : 56;
  static constexpr u32 kMultiplierRegisters =
      ((kMultipliers + kFillers) * kRegisters - kFillers * kFillerRegisters) / kMultipliers / 8 * 8;
  static constexpr bool kMovesRegisters = kRegisters < 240;
  // Results can go from registers to memory: nothing has to be added to them before.
  static constexpr bool kDirect = Shape::kParts == 1;
  // Arrivals at a stage that is filled: those of the stretches' bytes, and of the pieces.
  static constexpr u32 kArrivals = kBulk ? kFillerWarps : 1 + kFillers;

  WeightSource weights;
  ActivationSource<Shape::kParts> activations;
  const u8* image;  // of them: arrange_columns_kernel
  Epilogue epilogue;
  u32 rows;  // of the weights
  u32 span;  // tiles of 16 rows of a thread block
  // Which of them this one is: of how many columns, and of how many pieces of the depth.
  u32 row_block, column_block, column_blocks, split, splits;
  // Sums of each piece of the depth, and how many pieces are there: of each block's rows and columns.
  float* partial;
  u32* arrived;
  SharedPlace control, memory;
  u32* word;    // behind the barriers
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
  // Steps of this piece of the depth.
  FP4KIT_DEVICE u32 bound(u32 number) const {
    const u32 all = (weights.depth_tiles + kChunks - 1) / kChunks;
    return static_cast<u32>(static_cast<u64>(all) * number / splits);
  }
  FP4KIT_DEVICE u32 first_step() const { return bound(split); }
  FP4KIT_DEVICE u32 end_step() const { return bound(split + 1); }

  using Turn = StageTurn<Shape::kStages>;

  // ---- Filling ----

  // Pieces of 128 of the depth that a step has.
  FP4KIT_DEVICE u32 chunks_of(u32 step) const {
    return min_u32(weights.depth_tiles - step * kChunks, kChunks);
  }
  // How many tiles a warp that fills has.
  FP4KIT_DEVICE u32 filled_tiles(u32 warp) const {
    const u32 first = warp * kFillerTiles, count = tile_count();
    return first < count ? min_u32(count - first, kFillerTiles) : 0;
  }

  // By each warp that fills: what is copied in stretches, a lane for each. `tiles`: of its own.
  FP4KIT_DEVICE void fill_stretches(
      u32 step, u32 warp, u32 tiles, u32 stage, SharedPlace place, u64 policy) const {
    const u32 lane = threadIdx.x % 32, chunks = chunks_of(step);
    const bool is_image = warp == 0 && lane == kFillerTiles;
    const u32 bytes = chunks * (is_image ? Columns::kBytes : Stage::Tile::kBytes);
    if (lane == 0) {
      expect_bytes(filled(stage), (kBulk ? tiles * chunks * Stage::Tile::kBytes : 0) +
                                      (warp == 0 ? chunks * Columns::kBytes : 0));
    }
    __syncwarp();
    if (!is_image && !(kBulk && lane < tiles)) return;
    const u32 inside = warp * kFillerTiles + lane;
    const u32 line = is_image ? column_block : first_tile() + inside;
    const i64 number = static_cast<i64>(line) * weights.depth_tiles + step * kChunks;
    const u8* source = is_image ? image + number * Columns::kBytes
                                : weights.codes + number * Stage::Tile::kBytes;
    copy_bulk(place.at(is_image ? 0 : Shape::kColumnBytes + inside * Stage::kBytes), source, bytes,
        filled(stage), is_image ? keep_policy() : policy);
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
    const u32 warp = thread / 32, end = end_step(), tiles = filled_tiles(warp);
    const u64 policy = read_once_policy();
    [[maybe_unused]] RowCursors rows_of;
    if constexpr (!kBulk) rows_of.start(*this, warp);
    Turn turn;
#pragma unroll 1
    for (u32 step = first_step(); step < end; ++step, turn.next()) {
      wait_bytes(emptied(turn.stage), turn.phase ^ 1);
      __syncwarp();
      const SharedPlace place = memory.at(turn.stage * kStageBytes);
      if (kBulk || warp == 0) fill_stretches(step, warp, tiles, turn.stage, place, policy);
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
    const u32 first_inside = threadIdx.x / 32 * Shape::kTiles;
    const u32 first = first_step(), end = end_step();
    const bool is_first = threadIdx.x % 32 == 0;
    const View view(kept(memory.at(Shape::kColumnBytes + first_inside * Stage::kBytes)), false);
    u32 a[2][2][4];
    u32 odd[Shape::kTiles] = {};
    Turn turn;
    SharedPlace before = emptied(0);
#pragma unroll 1
    for (u32 step = first; step < end; ++step, turn.next()) {
      wait_bytes(filled(turn.stage), turn.phase);
      __syncwarp();
      const View here(view, turn.stage * kStageBytes);
      const Columns columns(memory.at(turn.stage * kStageBytes));
      const bool gives_back = is_first && step != first;
#pragma unroll
      for (u32 c = 0; c < kChunks; ++c) {
        if (c != 0 && step * kChunks + c >= weights.depth_tiles) break;
        multiply_chunk(result, a, here, c, columns.at(c * Columns::kBytes), odd, before,
            c == 0 && gives_back);
      }
      before = emptied(turn.stage);
    }
    wait_products<0>();
    u32 all = 0;
#pragma unroll
    for (u32 i = 0; i < Shape::kTiles; ++i) {
      // What lies where there is no tile is nobody's.
      if (first_inside + i < tile_count()) all |= odd[i];
    }
    return all;
  }

  // ---- Pieces of the depth ----

  // Where a piece's sums are, four of a thread beside each other, those of threads as well.
  static constexpr u32 kFours = Shape::kTiles * Shape::kColumns / 8;
  FP4KIT_DEVICE uint4* piece_place(u32 piece) const {
    const i64 block = static_cast<i64>(row_block) * column_blocks + column_block;
    return reinterpret_cast<uint4*>(partial) + (block * splits + piece) * (kFours * kMultipliers) +
           threadIdx.x;
  }

  FP4KIT_DEVICE void leave_piece(const Sums& result) const {
    uint4* place = piece_place(split);
#pragma unroll
    for (u32 i = 0; i < kFours; ++i) {
      const float* own = &result[i / (Shape::kColumns / 8)][i % (Shape::kColumns / 8) * 4];
      place[i * kMultipliers] =
          make_uint4(as_bits(own[0]), as_bits(own[1]), as_bits(own[2]), as_bits(own[3]));
    }
  }

  // Loads so many fours at once: an addition between two loads would wait for each.
  FP4KIT_DEVICE void add_piece(u32 piece, Sums& result) const {
    constexpr u32 kAtOnce = kFours < 16 ? kFours : kFours < 32 ? 16 : 4;
    const uint4* place = piece_place(piece);
    const bool is_first = piece == 0;
#pragma unroll
    for (u32 begin = 0; begin < kFours; begin += kAtOnce) {
      uint4 four[kAtOnce];
#pragma unroll
      for (u32 i = 0; i < kAtOnce; ++i) {
#ifdef __CUDA_ARCH__
        four[i] = __ldcg(place + (begin + i) * kMultipliers);  // what other blocks have written
#else
        four[i] = place[(begin + i) * kMultipliers];
#endif
      }
#pragma unroll
      for (u32 i = 0; i < kAtOnce; ++i) {
        const u32 at = begin + i;
        float* own = &result[at / (Shape::kColumns / 8)][at % (Shape::kColumns / 8) * 4];
        const u32 bits[4] = {four[i].x, four[i].y, four[i].z, four[i].w};
#pragma unroll
        for (u32 k = 0; k < 4; ++k) {
          own[k] = is_first ? as_float(bits[k]) : add_rn(own[k], as_float(bits[k]));
        }
      }
    }
  }

  // The sums of all pieces in their order, by the thread block that has the last of them; others
  // return false. `odd` becomes that of all.
  FP4KIT_DEVICE bool join_splits(Sums& result, bool& is_odd) const {
    leave_piece(result);
    __threadfence();
    const u32 odd = count_in_group<kMultipliers>(is_odd);
    if (threadIdx.x == 0) {
      constexpr u32 kOdd = 1u << 16;
      u32* counter = arrived + row_block * column_blocks + column_block;
      const u32 mine = 1 + (odd != 0 ? kOdd : 0);
      const u32 all = atomicAdd(counter, mine) + mine;
      *word = all % kOdd == splits ? 1 + all / kOdd : 0;
    }
    synchronize_group<kMultipliers>();
    const u32 found = *word;
    if (found == 0) return false;
    is_odd = found > 1;
    __threadfence();
    [[maybe_unused]] constexpr u32 kPiecesAtOnce = kFours < 8 ? 4 : kFours < 16 ? 2 : 1;
#pragma unroll kPiecesAtOnce
    for (u32 piece = 0; piece < splits; ++piece) add_piece(piece, result);
    return true;
  }

  // ---- Results ----

  // Codes are 2^-126 times what they stand for, scales 2^119.
  FP4KIT_DEVICE static float raised(float sum) {
    return mul_rn(sum, as_float(static_cast<u32>(kF32Bias + 7) << kF32MantissaBits));
  }

  FP4KIT_DEVICE void load_factors(u32 row, float (&factor)[2]) const {
    factor[0] = epilogue.factor(0, row);
    factor[1] = row + 1 < rows ? epilogue.factor(0, row + 1) : 0.0f;
  }

  // From registers, where pairs can be stored.
  FP4KIT_DEVICE void store_directly(const Sums& result) const {
    const u32 first_inside = threadIdx.x / 32 * Shape::kTiles, lane = threadIdx.x % 32;
    const u32 g = lane / 4, t = lane % 4, tokens = column_count();
#pragma unroll
    for (u32 i = 0; i < Shape::kTiles; ++i) {
      const u32 inside = first_inside + i;
      const u32 row = (first_tile() + inside) * kPreparedRows + 2 * g;
      if (inside >= tile_count() || row >= rows) continue;
      float factor[2];
      load_factors(row, factor);
#pragma unroll
      for (u32 j = 0; j < Shape::kColumns / 8; ++j) {
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
          const u32 token = 8 * j + 2 * t + h;
          if (token >= tokens) continue;
          epilogue.store_pair(first_column() + token, row, raised(result[i][4 * j + h]),
              raised(result[i][4 * j + 2 + h]), factor);
        }
      }
    }
  }

  FP4KIT_DEVICE static void emit(float* memory, const Sums& result) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (u32 i = 0; i < Shape::kTiles; ++i) {
      float* own = memory + (warp * Shape::kTiles + i) * kPreparedRows + 2 * g;
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
    const bool pairs = epilogue.can_store_pairs();
    float factor[2];
    load_factors(row, factor);
#pragma unroll 1
    for (u32 token = threadIdx.x / kPairs; token < tokens; token += kMultipliers / kPairs) {
      float first = 0.0f, second = 0.0f;
#pragma unroll
      for (u32 part = 0; part < Shape::kParts; ++part) {
        const float* own = sums + (token * Shape::kParts + part) * Shape::kSumRow + inside;
        const uint2 both = *reinterpret_cast<const uint2*>(own);
        first = add_rn(first, as_float(both.x));
        second = add_rn(second, as_float(both.y));
      }
      if (pairs) {
        epilogue.store_pair(first_token + token, row, raised(first), raised(second), factor);
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
    bool is_odd = kForm == kFormRows && has_odd_scale<Format>(odd);
    if (splits > 1 && !join_splits(result, is_odd)) return;
    if constexpr (kForm == kFormRows) {
      if (count_in_group<kMultipliers>(is_odd) != 0) {
        multiply_slowly();
        return;
      }
    }
    if (kDirect && epilogue.can_store_pairs()) {
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
