// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// quantize_measured.cu itself, run on the host for tests/test_measured_host.py: each thread of a
// block is a fiber that gives its turn away wherever it waits for others. What is missing arrives
// as a hang or an abort: barriers that not all reach, reads outside the input, misaligned accesses.
#include <stdint.h>
#include <stdlib.h>
#include <ucontext.h>

#include <utility>

#define __CUDACC__ 1
#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static

struct uint2 {
  unsigned x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};
struct Extent {
  unsigned x;
};

namespace {

constexpr unsigned kFibers = FP4KIT_THREADS;
constexpr unsigned kStackBytes = 1 << 16;
constexpr unsigned kLongestRun = 1 << 20;

Extent threadIdx, blockIdx, gridDim;
uintptr_t input_begin, input_end;

struct Fiber {
  ucontext_t context;
  bool done;
  char stack[kStackBytes];
};
Fiber fibers[kFibers];
ucontext_t scheduler;

struct Meeting {
  unsigned arrived;
  unsigned number;

  void wait(unsigned count) {
    const unsigned mine = number;
    if (++arrived == count) {
      arrived = 0;
      ++number;
    }
    while (number == mine) swapcontext(&fibers[threadIdx.x].context, &scheduler);
  }
};
Meeting warps[kFibers / 32];
Meeting barriers[16];
unsigned exchanged[kFibers];

void check(bool condition) {
  if (!condition) abort();
}

uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

template <class A>
A __ldg(const A* place) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(place);
  check(address % sizeof(A) == 0 && address >= input_begin && address + sizeof(A) <= input_end);
  return *place;
}

template <class A>
void __stcs(A* place, A value) {
  check(reinterpret_cast<uintptr_t>(place) % sizeof(A) == 0);
  *place = value;
}

unsigned __shfl_xor_sync(unsigned, unsigned value, unsigned distance) {
  const unsigned thread = threadIdx.x;
  exchanged[thread] = value;
  warps[thread / 32].wait(32);
  const unsigned result = exchanged[thread ^ distance];
  warps[thread / 32].wait(32);
  return result;
}

// Headers name these; no measured kernel uses them.
float __shfl_xor_sync(unsigned, float, unsigned) { abort(); }
unsigned atomicMax(unsigned*, unsigned) { abort(); }
unsigned __cvta_generic_to_shared(const void*) { abort(); }

void __syncthreads() { barriers[0].wait(kFibers); }
void named_barrier(unsigned number, unsigned count) { barriers[number].wait(count); }

}  // namespace

#include "quantize_measured_host.cu"

namespace {

struct Call {
  void (*enter)();
  const uint4* x;
  float* second;
  unsigned char* packed;
  unsigned char* scale;
  const long long* s;
} call;

template <class... A, std::size_t... kIndex>
void pass(void (*kernel)(const uint4*, float*, unsigned char*, unsigned char*, A...),
          std::index_sequence<kIndex...>) {
  kernel(call.x, call.second, call.packed, call.scale, static_cast<A>(call.s[kIndex])...);
}

template <class... A>
void pass(void (*kernel)(const uint4*, float*, unsigned char*, unsigned char*, A...)) {
  pass(kernel, std::index_sequence_for<A...>());
}

template <auto kKernel>
void enter() {
  pass(kKernel);
}

void (*const kKernels[])() = {
#include "instances.inc"
};

void run_fiber() {
  Fiber& fiber = fibers[threadIdx.x];
  call.enter();
  fiber.done = true;
  swapcontext(&fiber.context, &scheduler);
}

void run_block() {
  for (Fiber& fiber : fibers) {
    fiber.done = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack;
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, run_fiber, 0);
  }
  unsigned left = kFibers;
  for (unsigned turn = 0; left > 0; ++turn) {
    check(turn < kLongestRun);
    for (unsigned i = 0; i < kFibers; ++i) {
      // In either order, so that no thread is always ahead.
      threadIdx.x = turn % 2 == 0 ? i : kFibers - 1 - i;
      Fiber& fiber = fibers[threadIdx.x];
      if (fiber.done) continue;
      swapcontext(&scheduler, &fiber.context);
      if (fiber.done) --left;
    }
  }
  for (const Meeting& meeting : warps) check(meeting.arrived == 0);
  for (const Meeting& meeting : barriers) check(meeting.arrived == 0);
}

}  // namespace

extern "C" void quantize_measured(int number, unsigned blocks, const void* x, long long bytes,
                                  void* second, void* packed, void* scale,
                                  const long long* scalars) {
  input_begin = reinterpret_cast<uintptr_t>(x);
  input_end = input_begin + static_cast<uintptr_t>(bytes);
  gridDim.x = blocks;
  call = {kKernels[number],
          static_cast<const uint4*>(x),
          static_cast<float*>(second),
          static_cast<unsigned char*>(packed),
          static_cast<unsigned char*>(scale),
          scalars};
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) run_block();
}
