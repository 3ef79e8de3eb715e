// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// What follows the sums of products, where another kernel or cuBLAS made them.
//
// matmul_finish_kernel: adds the pieces of the depth in order and finishes each element
// (matmul/product.cuh). An element a thread, 256 of a row a thread block. The sums may be those of
// part_rows x part_cols elements from (first_row, first_col) on; part_rows = 0: of the whole
// product. matmul_factor_kernel: the one factor of a product without vectors of levels, and a 0:
// alpha and beta of a GEMM, in memory as the levels are; behind them, whether its result may hold
// NaN as far as that is known then. matmul_doubt_kernel: whether it may, by what is multiplied.
// matmul_nan_kernel: makes the NaN of a GEMM's result ours, if there may be any.
//
// Launch: 256 threads; the last two as many blocks as a device holds at once, at most.
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
__global__ void __launch_bounds__(kThreads)
    matmul_factor_kernel(const __grid_constant__ MatmulProducts<kMost> given, i64 in_doubt,
        float* __restrict__ out, u32* __restrict__ doubt) {
  if (threadIdx.x != 0) return;
  out[0] = product_factor(given.products[0], 0, 0);
  out[1] = 0.0f;
  *doubt = in_doubt != 0 || !is_finite(out[0]);
}

// Calls visit(word) with all 16-byte pieces of a stretch of memory, and single(byte address) with
// what is before and behind them, each by some thread of the grid.
template <class Visit, class Single>
FP4KIT_DEVICE void for_pieces(const u8* begin, i64 size, const Visit& visit, const Single& single) {
  const i64 thread = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
  const i64 threads = static_cast<i64>(gridDim.x) * kThreads;
  const i64 before = static_cast<i64>(-reinterpret_cast<u64>(begin) % 16);
  const i64 head = before < size ? before : size;
  const i64 pieces = (size - head) / 16;
#pragma unroll 4
  for (i64 i = thread; i < pieces; i += threads) visit(begin + head + i * 16);
  const i64 rest = size - pieces * 16;  // less than 32 bytes
  if (thread < rest) single(begin + (thread < head ? thread : thread + pieces * 16));
}

// A stretch of memory, and which of its items are large: of four items in a word (two, one) those
// whose magnitude, at the word's `shift`, is at least the limit. Adding what that lacks to a whole
// reaches the bit above a magnitude.
struct Stretch {
  const u8* begin;
  i64 size;
  u32 shift, mask, lack;

  FP4KIT_DEVICE u32 large(u32 word) const { return ((word >> shift & mask) + lack) & ~mask; }

  FP4KIT_DEVICE bool any_large() const {
    u32 found = 0;
    for_pieces(
        begin, size,
        [&](const u8* at) {
          u32 word[4];
          unpack_vec(__ldg(reinterpret_cast<const uint4*>(at)), word);
#pragma unroll
          for (int i = 0; i < 4; ++i) found |= large(word[i]);
        },
        [&](const u8* at) {
          // The others of the item are 0: a limit is in its highest byte.
          found |= large(static_cast<u32>(__ldg(at)) << (reinterpret_cast<u64>(at) % 4 * 8));
        });
    return found != 0;
  }
};

__global__ void __launch_bounds__(kThreads)
    matmul_doubt_kernel(const u8* numbers, const u8* scales, u32* __restrict__ doubt, i64 size,
        i64 mask, i64 lack, i64 scales_size, i64 shift, i64 scales_mask, i64 scales_lack) {
  const Stretch a{numbers, size, 0, static_cast<u32>(mask), static_cast<u32>(lack)};
  const Stretch b{scales, scales_size, static_cast<u32>(shift), static_cast<u32>(scales_mask),
      static_cast<u32>(scales_lack)};
  const bool first = a.any_large(), second = b.any_large();
  if (first || second) *doubt = 1;
}

// Of so many bytes.
template <class Out>
__global__ void __launch_bounds__(kThreads)
    matmul_nan_kernel(u8* out, const u32* __restrict__ doubt, i64 size) {
  using Bits = typename Out::Bits;
  constexpr bool kPairs = Out::kSize == 2;
  constexpr u32 kMask = kPairs ? 0x7FFF7FFFu : kMagnitudeMask;
  constexpr u32 kLack = kPairs ? (0x7FFFu - Out::kInf) * 0x10001u : kMagnitudeMask - kInfBits;
  if (*doubt == 0) return;
  const auto mend = [](u32 bits) {
    const u32 magnitude = bits & (kPairs ? 0x7FFFu : kMagnitudeMask);
    return magnitude > Out::kInf ? to_output_bits<Out>(as_float(kQuietNanBits)) : bits;
  };
  for_pieces(
      out, size,
      [&](const u8* at) {
        auto* place = reinterpret_cast<uint4*>(out + (at - out));
        u32 word[4], found = 0;
        unpack_vec(*place, word);
#pragma unroll
        for (int i = 0; i < 4; ++i) found |= (word[i] & kMask) + kLack;
        if ((found & ~kMask) == 0) return;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          word[i] = kPairs ? mend(word[i] & 0xFFFFu) | mend(word[i] >> 16) << 16 : mend(word[i]);
        }
        *place = pack_vec(word);
      },
      [&](const u8* at) {
        if (reinterpret_cast<u64>(at) % Out::kSize != 0) return;
        auto* place = reinterpret_cast<Bits*>(out + (at - out));
        *place = static_cast<Bits>(mend(*place));
      });
}

}  // namespace fp4kit
