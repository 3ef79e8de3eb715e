// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// rotate: the Hadamard transform of groups of 16 elements along rows or columns, forth and back.
// vector_amax: largest magnitudes of rows or columns (or of groups of them), perhaps after the
// rotation. Must equal ReferenceBackend.rotate and plan_amax.
//
// Algorithm: a thread takes a group of 16 elements. Groups of neighbouring columns lie side by
// side, so that a warp reads and writes whole lines in either direction.
//
// Launch: 256 threads, one thread per group. vector_amax raises zeroed results by integer maxima of
// the bits of positive floats: their order does not matter.
#include "rotation.cuh"

namespace fp4kit {

// Group `index`: the offset of its first element and the distance between elements.
template <bool kColumns>
struct Group {
  i64 vector;
  i64 start;
  i64 step;

  __device__ __forceinline__ Group(i64 index, i64 cols, i64 groups) {
    if constexpr (kColumns) {
      vector = index % cols;
      start = index / cols * (kLaneElements * cols) + vector;
      step = cols;
    } else {
      vector = index / groups;
      start = vector * cols + index % groups * kLaneElements;
      step = 1;
    }
  }
};

// The group's elements; `valid` of them exist, the others are +0.0.
template <class T>
__device__ __forceinline__ Words<T> load_group(const typename T::Bits* __restrict__ x, i64 start,
                                               i64 step, i64 valid) {
  Words<T> result;
  constexpr int kPerWord = 4 / T::kSize;
#pragma unroll
  for (int i = 0; i < Words<T>::kWords; ++i) {
    u32 word = 0;
#pragma unroll
    for (int k = 0; k < kPerWord; ++k) {
      const int e = i * kPerWord + k;
      if (e < valid) word |= static_cast<u32>(__ldg(x + start + e * step)) << (16 * k);
    }
    result.word[i] = word;
  }
  return result;
}

template <class T, class Out, bool kColumns>
__global__ void __launch_bounds__(kThreads)
    rotate_kernel(const typename T::Bits* __restrict__ x, typename Out::Bits* __restrict__ out,
                  i64 cols, i64 groups, i64 total, i64 mask, i64 to_bf16, i64 inverse) {
  const i64 index = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= total) return;
  const Group<kColumns> group(index, cols, groups);
  const Words<T> elements = load_group<T>(x, group.start, group.step, kLaneElements);
  float v[kLaneElements];
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) v[i] = elements.value(i);
  if (!inverse) flip_signs(v, static_cast<u32>(mask));
  butterfly(v);
  if (inverse) flip_signs(v, static_cast<u32>(mask));
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) {
    const float value = to_bf16 ? round_to<Bf16>(v[i]) : v[i];
    out[group.start + i * group.step] = static_cast<typename Out::Bits>(to_output_bits<Out>(value));
  }
}

// R is what the rotated elements are; without kRotate it is T.
template <class T, class R, bool kColumns, bool kRotate>
__global__ void __launch_bounds__(kThreads)
    vector_amax_kernel(const typename T::Bits* __restrict__ x, u32* __restrict__ result, i64 rows,
                       i64 cols, i64 groups, i64 total, i64 scales, i64 vectors_per_scale,
                       i64 mask) {
  const i64 index = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
  u32 bits = 0;
  i64 vector = 0;
  if (index < total) {
    const Group<kColumns> group(index, cols, groups);
    vector = group.vector;
    const i64 place = kColumns ? index / cols : index % groups;
    const i64 valid = (kColumns ? rows : cols) - place * kLaneElements;
    const Words<T> elements = load_group<T>(x, group.start, group.step, valid);
    u32 raw;
    if constexpr (kRotate) {
      const Words<R> rotated = rotate_lane<R>(elements, static_cast<u32>(mask));
      bits = lane_amax_bits<R>(rotated, raw);
    } else {
      bits = lane_amax_bits<R>(elements, raw);
    }
    bits = as_bits(from_input_bits<R>(bits));
  }
  if (scales == 1) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      bits = max_u32(bits, __shfl_xor_sync(0xFFFFFFFFu, bits, distance));
    }
    if (threadIdx.x % 32 == 0 && bits != 0) atomicMax(result, bits);
  } else if (bits != 0) {
    atomicMax(result + vector / vectors_per_scale, bits);
  }
}

}  // namespace fp4kit
