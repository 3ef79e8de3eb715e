// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// The largest magnitude of a row that a team of threads holds in registers: maxima of its groups,
// of a warp by shuffles, and of several warps by one exchange through shared memory.
#pragma once

#include "common/elements.cuh"

namespace fp4kit {

// The threads that share a row, a power of two, and how many groups each of them takes.
template <u32 kTeamThreads, u32 kThreadGroups>
struct Team {
  static constexpr u32 kSize = kTeamThreads;
  static constexpr u32 kGroups = kThreadGroups;
};

template <u32 kSize>
FP4KIT_DEVICE u32 neighbours_max(u32 value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  if constexpr (kSize == 32) {
    return __reduce_max_sync(0xFFFFFFFFu, value);
  } else
#endif
  {
    return max_across<kSize / 2>(value);
  }
}

template <u32 kSize>
FP4KIT_DEVICE void team_barrier(u32 team) {
  if constexpr (kSize == kThreads) {
    __syncthreads();
  } else {
#ifdef __CUDA_ARCH__
    asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "n"(kSize) : "memory");
#else
    named_barrier(1 + team, kSize);  // tests/host_gpu.hpp
#endif
  }
}

// The largest value of a team. `slots`: a word for each warp of the thread block.
template <u32 kSize>
FP4KIT_DEVICE u32 team_max(u32 value, u32* slots) {
  value = neighbours_max<kSize <= 32 ? kSize : 32>(value);
  if constexpr (kSize > 32) {
    constexpr u32 kWarps = kSize / 32;
    const u32 warp = threadIdx.x / 32;
    if (threadIdx.x % 32 == 0) slots[warp] = value;
    team_barrier<kSize>(threadIdx.x / kSize);
    value = neighbours_max<32>(slots[warp / kWarps * kWarps + threadIdx.x % kWarps]);
  }
  return value;
}

// The amax of each group without NaN, and of all of them. `finite`: neither NaN nor infinity there.
template <class T, u32 kGroups>
FP4KIT_DEVICE u32 amax_bits(const Words<T> (&x)[kGroups], u32 (&amax)[kGroups], bool& finite) {
  u32 largest = 0;
#pragma unroll
  for (u32 l = 0; l < kGroups; ++l) {
    MaxBits<T> maximum;
#pragma unroll
    for (int i = 0; i < Words<T>::kWords; ++i) maximum.add(x[l].word[i]);
    amax[l] = maximum.result();
    largest = max_u32(largest, amax[l]);
  }
  finite = largest < T::kInf;
  if (largest > T::kInf) {
    largest = 0;
#pragma unroll
    for (u32 l = 0; l < kGroups; ++l) {
      u32 raw;
      amax[l] = group_amax_bits<T>(x[l], raw);
      largest = max_u32(largest, amax[l]);
    }
  }
  return largest;
}

}  // namespace fp4kit
