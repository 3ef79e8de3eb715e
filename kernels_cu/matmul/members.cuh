// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Several weights, alike but for their arrays, and consecutive rows of activations for each: the
// experts of a layer.
#pragma once

#include "common/types.cuh"

namespace fp4kit {

// Addresses of the arrays of one of the weights; cuda/matmul_small.py writes them. Scales, level
// and bias may be missing.
struct SmallMember {
  u64 codes, scales, level, bias;

#ifdef __CUDACC__
  template <class Weights>
  FP4KIT_DEVICE auto join(Weights& weights) const -> decltype(weights.codes, void()) {
    weights.codes = reinterpret_cast<const u8*>(codes);
    weights.scales = reinterpret_cast<const u8*>(scales);
  }
  template <class Results>
  FP4KIT_DEVICE auto join(Results& results) const -> decltype(results.of_b, void()) {
    results.of_b.values = reinterpret_cast<const float*>(level);
    results.bias = reinterpret_cast<const void*>(bias);
  }
#endif
};

struct Members {
  const SmallMember* table;  // or nothing: one member
  const void* offsets;       // rows of activations where each begins, and the end; or nothing: all
  u32 count;
  bool wide;  // 64-bit offsets

#ifdef __CUDACC__
  FP4KIT_DEVICE i64 offset(u32 number) const {
    return wide ? static_cast<const i64*>(offsets)[number]
                : static_cast<const int*>(offsets)[number];
  }

  // Rows of a member, of those that there are.
  FP4KIT_DEVICE void range(u32 member, u32 rows, u32& first, u32& end) const {
    const i64 most = rows, begin = offset(member), after = offset(member + 1);
    first = static_cast<u32>(begin < 0 ? 0 : begin > most ? most : begin);
    end = static_cast<u32>(after < first ? first : after > most ? most : after);
  }
#endif
};

}  // namespace fp4kit
