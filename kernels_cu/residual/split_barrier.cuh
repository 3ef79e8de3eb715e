// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Barriers at which the warps of a thread block tell that they have arrived without waiting there,
// so that they need not all be at the same place: those that are early go on with what comes next.
#pragma once

#include "common/types.cuh"

namespace fp4kit {

// Where the hardware does not count arrivals, `wait` is a barrier of all threads: it must be called
// by all of them equally often.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
constexpr bool kCountsArrivals = true;
#else
constexpr bool kCountsArrivals = false;
#endif

// In shared memory. A phase ends when every warp of the thread block has arrived.
struct SplitBarrier {
  u64 state;

#ifdef __CUDACC__

  __device__ __forceinline__ u32 address() const {
#ifdef __CUDA_ARCH__
    return static_cast<u32>(__cvta_generic_to_shared(&state));
#else
    return 0;
#endif
  }

  // By one thread; all of them must meet after it.
  __device__ __forceinline__ void begin(u32 warps) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" : : "r"(address()), "r"(warps) : "memory");
#else
    static_cast<void>(warps);
#endif
  }

  // By whole warps.
  __device__ __forceinline__ void arrive() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      asm volatile(
          "{\n"
          ".reg .b64 token;\n"
          "mbarrier.arrive.shared.b64 token, [%0];\n"
          "}"
          :
          : "r"(address())
          : "memory");
    }
#endif
  }

  // Waits for the end of a phase of this parity: of the first one it is 0. The one before the first
  // counts as over.
  __device__ __forceinline__ void wait(u32 parity) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    u32 over;
    do {
#if __CUDA_ARCH__ >= 900
      // Gives way for a while.
      asm volatile(
          "{\n"
          ".reg .pred over;\n"
          "mbarrier.try_wait.parity.shared.b64 over, [%1], %2;\n"
          "selp.u32 %0, 1, 0, over;\n"
          "}"
          : "=r"(over)
          : "r"(address()), "r"(parity)
          : "memory");
#else
      asm volatile(
          "{\n"
          ".reg .pred over;\n"
          "mbarrier.test_wait.parity.shared.b64 over, [%1], %2;\n"
          "selp.u32 %0, 1, 0, over;\n"
          "}"
          : "=r"(over)
          : "r"(address()), "r"(parity)
          : "memory");
#endif
    } while (over == 0);
#else
    static_cast<void>(parity);
    __syncthreads();
#endif
  }

#endif  // __CUDACC__
};

}  // namespace fp4kit
