// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// quantize_dequantize: what dequantize(quantize(x)) gives, in one pass and without packed memory.
// Must equal ReferenceBackend.quantize_dequantize.
//
// Algorithm: steps 1 to 4 of quantize.cu, then steps 2 and 3 of dequantize.cu on the codes while
// they are in registers.
//
// Memory layout: x and out are (rows, cols) of one element type, both on 16 bytes with rows of
// whole 16-byte pieces. The launcher runs the two separate kernels for everything else. Launch: 256
// threads, ceil(lanes / 256) blocks, lanes = rows * blocks * block / 16.
#include "lane.cuh"
#include "swizzle.cuh"

namespace fp4kit {

template <class Format, class T, int kRecipe, bool kSecond>
__global__ void __launch_bounds__(kThreads)
    quantize_dequantize_kernel(const typename T::Bits* __restrict__ x,
                               const float* __restrict__ second, typename T::Bits* __restrict__ out,
                               i64 rows, i64 cols, i64 blocks, i64 magic, i64 shift, i64 scales,
                               i64 rows_per_scale, i64 rule) {
  const FastDivide divide{blocks, static_cast<u32>(magic), static_cast<u32>(shift)};
  const i64 lane = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
  const i64 scale = lane / Format::kLanes;
  const i64 row = divide(scale);
  const i64 col =
      (scale - row * blocks) * Format::kBlockSize + lane % Format::kLanes * kLaneElements;
  const i64 valid = row < rows ? cols - col : 0;
  const i64 offset = row * cols + col;

  Words<T> elements;
  load_elements<true, T>(x + offset, valid, elements);
  u32 raw;
  const float amax = block_amax<Format, T>(elements, raw);
  if (valid <= 0) return;

  const Levels<kRecipe, kSecond> levels(second, scales, rows_per_scale);
  const Level level = levels.at(row);
  const u32 byte =
      block_scale_byte<Format, T, kRecipe, kSecond>(amax, level, static_cast<int>(rule));
  u32 codes[Format::kLaneWords];
  encode_lane<Format, T, kRecipe>(elements, raw,
                                  element_factor<Format, kRecipe, kSecond>(byte, level), codes);
  float values[kLaneElements];
  const bool special = decode_lane<Format, kRecipe, kSecond, kLaneElements>(
      codes, decode_factors<Format, kRecipe, kSecond, T>(byte, level), values);
  Words<T> result;
  pack_outputs<T>(values, special, result);
  store_elements<true, T>(out + offset, valid, result);
}

}  // namespace fp4kit
