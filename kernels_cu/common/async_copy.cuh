// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Copies from global to shared memory that no register sees. Two ways:
//   copy_async, commit_copies, wait_copies: each thread copies its pieces (sm_80 on);
//   CopyBarrier, copy_bulk: one thread copies a stretch, whose arrival a barrier counts (sm_90 on).
// What is read once is marked as the first to leave the L2 cache. The order of a ring's steps is
// the caller's: a warp synchronizes before it overwrites what its lanes have read. On the host
// (tests/host_copies.hpp) targets hold a pattern until somebody has waited.
#pragma once

#include "common/types.cuh"

namespace fp4kit {

#ifdef __CUDACC__

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
#define FP4KIT_HAS_ASYNC_COPIES 1
#endif
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define FP4KIT_HAS_BULK_COPIES 1
#endif

#ifdef __CUDA_ARCH__
FP4KIT_DEVICE u32 shared_address(const void* place) {
  return static_cast<u32>(__cvta_generic_to_shared(place));
}
#endif

#ifdef FP4KIT_HAS_ASYNC_COPIES

// The cache policy of what is read once.
FP4KIT_DEVICE u64 read_once_policy() {
#ifdef __CUDA_ARCH__
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
#else
  return 0;
#endif
}

// Begins to copy 4, 8 or 16 bytes; both addresses are multiples of that.
template <int kBytes>
FP4KIT_DEVICE void copy_async(void* target, const void* source, u64 policy) {
#ifdef __CUDA_ARCH__
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;"
        :
        : "r"(shared_address(target)), "l"(source), "l"(policy)
        : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;"
        :
        : "r"(shared_address(target)), "l"(source), "n"(kBytes)
        : "memory");
  }
#else
  host_copies::copy_async(target, source, kBytes);
  static_cast<void>(policy);
#endif
}

// Ends a group of copies of this thread.
FP4KIT_DEVICE void commit_copies() {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.commit_group;" ::: "memory");
#else
  host_copies::commit();
#endif
}

// Waits until at most kLeft groups of this thread are on their way: its own pieces are there.
template <int kLeft>
FP4KIT_DEVICE void wait_copies() {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
#else
  host_copies::wait(kLeft);
#endif
}

#endif  // FP4KIT_HAS_ASYNC_COPIES

#ifdef FP4KIT_HAS_BULK_COPIES

// In shared memory: counts the bytes of copies, one phase after the other.
struct CopyBarrier {
  u64 state;
};

// By one thread, before the others may use it: then fence_barriers and a barrier of all threads.
FP4KIT_DEVICE void init_barrier(CopyBarrier& barrier) {
#ifdef __CUDA_ARCH__
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&barrier)) : "memory");
#else
  host_copies::init(&barrier);
#endif
}

FP4KIT_DEVICE void fence_barriers() {
#ifdef __CUDA_ARCH__
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// The phase ends when so many bytes have been copied; by one thread, once a phase.
FP4KIT_DEVICE void expect_bytes(CopyBarrier& barrier, u32 bytes) {
#ifdef __CUDA_ARCH__
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)),
      "r"(bytes)
      : "memory");
#else
  host_copies::expect(&barrier, bytes);
#endif
}

// Begins to copy a multiple of 16 bytes between addresses that are such multiples.
FP4KIT_DEVICE void copy_bulk(
    void* target, const void* source, u32 bytes, CopyBarrier& barrier, u64 policy) {
#ifdef __CUDA_ARCH__
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(target)),
      "l"(source), "r"(bytes), "r"(shared_address(&barrier)), "l"(policy)
      : "memory");
#else
  host_copies::copy_bulk(&barrier, target, source, bytes);
  static_cast<void>(policy);
#endif
}

// Waits for the end of a phase: of the first with parity 0, of the next with 1, and so on.
FP4KIT_DEVICE void wait_bytes(CopyBarrier& barrier, u32 parity) {
#ifdef __CUDA_ARCH__
  u32 over = 0;
  while (over == 0) {
    asm volatile(
        "{.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;}"
        : "=r"(over)
        : "r"(shared_address(&barrier)), "r"(parity)
        : "memory");
  }
#else
  host_copies::wait_bytes(&barrier, parity);
#endif
}

#endif  // FP4KIT_HAS_BULK_COPIES

#endif  // __CUDACC__

}  // namespace fp4kit
