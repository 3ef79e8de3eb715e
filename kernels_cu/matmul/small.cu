// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Products of a few rows of bfloat16 with FP4 weights, which are read once: reference.matmul but
// for the order of the sums, which is the same in every run.
//
// 1. Weights come through a ring of each warp (asynchronous copies, no thread waits for another's).
// 2. Activations lie in shared memory in the order of the fragments (activations.cuh): all of them
//    before the first step, or those of a step while the step before is computed.
// 3. A warp decodes its weights in registers and multiplies them as the A operand of mma.sync
//    m16n8k16 (weights.cuh): tokens are columns, so that few tokens waste nothing.
// 4. Sums of the warps that share rows are added in shared memory, in their order; epilogue.cuh.
//
// Rare values take a slow way that computes each result of a tile by itself: scales that are
// negative, NaN or very large where nobody has looked at them before (kFormRows), and activations
// beyond what the sliced form can scale.
//
// Launch: persistent thread blocks of Shape::kSmallThreads threads; a block takes tiles of
// Shape::kRows rows. Shared memory: the rings, the image of the activations, the sums of the warps.
#include "matmul/epilogue.cuh"
#include "matmul/shape.cuh"
#include "matmul/small.cuh"

namespace fp4kit {

#ifdef FP4KIT_HAS_MMA

template <class Format, int kForm, class Shape>
struct SmallProduct {
  using WarpRing = Ring<Format, kForm, Shape>;
  using View = LaneView<typename WarpRing::Stage, kForm>;
  static constexpr u32 kThreadCount = Shape::kSmallThreads;
  // Pieces of the activations of a step that a thread holds.
  static constexpr u32 kStepPieces = Shape::kStepChunks * (Shape::kTokens / 2) * kPairPieces;
  static constexpr u32 kHeld = Shape::kStaged ? (kStepPieces + kThreadCount - 1) / kThreadCount : 1;
  static constexpr u32 kStepPlaces = Shape::kStepChunks * 4 * Shape::kSlots;

  WeightSource weights;
  ActivationSource activations;
  Epilogue epilogue;
  i64 rows;  // of the weights
  u32 tiles, steps;
  SharedPlace image;
  float* sums_memory;
  bool raises;  // sliced: whether all tokens can be raised

  // ---- Activations ----

  // All of them. Returns whether each token can be raised (sliced).
  FP4KIT_DEVICE void stage_all(u32* largest) {
    const u32 pairs = (activations.tokens + 1) / 2;
    const u32 pieces = weights.depth_tiles * pairs * kPairPieces;
    u32 found[2] = {0, 0};
    for (u32 i = threadIdx.x; i < pieces; i += kThreadCount) {
      const PiecePlace at = piece_place(i, pairs, Shape::kSlots);
      uint4 piece = load_piece(activations, at.token, at.k);
      if constexpr (Shape::kSliced) {
        const u32 larger = larger_magnitude(at.token == 0 ? found[0] : found[1], piece);
        if (at.token == 0) {
          found[0] = larger;
        } else {
          found[1] = larger;
        }
        piece = raise_piece(piece);
      }
      image.at(at.place * 16).store_vec(arrange_piece<kForm>(piece, activations.high_first));
    }
    if constexpr (Shape::kSliced) {
#pragma unroll
      for (u32 i = 0; i < Shape::kTokens; ++i) {
        const u32 value = max_across<16>(found[i]);
        if (threadIdx.x % 32 == 0) atomicMax(largest + i, value);
      }
    }
    __syncthreads();
    raises = true;
    if constexpr (Shape::kSliced) {
      for (u32 i = 0; i < Shape::kTokens; ++i) raises = raises && can_be_raised(largest[i]);
    }
  }

  // Those of a step into registers, and from there into one of two images.
  FP4KIT_DEVICE void load_step(u32 step, uint4 (&held)[kHeld]) const {
#pragma unroll
    for (u32 i = 0; i < kHeld; ++i) {
      const PiecePlace at =
          piece_place(i * kThreadCount + threadIdx.x, Shape::kTokens / 2, Shape::kSlots);
      if (i * kThreadCount + threadIdx.x >= kStepPieces) continue;
      held[i] =
          load_piece(activations, at.token, step * Shape::kStepChunks * kPreparedDepth + at.k);
    }
  }
  FP4KIT_DEVICE void store_step(u32 buffer, const uint4 (&held)[kHeld]) const {
#pragma unroll
    for (u32 i = 0; i < kHeld; ++i) {
      const PiecePlace at =
          piece_place(i * kThreadCount + threadIdx.x, Shape::kTokens / 2, Shape::kSlots);
      if (i * kThreadCount + threadIdx.x >= kStepPieces) continue;
      const uint4 piece = arrange_piece<kForm>(held[i], activations.high_first);
      image.at((buffer * kStepPlaces + at.place) * 16).store_vec(piece);
    }
  }

  // ---- Results ----

  FP4KIT_DEVICE static float unscaled(float sum) {
    // Sliced: 2^96 of the activations, 2^-126 of the codes, 2^30 of E8M0 scales; else 2^119 of the
    // scales.
    constexpr u32 kUp = !Shape::kSliced ? 7 : Format::kIsMx ? 0 : 30;
    return mul_rn(sum, as_float((static_cast<u32>(kF32Bias) + kUp) << kF32MantissaBits));
  }

  // A tile's results, one by one.
  FP4KIT_DEVICE void multiply_slowly(u32 tile) const {
    for (u32 i = threadIdx.x; i < activations.tokens * Shape::kRows; i += kThreadCount) {
      const u32 token = i / Shape::kRows;
      const i64 row = static_cast<i64>(tile) * Shape::kRows + i % Shape::kRows;
      if (row >= rows) continue;
      float sum = 0.0f;
#pragma unroll 1
      for (u32 k = 0; k < activations.depth; ++k) {
        const u32 bits = activations.x[static_cast<i64>(token) * activations.depth + k];
        const float value = weight_value<Format, kForm>(weights, activations.high_first, row, k);
        sum = fma_rn(as_float(bits << 16), value, sum);
      }
      epilogue.store(token, row, sum);
    }
  }

  // Adds the sums of the slices of a tile and stores results.
  FP4KIT_DEVICE void finish_sums(u32 tile, const float* memory) const {
    for (u32 i = threadIdx.x; i < activations.tokens * Shape::kRows; i += kThreadCount) {
      const u32 token = i / Shape::kRows, inside = i % Shape::kRows;
      const i64 row = static_cast<i64>(tile) * Shape::kRows + inside;
      float sum = 0.0f;
#pragma unroll
      for (u32 slice = 0; slice < Shape::kSlices; ++slice) {
        sum = add_rn(sum, memory[(slice * Shape::kTokens + token) * Shape::kSumRow + inside]);
      }
      if (row < rows) epilogue.store(token, row, unscaled(sum));
    }
  }

  // Hands a sum of a warp on: to the others, or to its result.
  FP4KIT_DEVICE void emit_pair(
      u32 tile, u32 token, u32 inside, u32 slice, float first, float second, float* memory) const {
    if (Shape::kTokens < kMmaN && token >= Shape::kTokens) return;
    if constexpr (Shape::kSlices > 1) {
      float* place = memory + (slice * Shape::kTokens + token) * Shape::kSumRow + inside;
      *reinterpret_cast<uint2*>(place) = make_uint2(as_bits(first), as_bits(second));
    } else {
      const i64 row = static_cast<i64>(tile) * Shape::kRows + inside;
      if (token >= activations.tokens) return;
      if (row < rows) epilogue.store(token, row, unscaled(first));
      if (row + 1 < rows) epilogue.store(token, row + 1, unscaled(second));
    }
  }

  template <int kColumns, int kSums>
  FP4KIT_DEVICE void emit(
      u32 tile, float (&sums)[Shape::kTiles][kColumns][kSums], float* memory) const {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u32 group = warp / Shape::kSlices, slice = warp % Shape::kSlices;
#pragma unroll
    for (u32 i = 0; i < Shape::kTiles; ++i) {
      const u32 inside = group * Shape::kWarpRows + i * kPreparedRows + 2 * g;
#pragma unroll
      for (u32 m = 0; m < kColumns; ++m) {
        float (&sum)[kSums] = sums[i][m];
        if constexpr (Shape::kSliced) {
          constexpr u32 kMost = Shape::kTokens == 2 ? 1 : 2;
#pragma unroll
          for (u32 distance = 1; distance <= kMost; distance *= 2) {
            sum[0] = add_rn(sum[0], __shfl_xor_sync(0xFFFFFFFFu, sum[0], distance));
            sum[1] = add_rn(sum[1], __shfl_xor_sync(0xFFFFFFFFu, sum[1], distance));
          }
          if (t % (2 * kMost) == 0) {
            emit_pair(tile, t / 2, inside, slice, sum[0], sum[1], memory);
          }
        } else {
#pragma unroll
          for (u32 h = 0; h < 2; ++h) {
            emit_pair(tile, kMmaN * m + 2 * t + h, inside, slice, sum[h], sum[2 + h], memory);
          }
        }
#pragma unroll
        for (float& each : sum) each = 0.0f;
      }
    }
  }

  // ---- All of it ----

  // Where a warp is in its copies, kStages - 1 steps ahead of its products.
  struct Ahead {
    u32 tile, step, stage;
  };

  FP4KIT_DEVICE void start_tile(WarpRing& ring, const Ahead& ahead) const {
    const u32 warp = threadIdx.x / 32;
    const u32 row_tile = (ahead.tile * Shape::kGroups + warp / Shape::kSlices) * Shape::kTiles;
    ring.start(weights, row_tile, warp % Shape::kSlices * Shape::kChunks);
  }

  FP4KIT_DEVICE void copy_next(WarpRing& ring, Ahead& ahead, u32 first_chunk, bool is_first) const {
    if (ahead.tile < tiles) {
      ring.copy(weights, ahead.stage, ahead.step * Shape::kStepChunks + first_chunk, is_first);
      if (++ahead.step == steps) {
        ahead.step = 0;
        ahead.tile += gridDim.x;
        start_tile(ring, ahead);
      } else {
        ring.advance(weights);
      }
      ahead.stage = ahead.stage + 1 == Shape::kStages ? 0 : ahead.stage + 1;
    }
    ring.commit();
  }

  FP4KIT_DEVICE void run(WarpRing& ring) {
    const u32 lane = threadIdx.x % 32;
    const u32 first_chunk = kept(threadIdx.x / 32 % Shape::kSlices * Shape::kChunks);
    const bool is_first = kept(lane) == 0;
    Ahead ahead{blockIdx.x, 0, 0};
    start_tile(ring, ahead);
#pragma unroll
    for (u32 i = 0; i + 1 < Shape::kStages; ++i) copy_next(ring, ahead, first_chunk, is_first);

    __shared__ u32 largest[2];
    raises = true;
    if constexpr (!Shape::kStaged) {
      if (threadIdx.x < 2) largest[threadIdx.x] = 0;
      if constexpr (Shape::kSliced) __syncthreads();
      stage_all(largest);
    } else {
      uint4 held[kHeld];
      load_step(0, held);
      store_step(0, held);
    }

    // What a lane takes of a word's activations.
    u32 slot = lane % Shape::kSlots;
    if constexpr (Shape::kSliced) slot = (Shape::kTokens == 2 ? lane / 16 * 4 : 0) + lane % 4;
    constexpr u32 kChunkImage = 4 * Shape::kSlots * 16;
    const SharedPlace lane_image =
        kept(image.at(slot * 16 + (Shape::kStaged ? first_chunk * kChunkImage : 0)));
    View view(ring.memory, Shape::kSliced);

    float sums[Shape::kTiles][Shape::kColumns][Shape::kSums] = {};
    [[maybe_unused]] uint4 x[2] = {};  // see multiply_chunk_sliced
    u32 stage = 0, phase = 0, odd = 0, buffer = 0, parity = 0;
    for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      u32 chunk = first_chunk;
      for (u32 step = 0; step < steps; ++step) {
        uint4 held[kHeld];
        [[maybe_unused]] const bool is_last = step + 1 == steps && tile + gridDim.x >= tiles;
        if constexpr (Shape::kStaged) {
          __syncthreads();  // the image of this step is there, that of the one before is free
          if (!is_last) load_step(step + 1 == steps ? 0 : step + 1, held);
        } else if constexpr (WarpRing::kBulk) {
          __syncwarp();  // the stage of the step before is free
        }
        if constexpr (WarpRing::kBulk) {
          copy_next(ring, ahead, first_chunk, is_first);
          ring.wait(stage, phase);
        } else {
          ring.wait(stage, phase);
          copy_next(ring, ahead, first_chunk, is_first);
        }
        const View here(view, stage * WarpRing::kStageBytes);
        const SharedPlace step_image =
            lane_image.at((Shape::kStaged ? buffer * Shape::kStepChunks : chunk) * kChunkImage);
#pragma unroll
        for (u32 c = 0; c < Shape::kChunks; ++c) {
          if (chunk + c >= weights.depth_tiles) break;
          const SharedPlace piece = step_image.at(c * kChunkImage);
          if constexpr (Shape::kSliced) {
            multiply_chunk_sliced<Format, kForm, Shape>(sums, here, c, piece, x, odd);
          } else {
            multiply_chunk<Format, kForm, Shape>(sums, here, c, piece, odd);
          }
        }
        if constexpr (Shape::kStaged) {
          if (!is_last) store_step(buffer ^ 1, held);
          buffer ^= 1;
        }
        chunk += Shape::kStepChunks;
        stage = stage + 1 == Shape::kStages ? 0 : stage + 1;
        phase ^= stage == 0;
      }
      finish_tile(tile, sums, odd, sums_memory + parity * Shape::kSumFloats);
      odd = 0;
      if constexpr (Shape::kSumBuffers == 2) parity ^= 1;
    }
  }

  FP4KIT_DEVICE void finish_tile(u32 tile,
      float (&sums)[Shape::kTiles][Shape::kColumns][Shape::kSums], u32 odd, float* memory) const {
    // Only then may something be rare.
    constexpr bool kAsks = Shape::kSliced || kForm == kFormRows;
    const bool is_slow = kAsks && (!raises || has_odd_scale<Format>(odd));
    if constexpr (Shape::kSlices > 1) {
      emit(tile, sums, memory);
      if (__syncthreads_count(is_slow) != 0) {
        multiply_slowly(tile);
      } else {
        finish_sums(tile, memory);
      }
    } else {
      if (kAsks && __syncthreads_count(is_slow) != 0) {
        multiply_slowly(tile);
        clear(sums);
      } else {
        emit(tile, sums, memory);
      }
    }
  }

  FP4KIT_DEVICE static void clear(float (&sums)[Shape::kTiles][Shape::kColumns][Shape::kSums]) {
#pragma unroll
    for (auto& tile : sums) {
#pragma unroll
      for (auto& column : tile) {
#pragma unroll
        for (float& each : column) each = 0.0f;
      }
    }
  }
};

#endif  // FP4KIT_HAS_MMA

// x (tokens, depth) times the transpose of weights (rows, depth), into out (tokens, rows).
// level_*: values, rows of each, direction; types as in epilogue.cuh; factors as binary32 bits.
template <class Format, class Form, class Shape>
__global__ void __launch_bounds__(Shape::kSmallThreads)
    multiply_small_kernel(const u8* codes, const u8* scales, const u16* x, void* out,
        const float* level_a, const float* level_b, const void* bias, const void* c, i64 tokens,
        i64 rows, i64 depth, i64 row_bytes, i64 stored_cols, i64 layout, i64 high_first,
        i64 rows_per_level_a, i64 direction_a, i64 rows_per_level_b, i64 direction_b, i64 constant,
        i64 alpha, i64 out_type, i64 bias_type, i64 c_type) {
#ifdef FP4KIT_HAS_MMA
  constexpr int kForm = Form::kValue;
  using Product = SmallProduct<Format, kForm, Shape>;
  using WarpRing = typename Product::WarpRing;
  extern __shared__ uint4 memory[];
  const u32 warp = threadIdx.x / 32;
  const u32 depth_tiles = static_cast<u32>((depth + kPreparedDepth - 1) / kPreparedDepth);
  const u32 row_tiles = static_cast<u32>((rows + kPreparedRows - 1) / kPreparedRows);
  const u32 tiles = static_cast<u32>((rows + Shape::kRows - 1) / Shape::kRows);
  const u32 steps = (depth_tiles + Shape::kStepChunks - 1) / Shape::kStepChunks;
  u8* rings = reinterpret_cast<u8*>(memory);
  float* sums = reinterpret_cast<float*>(rings + Shape::kWarps * WarpRing::kBytes);
  const SharedPlace image = shared_place(sums + Shape::kSumBuffers * Shape::kSumFloats);
  const bool swaps = high_first != 0;
  const u32 scale_stride = ScalePlaces(static_cast<int>(layout), kTileCols).tile_bytes;
  Product product{{codes, scales, row_bytes, stored_cols, scale_stride, static_cast<int>(layout),
                      depth_tiles, row_tiles},
      {x, static_cast<u32>(tokens), static_cast<u32>(depth), swaps},
      {out, bias, c, {level_a, rows_per_level_a, static_cast<int>(direction_a)},
          {level_b, rows_per_level_b, static_cast<int>(direction_b)},
          as_float(static_cast<u32>(constant)), as_float(static_cast<u32>(alpha)),
          static_cast<int>(out_type), static_cast<int>(bias_type), static_cast<int>(c_type), rows},
      rows, tiles, steps, image, sums, true};
  const SharedPlace ring_memory = kept(shared_place(rings + warp * WarpRing::kBytes));
  WarpRing ring{ring_memory, ring_memory, LaneTarget<typename WarpRing::Stage, kForm>(ring_memory),
      read_once_policy(), {}};
#ifdef FP4KIT_HAS_BULK_COPIES
  if constexpr (WarpRing::kBulk) {
    __shared__ u64 barriers[Shape::kWarps * Shape::kStages];
    ring.barriers = kept(shared_place(barriers + warp * Shape::kStages));
    const u32 lane = threadIdx.x % 32;
    if (lane < Shape::kStages) init_barrier(ring.barriers.at(lane * kBarrierBytes));
    fence_barriers();
    __syncwarp();
  }
#endif
  product.run(ring);
#endif
}

}  // namespace fp4kit
