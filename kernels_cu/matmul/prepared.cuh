// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Where codes and scales lie in tiles of prepared weights: fp4kit/backend/prepared.py says it in
// full. A tile is 16 rows x 128 of the depth, in the order in which the lanes of a warp take it as
// the A operand of mma.sync.m16n8k16: lane 4 g + t has 32 codes of rows 2 g and 2 g + 1.
#pragma once

#include "common/types.cuh"

namespace fp4kit {

constexpr int kPreparedRows = 16;
constexpr int kPreparedDepth = 128;

template <class Format>
struct PreparedTile {
  static constexpr int kBlocks = kPreparedDepth / Format::kBlockSize;  // of a row
  static constexpr int kLaneBlocks = kBlocks / 4;                      // of a lane's row
  static constexpr int kCodeBytes = kPreparedRows * kPreparedDepth / 2;
  static constexpr int kScaleBytes = kPreparedRows * kBlocks;
  static constexpr int kBytes = kCodeBytes + kScaleBytes;

  // Place of the word of codes 8 i .. 8 i + 7 of a row.
  FP4KIT_HD static constexpr u32 word_place(u32 row, u32 i) {
    return (row % 2 * 32 + row / 2 * 4 + i / 4) * 16 + i % 4 * 4;
  }
  FP4KIT_HD static constexpr u32 scale_place(u32 row, u32 block) {
    return kCodeBytes + ((row / 2 * 4 + block / kLaneBlocks) * 2 + row % 2) * kLaneBlocks +
           block % kLaneBlocks;
  }
};

// E8M0 scales above the first times a code are beyond bfloat16, which holds products times 2^-7.
// Below the other one the smallest codes are lost there.
constexpr u32 kMostScaleE8m0 = 135, kLeastScaleE8m0 = 2;
// All codes of a word but zeros.
constexpr u32 kCodeMagnitudes = 0x77777777u;

// Scales that the kernels of small products do not multiply by: negative or NaN E4M3, large E8M0.
template <class Format>
FP4KIT_HD bool is_odd_scale(u32 byte) {
  return byte > (Format::kIsMx ? kMostScaleE8m0 : E4m3::kMaxCode);
}

// Eight codes, the first in the lowest nibble, to a word of a tile: codes 0, 2, 4, 6 in the low
// half, 1, 3, 5, 7 in the high one, the bits of each half (s the sign, m the magnitude's three)
//   15 s0  14 m6.1  13 m6.0  12 s2  11 s6  10 m6.2  9 s4  8..6 m0  5..3 m2  2..0 m4
// so that shifts by 0, 3 and 6 put three of the pairs where a bfloat16 has them.
FP4KIT_HD u32 prepare_word(u32 codes) {
  u32 word = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    u32 code[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) code[j] = codes >> (8 * j + 4 * half) & 15u;
    const u32 bits = (code[0] >> 3) << 15 | (code[0] & 7u) << 6 | (code[1] >> 3) << 12 |
                     (code[1] & 7u) << 3 | (code[2] >> 3) << 9 | (code[2] & 7u) |
                     (code[3] >> 3) << 11 | (code[3] >> 2 & 1u) << 10 | (code[3] & 3u) << 13;
    word |= bits << (16 * half);
  }
  return word;
}

// The inverse of prepare_word.
FP4KIT_HD u32 restore_word(u32 word) {
  u32 codes = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const u32 bits = word >> (16 * half);
    const u32 code[4] = {(bits >> 15 & 1u) << 3 | (bits >> 6 & 7u),
        (bits >> 12 & 1u) << 3 | (bits >> 3 & 7u), (bits >> 9 & 1u) << 3 | (bits & 7u),
        (bits >> 11 & 1u) << 3 | (bits >> 10 & 1u) << 2 | (bits >> 13 & 3u)};
#pragma unroll
    for (int j = 0; j < 4; ++j) codes |= code[j] << (8 * j + 4 * half);
  }
  return codes;
}

}  // namespace fp4kit
