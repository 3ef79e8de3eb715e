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
// Launch: 256 threads; the last as many blocks as a device holds at once, at most.
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

// Of so many elements.
template <class Out>
__global__ void __launch_bounds__(kThreads)
    matmul_nan_kernel(typename Out::Bits* __restrict__ out, i64 size) {
  using Bits = typename Out::Bits;
  constexpr bool kPairs = Out::kSize == 2;
  constexpr i64 kEach = 16 / Out::kSize;
  constexpr u32 kMask = kPairs ? 0x7FFF7FFFu : kMagnitudeMask;
  // Added to a magnitude that is more than infinity, it reaches the bit above.
  constexpr u32 kLack = kPairs ? (0x7FFFu - Out::kInf) * 0x10001u : kMagnitudeMask - kInfBits;
  const auto mend = [](u32 bits) {
    const u32 magnitude = bits & (kPairs ? 0x7FFFu : kMagnitudeMask);
    return magnitude > Out::kInf ? to_output_bits<Out>(as_float(kQuietNanBits)) : bits;
  };
  const i64 thread = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
  const i64 threads = static_cast<i64>(gridDim.x) * kThreads;
  const i64 before = static_cast<i64>(-reinterpret_cast<u64>(out) % 16) / Out::kSize;
  const i64 head = before < size ? before : size;
  const i64 pieces = (size - head) / kEach;
  auto* piece = reinterpret_cast<uint4*>(out + head);
#pragma unroll 4
  for (i64 i = thread; i < pieces; i += threads) {
    u32 word[4], found = 0;
    unpack_vec(piece[i], word);
#pragma unroll
    for (int j = 0; j < 4; ++j) found |= (word[j] & kMask) + kLack;
    if ((found & ~kMask) == 0) continue;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      word[j] = kPairs ? mend(word[j] & 0xFFFFu) | mend(word[j] >> 16) << 16 : mend(word[j]);
    }
    piece[i] = pack_vec(word);
  }
  // Less than a piece before the first one, and behind the last.
  if (thread >= size - pieces * kEach) return;
  Bits& single = out[thread < head ? thread : thread + pieces * kEach];
  single = static_cast<Bits>(mend(single));
}

}  // namespace fp4kit
