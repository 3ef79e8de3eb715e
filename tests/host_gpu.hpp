// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Kernels on the host, one thread block after the other: the threads of a block are contexts that
// give way to each other where they synchronize. A barrier or shuffle that some thread never
// reaches is an error here, as it is undefined on a device.
//
// Only what the kernels of groups use is here.
#pragma once

#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <type_traits>
#include <utility>
#include <vector>

#define __CUDACC__ 1
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static

struct Dim {
  unsigned x;
};
inline Dim threadIdx, blockIdx, gridDim;

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

template <class A>
void check_alignment(const A* address) {
  if (reinterpret_cast<unsigned long long>(address) % sizeof(A) != 0) {
    std::fprintf(stderr, "misaligned access of %zu bytes\n", sizeof(A));
    std::abort();
  }
}
template <class A>
A __ldg(const A* address) {
  check_alignment(address);
  return *address;
}
template <class A>
A __ldcs(const A* address) {
  return __ldg(address);
}
template <class A>
void __stcs(A* address, A value) {
  check_alignment(address);
  *address = value;
}
template <class A>
A atomicMax(A* address, A value) {
  const A old = *address;
  if (value > old) *address = value;
  return old;
}
template <class A>
A atomicAdd(A* address, A value) {
  const A old = *address;
  *address = old + value;
  return old;
}

// Only named: what uses it is PTX.
unsigned long long __cvta_generic_to_shared(const void* address);

namespace host_gpu {

constexpr std::size_t kStack = 1 << 17;

enum class State { kReady, kBarrier, kShuffle, kDone };

struct Thread {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(kStack);
  State state;
  int predicate;
  unsigned mask, value, distance;
};

inline std::vector<Thread> threads(FP4KIT_THREADS);
inline ucontext_t scheduler;
inline int current;
inline int barrier_count;
inline void (*body)();

inline void give_way(State state) {
  Thread& thread = threads[current];
  thread.state = state;
  swapcontext(&thread.context, &scheduler);
}

inline void run_thread() {
  body();
  threads[current].state = State::kDone;
}

inline bool finish_shuffles() {
  bool any = false;
  for (int first = 0; first < FP4KIT_THREADS; first += 32) {
    for (int lane = 0; lane < 32; ++lane) {
      Thread& thread = threads[first + lane];
      if (thread.state != State::kShuffle) continue;
      bool complete = true;
      for (int other = 0; other < 32; ++other) {
        const Thread& partner = threads[first + other];
        if ((thread.mask >> other & 1u) == 0) continue;
        complete = complete && partner.state == State::kShuffle && partner.mask == thread.mask;
      }
      if (!complete) continue;
      unsigned result[32];
      for (int other = 0; other < 32; ++other) {
        result[other] = threads[first + (other ^ threads[first + other].distance) % 32].value;
      }
      const unsigned mask = thread.mask;
      for (int other = 0; other < 32; ++other) {
        if ((mask >> other & 1u) == 0) continue;
        threads[first + other].value = result[other];
        threads[first + other].state = State::kReady;
      }
      any = true;
    }
  }
  return any;
}

inline void run_block() {
  for (int i = 0; i < FP4KIT_THREADS; ++i) {
    Thread& thread = threads[i];
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.data();
    thread.context.uc_stack.ss_size = thread.stack.size();
    thread.context.uc_link = &scheduler;
    makecontext(&thread.context, run_thread, 0);
    thread.state = State::kReady;
  }
  while (true) {
    bool progress = false;
    int waiting = 0, done = 0;
    for (int i = 0; i < FP4KIT_THREADS; ++i) {
      if (threads[i].state == State::kReady) {
        current = i;
        threadIdx.x = static_cast<unsigned>(i);
        swapcontext(&scheduler, &threads[i].context);
        progress = true;
      }
      waiting += threads[i].state == State::kBarrier;
      done += threads[i].state == State::kDone;
    }
    if (done == FP4KIT_THREADS) return;
    if (finish_shuffles()) continue;
    if (waiting > 0 && waiting + done == FP4KIT_THREADS) {
      barrier_count = 0;
      for (Thread& thread : threads) {
        if (thread.state != State::kBarrier) continue;
        barrier_count += thread.predicate != 0;
        thread.state = State::kReady;
      }
      continue;
    }
    if (!progress) {
      std::fprintf(stderr, "%d threads wait at a barrier, %d are done, the others shuffle\n",
                   waiting, done);
      std::abort();
    }
  }
}

template <class A>
A argument(long long word) {
  if constexpr (std::is_pointer_v<A>) {
    return reinterpret_cast<A>(word);
  } else {
    return word;
  }
}

inline const long long* words;

template <class... A, std::size_t... kIndex>
void call(void (*kernel)(A...), std::index_sequence<kIndex...>) {
  kernel(argument<A>(words[kIndex])...);
}

template <class... A>
void call(void (*kernel)(A...)) {
  call(kernel, std::index_sequence_for<A...>());
}

template <class... A>
constexpr int parameters(void (*)(A...)) {
  return sizeof...(A);
}

}  // namespace host_gpu

inline int __syncthreads_count(int predicate) {
  host_gpu::threads[host_gpu::current].predicate = predicate;
  host_gpu::give_way(host_gpu::State::kBarrier);
  return host_gpu::barrier_count;
}

inline void __syncthreads() { __syncthreads_count(0); }

template <class A>
A __shfl_xor_sync(unsigned mask, A value, int distance) {
  static_assert(sizeof(A) == 4);
  host_gpu::Thread& thread = host_gpu::threads[host_gpu::current];
  __builtin_memcpy(&thread.value, &value, 4);
  thread.mask = mask;
  thread.distance = static_cast<unsigned>(distance);
  host_gpu::give_way(host_gpu::State::kShuffle);
  __builtin_memcpy(&value, &thread.value, 4);
  return value;
}
