// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// amax: largest magnitude of each group, NaN ignored; and the census of non-finite values. Must
// equal ReferenceBackend.amax, .scan and .count_nonfinite.
//
// Each thread block takes a chunk: 16 bytes a load, eight loads in flight. NaN patterns are the
// largest integers, so a chunk that holds one shows it, and only such a chunk is read again with
// NaN counted as 0. The chunk's maximum goes to out[group], as float32 bits, by an atomic maximum:
// the order of chunks does not matter.
//
// Launch: 256 threads, one block per chunk. The launcher clears `out` (and `nonfinite`) on the same
// stream just before: the pair can be captured in a graph and replayed.
#include "common/members.cuh"
#include "reduce/amax.cuh"

namespace fp4kit {

// nonfinite[0] becomes 1 if any value is NaN or infinite; a null pointer skips that.
template <class T>
__global__ void __launch_bounds__(kThreads)
    amax_kernel(const typename T::Bits* __restrict__ x, u32* __restrict__ out,
        u32* __restrict__ nonfinite, i64 group_size, i64 chunk_size, i64 group_chunks, i64 chunks) {
  for (i64 chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    const i64 group = chunk / group_chunks;
    const i64 start = (chunk - group * group_chunks) * chunk_size;
    const i64 rest = group_size - start;
    const i64 count = rest < chunk_size ? rest : chunk_size;
    const typename T::Bits* begin = x + group * group_size + start;
    bool finite;
    const u32 maximum = stretch_max<T>(begin, count, finite);
    if (threadIdx.x == 0) {
      if (maximum != 0) atomicMax(out + group, as_bits(from_input_bits<T>(maximum)));
      if (nonfinite != nullptr && !finite) atomicMax(nonfinite, 1u);
    }
  }
}

// counts = {NaN, infinities, size - index of the first of either}, cleared by the launcher; 0 means
// none.
template <class T>
__global__ void __launch_bounds__(kThreads) count_nonfinite_kernel(
    const typename T::Bits* __restrict__ x, i64 size, u64* __restrict__ counts) {
  u64 nans = 0;
  u64 infinities = 0;
  u64 from_end = 0;
  const i64 stride = static_cast<i64>(gridDim.x) * kThreads;
  for (i64 i = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x; i < size; i += stride) {
    constexpr u32 kMask = T::kSize == 4 ? kMagnitudeMask : 0x7FFFu;
    const u32 magnitude = __ldg(x + i) & kMask;
    if (magnitude < T::kInf) continue;
    nans += magnitude > T::kInf;
    infinities += magnitude == T::kInf;
    if (from_end == 0) from_end = static_cast<u64>(size - i);
  }
  if (nans != 0) atomicAdd(counts, nans);
  if (infinities != 0) atomicAdd(counts + 1, infinities);
  if (from_end != 0) atomicMax(counts + 2, from_end);
}

// One amax for each member of a group; one block per chunk of any member, which the table counts.
template <class T, class Table>
__global__ void __launch_bounds__(kThreads)
    grouped_amax_kernel(const typename T::Bits* __restrict__ x, const __grid_constant__ Table table,
        u32* __restrict__ result, i64 columns, i64 chunk_size) {
  __shared__ i64 start;
  __shared__ i64 size;
  __shared__ i64 place;
  const i64 at = find_member(table, blockIdx.x);
  if (at >= 0) {
    const Member member = table.member(static_cast<u32>(at));
    const i64 skipped = (blockIdx.x - table.first(static_cast<u32>(at))) * chunk_size;
    const i64 rest = member.rows * member.cols - skipped;
    start = member.start + skipped;
    size = rest < chunk_size ? rest : chunk_size;
    place = columns ? member.col.second : member.row.second;
  }
  __syncthreads();
  bool finite;
  const u32 maximum = stretch_max<T>(x + start, size, finite);
  if (threadIdx.x == 0 && maximum != 0) {
    atomicMax(result + place, as_bits(from_input_bits<T>(maximum)));
  }
}

}  // namespace fp4kit
