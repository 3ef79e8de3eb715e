// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Barriers for some of a thread block's threads, whole warps: the others go on, or have ended.
#pragma once

#include "common/types.cuh"

namespace fp4kit {

#ifdef __CUDACC__

constexpr u32 kGroupBarrier = 1;  // that of all threads is 0

// Meets the others of kCount threads.
template <u32 kCount>
FP4KIT_DEVICE void synchronize_group() {
#ifdef __CUDA_ARCH__
  asm volatile("bar.sync %0, %1;" ::"n"(kGroupBarrier), "n"(kCount) : "memory");
#else
  named_barrier(kGroupBarrier, kCount);
#endif
}

// The same; how many of them say so.
template <u32 kCount>
FP4KIT_DEVICE u32 count_in_group(bool says) {
#ifdef __CUDA_ARCH__
  u32 result;
  asm volatile("{.reg .pred p;\nsetp.ne.u32 p, %1, 0;\nbarrier.cta.red.popc.u32 %0, %2, %3, p;}"
      : "=r"(result)
      : "r"(static_cast<u32>(says)), "n"(kGroupBarrier), "n"(kCount)
      : "memory");
  return result;
#else
  return meet(kGroupBarrier, kCount, says);
#endif
}

#endif  // __CUDACC__

}  // namespace fp4kit
