// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// The kernels of residual channels as a host library, for tests/test_device_residual.py, which
// appends a HOST_KERNEL for each instance.
#include "device_threads_host.hpp"
//
#include "dequantize_residual.cu"
#include "quantize_residual.cu"
#include "quantize_residual_ordered.cu"

namespace fp4kit {

// What the kernels declare: as much as a thread block of an H200 may have, and a bit.
thread_local uint4 memory[(227 * 1024 + 64) / 16];

}  // namespace fp4kit

using namespace fp4kit;

// Fills shared memory, so that what a kernel does not write is not by chance right, and so that
// what it writes past its own part shows.
extern "C" void fill_memory(u8 byte) { std::memset(memory, byte, sizeof(memory)); }

// Bytes from `shared` on that no longer are `byte`.
extern "C" i64 memory_changed_from(i64 shared, u8 byte) {
  i64 changed = 0;
  const u8* const bytes = reinterpret_cast<const u8*>(memory);
  for (i64 i = shared; i < static_cast<i64>(sizeof(memory)); ++i) changed += bytes[i] != byte;
  return changed;
}

// Positive floats from `first` on whose quotient by 6 is not the rounded one.
extern "C" i64 wrong_quotients(u32 first, u32 count) {
  i64 wrong = 0;
  for (u32 bits = first; bits < first + count; ++bits) {
    wrong += as_bits(amax_by_six(as_float(bits))) != as_bits(as_float(bits) / kE2m1Max);
  }
  return wrong;
}
