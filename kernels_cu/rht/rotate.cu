// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// rotate: the Hadamard transform of groups of 16 elements along rows or columns, forth and back.
// Must equal ReferenceBackend.rotate.
//
// Rows: a thread rotates a group, or two of 16-bit elements, whose loads are in flight together. Of
// two neighbouring lanes each then stores half of both groups: a store writes whole sectors.
// Columns: a thread takes two columns of 16 rows if either type has 16 bits, else one.
//
// Signs are changed on the bits as they lie in memory. NaN is rare: it is only made canonical where
// the maximum of a thread's results shows one.
//
// Launch: 256 threads. Without kVector single elements are moved; columns with kVector need an even
// number of columns.
#include "common/scale_layout.cuh"
#include "rht/rht.cuh"

namespace fp4kit {

// Rounds to bfloat16 in between, unless the result is rounded so anyway.
template <class Out>
FP4KIT_DEVICE void round_between(float (&v)[kGroupSize], bool to_bf16) {
  if (SameType<Out, Bf16>::kValue || !to_bf16) return;
#pragma unroll
  for (int i = 0; i < kGroupSize; i += 2) {
    const Words<Bf16, 2> pair{{pack_pair<Bf16>(v[i], v[i + 1])}};
    v[i] = pair.value(0);
    v[i + 1] = pair.value(1);
  }
}

// Makes the NaN of a word of results positive and canonical.
template <class Out>
FP4KIT_DEVICE u32 canonical_nan(u32 word) {
  const u32 nan = to_output_bits<Out>(as_float(kQuietNanBits));
  if constexpr (Out::kSize == 4) {
    return (word & kMagnitudeMask) > Out::kInf ? nan : word;
  } else {
    const u32 first = (word & 0x7FFFu) > Out::kInf ? nan : word & 0xFFFFu;
    const u32 second = ((word >> 16) & 0x7FFFu) > Out::kInf ? nan : word >> 16;
    return first | (second << 16);
  }
}

template <class Out, int kCount>
FP4KIT_DEVICE void canonical_nans(u32* word) {
  MaxBits<Out> maximum;
#pragma unroll
  for (int i = 0; i < kCount; ++i) maximum.add(word[i]);
  if (maximum.result() <= Out::kInf) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) word[i] = canonical_nan<Out>(word[i]);
}

template <class Out, class T>
FP4KIT_DEVICE Words<Out> rotated_group(const Words<T>& x, u32 before, u32 after, bool to_bf16) {
  float v[kGroupSize];
  signed_values(x, before, v);
  butterfly(v);
  round_between<Out>(v, to_bf16);
  Words<Out> result;
  pack_words<Out, false>(v, result.word);
  flip_signs(result, after);
  canonical_nans<Out, Words<Out>::kWords>(result.word);
  return result;
}

// Lanes 2k have groups k of 32, lanes 2k + 1 groups 16 + k. `first` is group 0, `groups` of them
// exist.
template <class Out>
FP4KIT_DEVICE void store_groups(
    typename Out::Bits* __restrict__ first, i64 groups, const Words<Out>& x) {
  constexpr int kVec = 16 / Out::kSize;
  const u32 lane = threadIdx.x % 32;
  const bool odd = lane % 2 != 0;
  typename Out::Bits* const out = first + lane / 2 * kGroupSize + lane % 2 * kVec;
#pragma unroll
  for (int sector = 0; sector < Words<Out>::kWords / 8; ++sector) {
    u32 low[4];
    u32 high[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 mine = x.word[8 * sector + i];
      const u32 next = x.word[8 * sector + 4 + i];
      const u32 other = __shfl_xor_sync(0xFFFFFFFFu, odd ? mine : next, 1);
      low[i] = odd ? other : mine;
      high[i] = odd ? next : other;
    }
    if (lane / 2 < groups) store_words(out + sector * 2 * kVec, low);
    if (16 + lane / 2 < groups) {
      store_words(out + 16 * kGroupSize + sector * 2 * kVec, high);
    }
  }
}

template <class T, class Out, bool kVector>
__global__ void __launch_bounds__(kThreads)
    rotate_rows_kernel(const typename T::Bits* __restrict__ x, typename Out::Bits* __restrict__ out,
        i64 groups, i64 mask, i64 to_bf16, i64 inverse) {
  constexpr int kEach = T::kSize == 2 ? FP4KIT_ROTATE_UNROLL_2 : FP4KIT_ROTATE_UNROLL_4;
  const u32 before = inverse ? 0 : static_cast<u32>(mask);
  const u32 after = inverse ? static_cast<u32>(mask) : 0;
  const u32 lane = threadIdx.x % 32;
  const i64 first = (static_cast<i64>(blockIdx.x) * kThreads + (threadIdx.x - lane)) * kEach;
  const u32 mine = lane / 2 + lane % 2 * 16;
  Words<T> elements[kEach];
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    // The last group again, not nothing: loads without a condition stay together.
    const i64 group = first + k * 32 + mine;
    const i64 there = group < groups ? group : groups - 1;
    load_elements<kVector>(x + there * kGroupSize, kGroupSize, elements[k]);
  }
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    const Words<Out> result = rotated_group<Out>(elements[k], before, after, to_bf16 != 0);
    const i64 start = first + k * 32;
    if constexpr (kVector) {
      store_groups<Out>(out + start * kGroupSize, groups - start, result);
    } else {
      store_elements<false, Out>(
          out + (start + mine) * kGroupSize, start + mine < groups ? kGroupSize : 0, result);
    }
  }
}

template <class T, class Out, bool kVector>
__global__ void __launch_bounds__(kThreads) rotate_columns_kernel(
    const typename T::Bits* __restrict__ x, typename Out::Bits* __restrict__ out, i64 cols,
    i64 magic, i64 shift, i64 total, i64 mask, i64 to_bf16, i64 inverse) {
  constexpr int kAcross = kVector ? 2 : 1;
  const i64 index = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= total) return;
  const i64 width = cols / kAcross;
  const FastDivide divide(width, magic, shift);
  const i64 down = divide(index);
  const i64 start = down * kGroupSize * cols + (index - down * width) * kAcross;
  ColumnGroup<T, kAcross> group;
  group.load(x + start, cols);
  group.flip_signs(inverse ? 0 : static_cast<u32>(mask));
  float v[kAcross][kGroupSize];
#pragma unroll
  for (int c = 0; c < kAcross; ++c) {
    group.column(c, v[c]);
    butterfly(v[c]);
    round_between<Out>(v[c], to_bf16 != 0);
  }
  ColumnGroup<Out, kAcross> result;
#pragma unroll
  for (int i = 0; i < kGroupSize; ++i) {
    if constexpr (Out::kSize == 4) {
#pragma unroll
      for (int c = 0; c < kAcross; ++c) result.word[i][c] = as_bits(v[c][i]);
    } else {
      result.word[i][0] = pack_pair<Out>(v[0][i], kAcross == 2 ? v[kAcross - 1][i] : 0.0f);
    }
  }
  result.flip_signs(inverse ? static_cast<u32>(mask) : 0);
  canonical_nans<Out, kGroupSize * ColumnGroup<Out, kAcross>::kRowWords>(&result.word[0][0]);
  typename Out::Bits* row = out + start;
#pragma unroll
  for (int i = 0; i < kGroupSize; ++i, row += cols) result.store_row(row, i);
}

}  // namespace fp4kit
