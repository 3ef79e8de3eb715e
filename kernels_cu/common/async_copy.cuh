// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Copies from global to shared memory that no register sees. Two ways:
//   copy_async, commit_copies, wait_copies: each thread copies its pieces (sm_80 on);
//   copy_bulk: one thread copies a stretch, whose bytes a barrier counts (sm_90 on).
// Stretches that are read once are marked as the first to leave the L2 cache. The order of a ring's
// steps is the caller's: a warp synchronizes before it overwrites what its lanes have read. On the
// host (tests/host_copies.hpp) targets hold a pattern until somebody has waited.
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

#define FP4KIT_SHARED_LOAD(kind, outputs, ...) \
  asm volatile("ld.shared." kind " " outputs ";" : __VA_ARGS__ : "r"(address))
#endif

// A place in shared memory: an address of 32 bits that stays in a register, where the compiler
// works those of pointers out anew in every step of a loop.
struct SharedPlace {
#ifdef __CUDA_ARCH__
  u32 address;
#else
  u8* address;
#endif

  FP4KIT_DEVICE SharedPlace at(u32 offset) const { return {address + offset}; }

  FP4KIT_DEVICE uint4 load_vec() const {
    uint4 value;
#ifdef __CUDA_ARCH__
    FP4KIT_SHARED_LOAD("v4.u32", "{%0, %1, %2, %3}, [%4]", "=r"(value.x), "=r"(value.y),
        "=r"(value.z), "=r"(value.w));
#else
    host_gpu::check_alignment(reinterpret_cast<uint4*>(address));
    value = *reinterpret_cast<uint4*>(address);
#endif
    return value;
  }

  FP4KIT_DEVICE uint2 load_pair() const {
    uint2 value;
#ifdef __CUDA_ARCH__
    FP4KIT_SHARED_LOAD("v2.u32", "{%0, %1}, [%2]", "=r"(value.x), "=r"(value.y));
#else
    host_gpu::check_alignment(reinterpret_cast<uint2*>(address));
    value = *reinterpret_cast<uint2*>(address);
#endif
    return value;
  }

  FP4KIT_DEVICE u32 load_word() const {
    u32 value;
#ifdef __CUDA_ARCH__
    FP4KIT_SHARED_LOAD("u32", "%0, [%1]", "=r"(value));
#else
    host_gpu::check_alignment(reinterpret_cast<u32*>(address));
    value = *reinterpret_cast<u32*>(address);
#endif
    return value;
  }

  FP4KIT_DEVICE u32 load_half() const {
#ifdef __CUDA_ARCH__
    u16 value;
    FP4KIT_SHARED_LOAD("u16", "%0, [%1]", "=h"(value));
    return value;
#else
    host_gpu::check_alignment(reinterpret_cast<u16*>(address));
    return *reinterpret_cast<u16*>(address);
#endif
  }

  FP4KIT_DEVICE u32 load_byte() const {
#ifdef __CUDA_ARCH__
    u32 value;
    FP4KIT_SHARED_LOAD("u8", "%0, [%1]", "=r"(value));
    return value;
#else
    return *address;
#endif
  }

  FP4KIT_DEVICE void store_word(u32 value) const {
#ifdef __CUDA_ARCH__
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
#else
    host_gpu::check_alignment(reinterpret_cast<u32*>(address));
    *reinterpret_cast<u32*>(address) = value;
#endif
  }

  FP4KIT_DEVICE void store_vec(const uint4& value) const {
#ifdef __CUDA_ARCH__
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x),
        "r"(value.y), "r"(value.z), "r"(value.w)
        : "memory");
#else
    host_gpu::check_alignment(reinterpret_cast<uint4*>(address));
    *reinterpret_cast<uint4*>(address) = value;
#endif
  }
};

#ifdef __CUDA_ARCH__
#undef FP4KIT_SHARED_LOAD
#endif

FP4KIT_DEVICE SharedPlace shared_place(void* place) {
#ifdef __CUDA_ARCH__
  return {shared_address(place)};
#else
  return {static_cast<u8*>(place)};
#endif
}

// A number that the compiler keeps in a register instead of working it out anew: it cannot know
// that lanes get their own back. All lanes of a warp must call it.
FP4KIT_DEVICE u32 kept(u32 number) { return __shfl_xor_sync(0xFFFFFFFFu, number, 0); }
FP4KIT_DEVICE SharedPlace kept(SharedPlace place) {
#ifdef __CUDA_ARCH__
  return {kept(place.address)};
#else
  return place;
#endif
}

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

// That of what others read as well.
FP4KIT_DEVICE u64 keep_policy() {
#ifdef __CUDA_ARCH__
  u64 policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
#else
  return 0;
#endif
}

// Begins to copy 4, 8 or 16 bytes; both addresses are multiples of that. Without a cache policy:
// NVRTC 13.0 makes an illegal instruction of one whose target has a uniform offset.
template <int kBytes>
FP4KIT_DEVICE void copy_async(SharedPlace target, const void* source) {
#ifdef __CUDA_ARCH__
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;"
        :
        : "r"(target.address), "l"(source)
        : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;"
        :
        : "r"(target.address), "l"(source), "n"(kBytes)
        : "memory");
  }
#else
  host_copies::copy_async(target.address, source, kBytes);
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

// Barriers are 8 bytes of shared memory that count arrivals, one phase after the other.
constexpr u32 kBarrierBytes = 8;

// By one thread, before the others may use it: then fence_barriers and a barrier of all threads.
// `arrivals`: how many end a phase, that of expect_bytes included.
FP4KIT_DEVICE void init_barrier(SharedPlace barrier, u32 arrivals = 1) {
#ifdef __CUDA_ARCH__
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier.address), "r"(arrivals)
      : "memory");
#else
  host_copies::init(barrier.address, arrivals);
#endif
}

FP4KIT_DEVICE void fence_barriers() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// By a thread: what it has written to or read from shared memory before is over for those who wait.
FP4KIT_DEVICE void arrive(SharedPlace barrier) {
#ifdef __CUDA_ARCH__
  asm volatile("{.reg .b64 token;\nmbarrier.arrive.shared.b64 token, [%0];}" ::"r"(barrier.address)
      : "memory");
#else
  host_copies::arrive(barrier.address);
#endif
}

// By a thread: an arrival, once its copy_async so far have ended.
FP4KIT_DEVICE void arrive_copies(SharedPlace barrier) {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier.address) : "memory");
#else
  host_copies::arrive_copies(barrier.address);
#endif
}

#ifdef __CUDA_ARCH__
#if __CUDA_ARCH__ >= 900
#define FP4KIT_WAIT_PARITY "mbarrier.try_wait.parity.shared.b64"
#else
#define FP4KIT_WAIT_PARITY "mbarrier.test_wait.parity.shared.b64"
#endif
#endif

// Waits for the end of a phase: of the first with parity 0, of the next with 1, and so on.
FP4KIT_DEVICE void wait_bytes(SharedPlace barrier, u32 parity) {
#ifdef __CUDA_ARCH__
  u32 over = 0;
  while (over == 0) {
    asm volatile("{.reg .pred p;\n" FP4KIT_WAIT_PARITY
                 " p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;}"
        : "=r"(over)
        : "r"(barrier.address), "r"(parity)
        : "memory");
  }
#else
  host_copies::wait_bytes(barrier.address, parity);
#endif
}

#ifdef __CUDA_ARCH__
#undef FP4KIT_WAIT_PARITY
#endif

// The stage of a step in a ring of so many, and the parity of its phase.
template <int kStages>
struct StageTurn {
  u32 stage = 0, phase = 0;

  FP4KIT_DEVICE void next() {
    stage = stage + 1 == kStages ? 0 : stage + 1;
    phase ^= stage == 0;
  }
};

// The barriers of such a ring: a stage is filled, a stage is free.
template <int kStages>
struct StageBarriers {
  SharedPlace place;

  FP4KIT_DEVICE SharedPlace filled(u32 stage) const { return place.at(stage * kBarrierBytes); }
  FP4KIT_DEVICE SharedPlace emptied(u32 stage) const {
    return place.at((kStages + stage) * kBarrierBytes);
  }

  // By all threads of the block, before any other use: how many arrivals say so.
  FP4KIT_DEVICE void begin(u32 of_filled, u32 of_emptied) const {
    if (threadIdx.x < kStages) {
      init_barrier(filled(threadIdx.x), of_filled);
      init_barrier(emptied(threadIdx.x), of_emptied);
    }
    fence_barriers();
    __syncthreads();
  }
};

#endif  // FP4KIT_HAS_ASYNC_COPIES

#ifdef FP4KIT_HAS_BULK_COPIES

// An arrival; the phase does not end before so many bytes have been copied.
FP4KIT_DEVICE void expect_bytes(SharedPlace barrier, u32 bytes) {
#ifdef __CUDA_ARCH__
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier.address), "r"(bytes)
      : "memory");
#else
  host_copies::expect(barrier.address, bytes);
#endif
}

// Begins to copy a multiple of 16 bytes between addresses that are such multiples. By one thread:
// the instruction takes what it needs from registers of the warp.
FP4KIT_DEVICE void copy_bulk(
    SharedPlace target, const void* source, u32 bytes, SharedPlace barrier, u64 policy) {
#ifdef __CUDA_ARCH__
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(target.address),
      "l"(source), "r"(bytes), "r"(barrier.address), "l"(policy)
      : "memory");
#else
  host_copies::copy_bulk(barrier.address, target.address, source, bytes);
  static_cast<void>(policy);
#endif
}

#endif  // FP4KIT_HAS_BULK_COPIES

#endif  // __CUDACC__

}  // namespace fp4kit
