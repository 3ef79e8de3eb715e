// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Moving elements between memory and registers: by 16-byte accesses where the pointer and every row
// start on 16 bytes (so that an access is either inside or outside a row), else one by one. The 16
// elements of a group stay packed in 32-bit words until they are needed as floats.
#pragma once

#include "common/conversions.cuh"

namespace fp4kit {

constexpr int kNoFunction = -1;

// kCount elements of type T as they lie in memory.
template <class T, int kElements = kGroupSize>
struct Words {
  static constexpr int kCount = kElements;
  static constexpr int kWords = kElements * T::kSize / 4;
  u32 word[kWords];

  // Bits of element i, which must be a constant after unrolling.
  FP4KIT_HD u32 bits(int i) const {
    if constexpr (T::kSize == 4) {
      return word[i];
    } else {
      return i % 2 ? word[i / 2] >> 16 : word[i / 2] & 0xFFFFu;
    }
  }

  FP4KIT_HD float value(int i) const {
    if constexpr (SameType<T, Bf16>::kValue) {
      // Cheaper than isolating the half first.
      return as_float(i % 2 ? word[i / 2] & 0xFFFF0000u : word[i / 2] << 16);
    } else {
      return from_input_bits<T>(bits(i));
    }
  }
};

// Running maximum of magnitude bits. The fast form lets NaN win, so that a result above T::kInf
// tells that the careful form, in which NaN counts as 0, must look again.
template <class T>
struct MaxBits {
  static constexpr u32 kMask = T::kSize == 4 ? kMagnitudeMask : 0x7FFF7FFFu;
  u32 packed = 0;  // its signs mean nothing
  u32 low = 0;     // only where there is no packed maximum

  FP4KIT_HD MaxBits() = default;

  FP4KIT_HD explicit MaxBits(u32 first) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    packed = first;
#else
    add(first);
#endif
  }

  FP4KIT_HD void join(const MaxBits& other) {
    add(other.packed);
    low = max_u32(low, other.low);
  }

  FP4KIT_HD void add(u32 word) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    // Maxima of floats here, as they take magnitudes for free.
    if constexpr (SameType<T, Bf16>::kValue) {
      asm("max.NaN.xorsign.abs.bf16x2 %0, %0, %1;" : "+r"(packed) : "r"(word));
    } else if constexpr (SameType<T, F16>::kValue) {
      asm("max.NaN.xorsign.abs.f16x2 %0, %0, %1;" : "+r"(packed) : "r"(word));
    } else {
      float value = __uint_as_float(packed);
      asm("max.NaN.xorsign.abs.f32 %0, %0, %1;" : "+f"(value) : "f"(__uint_as_float(word)));
      packed = as_bits(value);
    }
#else
    // The low half below a high one decides only between equal high halves.
    const u32 magnitude = word & kMask;
    packed = max_u32(packed, magnitude);
    if constexpr (T::kSize == 2) low = max_u32(low, magnitude & 0xFFFFu);
#endif
  }

  FP4KIT_HD void add_careful(u32 word) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    // Of a NaN and a number these maxima are the number, which `packed` always is.
    if constexpr (SameType<T, Bf16>::kValue) {
      asm("max.xorsign.abs.bf16x2 %0, %0, %1;" : "+r"(packed) : "r"(word));
    } else if constexpr (SameType<T, F16>::kValue) {
      asm("max.xorsign.abs.f16x2 %0, %0, %1;" : "+r"(packed) : "r"(word));
    } else {
      float value = __uint_as_float(packed);
      asm("max.xorsign.abs.f32 %0, %0, %1;" : "+f"(value) : "f"(__uint_as_float(word)));
      packed = as_bits(value);
    }
#else
    if constexpr (T::kSize == 4) {
      const u32 magnitude = word & kMagnitudeMask;
      add(magnitude > T::kInf ? 0 : magnitude);
    } else {
      const u32 first = word & 0x7FFFu;
      const u32 second = (word >> 16) & 0x7FFFu;
      add((first > T::kInf ? 0 : first) | ((second > T::kInf ? 0 : second) << 16));
    }
#endif
  }

  FP4KIT_HD u32 half(int number) const {
    const u32 magnitude = packed & kMask;
    if (number == 1) return magnitude >> 16;
    return max_u32(magnitude & (kPackedHalves ? 0xFFFFu : 0u), low);
  }

  FP4KIT_HD u32 result() const {
    // Hidden, or NVRTC 12.9 makes it the absolute value of a float, which flushes subnormals.
    if constexpr (T::kSize == 4) return opaque(packed & kMask);
    return max_u32(half(0), half(1));
  }

 private:
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  static constexpr bool kPackedHalves = true;
#else
  static constexpr bool kPackedHalves = false;
#endif
};

// The maximum of some words, in two chains that do not wait for each other.
template <class T, int kCount>
FP4KIT_HD MaxBits<T> maximum_of(const u32 (&word)[kCount]) {
  MaxBits<T> even(word[0]);
  MaxBits<T> odd(word[1]);
#pragma unroll
  for (int i = 2; i < kCount; i += 2) {
    even.add(word[i]);
    odd.add(word[i + 1]);
  }
  even.join(odd);
  return even;
}

// The largest magnitude without NaN, as bits of T; `raw`: with NaN as the largest.
template <class T, int kElements>
FP4KIT_HD u32 group_amax_bits(const Words<T, kElements>& x, u32& raw) {
  raw = maximum_of<T>(x.word).result();
  if (raw <= T::kInf) return raw;
  MaxBits<T> numbers;
#pragma unroll
  for (int i = 0; i < Words<T, kElements>::kWords; ++i) numbers.add_careful(x.word[i]);
  return numbers.result();
}

// kCount floats rounded once to Out, as words. Without kCanonical NaN may come out as any NaN.
template <class Out, bool kCanonical, int kCount>
FP4KIT_HD void pack_words(const float (&value)[kCount], u32* word) {
#pragma unroll
  for (int i = 0; i < kCount * Out::kSize / 4; ++i) {
    if constexpr (Out::kSize == 4) {
      word[i] = kCanonical ? to_output_bits<Out>(value[i]) : as_bits(value[i]);
    } else if constexpr (kCanonical) {
      word[i] = to_output_bits<Out>(value[2 * i]) | (to_output_bits<Out>(value[2 * i + 1]) << 16);
    } else {
      word[i] = pack_pair<Out>(value[2 * i], value[2 * i + 1]);
    }
  }
}

#ifdef __CUDACC__

// The words of a 16-byte access, and the access that stores them.
FP4KIT_DEVICE void unpack_vec(const uint4& vec, u32* word) {
  word[0] = vec.x;
  word[1] = vec.y;
  word[2] = vec.z;
  word[3] = vec.w;
}
FP4KIT_DEVICE uint4 pack_vec(const u32* word) {
  return make_uint4(word[0], word[1], word[2], word[3]);
}

// The largest of a warp's values whose lanes differ by distances kLeast .. kMost, for all of them.
template <u32 kMost, u32 kLeast = 1>
FP4KIT_DEVICE u32 max_across(u32 value) {
#pragma unroll
  for (u32 distance = kMost; distance >= kLeast; distance /= 2) {
    value = max_u32(value, __shfl_xor_sync(0xFFFFFFFFu, value, distance));
  }
  return value;
}

// The sum of a warp's values, for all of its lanes.
FP4KIT_DEVICE u32 sum_across(u32 value) {
#pragma unroll
  for (u32 distance = 16; distance != 0; distance /= 2) {
    value += __shfl_xor_sync(0xFFFFFFFFu, value, distance);
  }
  return value;
}

// A group's elements x[0 .. valid), the rest +0.0. valid may be negative or beyond the count.
template <bool kVector, class T, int kElements>
FP4KIT_DEVICE void load_elements(
    const typename T::Bits* __restrict__ x, i64 valid, Words<T, kElements>& result) {
  constexpr int kWords = Words<T, kElements>::kWords;
  if constexpr (kVector) {
    static_assert(kWords % 4 == 0, "whole 16-byte vecs");
#pragma unroll
    for (int i = 0; i < kWords / 4; ++i) {
      uint4 vec = make_uint4(0, 0, 0, 0);
      if (i * (16 / T::kSize) < valid) vec = __ldg(reinterpret_cast<const uint4*>(x) + i);
      unpack_vec(vec, result.word + 4 * i);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (T::kSize == 4) {
        result.word[i] = i < valid ? __ldg(x + i) : 0;
      } else {
        const u32 first = 2 * i < valid ? __ldg(x + 2 * i) : 0;
        const u32 second = 2 * i + 1 < valid ? __ldg(x + 2 * i + 1) : 0;
        result.word[i] = first | (second << 16);
      }
    }
  }
}

// The code bytes of a vec, as words. Nothing reads them again.
template <bool kVector, int kBytes, int kWords>
FP4KIT_DEVICE void load_codes(const u8* __restrict__ packed, u32 (&word)[kWords]) {
  if constexpr (kVector && kBytes == 8) {
    const uint2 both = __ldcs(reinterpret_cast<const uint2*>(packed));
    word[0] = both.x;
    word[1] = both.y;
  } else if constexpr (kVector && kBytes == 4) {
    word[0] = __ldcs(reinterpret_cast<const unsigned int*>(packed));
  } else if constexpr (kVector && kBytes == 2) {
    word[0] = __ldcs(reinterpret_cast<const unsigned short*>(packed));
  } else {
#pragma unroll
    for (int i = 0; i < kWords; ++i) word[i] = 0;
#pragma unroll
    for (int i = 0; i < kBytes; ++i) {
      word[i / 4] |= static_cast<u32>(__ldg(packed + i)) << (8 * (i % 4));
    }
  }
}

// kStreams: the stores do not stay in L2; without it they stay until the rest of their line is
// written.
template <bool kStreams, class Access>
FP4KIT_DEVICE void store_access(void* out, const Access& value) {
  if constexpr (kStreams) {
    __stcs(static_cast<Access*>(out), value);
  } else {
    *static_cast<Access*>(out) = value;
  }
}

template <bool kStreams = true, int kWords>
FP4KIT_DEVICE void store_words(void* out, const u32 (&word)[kWords]) {
  if constexpr (kWords == 1) {
    store_access<kStreams>(out, word[0]);
  } else if constexpr (kWords == 2) {
    store_access<kStreams>(out, make_uint2(word[0], word[1]));
  } else {
    static_assert(kWords % 4 == 0, "whole 16-byte vecs");
#pragma unroll
    for (int i = 0; i < kWords / 4; ++i) {
      store_access<kStreams>(static_cast<uint4*>(out) + i, pack_vec(word + 4 * i));
    }
  }
}

template <bool kVector, bool kStreams = true, int kWords>
FP4KIT_DEVICE void store_codes(u8* __restrict__ out, const u32 (&word)[kWords]) {
  if constexpr (kVector) {
    store_words<kStreams>(out, word);
  } else {
#pragma unroll
    for (int i = 0; i < 4 * kWords; ++i) out[i] = static_cast<u8>(word[i / 4] >> (8 * (i % 4)));
  }
}

template <bool kVector, class T, int kElements>
FP4KIT_DEVICE void store_elements(
    typename T::Bits* __restrict__ out, i64 valid, const Words<T, kElements>& x) {
  if constexpr (kVector) {
    constexpr int kVec = 16 / T::kSize;
#pragma unroll
    for (int i = 0; i < Words<T, kElements>::kWords / 4; ++i) {
      if (i * kVec < valid) store_access<true>(out + i * kVec, pack_vec(x.word + 4 * i));
    }
  } else {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      if (i < valid) out[i] = static_cast<typename T::Bits>(x.bits(i));
    }
  }
}

#endif  // __CUDACC__

}  // namespace fp4kit
