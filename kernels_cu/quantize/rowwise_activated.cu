// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// activate and quantize in one read: the activated elements never reach memory. Must equal
// activation/activate.cu and quantize/rowwise_any.cu one after the other.
//
// Algorithm: quantize/rowwise.cu's, whose conditions hold for the result; a group's elements are
// activated, and rounded to their type, as they arrive.
//
// Memory layout: as in quantize/rowwise.cu. gate and factor are what activation/activate.cu takes:
// for swiglu rows of twice the length, of which they are the halves.
//
// Launch: 256 threads; at most as many blocks as the device holds at once.
#include "activation/activations.cuh"
#include "quantize/rowwise.cuh"

namespace fp4kit {

template <class Format, class ElementType, int kFunction>
struct ActivatedSource {
  using T = ElementType;
  using Loaded = ActivatedGroup<T, kFunction>;
  const typename T::Bits* __restrict__ gate;
  const typename T::Bits* __restrict__ factor;
  RowShape shape;

  __device__ __forceinline__ void load(u32 group, bool inside, Loaded& loaded) const {
    u64 source = group;
    // The other half of each row before lies between.
    if constexpr (kFunction == kSwiglu) {
      const u32 row = row_of_block(group / Format::kGroups, shape);
      source += static_cast<u64>(row) * (shape.blocks * Format::kGroups);
    }
    loaded.load(gate, factor, source, inside);
  }
  __device__ __forceinline__ Words<T> elements(const Loaded& loaded) const {
    return loaded.elements();
  }
};

template <class Format, class T, int kRecipe, bool kSecond, int kLayout, int kFunction>
__global__ void __launch_bounds__(kThreads, activated_blocks<T, kFunction>())
    quantize_rowwise_activated_kernel(const typename T::Bits* __restrict__ gate,
        const typename T::Bits* __restrict__ factor, const float* __restrict__ second,
        u8* __restrict__ packed, u8* __restrict__ block_scale, i64 groups, i64 rows, i64 blocks,
        i64 stored_rows, i64 stored_cols, i64 magic, i64 shift, i64 high_first, i64 rule,
        i64 has_padding) {
  __shared__ FactorTable table;
  const RowShape shape{static_cast<u32>(blocks), static_cast<u32>(magic), static_cast<u32>(shift),
      static_cast<u32>(stored_cols)};
  const ActivatedSource<Format, T, kFunction> source{gate, factor, shape};
  quantize_groups<Format, kRecipe, kSecond, kLayout>(source, packed, block_scale, second, table,
      Rounding<>(), blockIdx.x * kThreads, static_cast<u32>(groups), gridDim.x * kThreads, shape,
      static_cast<int>(rule), high_first != 0);
  if (kLayout != kLayoutLinear && has_padding) {
    clear_padding(block_scale, kLayout, rows, blocks, stored_rows, stored_cols);
  }
}

}  // namespace fp4kit
