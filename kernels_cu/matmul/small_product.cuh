// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// What the kernels of small products (small.cu) have in common: what follows the sums.
#pragma once

#include "common/thread_group.cuh"
#include "matmul/epilogue.cuh"
#include "matmul/members.cuh"
#include "matmul/small.cuh"

namespace fp4kit {

#ifdef __CUDACC__
#ifdef FP4KIT_HAS_MMA

template <class Format, int kForm, class Shape>
struct SmallProduct {
  using WarpRing = Ring<Format, kForm, Shape>;
  using View = LaneView<typename WarpRing::Stage, kForm>;
  static constexpr u32 kThreadCount = Shape::kSmallThreads;  // that multiply

  // Meets the other threads that multiply.
  FP4KIT_DEVICE static void synchronize() {
    if constexpr (Shape::kFillers == 0) {
      __syncthreads();
    } else {
      synchronize_group<kThreadCount>();
    }
  }

  // The same; how many of them say so.
  FP4KIT_DEVICE static u32 count(bool says) {
    if constexpr (Shape::kFillers == 0) {
      return static_cast<u32>(__syncthreads_count(says));
    } else {
      return count_in_group<kThreadCount>(says);
    }
  }

  WeightSource weights;
  ActivationSource<Shape::kParts> activations;
  Epilogue epilogue;
  Members members;
  u32 rows;  // of the weights
  u32 steps;
  u32 span;               // tiles of 16 rows that a thread block takes at a time
  u32 row_blocks, tiles;  // of so many rows of one member, and of all
  SharedPlace image;
  float* sums_memory;
  u32* largest;  // sliced: magnitudes of both tokens
  bool raises;   // sliced: whether all tokens can be raised

  // ---- Where a thread block is ----

  // A step of a tile, for some of the tokens of its member.
  struct Walk {
    u32 tile, step;
    u32 first, end;  // columns that are left of the member
  };

  // Only activations that come step by step can be those of several members.
  FP4KIT_DEVICE bool has_members() const { return Shape::kStaged && members.table != nullptr; }
  FP4KIT_DEVICE u32 columns_of(const Walk& at) const {
    return min_u32(at.end - at.first, Shape::kRoom);
  }

  FP4KIT_DEVICE u32 member_of(u32 tile) const { return has_members() ? tile / row_blocks : 0; }

  // Of a step, how many pieces of 128 of the depth there are from one of its own on.
  FP4KIT_DEVICE u32 left_of(u32 step, u32 first, u32 most) const {
    const u32 chunk = step * Shape::kStepChunks + first;
    return chunk < weights.depth_tiles ? min_u32(weights.depth_tiles - chunk, most) : 0;
  }

  // ---- Results ----

  FP4KIT_DEVICE static float unscaled(float sum) {
    // Sliced: 2^96 of the activations, 2^-126 of the codes, 2^30 of E8M0 scales; else 2^119 of the
    // scales.
    constexpr u32 kUp = !Shape::kSliced ? 7 : Format::kIsMx ? 0 : 30;
    return mul_rn(sum, as_float((static_cast<u32>(kF32Bias) + kUp) << kF32MantissaBits));
  }

  // Where the results of a step's tile go.
  struct Target {
    Epilogue epilogue;
    u32 first_row;  // of the weights
    u32 rows_left;
    u32 first_token, tokens;

    FP4KIT_DEVICE void store(u32 token, u32 inside, float sum) const {
      if (inside < rows_left) epilogue.store(first_token + token, first_row + inside, sum);
    }

    // Of this row and the next.
    FP4KIT_DEVICE void store_pair(u32 token, u32 inside, float first, float second) const {
      if (epilogue.stores_pairs && inside + 1 < rows_left) {
        epilogue.store_pair(first_token + token, first_row + inside, first, second);
      } else {
        store(token, inside, first);
        store(token, inside + 1, second);
      }
    }
  };

  FP4KIT_DEVICE Target target_of(const Walk& at) const {
    const u32 member = member_of(at.tile);
    const u32 most = span * kPreparedRows, first_row = (at.tile - member * row_blocks) * most;
    Target result{epilogue, first_row, min_u32(rows - first_row, most), at.first / Shape::kParts,
        columns_of(at) / Shape::kParts};
    if (has_members()) members.table[member].join(result.epilogue);
    return result;
  }

  // A tile's results, one by one.
  FP4KIT_DEVICE void multiply_slowly(const Walk& at, const Target& target) const {
    WeightSource source = weights;
    if (has_members()) members.table[member_of(at.tile)].join(source);
    for (u32 i = threadIdx.x; i < target.tokens * Shape::kRows; i += kThreadCount) {
      const u32 token = i / Shape::kRows, inside = i % Shape::kRows;
      if (inside >= target.rows_left) continue;
      float sum = 0.0f;
#pragma unroll 1
      for (u32 k = 0; k < activations.depth; ++k) {
        const float value = weight_value<Format, kForm>(
            source, activations.high_first, target.first_row + inside, k);
        sum = fma_rn(activations.value(target.first_token + token, k), value, sum);
      }
      target.store(token, inside, sum);
    }
  }

  // Adds the sums of the slices of a tile and stores results, of two rows at a time.
  FP4KIT_DEVICE void finish_sums(const Target& target, const float* memory) const {
    constexpr u32 kPairs = Shape::kRows / 2;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < target.tokens * kPairs; i += kThreadCount) {
      const u32 token = i / kPairs, inside = i % kPairs * 2;
      const float* from = memory + token * (Shape::kParts * Shape::kSumRow) + inside;
      float first = 0.0f, second = 0.0f;
#pragma unroll
      for (u32 part = 0; part < Shape::kParts; ++part) {
#pragma unroll
        for (u32 slice = 0; slice < Shape::kSlices; ++slice) {
          const u32 place = (slice * Shape::kTokens + part) * Shape::kSumRow;
          const uint2 pair = *reinterpret_cast<const uint2*>(from + place);
          first = add_rn(first, as_float(pair.x));
          second = add_rn(second, as_float(pair.y));
        }
      }
      target.store_pair(token, inside, unscaled(first), unscaled(second));
    }
  }

  // Sums of two rows of a warp, for one column of its slice.
  FP4KIT_DEVICE static void emit_pair(
      float* memory, u32 column, u32 inside, float first, float second) {
    if (Shape::kTokens < kMmaN && column >= Shape::kTokens) return;
    *reinterpret_cast<uint2*>(memory + column * Shape::kSumRow + inside) =
        make_uint2(as_bits(first), as_bits(second));
  }

  // Hands a warp's sums on, to where those of its slice lie, and begins anew.
  FP4KIT_DEVICE static void emit(
      float* memory, float (&sums)[Shape::kTiles][Shape::kColumns][Shape::kSums]) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u32 group = warp / Shape::kSlices;
#pragma unroll
    for (u32 i = 0; i < Shape::kTiles; ++i) {
      const u32 inside = group * Shape::kWarpRows + i * kPreparedRows + 2 * g;
#pragma unroll
      for (u32 m = 0; m < Shape::kColumns; ++m) {
        float (&sum)[Shape::kSums] = sums[i][m];
        if constexpr (Shape::kSliced) {
          constexpr u32 kMost = Shape::kTokens == 2 ? 1 : 2;
#pragma unroll
          for (u32 distance = 1; distance <= kMost; distance *= 2) {
            sum[0] = add_rn(sum[0], __shfl_xor_sync(0xFFFFFFFFu, sum[0], distance));
            sum[1] = add_rn(sum[1], __shfl_xor_sync(0xFFFFFFFFu, sum[1], distance));
          }
          if (t % (2 * kMost) == 0) {
            emit_pair(memory, t / 2, inside, sum[0], sum[1]);
          }
        } else {
#pragma unroll
          for (u32 h = 0; h < 2; ++h) {
            emit_pair(memory, kMmaN * m + 2 * t + h, inside, sum[h], sum[2 + h]);
          }
        }
#pragma unroll
        for (float& each : sum) each = 0.0f;
      }
    }
  }

  FP4KIT_DEVICE void finish_tile(const Walk& at, const Target& target,
      float (&sums)[Shape::kTiles][Shape::kColumns][Shape::kSums], u32 odd, float* memory) const {
    // Only then may something be rare.
    constexpr bool kAsks = Shape::kSliced || kForm == kFormRows;
    const bool is_slow = kAsks && (!raises || has_odd_scale<Format>(odd));
    const u32 slice = threadIdx.x / 32 % Shape::kSlices;
    // Those of the tile before have been read, or there are two places.
    if constexpr (Shape::kSumBuffers == 1) synchronize();
    emit(memory + slice * (Shape::kTokens * Shape::kSumRow), sums);
    if constexpr (kAsks) {
      if (count(is_slow) != 0) {
        multiply_slowly(at, target);
        return;
      }
    } else {
      synchronize();
    }
    finish_sums(target, memory);
  }
  FP4KIT_DEVICE void finish_tile(const Walk& at,
      float (&sums)[Shape::kTiles][Shape::kColumns][Shape::kSums], u32 odd, float* memory) const {
    finish_tile(at, target_of(at), sums, odd, memory);
  }
};

#endif  // FP4KIT_HAS_MMA
#endif  // __CUDACC__

}  // namespace fp4kit
