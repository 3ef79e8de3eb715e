// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// A kernel that begins while the one before it still runs (PTX's griddepcontrol, sm_90 on):
// launched so by fp4kit/cuda/ready.py. Without that, and on other architectures, these do nothing.
#pragma once

#include "common/types.cuh"

namespace fp4kit {

#ifdef __CUDACC__

// By the kernel before: the next may begin once every thread block has said so.
FP4KIT_DEVICE void let_next_kernel_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// By each thread of the next that reads what the kernel before has written.
FP4KIT_DEVICE void wait_for_kernel_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#endif  // __CUDACC__

}  // namespace fp4kit
