// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Runs kernels on the host: one thread block after the other, its threads being contexts that give
// way to the next at a barrier. To be included before a kernel's source.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#define __CUDACC__ 1
#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__
// Of a block scope: lives on between calls, and may be extern.
#define __shared__ thread_local

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// Accesses must be as aligned as a device needs them.
template <class T>
const T* checked(const T* address) {
  if (reinterpret_cast<std::uintptr_t>(address) % sizeof(T) != 0) std::abort();
  return address;
}
template <class T>
T __ldg(const T* address) {
  return *checked(address);
}
template <class T>
T __ldcs(const T* address) {
  return *checked(address);
}
template <class T>
void __stcs(T* address, T value) {
  checked(address);
  *address = value;
}

// Declared for headers; no kernel run here exchanges values between threads.
unsigned __shfl_xor_sync(unsigned, unsigned, int);

struct Dim {
  unsigned x;
};
inline Dim threadIdx, blockIdx, gridDim;

namespace host_threads {

constexpr unsigned kMaxThreads = 1024;
constexpr std::size_t kStack = 64 * 1024;

inline ucontext_t scheduler;
inline ucontext_t context[kMaxThreads];
inline bool finished[kMaxThreads];
inline void (*body)();

inline void enter() {
  body();
  finished[threadIdx.x] = true;
}

// Runs `body` as a whole thread block. Between barriers threads run in turn, from the first or from
// the last on, so that what relies on the order of threads shows.
inline void run_block(unsigned threads) {
  static std::vector<char> stacks(kMaxThreads * kStack);
  for (unsigned t = 0; t < threads; ++t) {
    getcontext(&context[t]);
    context[t].uc_stack.ss_sp = stacks.data() + t * kStack;
    context[t].uc_stack.ss_size = kStack;
    context[t].uc_link = &scheduler;
    makecontext(&context[t], enter, 0);
    finished[t] = false;
  }
  unsigned backwards = blockIdx.x % 2;
  for (bool running = true; running; backwards ^= 1) {
    running = false;
    for (unsigned turn = 0; turn < threads; ++turn) {
      const unsigned t = backwards ? threads - 1 - turn : turn;
      if (finished[t]) continue;
      threadIdx.x = t;
      swapcontext(&scheduler, &context[t]);
      running = running || !finished[t];
    }
  }
}

template <class... Parameters, std::size_t... I>
void call(void (*kernel)(Parameters...), const long long* arguments, std::index_sequence<I...>) {
  kernel((Parameters)arguments[I]...);
}

// Launches a kernel, whose arguments are addresses and integers of 64 bits.
template <auto kKernel, class... Parameters>
void launch(void (*)(Parameters...), unsigned grid, unsigned threads, const long long* arguments) {
  static const long long* given;
  given = arguments;
  body = [] { call(kKernel, given, std::make_index_sequence<sizeof...(Parameters)>()); };
  gridDim.x = grid;
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) run_block(threads);
}

}  // namespace host_threads

inline void __syncthreads() {
  swapcontext(&host_threads::context[threadIdx.x], &host_threads::scheduler);
}

// A function of the library for a kernel instance.
#define HOST_KERNEL(name, ...)                                                        \
  extern "C" void name(unsigned grid, unsigned threads, const long long* arguments) { \
    host_threads::launch<&__VA_ARGS__>(&__VA_ARGS__, grid, threads, arguments);       \
  }
