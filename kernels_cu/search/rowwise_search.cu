// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// quantize rows with a searched scale, the fast path: blocks of 16, whole and aligned, one second
// level, fewer than 2^31 blocks. The bytes are those of tiles/quantize_tiles.cu, which serves
// everything else.
//
// A search is bound by the instructions that are issued: blocks are one flat sequence, as in
// quantize/rowwise.cu, and go from memory to registers. Shared memory holds what each of the 128
// scale bytes comes to, and a table for each thread.
//
// Launch: 256 threads; some times as many blocks as the device holds at once. Scales past the last
// row or block are not written here.
#include "quantize/rowwise.cuh"
#include "search/tables.cuh"

namespace fp4kit {

template <int kSearch>
struct SearchShared {
  Candidate candidate[kScaleBytes];
  float decoded[table_entries<kSearch, true>() * kThreads];
};

template <class T, int kSearch, int kError, int kLayout>
__global__ void __launch_bounds__(kThreads, FP4KIT_TILE_BLOCKS) quantize_rowwise_search_kernel(
    const typename T::Bits* __restrict__ x, const float* __restrict__ second,
    u8* __restrict__ packed, u8* __restrict__ block_scale, i64 groups, i64 blocks, i64 stored_cols,
    i64 magic, i64 shift, i64 high_first, i64 largest) {
  __shared__ SearchShared<kSearch> shared;
  const float range = static_cast<float>(largest);
  const Level level = make_te_level(__ldg(second), range);
  if (threadIdx.x < kScaleBytes) {
    shared.candidate[threadIdx.x] = make_candidate<kSearch>(threadIdx.x, level, range, kError);
  }
  __syncthreads();

  const SharedTable table(shared.decoded);
  const SharedCandidates candidate_of(shared.candidate);
  const RowShape shape{static_cast<u32>(blocks), static_cast<u32>(magic), static_cast<u32>(shift),
      static_cast<u32>(stored_cols)};
  const u32 count = static_cast<u32>(groups);
  const u32 stride = gridDim.x * kThreads;
#pragma unroll 1
  for (u32 group = blockIdx.x * kThreads + threadIdx.x; group < count; group += stride) {
    Words<T> elements;
    load_elements<true, T>(x + static_cast<u64>(group) * kGroupSize, kGroupSize, elements);
    const u32 raw = maximum_of<T>(elements.word).result();
    const auto amax_of = [&] {
      u32 same;
      return from_input_bits<T>(group_amax_bits<T>(elements, same));
    };
    Found found = search_scale<kSearch, kError>(
        elements, raw, amax_of, level, range, table, candidate_of, AloneSum());
    order_nibbles<Nvfp4>(found.codes, static_cast<u32>(high_first) != 0);
    store_codes<true>(packed + static_cast<u64>(group) * sizeof(found.codes), found.codes);
    block_scale[rowwise_scale_offset<kLayout>(group, shape)] = static_cast<u8>(found.byte);
  }
}

}  // namespace fp4kit
