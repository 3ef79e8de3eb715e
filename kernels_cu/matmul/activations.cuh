// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// bfloat16 activations in shared memory, in the order of the B fragments of a product with FP4
// weights (weights.cuh): a lane takes the eight elements of a word by one access of 16 bytes.
//
// An image holds, for pieces of 128 of the depth and for each of the four words of a lane, `slots`
// places of 16 bytes: place 4 token + t is what lane t of that token's column takes. Columns
// without a token may hold anything, as columns do not meet.
#pragma once

#include "common/elements.cuh"
#include "matmul/weights.cuh"

namespace fp4kit {

#ifdef __CUDACC__
#ifdef FP4KIT_HAS_MMA

struct ActivationSource {
  const u16* x;
  u32 tokens;
  u32 depth;  // a multiple of 8
  bool high_first;
};

// Pieces of 8 elements in 128 of the depth of two tokens.
constexpr u32 kPairPieces = 32;

// Eight elements of a token before `end`, from k on; zeros beyond that and the depth.
FP4KIT_DEVICE uint4 load_piece(const ActivationSource& from, u32 token, u32 end, u32 k) {
  if (token >= end || k >= from.depth) return make_uint4(0, 0, 0, 0);
  const u16* place = from.x + static_cast<i64>(token) * from.depth + k;
  return __ldg(reinterpret_cast<const uint4*>(place));
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
