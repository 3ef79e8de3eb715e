// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// The largest magnitude of a stretch of elements, by a whole thread block.
#pragma once

#include "common/elements.cuh"

namespace fp4kit {

constexpr int kAmaxLoads = 8;

template <class T, bool kCareful>
FP4KIT_DEVICE u32 chunk_max(const typename T::Bits* __restrict__ x, i64 count) {
  constexpr int kVec = 16 / T::kSize;
  MaxBits<T> maximum;
  const auto add = [&maximum](u32 word) {
    if constexpr (kCareful) {
      maximum.add_careful(word);
    } else {
      maximum.add(word);
    }
  };
  const auto add_vec = [&add](const uint4& vec) {
    add(vec.x);
    add(vec.y);
    add(vec.z);
    add(vec.w);
  };
  const u32 misplaced = static_cast<u32>(reinterpret_cast<u64>(x) % 16) / T::kSize;
  i64 head = misplaced == 0 ? 0 : kVec - misplaced;
  if (head > count) head = count;
  const i64 vecs = (count - head) / kVec;
  const uint4* __restrict__ body = reinterpret_cast<const uint4*>(x + head);
  i64 i = threadIdx.x;
  if (i < head) add(__ldg(x + i));
  for (; i + (kAmaxLoads - 1) * kThreads < vecs; i += kAmaxLoads * kThreads) {
    uint4 piece[kAmaxLoads];
#pragma unroll
    for (int k = 0; k < kAmaxLoads; ++k) piece[k] = __ldg(body + i + k * kThreads);
#pragma unroll
    for (int k = 0; k < kAmaxLoads; ++k) add_vec(piece[k]);
  }
  for (; i < vecs; i += kThreads) add_vec(__ldg(body + i));
  const i64 tail = head + vecs * kVec + threadIdx.x;
  if (tail < count) add(__ldg(x + tail));
  return maximum.result();
}

// Maximum over the block, for every thread of it.
FP4KIT_DEVICE u32 block_max(u32 value) {
  __shared__ u32 warps[kThreads / 32];
  value = max_across<16>(value);
  __syncthreads();  // the last call's readers are done
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) value = max_u32(value, warps[i]);
  return value;
}

// The largest magnitude of x[0 .. count) as bits of T, NaN ignored, for every thread. `finite`: all
// are numbers.
template <class T>
FP4KIT_DEVICE u32 stretch_max(const typename T::Bits* __restrict__ x, i64 count, bool& finite) {
  const u32 maximum = block_max(chunk_max<T, false>(x, count));
  finite = maximum < T::kInf;
  return maximum > T::kInf ? block_max(chunk_max<T, true>(x, count)) : maximum;
}

// Measures elements that pass by, of which a thread sees some.
template <class T>
struct Scan {
  u32 largest = 0;  // NaN ignored, as bits of T
  u32 raw = 0;      // NaN as the largest

  template <int kElements>
  FP4KIT_DEVICE void add(const Words<T, kElements>& x) {
    u32 own;
    largest = max_u32(largest, group_amax_bits(x, own));
    raw = max_u32(raw, own);
  }

  // Raises `amax`, as float32 bits, and sets `nonfinite` if some element is. By all threads.
  FP4KIT_DEVICE void store(u32* __restrict__ amax, u32* __restrict__ nonfinite) const {
    const u32 top = block_max(raw);
    const u32 maximum = top > T::kInf ? block_max(largest) : top;
    if (threadIdx.x != 0) return;
    if (maximum != 0) atomicMax(amax, as_bits(from_input_bits<T>(maximum)));
    if (top >= T::kInf) atomicMax(nonfinite, 1u);
  }
};

}  // namespace fp4kit
