// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// second_level: tensor amax to the scale that a recipe keeps, and one kind of it to another,
// without the host ever seeing a value. Must equal scaling.second_level_from_amax and
// scaling.convert_second_level (common/recipes.cuh).
//
// Launch: 256 threads, ceil(count / 256) blocks; value and out may be the same array.
#include "common/recipes.cuh"

namespace fp4kit {

// T is the type of the tensor that was measured: compressed-tensors rounds to it.
template <class T>
__global__ void second_level_kernel(const float* amax, float* out, i64 count, i64 recipe) {
  const i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) out[i] = second_level_from_amax<T>(amax[i], static_cast<int>(recipe));
}

__global__ void convert_second_level_kernel(
    const float* value, float* out, i64 count, i64 source, i64 target) {
  const i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) {
    out[i] = convert_second_level(value[i], static_cast<int>(source), static_cast<int>(target));
  }
}

}  // namespace fp4kit
