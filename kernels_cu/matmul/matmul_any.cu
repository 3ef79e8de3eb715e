// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// matmul: D = A B^T of operands of any kind, layout, alignment and shape. Must equal
// fp4kit/reference/matmul.py but for the order of the sums.
//
// matmul_any_kernel: a thread block takes a tile of 64 x 64 of one of the products and one of its
// pieces of the depth (matmul/tile.cuh). With several pieces the sums go to product.partial, and
// matmul_finish_kernel adds them up in order.
// matmul_ragged_kernel: rows of a that a device array cuts into ranges, each with a weight of its
// own. Range m may begin in tiles o(m) / 64 + m and later, where o(m) is its first row: these
// numbers rise, and leave enough tiles for any division of the rows. A thread block counts the
// ranges that may begin before or at its tile; what has no rows left returns.
//
// Launch: 256 threads.
#include "matmul/tile.cuh"

namespace fp4kit {

template <class A, class B, int kMost>
__global__ void __launch_bounds__(kThreads, 2)
    matmul_any_kernel(const __grid_constant__ MatmulProducts<kMost> given) {
  const i64 block = blockIdx.x;
  const int at = given.find(block);
  const MatmulProduct& product = given.products[at];
  if (product.inexact != nullptr && __ldg(product.inexact) == 0) return;
  i64 tile = block - given.begins[at];
  const i64 split = tile % product.splits;
  tile /= product.splits;
  const i64 across = ceil_div(product.cols(), kMatmulCols);
  const i64 down = tile / across;
  const MatmulSpan rows{down * kMatmulRows, product.rows()};
  const MatmulSpan cols{(tile - down * across) * kMatmulCols, product.cols()};
  // Cut between scales of 128 x 128.
  const i64 pieces = ceil_div(product.depth, kMatmulPiece);
  const i64 begin = pieces * split / product.splits * kMatmulPiece;
  const i64 end = split + 1 < product.splits ? pieces * (split + 1) / product.splits * kMatmulPiece
                                             : product.depth;
  __shared__ MatmulTile shared;
  multiply_tile<A, B>(product, rows, cols, begin, end, shared);
  if (product.splits > 1) {
    float* partial = product.partial + split * product.rows() * product.cols();
    for_sums(shared, rows, cols,
        [&](i64 row, i64 col, float sum) { partial[row * product.cols() + col] = sum; });
    return;
  }
  for_sums(shared, rows, cols,
      [&](i64 row, i64 col, float sum) { finish_element(product, row, col, sum); });
}

// A weight of a ragged product.
struct RaggedWeight {
  const void* data;
  const void* scale;
  const float* level;
};

template <int kMost>
struct RaggedWeights {
  MatmulProduct product;  // of all rows; what its weight lacks is below
  const void* offsets;    // of the first range
  i64 wide;               // whether offsets have 64 bits
  i64 count;
  i64 first_bias;  // element of the bias where that of the first range begins
  RaggedWeight weights[kMost];

  // The row where a range begins, inside of the rows of a whatever is in memory.
  FP4KIT_DEVICE i64 offset(i64 range) const {
    const i64 given = wide ? __ldg(static_cast<const i64*>(offsets) + range)
                           : __ldg(static_cast<const int*>(offsets) + range);
    return given < 0 ? 0 : given < product.rows() ? given : product.rows();
  }
};

template <class A, class B, int kMost>
__global__ void __launch_bounds__(kThreads, 2)
    matmul_ragged_kernel(const __grid_constant__ RaggedWeights<kMost> given) {
  const i64 across = ceil_div(given.product.cols(), kMatmulCols);
  const i64 place = blockIdx.x / across;
  const auto begins = [&](i64 range) { return given.offset(range) / kMatmulRows + range; };
  i64 range = -1;
  for (i64 at = 0; at < given.count; at += kThreads) {
    const i64 mine = at + threadIdx.x;
    range += __syncthreads_count(mine < given.count && begins(mine) <= place);
  }
  if (range < 0) return;
  const i64 first = given.offset(range) + (place - begins(range)) * kMatmulRows;
  const MatmulSpan rows{first, given.offset(range + 1)};
  if (!rows.has(0)) return;
  const MatmulSpan cols{(blockIdx.x - place * across) * kMatmulCols, given.product.cols()};
  MatmulProduct product = given.product;
  product.b.data = given.weights[range].data;
  product.b.scale = given.weights[range].scale;
  product.b.level = given.weights[range].level;
  if (product.bias != nullptr) {
    const i64 bytes = product.type(kTypeBias) == kTypeF32 ? 4 : 2;
    const i64 skipped = (given.first_bias + range * product.cols()) * bytes;
    product.bias = static_cast<const u8*>(product.bias) + skipped;
  }
  __shared__ MatmulTile shared;
  multiply_tile<A, B>(product, rows, cols, 0, product.depth, shared);
  for_sums(shared, rows, cols,
      [&](i64 row, i64 col, float sum) { finish_element(product, row, col, sum); });
}

}  // namespace fp4kit
