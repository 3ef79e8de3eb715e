// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// What follows the sums of products, where another kernel or cuBLAS made them.
//
// matmul_finish_kernel: adds the pieces of the depth in order and finishes each element
// (matmul/product.cuh). An element a thread, 256 of a row a thread block. The sums may be those of
// part_rows x part_cols elements from (first_row, first_col) on; part_rows = 0: of the whole
// product. matmul_factor_kernel: the one factor of a product without vectors of levels, and a 0:
// alpha and beta of a GEMM, in memory as the levels are. matmul_nan_kernel: makes the NaN of a
// GEMM's result ours.
//
// Launch: 256 threads.
#include "matmul/product.cuh"

namespace fp4kit {

template <int kMost>
__global__ void __launch_bounds__(kThreads)
    matmul_finish_kernel(const __grid_constant__ MatmulProducts<kMost> given, i64 first_row,
        i64 first_col, i64 part_rows, i64 part_cols) {
  const i64 block = blockIdx.x;
  const int at = given.find(block);
  const MatmulProduct& product = given.products[at];
  const i64 rows = part_rows > 0 ? part_rows : product.rows();
  const i64 cols = part_rows > 0 ? part_cols : product.cols();
  const i64 across = ceil_div(cols, kThreads);
  const i64 row = (block - given.begins[at]) / across;
  const i64 col = (block - given.begins[at] - row * across) * kThreads + threadIdx.x;
  if (col >= cols) return;
  const float* partial = product.partial + row * cols + col;
  float sum = *partial;
  for (i64 split = 1; split < product.splits; ++split) {
    partial += rows * cols;
    sum = add_rn(sum, *partial);
  }
  finish_element(product, first_row + row, first_col + col, sum);
}

template <int kMost>
__global__ void __launch_bounds__(kThreads) matmul_factor_kernel(
    const __grid_constant__ MatmulProducts<kMost> given, float* __restrict__ out) {
  if (threadIdx.x != 0) return;
  out[0] = product_factor(given.products[0], 0, 0);
  out[1] = 0.0f;
}

// Columns 0 .. cols of rows that are `stride` elements long, 256 of a row a thread block.
template <class Out>
__global__ void __launch_bounds__(kThreads)
    matmul_nan_kernel(typename Out::Bits* __restrict__ out, i64 cols, i64 stride) {
  const i64 across = ceil_div(cols, kThreads);
  const i64 row = blockIdx.x / across;
  const i64 col = (blockIdx.x - row * across) * kThreads + threadIdx.x;
  if (col >= cols) return;
  const u32 bits = out[row * stride + col];
  const u32 magnitude = bits & (Out::kSize == 4 ? kMagnitudeMask : 0x7FFFu);
  if (magnitude <= Out::kInf) return;
  out[row * stride + col] =
      static_cast<typename Out::Bits>(to_output_bits<Out>(as_float(kQuietNanBits)));
}

}  // namespace fp4kit
