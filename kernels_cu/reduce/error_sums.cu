// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// error_sums / quantized_error_sums: the sums behind error statistics. Must agree with
// ReferenceBackend.error_sums and .quantized_error_sums: counts and the maximum exactly, the sums
// up to the order of float64 additions.
//
// Algorithm:
//   1. each thread walks over its groups of 16 elements and keeps every sum in float64
//   2. warp shuffles, then shared memory, give one row of sums per block of threads
//   3. the host adds the rows. The grid has the same number of blocks everywhere and no atomic is
//      used, so the result does not depend on the device or on timing
//
// Memory layout: partials is float64 (gridDim.x, kSums). Counts are float64 too: exact to 2^53.
// Launch: 256 threads, 1024 blocks.
#include "common/scale_layout.cuh"
#include "search/scale_search.cuh"

namespace fp4kit {

// Order of a row of partials (cuda_launch.ERROR_FIELDS); the maximum comes last.
constexpr int kSumX2 = 0, kSumY2 = 1, kSumXy = 2, kSumD2 = 3, kSaturated = 4, kZeroCodes = 5;
constexpr int kUnderflow = 6, kSubnormal = 7, kMaxError = 8, kSums = 9;

// np.maximum: NaN wins.
FP4KIT_DEVICE double max_or_nan(double a, double b) { return b > a || b != b ? b : a; }

struct Sums {
  double value[kSums] = {};

  FP4KIT_DEVICE void add(float original, float result) {
    const double x = widen(original);
    const double y = widen(result);
    const double d = x - y;
    value[kSumX2] += x * x;
    value[kSumY2] += y * y;
    value[kSumXy] += x * y;
    value[kSumD2] += d * d;
    value[kMaxError] = max_or_nan(value[kMaxError], fabs(d));
  }

  FP4KIT_DEVICE void merge(int i, double other) {
    value[i] = i == kMaxError ? max_or_nan(value[i], other) : value[i] + other;
  }

  // One row of partials from the block's threads, always in the same order.
  FP4KIT_DEVICE void store(double* __restrict__ partials) {
    __shared__ double warps[kThreads / 32][kSums];
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        merge(i, __shfl_down_sync(0xFFFFFFFFu, value[i], step));
      }
      if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32][i] = value[i];
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      for (int warp = 1; warp < kThreads / 32; ++warp) merge(i, warps[warp][i]);
      partials[static_cast<i64>(blockIdx.x) * kSums + i] = value[i];
    }
  }
};

template <class T>
FP4KIT_DEVICE void load_either(bool vector, const typename T::Bits* x, i64 valid, Words<T>& words) {
  if (vector) {
    load_elements<true, T>(x, valid, words);
  } else {
    load_elements<false, T>(x, valid, words);
  }
}

// A vector path needs its pointer on 16 bytes and size a multiple of 16 bytes.
template <class X, class Y>
__global__ void __launch_bounds__(kThreads) error_sums_kernel(
    const typename X::Bits* __restrict__ x, const typename Y::Bits* __restrict__ y, i64 size,
    i64 x_vector, i64 y_vector, double* __restrict__ partials) {
  Sums sums;
  const i64 stride = static_cast<i64>(gridDim.x) * kThreads * kGroupSize;
  i64 start = (static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x) * kGroupSize;
  for (; start < size; start += stride) {
    Words<X> original;
    Words<Y> result;
    load_either<X>(x_vector, x + start, size - start, original);
    load_either<Y>(y_vector, y + start, size - start, result);
#pragma unroll
    for (int i = 0; i < kGroupSize; ++i) sums.add(original.value(i), result.value(i));
  }
  sums.store(partials);
}

template <class Format, int kRecipe>
__device__ DecodeFactors factors_under(u32 byte, float second) {
  return decode_factors<Format, kRecipe, true, F32>(byte, make_level<kRecipe, true>(second));
}

FP4KIT_DEVICE DecodeFactors factors_in(u32 byte, float second, float range) {
  const Level level = make_te_level(second, range);
  return {te_decode_factor(decode_fp8<E4m3>(byte), level, range), 1.0f};
}

// Decode factors with recipe and range known only at run time: one instance per format and type.
template <class Format>
__device__ DecodeFactors factors_of(int recipe, float range, const float* second, u32 byte) {
  if constexpr (Format::kIsMx) {
    return decode_factors<Format, kRecipeNone, false, F32>(byte, Level{});
  } else {
    if (second == nullptr) return {decode_fp8<E4m3>(byte), 1.0f};
    const float value = __ldg(second);
    switch (recipe) {
      case kRecipeTe:
        if (as_bits(range) != as_bits(kSecondLevelRange)) return factors_in(byte, value, range);
        return factors_under<Format, kRecipeTe>(byte, value);
      case kRecipeNvfuser:
        return factors_under<Format, kRecipeNvfuser>(byte, value);
      case kRecipeTorchao:
        return factors_under<Format, kRecipeTorchao>(byte, value);
      case kRecipeModelopt:
        return factors_under<Format, kRecipeModelopt>(byte, value);
      case kRecipeCompressedTensors:
        return factors_under<Format, kRecipeCompressedTensors>(byte, value);
      default:
        return factors_under<Format, kRecipeComfy>(byte, value);
    }
  }
}

// A null `second` means that there is no second level.
template <class Format, class T>
__global__ void __launch_bounds__(kThreads) quantized_error_sums_kernel(
    const typename T::Bits* __restrict__ x, const u8* __restrict__ packed,
    const u8* __restrict__ block_scale, const float* __restrict__ second, i64 rows, i64 cols,
    i64 blocks, i64 stored_cols, i64 magic, i64 shift, i64 scales, i64 rows_per_scale, i64 layout,
    i64 high_first, i64 recipe, i64 range, i64 x_vector, double* __restrict__ partials) {
  using Element = typename Format::Element;
  constexpr int kCodeBytes = 4 * Format::kGroupWords;
  constexpr u32 kCodeMask = (1u << (Element::kBits - 1)) - 1u;
  const FastDivide divide(blocks, magic, shift);
  const i64 groups = rows * blocks * Format::kGroups;
  const i64 stride = static_cast<i64>(gridDim.x) * kThreads;
  const float largest = static_cast<float>(range);
  Sums sums;
  // Whole warps walk together: the groups of a block exchange their maximum.
  for (i64 base = static_cast<i64>(blockIdx.x) * kThreads; base < groups; base += stride) {
    const i64 group = base + threadIdx.x;
    const i64 scale = group / Format::kGroups;
    const i64 row = divide(scale);
    const i64 block = scale - row * blocks;
    const i64 col = block * Format::kBlockSize + group % Format::kGroups * kGroupSize;
    const i64 valid = row < rows ? cols - col : 0;
    Words<T> original;
    load_either<T>(x_vector, x + row * cols + col, valid, original);
    u32 raw;
    const float amax = block_amax<Format, T>(original, raw);
    if (row >= rows) continue;

    const u32 byte = block_scale[scale_offset(static_cast<int>(layout), row, block, stored_cols)];
    if (group % Format::kGroups == 0) {
      const bool not_zero = !is_zero(amax);
      if constexpr (Format::kIsMx) {
        sums.value[kSubnormal] += byte == 0 && not_zero;
      } else {
        sums.value[kUnderflow] += byte == 0 && not_zero;
        sums.value[kSubnormal] += byte > 0 && byte < (1u << E4m3::kMantissaBits);
      }
    }
    u32 codes[Format::kGroupWords];
#pragma unroll
    for (int i = 0; i < Format::kGroupWords; ++i) {
      codes[i] = 0;
      for (int k = 0; k < 4; ++k) {
        codes[i] |= static_cast<u32>(packed[group * kCodeBytes + 4 * i + k]) << (8 * k);
      }
    }
    order_nibbles<Format>(codes, high_first != 0);
    const float* value_of = second;
    if (second != nullptr && scales != 1) value_of += row / rows_per_scale;
    const DecodeFactors factors =
        factors_of<Format>(static_cast<int>(recipe), largest, value_of, byte);
    // A last factor of 1 changes nothing, nor a zero's sign: one recipe's decoding serves all.
    float values[kGroupSize];
    decode_group<Format, Format::kIsMx ? kRecipeNone : kRecipeNvfuser, !Format::kIsMx>(
        codes, factors, values);
#pragma unroll
    for (int i = 0; i < kGroupSize; ++i) {
      if (i >= valid) continue;
      sums.add(original.value(i), values[i]);
      constexpr int kPerWord = 32 / Element::kBits;
      const u32 magnitude = (codes[i / kPerWord] >> (i % kPerWord * Element::kBits)) & kCodeMask;
      sums.value[kSaturated] += magnitude == Element::kMaxCode;
      sums.value[kZeroCodes] += magnitude == 0;
    }
  }
  sums.store(partials);
}

}  // namespace fp4kit
