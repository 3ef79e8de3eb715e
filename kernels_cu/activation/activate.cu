// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// activate: gelu, silu, relu, swiglu and their derivatives of a whole array, rounded to its type.
// Must equal ReferenceBackend.activate.
//
// Elements are one flat sequence of 16-byte vecs; what fills none is done one by one. Only swiglu
// has rows, whose halves lie side by side: a result at `place` comes from `place + row * width` of
// either. The results can be measured on the way; the launcher clears `measured` (Scan in
// reduce/amax.cuh).
//
// Launch: 256 threads, a block for each tile of 256 * kUnroll vecs (or elements, not kVector).
#include "activation/activations.cuh"
#include "common/scale_layout.cuh"
#include "reduce/amax.cuh"

namespace fp4kit {

// Loads in flight of a thread; cuda_activations.UNROLL.
template <int kFunction, bool kVector>
constexpr int activate_unroll() {
  if (!kVector) return 4;
  return has_factor(kFunction) ? 1 : 2;
}

// Where the inputs of a result lie, in elements or vecs; `width` of them in a row.
template <int kFunction>
FP4KIT_DEVICE i64 source_of(i64 place, const FastDivide& width) {
  if constexpr (kFunction != kSwiglu) return place;
  return place + width(place) * width.divisor;
}

template <class T, int kFunction>
FP4KIT_DEVICE void activate_one(const typename T::Bits* __restrict__ gate,
    const typename T::Bits* __restrict__ factor, typename T::Bits* __restrict__ out, i64 place,
    i64 source, Scan<T>& scan) {
  const float value = from_input_bits<T>(__ldg(gate + source));
  float other = 0.0f;
  if constexpr (has_factor(kFunction)) other = from_input_bits<T>(__ldg(factor + source));
  const u32 bits = to_output_bits<T>(activation<kFunction, true>(value, other));
  out[place] = static_cast<typename T::Bits>(bits);
  scan.add(Words<T, 8 / T::kSize>{{bits, 0}});
}

// kVector: all addresses on 16 bytes and, for swiglu, rows of whole vecs. `width`, `magic`,
// `shift`: of a row of the result. A null `measured` asks for no amax.
template <class T, int kFunction, bool kVector>
__global__ void __launch_bounds__(kThreads, 4)
    activate_kernel(const typename T::Bits* __restrict__ gate,
        const typename T::Bits* __restrict__ factor, typename T::Bits* __restrict__ out,
        u32* __restrict__ measured, i64 size, i64 width, i64 magic, i64 shift) {
  constexpr int kUnroll = activate_unroll<kFunction, kVector>();
  const FastDivide divide(width, magic, shift);
  const i64 first = static_cast<i64>(blockIdx.x) * (kThreads * kUnroll) + threadIdx.x;
  Scan<T> scan;
  if constexpr (kVector) {
    constexpr int kVec = Vec<T>::kCount;
    const i64 vecs = size / kVec;
    Vec<T> gates[kUnroll];
    Vec<T> factors[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const i64 place = first + k * kThreads;
      const i64 source = source_of<kFunction>(place, divide) * kVec;
      const i64 valid = place < vecs ? kVec : 0;
      load_elements<true, T>(gate + source, valid, gates[k]);
      if constexpr (has_factor(kFunction)) {
        load_elements<true, T>(factor + source, valid, factors[k]);
      }
    }
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const i64 place = first + k * kThreads;
      if (place >= vecs) continue;
      const Vec<T> results = activate_all<T, kFunction>(gates[k], factors[k]);
      store_vec<T>(out + place * kVec, results);
      if (measured != nullptr) scan.add(results);
    }
    const i64 tail = vecs * kVec + threadIdx.x;
    if (blockIdx.x == gridDim.x - 1 && tail < size) {
      activate_one<T, kFunction>(gate, factor, out, tail, tail, scan);
    }
  } else {
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const i64 place = first + k * kThreads;
      if (place >= size) continue;
      activate_one<T, kFunction>(
          gate, factor, out, place, source_of<kFunction>(place, divide), scan);
    }
  }
  if (measured != nullptr) scan.store(measured, measured + 1);
}

}  // namespace fp4kit
