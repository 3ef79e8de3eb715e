// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Products of a few rows of bfloat16 with FP4 weights, which are read once: reference.matmul but
// for the order of the sums, which is the same in every run.
//
// 1. Weights come through a ring of stages by asynchronous copies.
// 2. Activations lie in shared memory in the order of the fragments (activations.cuh): all of them
//    from the first tile of rows on (resident_product.cuh; filled_product.cuh: warps of their own
//    fill one ring), or those of a step in its stage, by warps of their own, from where they lie or
//    from an image in memory that arrange_tokens_kernel makes (staged_product.cuh).
// 3. A warp decodes its weights in registers and multiplies them as the A operand of mma.sync
//    m16n8k16 (weights.cuh): tokens are columns, so that few tokens waste nothing.
// 4. Sums of the warps that share rows are added in shared memory, in their order; epilogue.cuh.
//
// Rare values take a slow way that computes each result of a tile by itself: scales that are
// negative, NaN or very large where nobody has looked at them before (kFormRows), and activations
// beyond what the sliced form can scale.
//
// Launch: persistent thread blocks of Shape::kSmallThreads + Shape::kFillers threads; a block takes
// tiles of 16 `span` rows, Shape::kRows at most. Shared memory: the rings, the sums of the warps,
// the image of the activations.
#include "matmul/filled_product.cuh"
#include "matmul/members.cuh"
#include "matmul/resident_product.cuh"
#include "matmul/shape.cuh"
#include "matmul/staged_product.cuh"

namespace fp4kit {

// The image of activations x (columns / kParts, depth) for StagedProduct, where it needs one.
// Launch: 256 threads, each takes eight elements of a column.
template <class Form, class Parts>
__global__ void arrange_tokens_kernel(
    const void* x, u8* image, i64 columns, i64 depth, i64 high_first) {
#ifdef FP4KIT_HAS_MMA
  const ActivationSource<Parts::kValue> source{
      x, static_cast<u32>(columns), static_cast<u32>(depth), high_first != 0};
  const i64 piece = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x, line = piece / 16;
  const u32 chunk = static_cast<u32>(line / columns), column = static_cast<u32>(line % columns);
  if (chunk * static_cast<i64>(kPreparedDepth) >= depth) return;
  arrange_into<Form::kValue>(image, source, column, chunk, static_cast<u32>(piece % 16));
#endif
}

// x (tokens, depth), `columns` its tokens times Shape::kParts, times the transpose of weights
// (rows, depth), into out (tokens, rows). level_*: values, rows of each, direction; types as in
// epilogue.cuh; factors as binary32 bits. members: a table of several weights, whose tokens begin
// at `offsets` (members.cuh), or nothing. arranged: the image of x, if it comes step by step and is
// not such that it needs none.
template <class Format, class Form, class Shape>
__global__ void __launch_bounds__(Shape::kSmallThreads + Shape::kFillers, 1)
    multiply_small_kernel(const u8* codes, const u8* scales, const void* x, void* out,
        const float* level_a, const float* level_b, const void* bias, const void* c,
        const SmallMember* members, const void* offsets, const u8* arranged, i64 columns, i64 rows,
        i64 depth, i64 row_bytes, i64 stored_cols, i64 span, i64 layout, i64 high_first,
        i64 rows_per_level_a, i64 direction_a, i64 rows_per_level_b, i64 direction_b, i64 divisor,
        i64 alpha, i64 out_type, i64 bias_type, i64 c_type, i64 member_count, i64 wide_offsets) {
#ifdef FP4KIT_HAS_MMA
  constexpr int kForm = Form::kValue;
  using WarpRing = Ring<Format, kForm, Shape>;
  extern __shared__ uint4 memory[];
  const u32 depth_tiles = static_cast<u32>((depth + kPreparedDepth - 1) / kPreparedDepth);
  const u32 row_tiles = static_cast<u32>((rows + kPreparedRows - 1) / kPreparedRows);
  const u32 row_blocks = (row_tiles + static_cast<u32>(span) - 1) / static_cast<u32>(span);
  const u32 tiles = row_blocks * static_cast<u32>(member_count);
  const u32 steps = (depth_tiles + Shape::kStepChunks - 1) / Shape::kStepChunks;
  // Barriers, the magnitudes of two tokens, then the rings.
  u64* barriers = reinterpret_cast<u64*>(memory);
  u32* largest = reinterpret_cast<u32*>(barriers + Shape::kWarps * Shape::kStages);
  u8* rings = reinterpret_cast<u8*>(memory) + Shape::kControlBytes;
  float* sums = reinterpret_cast<float*>(rings + Shape::kWarps * WarpRing::kBytes);
  const SharedPlace image = shared_place(sums + Shape::kSumBuffers * Shape::kSumFloats);
  const bool swaps = high_first != 0;
  const u32 scale_stride = ScalePlaces(static_cast<int>(layout), kTileCols).tile_bytes;
  const SmallProduct<Format, kForm, Shape> given{
      {codes, scales, row_bytes, stored_cols, scale_stride, static_cast<int>(layout), depth_tiles,
          row_tiles},
      {x, static_cast<u32>(columns), static_cast<u32>(depth), swaps},
      {out, bias, c, {level_a, static_cast<u32>(rows_per_level_a), static_cast<int>(direction_a)},
          {level_b, static_cast<u32>(rows_per_level_b), static_cast<int>(direction_b)},
          as_float(static_cast<u32>(divisor)), as_float(static_cast<u32>(alpha)),
          static_cast<int>(out_type), static_cast<int>(bias_type), static_cast<int>(c_type), rows},
      {members, offsets, static_cast<u32>(member_count), wide_offsets != 0}, static_cast<u32>(rows),
      steps, static_cast<u32>(span), row_blocks, tiles, image, sums, largest, true};
  if constexpr (Shape::kStaged) {
    StagedProduct<Format, kForm, Shape>{
        given, arranged, {shared_place(barriers)}, shared_place(rings)}
        .run();
  } else if constexpr (Shape::kFilled) {
    FilledProduct<Format, kForm, Shape>{given, {shared_place(barriers)}, shared_place(rings)}.run();
  } else {
    const u32 warp = threadIdx.x / 32;
    const SharedPlace ring_memory = kept(shared_place(rings + warp * WarpRing::kBytes));
    WarpRing ring{ring_memory, ring_memory,
        LaneTarget<typename WarpRing::Stage, kForm>(ring_memory), read_once_policy(), {}};
#ifdef FP4KIT_HAS_BULK_COPIES
    if constexpr (WarpRing::kBulk) {
      ring.barriers = kept(shared_place(barriers + warp * Shape::kStages));
      const u32 lane = threadIdx.x % 32;
      if (lane < Shape::kStages) init_barrier(ring.barriers.at(lane * kBarrierBytes));
      fence_barriers();
      __syncwarp();
    }
#endif
    ResidentProduct<Format, kForm, Shape>{given}.run(ring);
  }
#endif
}

}  // namespace fp4kit
