// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Linear scales of squares: copies those of each sixteenth vector to the fifteen after it
// (tiles/full_tile_scales.cuh).
//
// Launch: kThreads threads, one for each 8 bytes of a sixteenth vector of the scales of rows, then
// of columns. Vectors are multiples of 8 bytes, and of sixteen in number.
#include "common/types.cuh"

namespace fp4kit {

constexpr u32 kRepeats = FP4KIT_NVFP4_BLOCK_SIZE;
constexpr i64 kVecBytes = sizeof(uint2);

__global__ void __launch_bounds__(kThreads) repeat_scales_kernel(
    u8* row_scale, u8* col_scale, i64 row_vecs, i64 row_stored, i64 col_pieces, i64 col_stored) {
  i64 piece = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
  const bool columns = piece >= row_vecs;
  if (columns) piece -= row_vecs;
  if (columns && piece >= col_pieces) return;
  const i64 across = (columns ? col_stored : row_stored) / kVecBytes;
  const i64 group = piece / across;
  uint2* to = reinterpret_cast<uint2*>(columns ? col_scale : row_scale) +
              (group * kRepeats * across + (piece - group * across));
  const uint2 scales = *to;
#pragma unroll
  for (u32 i = 1; i < kRepeats; ++i) to[i * across] = scales;
}

}  // namespace fp4kit
