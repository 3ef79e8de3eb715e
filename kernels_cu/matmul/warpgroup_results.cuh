// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// What a thread block of multiply_warpgroup_kernel (warpgroup.cu) does with its sums: those of
// pieces of the depth are added, results stored. By the threads that multiply.
#pragma once

#include "common/launch_order.cuh"
#include "common/thread_group.cuh"
#include "matmul/activations.cuh"
#include "matmul/epilogue.cuh"
#include "matmul/shape.cuh"
#include "matmul/weights.cuh"

namespace fp4kit {

#ifdef __CUDACC__
#ifdef FP4KIT_HAS_MMA

template <class Format, int kForm, class Shape>
struct WarpgroupResults {
  static constexpr u32 kMultipliers = 32 * Shape::kWarps;
  // Results can go from registers to memory: nothing has to be added to them before.
  static constexpr bool kDirect = Shape::kParts == 1;
  using Sums = float[Shape::kTiles][Shape::kColumns / 2];

  WeightSource weights;
  ActivationSource<Shape::kParts> activations;
  Epilogue epilogue;
  u32 rows;  // of the weights
  u32 span;  // tiles of 16 rows of a thread block
  // Which of them this one is: of how many columns, and of how many pieces of the depth.
  u32 row_block, column_block, column_blocks, split, splits;
  // Sums of each piece of the depth, and how many pieces are there: of each block's rows and
  // columns.
  float* partial;
  u32* arrived;
  u32* word;    // in shared memory
  float* sums;  // likewise, where the stages are

  // ---- Where ----

  FP4KIT_DEVICE u32 first_tile() const { return row_block * span; }
  FP4KIT_DEVICE u32 tile_count() const { return min_u32(span, weights.row_tiles - first_tile()); }
  FP4KIT_DEVICE u32 first_column() const { return column_block * Shape::kRoom; }
  FP4KIT_DEVICE u32 column_count() const {
    return min_u32(activations.columns - first_column(), Shape::kRoom);
  }
  // Steps of this piece of the depth.
  FP4KIT_DEVICE u32 bound(u32 number) const {
    const u32 all = (weights.depth_tiles + Shape::kChunks - 1) / Shape::kChunks;
    return static_cast<u32>(static_cast<u64>(all) * number / splits);
  }
  FP4KIT_DEVICE u32 first_step() const { return bound(split); }
  FP4KIT_DEVICE u32 end_step() const { return bound(split + 1); }

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
    wait_for_kernel_before();  // it set the counters to 0
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

  // What follows the products. `odd`: what has_odd_scale asks for.
  FP4KIT_DEVICE void finish(Sums& result, u32 odd) const {
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

#endif  // FP4KIT_HAS_MMA
#endif  // __CUDACC__

}  // namespace fp4kit
