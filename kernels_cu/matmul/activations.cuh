// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Activations in shared memory as bfloat16, in the order of the B fragments of a product with FP4
// weights (weights.cuh): a lane takes the eight elements of a word by one access of 16 bytes.
//
// A row of float16 is exactly the sum of two rows of bfloat16, one of float32 of three (but for
// what is below 2^-133): a token takes as many columns, whose sums are added. "Tokens" are columns
// here.
//
// An image holds, for pieces of 128 of the depth and for each of the four words of a lane, `slots`
// places of 16 bytes: place 4 token + t is what lane t of that token's column takes. Columns
// without a token may hold anything, as columns do not meet.
#pragma once

#include "common/elements.cuh"
#include "matmul/epilogue.cuh"
#include "matmul/weights.cuh"

namespace fp4kit {

#ifdef __CUDACC__
#ifdef FP4KIT_HAS_MMA

// kParts: columns of a token: 1 (bfloat16), 2 (float16) or 3 (float32).
template <int kParts>
struct ActivationSource {
  static constexpr int kType = kParts == 1 ? kTypeBf16 : kParts == 2 ? kTypeF16 : kTypeF32;
  const void* x;
  u32 columns;  // tokens times their parts
  u32 depth;    // a multiple of 8
  bool high_first;

  static constexpr u32 kBytes = kParts == 3 ? 4 : 2;  // of an element

  FP4KIT_DEVICE float value(u32 token, u32 k) const {
    return load_as_float(x, kType, static_cast<i64>(token) * depth + k);
  }
  FP4KIT_DEVICE const u8* place(u32 column, u32 k) const {
    return static_cast<const u8*>(x) + (static_cast<i64>(column / kParts) * depth + k) * kBytes;
  }
};

// Pieces of 8 elements in 128 of the depth of two tokens.
constexpr u32 kPairPieces = 32;

// A part of a number as a bfloat16: its upper bits, or those of what the parts before leave of it.
FP4KIT_DEVICE u32 part_of(float value, u32 part) {
  constexpr u32 kUpper = 0xFFFF0000u;
  const float first = as_float(as_bits(value) & kUpper);
  const float rest = sub_rn(value, first);
  const float second = as_float(as_bits(rest) & kUpper);
  const float chosen = part == 0 ? first : part == 1 ? second : sub_rn(rest, second);
  if (magnitude_bits(value) < kInfBits) return as_bits(chosen) >> 16;
  // Once is enough.
  return part != 0 ? 0 : is_nan(value) ? kQuietNanBits >> 16 : as_bits(value) >> 16;
}

// The eight elements at a place, for a column. float16 is left to finish_piece, so that nothing
// waits here.
template <int kParts>
FP4KIT_DEVICE uint4 load_piece(const u8* place, u32 column) {
  const uint4* source = reinterpret_cast<const uint4*>(place);
  if constexpr (kParts < 3) {
    return __ldg(source);
  } else {
    u32 word[8], result[4];
    unpack_vec(__ldg(source), word);
    unpack_vec(__ldg(source + 1), word + 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 low = part_of(as_float(word[2 * i]), column % kParts);
      result[i] = low | part_of(as_float(word[2 * i + 1]), column % kParts) << 16;
    }
    return pack_vec(result);
  }
}

template <int kParts>
FP4KIT_DEVICE uint4 finish_piece(u32 column, const uint4& piece) {
  if constexpr (kParts != 2) return piece;
  u32 word[4];
  unpack_vec(piece, word);
#pragma unroll
  for (u32& each : word) {
    const u32 low = part_of(half_to_float(each & 0xFFFFu), column % kParts);
    each = low | part_of(half_to_float(each >> 16), column % kParts) << 16;
  }
  return pack_vec(word);
}

// Elements in the order of raw_pairs.
template <int kForm>
FP4KIT_DEVICE uint4 arrange_piece(const uint4& piece, bool high_first) {
  if constexpr (kForm == kFormPrepared) return piece;
  const u32 k37 = byte_perm(piece.y, piece.w, 0x7632u), k26 = byte_perm(piece.y, piece.w, 0x5410u);
  const u32 k15 = byte_perm(piece.x, piece.z, 0x7632u), k04 = byte_perm(piece.x, piece.z, 0x5410u);
  return high_first ? make_uint4(k26, k37, k04, k15) : make_uint4(k37, k26, k15, k04);
}

// Token and first element of piece i of a stretch of chunks, and its place in the image of the
// stretch. A warp's lanes write whole lines for each word of a pair of tokens, and read whole lines
// of these. `pairs`: of tokens, at least one.
struct PiecePlace {
  u32 token, k, place;
};
FP4KIT_DEVICE PiecePlace piece_place(u32 i, u32 pairs, u32 slots) {
  const u32 t = i % 4, word = i / 8 % 4, line = i / 32;
  const u32 chunk = line / pairs, token = 2 * (line - chunk * pairs) + i / 4 % 2;
  return {token, chunk * kPreparedDepth + 32 * t + 8 * word,
      (chunk * 4 + word) * slots + 4 * token + t};
}

// ---- An image in memory ----

// For each piece of 128 of the depth, `columns` times kColumnBytes: whatever range of columns is
// wanted, it is one stretch. 16 places of 16 bytes of a column: lane t of its fragment has word w
// at place 4 w + t, in columns of odd number at that of word w ^ 1, so that neighbours are in other
// banks.
constexpr u32 kColumnBytes = 2 * kPreparedDepth;

FP4KIT_DEVICE u32 column_place(u32 column, u32 word, u32 t) {
  return ((word ^ column % 2) * 4 + t) * 16;
}

// Piece i of a column, in the order of the depth, at its place.
template <int kForm, int kParts>
FP4KIT_DEVICE void arrange_into(
    u8* image, const ActivationSource<kParts>& from, u32 column, u32 chunk, u32 i) {
  const u32 k = chunk * kPreparedDepth + i * 8;
  uint4 piece = make_uint4(0, 0, 0, 0);
  if (k < from.depth) piece = load_piece<kParts>(from.place(column, k), column);
  u8* place = image + (static_cast<i64>(chunk) * from.columns + column) * kColumnBytes;
  *reinterpret_cast<uint4*>(place + column_place(column, i % 4, i / 4)) =
      arrange_piece<kForm>(finish_piece<kParts>(column, piece), from.high_first);
}

// What a lane takes of a piece in shared memory, of columns from `first` on.
struct ColumnWords {
  SharedPlace place[2];  // of words of even and of odd number

  FP4KIT_DEVICE ColumnWords(SharedPlace piece, u32 first, u32 lane) : place{piece, piece} {
    const u32 g = lane / 4;
#pragma unroll
    for (u32 word = 0; word < 2; ++word) {
      place[word] = kept(piece.at(g * kColumnBytes + column_place(first + g, word, lane % 4)));
    }
  }
  FP4KIT_DEVICE ColumnWords(SharedPlace even, SharedPlace odd) : place{even, odd} {}
  FP4KIT_DEVICE ColumnWords at(u32 offset) const {
    return {place[0].at(offset), place[1].at(offset)};
  }
  // Word w, of the m-th eight columns.
  FP4KIT_DEVICE uint4 load(u32 w, u32 m) const {
    return place[w % 2].at(w / 2 * 128 + m * (8 * kColumnBytes)).load_vec();
  }
};

// ---- Magnitudes ----

// The larger of each half's magnitudes and before.
FP4KIT_DEVICE u32 larger_magnitude(u32 before, const uint4& piece) {
  const u32 word[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
  for (u32 each : word) {
    before = max_u32(before, max_u32(each << 16 & 0x7FFF0000u, each & 0x7FFF0000u));
  }
  return before;
}

// Elements times 2^96, exact below 2^32.
FP4KIT_DEVICE uint4 raise_piece(const uint4& piece) {
  constexpr u32 kUp = 0x6F806F80u;
  return make_uint4(mul_pairs(piece.x, kUp), mul_pairs(piece.y, kUp), mul_pairs(piece.z, kUp),
      mul_pairs(piece.w, kUp));
}

// Whether a token whose largest magnitude (as float32 bits) this is can be raised so: what is 2^-60
// of it is a normal number still.
FP4KIT_DEVICE bool can_be_raised(u32 largest) {
  constexpr u32 kLeast = static_cast<u32>(kF32Bias - 60) << kF32MantissaBits;
  constexpr u32 kMost = static_cast<u32>(kF32Bias + 32) << kF32MantissaBits;
  return largest == 0 || (largest >= kLeast && largest < kMost);
}

#endif  // FP4KIT_HAS_MMA
#endif  // __CUDACC__

}  // namespace fp4kit
