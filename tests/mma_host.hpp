// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// One product of fragments, to test common/mma.cuh: D (16 x 8) += A (16 x 16) B (16 x 8).
#include "common/mma.cuh"

namespace fp4kit {

template <class T>
__global__ void product_kernel(const u16* a, const u16* b, float* d) {
  const int g = static_cast<int>(threadIdx.x) / 4;
  const int t = static_cast<int>(threadIdx.x) % 4;
  // A by rows; B by columns, so that neighbours in k are neighbours in memory.
  __shared__ uint4 pieces[16 * 2];
  u16* rows = reinterpret_cast<u16*>(pieces);
  for (u32 i = threadIdx.x; i < 256; i += 32) rows[i] = a[i];
  __syncthreads();
  u32 fragment[4];
  const int matrix = static_cast<int>(threadIdx.x) / 8;
  const int row = static_cast<int>(threadIdx.x) % 8 + matrix % 2 * 8;
  load_matrices(fragment, rows + row * 16 + matrix / 2 * 8);
  const auto pair = [&](int k) {
    return b[g * 16 + k] | static_cast<u32>(b[g * 16 + k + 1]) << 16;
  };
  const u32 columns[2] = {pair(2 * t), pair(2 * t + 8)};
  float sums[4];
  for (int i = 0; i < 4; ++i) sums[i] = d[(g + i / 2 * 8) * 8 + 2 * t + i % 2];
  mma_16816<T>(sums, fragment, columns);
  for (int i = 0; i < 4; ++i) d[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = sums[i];
}

}  // namespace fp4kit
