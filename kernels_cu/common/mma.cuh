// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Products of small matrices by a whole warp, in the fragments that PTX defines for
// mma.sync.m16n8k16. With g = lane / 4 and t = lane % 4, two 16-bit elements in a word, the one of
// the smaller k in the low half:
//   A (16 x 16): a[0] is row g, k = 2t and 2t + 1; a[1] row g + 8; a[2], a[3] the same at k + 8
//   B (16 x 8):  b[0] is column g, k = 2t and 2t + 1; b[1] the same at k + 8
//   D (16 x 8):  d[0], d[1] are row g, columns 2t and 2t + 1; d[2], d[3] row g + 8
// The order of the sums is the hardware's, the same in every run. On the host: tests/host_gpu.hpp.
#pragma once

#include "common/conversions.cuh"

// float16 has the instruction from sm_80 on, as bfloat16 has: sm_75 only knows half of it.
#if defined(__CUDA_ARCH__) ? __CUDA_ARCH__ >= 800 : !defined(FP4KIT_TEST_WITHOUT_MMA)
#define FP4KIT_HAS_MMA 1
#endif

namespace fp4kit {

#ifdef __CUDACC__
#ifdef FP4KIT_HAS_MMA

constexpr int kMmaM = 16, kMmaN = 8, kMmaK = 16;

// D += A B, elements of T (F16 or Bf16), float32 sums. All lanes of the warp must call it.
template <class T>
FP4KIT_DEVICE void mma_16816(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#ifdef __CUDA_ARCH__
  if constexpr (SameType<T, Bf16>::kValue) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
#else
  warp_mma<from_input_bits<T> >(d, a, b);
#endif
}

#endif  // FP4KIT_HAS_MMA

// Four matrices of 8 x 8 16-bit elements of shared memory: lane i names a row of 16 bytes, the
// i % 8-th of matrix i / 8; word j of a lane are elements 2t and 2t + 1 of row g of matrix j.
// From sm_75 on. All lanes of the warp must call it.
FP4KIT_DEVICE void load_matrices(u32 (&word)[4], const void* row) {
#ifdef __CUDA_ARCH__
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
      : "r"(static_cast<u32>(__cvta_generic_to_shared(row)))
      : "memory");
#else
  warp_load_matrices(word, row);
#endif
}

#endif  // __CUDACC__

}  // namespace fp4kit
