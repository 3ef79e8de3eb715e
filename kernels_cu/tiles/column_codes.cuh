// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Codes of the columns of a tile. A thread takes the column that a 32-bit word of each row belongs
// to, or the two columns of 16-bit elements: those are encoded together, straight from the words.
#pragma once

#include "rht/rht.cuh"
#include "tiles/block.cuh"

namespace fp4kit {

// Whether pairs of columns can be encoded together: the plain arithmetic of multiplied elements.
template <class C>
FP4KIT_HD constexpr bool encodes_pairs() {
#ifdef FP4KIT_HARDWARE_E2M1
  return false;
#else
  return C::T::kSize == 2 && !C::kRotateCols && !C::V::kStochastic && !C::kSearches &&
         !recipe_divides(C::kRecipe) && recipe_keeps_negative_zero(C::kRecipe);
#endif
}

// Codes of two columns whose words these are, under ordinary scales and without NaN or infinity.
template <class C>
FP4KIT_DEVICE void encode_pair(
    const u32 (&word)[C::kBlock], const float (&factor)[2], u32 (&code)[2][C::Format::kGroups][2]) {
  using T = typename C::T;
#pragma unroll
  for (u32 first = 0; first < C::kBlock; first += 8) {
    u32 fours[2];
#pragma unroll
    for (u32 f = 0; f < 2; ++f) {
      const u32* four = word + first + 4 * f;
      u32 joined[2];
#pragma unroll
      for (u32 half = 0; half < 2; ++half) {
        u32 sum[4];
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
          sum[i] = e2m1_magic<false>(mul_magnitude_rn(half_value<T>(four[i], half), factor[half]));
        }
        joined[half] = e2m1_join4(sum[0], sum[1], sum[2], sum[3]);
      }
      const u32 even = sign_perm(four[0], four[2], 0xFBD9u);
      const u32 odd = sign_perm(four[1], four[3], 0xFBD9u);
      fours[f] =
          byte_perm(joined[0], joined[1], 0x5410u) | (even & 0x08080808u) | (odd & 0x80808080u);
    }
    const u32 l = first / kGroupSize;
    const u32 i = first % kGroupSize / 8;
    code[0][l][i] = byte_perm(fours[0], fours[1], 0x5410u);
    code[1][l][i] = byte_perm(fours[0], fours[1], 0x7632u);
  }
}

template <class R, class T, int kAcross>
FP4KIT_DEVICE Words<R> rotate_column(const ColumnGroup<T, kAcross>& signed_group, u32 column) {
  float v[kGroupSize];
  signed_group.column(static_cast<int>(column), v);
  return rotate_floats<R>(v);
}

template <class C>
FP4KIT_DEVICE u32 column_word(const u32* first, u32 i) {
  return first[C::TileType::offset(i, 0)];
}

// Codes and scales of a block of the columns that share words: word number `w` of a row of the
// tile. `left`: rows inside of the matrix; `piece`: the block's number in the first of the columns.
template <class C>
FP4KIT_DEVICE void encode_columns(TileShared<C>& shared, const u32 (&word)[C::kBlock], u32 w,
    u32 left, u64 piece, u64 pitch, u32 stream, const Options& options,
    u32 (&code)[2][C::Format::kGroups][2], u32 (&byte)[2]) {
  using Format = typename C::Format;
  using T = typename C::T;
  using R = typename C::ColR;
  constexpr u32 kGroups = Format::kGroups;
  constexpr u32 kBlock = C::kBlock;
  constexpr u32 kHalves = C::TileType::kPerWord;
  bool done = false;
  if constexpr (encodes_pairs<C>()) {
    const MaxBits<T> maximum = maximum_of<T>(word);
    float factor[2];
    done = true;
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
      const u32 bits = maximum.half(half);
      const Level& level = level_at(shared.cols, w * 2 + half);
      byte[half] = block_scale_byte<Format, T, C::kRecipe, C::kSecond>(
          from_input_bits<T>(bits), level, options.rule);
      factor[half] = factor_at(shared.cols, byte[half], level);
      done = done && bits < T::kInf && is_ordinary_scale<Format>(byte[half], options.rule) &&
             is_ordinary_level<C::kRecipe>(level);
    }
    if (done) encode_pair<C>(word, factor, code);
  }
  if (!done) {
    // With random numbers beside them the signed words do not fit registers.
    constexpr bool kFromWords = C::kRotateCols && !C::V::kStochastic;
    ColumnGroup<T, kHalves> group[kGroups];
    if constexpr (kFromWords) {
#pragma unroll
      for (u32 i = 0; i < kBlock; ++i) group[i / kGroupSize].word[i % kGroupSize][0] = word[i];
#pragma unroll
      for (u32 l = 0; l < kGroups; ++l) group[l].flip_signs(options.col_mask);
    }
#pragma unroll(encodes_pairs<C>() ? 1 : kHalves)
    for (u32 half = 0; half < kHalves; ++half) {
      const u32 col = w * kHalves + half;
      Words<R> x[kGroups];
      if constexpr (kFromWords) {
#pragma unroll
        for (u32 l = 0; l < kGroups; ++l) {
          const bool inside = kGroups == 1 || l * kGroupSize < left;
          x[l] = inside ? rotate_column<R>(group[l], half) : Words<R>{};
        }
      } else if constexpr (C::kRotateCols) {
        Words<T> elements[kGroups];
        gather_column<T>(word, half, elements);
        maybe_rotate<true>(elements, options.col_mask, left, x);
      } else {
        gather_column<T>(word, half, x);
      }
      u32 raw[kGroups];
      const float amax = block_amax_of<Format, R>(x, raw);
      const u64 group = (piece + half * pitch) * kGroups;
      Coded<Format> coded;
      encode_block(shared, x, amax, raw, shared.cols, col, options, group, 1, stream, coded);
      const bool first = half == 0;
#pragma unroll
      for (u32 l = 0; l < kGroups; ++l) {
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
          // Selected, not indexed: the array stays in registers.
          code[0][l][i] = first ? coded.code[l][i] : code[0][l][i];
          code[1][l][i] = first ? code[1][l][i] : coded.code[l][i];
        }
      }
      byte[0] = first ? coded.byte : byte[0];
      byte[1] = first ? byte[1] : coded.byte;
    }
  }
}

}  // namespace fp4kit
