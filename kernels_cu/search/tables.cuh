// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// What a search keeps in shared memory: candidates by scale byte, and for each thread what the
// codes decode to under the scale that it tries.
#pragma once

#include "search/scale_search.cuh"

namespace fp4kit {

// What the scale bytes come to: kept by address, which the compiler would work out for each block.
struct SharedCandidates {
#ifdef __CUDA_ARCH__
  u32 address;

  FP4KIT_DEVICE explicit SharedCandidates(const Candidate* candidates)
      : address(opaque(static_cast<u32>(__cvta_generic_to_shared(candidates)))) {}

  FP4KIT_DEVICE Candidate operator()(u32 byte) const {
    Candidate result;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
        : "=f"(result.factor), "=f"(result.one), "=f"(result.three_halves), "=r"(result.traits)
        : "r"(address + byte * static_cast<u32>(sizeof(Candidate)))
        : "memory");
    return result;
  }
#else
  const Candidate* candidates;

  explicit SharedCandidates(const Candidate* first) : candidates(first) {}
  Candidate operator()(u32 byte) const { return candidates[byte]; }
#endif
};

// Entries of a thread's table. kAlone: no squares, whose searches take the path of any block.
template <int kSearch, bool kAlone>
FP4KIT_HD constexpr u32 table_entries() {
  return kSearch == kSearchSweep && kAlone ? 9 : 8;
}

// A thread's own table, an entry per row of banks. Read by address, as the sums of e2m1_magic are.
struct SharedTable {
#ifdef __CUDA_ARCH__
  u32 address;

  FP4KIT_DEVICE explicit SharedTable(float* values)
      : address(static_cast<u32>(__cvta_generic_to_shared(values + threadIdx.x))) {}

  FP4KIT_DEVICE void set(u32 k, float value) const {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address + k * (4 * kThreads)), "f"(value)
        : "memory");
  }

  FP4KIT_DEVICE float get(u32 sum) const {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];"
        : "=f"(value)
        : "r"(address + sum * (4 * kThreads))
        : "memory");
    return value;
  }
#else
  float* own;

  explicit SharedTable(float* values) : own(values + threadIdx.x) {}
  void set(u32 k, float value) const { own[k * kThreads] = value; }
  float get(u32 sum) const { return own[(sum - kMagic23) * kThreads]; }
#endif
};

}  // namespace fp4kit
