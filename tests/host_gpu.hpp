// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Kernels on the host, one thread block after the other: the threads of a block are contexts that
// give way to each other where they synchronize. A barrier or shuffle that some thread never
// reaches is an error here, as it is undefined on a device; so are accesses that are not aligned,
// and those of read-only and streamed memory outside of all arrays.
//
// Only what the kernels run in tests use is here.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#define __CUDACC__ 1
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
// Of a block scope: lives on between calls, and may be extern.
#define __shared__ thread_local
#define __align__(bytes)

struct Dim {
  unsigned x;
};
inline Dim threadIdx, blockIdx, blockDim, gridDim;

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace fp4kit {

// The shared memory that launches ask for: as much as a thread block of an H200 may have, and a
// bit.
inline thread_local uint4 memory[(227 * 1024 + 64) / 16];

}  // namespace fp4kit

namespace host_gpu {

constexpr std::size_t kStack = 1 << 17;
constexpr unsigned kWarp = 32;

// What memory holds that nobody has written.
constexpr unsigned char kPattern = 0xCD;

// Memory that kernels may use, from `begin` to before `end`.
struct Range {
  std::uintptr_t begin, end;
};
inline const Range *ranges, *ranges_end;
inline const Range* last_range;  // most accesses are where the one before was

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "thread %u of block %u: %s\n", threadIdx.x, blockIdx.x, what);
  std::abort();
}

template <class A>
void check_alignment(const A* address) {
  if (reinterpret_cast<std::uintptr_t>(address) % sizeof(A) != 0) fail("misaligned access");
}

template <class A>
void check_access(const A* address) {
  check_alignment(address);
  const auto begin = reinterpret_cast<std::uintptr_t>(address);
  const auto is_inside = [&] {
    return begin >= last_range->begin && begin + sizeof(A) <= last_range->end;
  };
  if (last_range < ranges_end && is_inside()) return;
  for (last_range = ranges; last_range < ranges_end && begin >= last_range->end;) ++last_range;
  if (last_range == ranges_end || !is_inside()) fail("access outside of all arrays");
}

enum class State { kReady, kBarrier, kShuffle, kTogether, kPoll, kDone };

// What the lanes of a warp do together, with what each of them brought.
using Together = void (*)(void* const* brought);

// Whether what a thread waits for has happened.
using Poll = bool (*)(void* place, unsigned number);

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStack]};
  State state;
  unsigned barrier, expected;  // at a barrier: its number, and how many threads it is for
  unsigned mask, distance;     // at a shuffle
  unsigned value;              // what is brought, and then what is found
  Together together;           // where all lanes meet: what is to be done
  void* brought;
  Poll poll;  // with `brought` and `value`
};

// Many are made once; a block has the first `count` of them.
inline std::vector<Thread> threads;
inline unsigned count;
inline ucontext_t scheduler;
inline void (*body)();

inline Thread& current() { return threads[threadIdx.x]; }

inline void give_way(State state) {
  Thread& thread = current();
  thread.state = state;
  swapcontext(&thread.context, &scheduler);
}

inline void poll(Poll poll, void* place, unsigned number) {
  Thread& thread = current();
  thread.poll = poll;
  thread.brought = place;
  thread.value = number;
  give_way(State::kPoll);
}

inline void run_thread() {
  body();
  current().state = State::kDone;
}

inline bool finish_shuffles(Thread* warp) {
  bool any = false;
  for (unsigned i = 0; i < kWarp; ++i) {
    if (warp[i].state != State::kShuffle) continue;
    const unsigned mask = warp[i].mask;
    bool complete = true;
    unsigned result[kWarp];
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      if ((mask >> lane & 1u) == 0) continue;
      complete = complete && warp[lane].state == State::kShuffle && warp[lane].mask == mask;
      result[lane] = warp[(lane ^ warp[lane].distance) % kWarp].value;
    }
    if (!complete) continue;
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      if ((mask >> lane & 1u) == 0) continue;
      warp[lane].value = result[lane];
      warp[lane].state = State::kReady;
    }
    any = true;
  }
  return any;
}

inline bool finish_together(Thread* warp) {
  void* brought[kWarp];
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    const bool same = warp[lane].together == warp[0].together;
    if (warp[lane].state != State::kTogether || !same) return false;
    brought[lane] = warp[lane].brought;
  }
  warp[0].together(brought);
  for (unsigned lane = 0; lane < kWarp; ++lane) warp[lane].state = State::kReady;
  return true;
}

inline bool finish_barriers() {
  struct {
    unsigned expected, arrived, sum;
  } barriers[16] = {};
  for (unsigned i = 0; i < count; ++i) {
    const Thread& thread = threads[i];
    if (thread.state != State::kBarrier) continue;
    auto& barrier = barriers[thread.barrier];
    if (barrier.arrived++ == 0) barrier.expected = thread.expected;
    if (barrier.expected != thread.expected) fail("a barrier of several sizes");
    barrier.sum += thread.value;
  }
  bool any = false;
  for (unsigned i = 0; i < count; ++i) {
    Thread& thread = threads[i];
    if (thread.state != State::kBarrier) continue;
    const auto& barrier = barriers[thread.barrier];
    if (barrier.arrived != barrier.expected) continue;
    thread.value = barrier.sum;
    thread.state = State::kReady;
    any = true;
  }
  return any;
}

inline bool finish_polls() {
  bool any = false;
  for (unsigned i = 0; i < count; ++i) {
    Thread& thread = threads[i];
    if (thread.state != State::kPoll || !thread.poll(thread.brought, thread.value)) continue;
    thread.state = State::kReady;
    any = true;
  }
  return any;
}

// Runs the warp of thread `first` until all its threads wait at barriers or are done.
inline void run_warp(unsigned first, bool backwards) {
  do {
    for (unsigned turn = 0; turn < kWarp; ++turn) {
      threadIdx.x = first + (backwards ? kWarp - 1 - turn : turn);
      Thread& thread = current();
      if (thread.state == State::kReady) swapcontext(&scheduler, &thread.context);
    }
    backwards = !backwards;
  } while (finish_shuffles(&threads[first]) || finish_together(&threads[first]));
}

inline void run_block() {
  for (unsigned i = 0; i < count; ++i) {
    Thread& thread = threads[i];
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = kStack;
    thread.context.uc_link = &scheduler;
    makecontext(&thread.context, run_thread, 0);
    thread.state = State::kReady;
  }
  // Each warp goes on for as long as it can, from the first or from the last on, as do its threads:
  // what relies on an order shows, and so does what a warp does too early for the others.
  for (bool backwards = blockIdx.x % 2 != 0;; backwards = !backwards) {
    for (unsigned turn = 0; turn < count; turn += kWarp) {
      run_warp(backwards ? count - kWarp - turn : turn, backwards);
    }
    unsigned done = 0;
    for (unsigned i = 0; i < count; ++i) done += threads[i].state == State::kDone;
    if (done == count) return;
    const bool any = finish_barriers();
    if (!finish_polls() && !any) fail("waits for threads that are done or wait elsewhere");
  }
}

template <class A>
A argument(long long word) {
  if constexpr (std::is_pointer_v<A>) {
    return reinterpret_cast<A>(word);
  } else if constexpr (std::is_class_v<A>) {
    return *reinterpret_cast<const A*>(word);
  } else {
    return static_cast<A>(word);
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

// A kernel of a library.
struct Kernel {
  int parameters;
  void (*body)();
};

template <auto kKernel>
constexpr Kernel make_kernel() {
  return {parameters(kKernel), [] { call(kKernel); }};
}

struct Launch {
  long long blocks, threads, shared;
  const long long* words;
  const Range* ranges;
  long long range_count;
};

// False if a block wrote to shared memory that was not asked for.
inline bool launch(const Kernel& kernel, const Launch& given) {
  words = given.words;
  ranges = last_range = given.ranges;
  ranges_end = ranges + given.range_count;
  body = kernel.body;
  count = static_cast<unsigned>(given.threads);
  if (threads.size() < count) threads = std::vector<Thread>(count);
  gridDim.x = static_cast<unsigned>(given.blocks);
  blockDim.x = count;
  const auto shared = static_cast<std::size_t>(given.shared);
  auto* bytes = reinterpret_cast<unsigned char*>(fp4kit::memory);
  std::memset(bytes, kPattern, sizeof(fp4kit::memory));
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
    std::memset(bytes, kPattern, shared);
    run_block();
  }
  // What was not asked for is untouched if its first byte is and each equals the next.
  const std::size_t rest = sizeof(fp4kit::memory) - shared;
  bytes += shared;
  return bytes[0] == kPattern && std::memcmp(bytes, bytes + 1, rest - 1) == 0;
}

}  // namespace host_gpu

template <class A>
A __ldg(const A* address) {
  host_gpu::check_access(address);
  return *address;
}
template <class A>
A __ldcs(const A* address) {
  return __ldg(address);
}
template <class A>
void __stcs(A* address, A value) {
  host_gpu::check_access(address);
  *address = value;
}
template <class A>
A atomicMax(A* address, A value) {
  host_gpu::check_alignment(address);
  const A old = *address;
  if (value > old) *address = value;
  return old;
}
template <class A>
A atomicAdd(A* address, A value) {
  host_gpu::check_alignment(address);
  const A old = *address;
  *address = old + value;
  return old;
}

// Only named: what uses it is PTX.
unsigned long long __cvta_generic_to_shared(const void* address);

// The sum of what the threads bring that meet at a barrier of a number.
inline unsigned meet(unsigned barrier, unsigned expected, unsigned value) {
  host_gpu::Thread& thread = host_gpu::current();
  thread.barrier = barrier;
  thread.expected = expected;
  thread.value = value;
  host_gpu::give_way(host_gpu::State::kBarrier);
  return thread.value;
}

inline int __syncthreads_count(int predicate) {
  return static_cast<int>(meet(0, host_gpu::count, predicate != 0));
}

inline void __threadfence() {}  // memory is what all see
inline void __syncthreads() { meet(0, host_gpu::count, 0); }

// PTX's bar.sync.
inline void named_barrier(unsigned number, unsigned expected) { meet(number, expected, 0); }

template <class A>
A __shfl_xor_sync(unsigned mask, A value, unsigned distance) {
  static_assert(sizeof(A) == 4);
  host_gpu::Thread& thread = host_gpu::current();
  std::memcpy(&thread.value, &value, 4);
  thread.mask = mask;
  thread.distance = distance;
  host_gpu::give_way(host_gpu::State::kShuffle);
  std::memcpy(&value, &thread.value, 4);
  return value;
}

// Meets the other lanes of the warp, all of them.
inline void meet_warp(host_gpu::Together together, void* brought) {
  host_gpu::Thread& thread = host_gpu::current();
  thread.together = together;
  thread.brought = brought;
  host_gpu::give_way(host_gpu::State::kTogether);
}

// PTX's mma.sync.m16n8k16 (kernels_cu/common/mma.cuh has its fragments): products and sums in
// float32, one element of k after the other.
template <float (*kToFloat)(unsigned)>
void warp_mma(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  struct Fragments {
    float* d;
    const unsigned *a, *b;
  } mine{d, a, b};
  const host_gpu::Together multiply = [](void* const* brought) {
    const auto of = [brought](int lane) { return static_cast<Fragments*>(brought[lane]); };
    const auto element = [](const unsigned* words, int word, int k) {
      return kToFloat(k % 2 ? words[word] >> 16 : words[word] & 0xFFFFu);
    };
    for (int row = 0; row < 16; ++row) {
      for (int col = 0; col < 8; ++col) {
        float& sum = of(row % 8 * 4 + col / 2)->d[row / 8 * 2 + col % 2];
        for (int k = 0; k < 16; ++k) {
          const int lane = k % 8 / 2;
          const float x = element(of(row % 8 * 4 + lane)->a, k / 8 * 2 + row / 8, k);
          const float y = element(of(col * 4 + lane)->b, k / 8, k);
          sum += x * y;
        }
      }
    }
  };
  meet_warp(multiply, &mine);
}

// PTX's wgmma of one of the four warps: 16 elements of k, the number of a step, of kN columns of B
// in memory (kernels_cu/common/warpgroup_mma.cuh). Done at once.
template <float (*kToFloat)(unsigned), int kN>
void warp_mma_columns(
    float (&d)[kN / 2], const unsigned (&a)[4], const unsigned char* columns, unsigned number) {
  struct Fragments {
    float* d;
    const unsigned* a;
    const unsigned char* columns;
    unsigned number;
  } mine{d, a, columns, number};
  const host_gpu::Together multiply = [](void* const* brought) {
    const auto of = [brought](int lane) { return static_cast<Fragments*>(brought[lane]); };
    for (int row = 0; row < 16; ++row) {
      for (int col = 0; col < kN; ++col) {
        float& sum = of(row % 8 * 4 + col % 8 / 2)->d[col / 8 * 4 + row / 8 * 2 + col % 2];
        for (int k = 0; k < 16; ++k) {
          const unsigned word = of(row % 8 * 4 + k % 8 / 2)->a[k / 8 * 2 + row / 8];
          const unsigned step = of(0)->number, unit = step % 4 * 2 + k / 8;
          const unsigned place = step / 4 * 128 * kN + col * 128 + (unit ^ col % 8) * 16;
          unsigned short y;
          std::memcpy(&y, of(0)->columns + place + k % 8 * 2, 2);
          sum += kToFloat(k % 2 ? word >> 16 : word & 0xFFFFu) * kToFloat(y);
        }
      }
    }
  };
  meet_warp(multiply, &mine);
}

// PTX's ldmatrix.x4.
inline void warp_load_matrices(unsigned (&word)[4], const void* row) {
  struct Piece {
    unsigned* word;
    const uint4* row;
  } mine{word, static_cast<const uint4*>(row)};
  host_gpu::check_alignment(mine.row);
  const host_gpu::Together load = [](void* const* brought) {
    const auto of = [brought](unsigned lane) { return static_cast<Piece*>(brought[lane]); };
    for (unsigned lane = 0; lane < host_gpu::kWarp; ++lane) {
      for (unsigned j = 0; j < 4; ++j) {
        std::memcpy(of(lane)->word + j,
            reinterpret_cast<const char*>(of(8 * j + lane / 4)->row) + lane % 4 * 4, 4);
      }
    }
  };
  meet_warp(load, &mine);
}

inline void __syncwarp() {
  meet_warp([](void* const*) {}, nullptr);
}

#include "host_copies.hpp"
