// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Products of some ten to some hundred rows of bfloat16 with FP4 weights, by the products of
// warpgroups that sm_90a has: reference.matmul but for the order of the sums, which is the same in
// every run.
//
// 1. arrange_columns_kernel puts activations in the order of warpgroup_mma.cuh, in memory: all
//    thread blocks read all of them. The product begins before that has ended, with its weights.
// 2. Some warps fill a ring of stages by asynchronous copies. Barriers in shared memory say that a
//    stage is full or free.
// 3. The others decode weights in registers, as the A operand: activations need no
//    registers, and are read from shared memory once for 64 rows.
// 4. Sums lie in registers. Where rows and columns are too few for all multiprocessors, thread
//    blocks take pieces of the depth: each leaves its sums in memory, and the last one to do so
//    adds all of them, in their order; epilogue.cuh.
//
// Scales that are negative, NaN or very large where nobody has looked at them before (kFormRows)
// take a slow way that computes each result by itself.
//
// Launch: 32 Shape::kWarps + 128 threads; a thread block takes `span` tiles of 16 rows and
// Shape::kRoom columns, the next one the next columns. Shared memory: barriers, and the stages or
// the sums.
#include "matmul/warpgroup_product.cuh"

namespace fp4kit {

// The image of activations x (columns / kParts, depth) for blocks of kColumns columns: for each of
// them and 128 of the depth, 16 steps of k of warpgroup_mma.cuh. Launch: 256 threads, each takes
// the 32 elements that a lane multiplies of 128.
// `arrived`: so many counters of the product that follows, set to 0.
template <class Form, class Columns, class Parts>
__global__ void arrange_columns_kernel(const void* x, u8* image, u32* arrived, i64 columns,
    i64 depth, i64 depth_tiles, i64 room, i64 high_first, i64 counters) {
#ifdef FP4KIT_HAS_WARPGROUP_MMA
  constexpr u32 kColumns = Columns::kValue, kParts = Parts::kValue;
  using Places = ProductColumns<kColumns>;
  const ActivationSource<kParts> source{
      x, static_cast<u32>(columns), static_cast<u32>(depth), high_first != 0};
  const i64 thread = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
  let_next_kernel_begin();
  if (thread < counters) arrived[thread] = 0;
  const u32 t = thread % 4, inside = thread / 4 % kColumns;
  const i64 number = thread / 4 / kColumns;  // of a block's pieces of 128
  const u32 block = static_cast<u32>(number / depth_tiles);
  const u32 chunk = static_cast<u32>(number % depth_tiles);
  const i64 column = block * room + inside;
  if (block * room >= columns) return;
  u8* target = image + number * Places::kBytes + t * 4;
#pragma unroll
  for (u32 w = 0; w < 4; ++w) {
    const u32 k = chunk * kPreparedDepth + 32 * t + 8 * w, own = static_cast<u32>(column);
    uint4 piece = make_uint4(0, 0, 0, 0);
    if (inside < room && column < columns && k < depth) {
      piece = load_piece<kParts>(source.place(own, k), own);
    }
    const uint4 whole = finish_piece<kParts>(own, piece);
    const uint4 pairs = arrange_piece<Form::kValue>(whole, source.high_first);
    const u32 words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      *reinterpret_cast<u32*>(target + Places::offset(inside, 2 * w + i / 2, i % 2)) = words[i];
    }
  }
#endif
}

// The same parameters as multiply_small_kernel's (small.cu) but for several weights.
template <class Format, class Form, class Shape>
__global__ void __launch_bounds__(32 * Shape::kWarps + 128, 1)
    multiply_warpgroup_kernel(const u8* codes, const u8* scales, const void* x, void* out,
        const float* level_a, const float* level_b, const void* bias, const void* c,
        const u8* image, float* partial, u32* arrived, i64 columns, i64 rows, i64 depth,
        i64 row_bytes, i64 stored_cols, i64 span, i64 splits, i64 layout, i64 high_first,
        i64 rows_per_level_a, i64 direction_a, i64 rows_per_level_b, i64 direction_b, i64 divisor,
        i64 alpha, i64 out_type, i64 bias_type, i64 c_type) {
#ifdef FP4KIT_HAS_WARPGROUP_MMA
  extern __shared__ __align__(1024) uint4 memory[];
  u8* stages = reinterpret_cast<u8*>(memory) + Shape::kControlBytes;
  const u32 depth_tiles = static_cast<u32>((depth + kPreparedDepth - 1) / kPreparedDepth);
  const u32 row_tiles = static_cast<u32>((rows + kPreparedRows - 1) / kPreparedRows);
  // Those of the same rows beside each other: their weights are in the L2 cache.
  const u32 column_blocks = (static_cast<u32>(columns) + Shape::kRoom - 1) / Shape::kRoom;
  const u32 number = blockIdx.x / column_blocks, count = static_cast<u32>(splits);
  const u32 scale_stride = ScalePlaces(static_cast<int>(layout), kTileCols).tile_bytes;
  const WarpgroupResults<Format, Form::kValue, Shape> results{
      {codes, scales, row_bytes, stored_cols, scale_stride, static_cast<int>(layout), depth_tiles,
          row_tiles},
      {x, static_cast<u32>(columns), static_cast<u32>(depth), high_first != 0},
      {out, bias, c, {level_a, static_cast<u32>(rows_per_level_a), static_cast<int>(direction_a)},
          {level_b, static_cast<u32>(rows_per_level_b), static_cast<int>(direction_b)},
          as_float(static_cast<u32>(divisor)), as_float(static_cast<u32>(alpha)),
          static_cast<int>(out_type), static_cast<int>(bias_type), static_cast<int>(c_type), rows},
      static_cast<u32>(rows), static_cast<u32>(span), number / count, blockIdx.x % column_blocks,
      column_blocks, number % count, count, partial, arrived,
      reinterpret_cast<u32*>(memory) + Shape::kControlBytes / 8, reinterpret_cast<float*>(stages)};
  const WarpgroupProduct<Format, Form::kValue, Shape> product{
      results, image, {shared_place(memory)}, shared_place(stages)};
  product.run();
#endif
}

}  // namespace fp4kit
