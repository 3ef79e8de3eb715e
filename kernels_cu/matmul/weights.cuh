// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// FP4 weights on their way to tensor cores: 16 rows x 128 of the depth come to shared memory, a
// lane takes 16 bytes (32 codes) of two rows, words become pairs of bfloat16.
//
// A pair's bits are put where bfloat16 has sign, the low bits of the exponent and the first of the
// mantissa: that is the value times 2^-126, subnormal 0.5 included. Lane 4 g + t has rows 2 g and
// 2 g + 1 as fragment rows g and g + 8, and elements 32 t .. 32 t + 31, word i those from 8 i on.
// The order of a sum over the depth is free, so that activations come in the order of the pairs.
#pragma once

#include "common/async_copy.cuh"
#include "common/mma.cuh"
#include "common/scale_layout.cuh"
#include "matmul/prepared.cuh"

namespace fp4kit {

#ifdef __CUDACC__
#ifdef FP4KIT_HAS_MMA

// How weights lie in memory: tiles of prepared.cuh, or rows of codes and scales in some layout.
constexpr int kFormPrepared = 0, kFormRows = 1;

struct WeightSource {
  const u8* codes;   // or tiles
  const u8* scales;  // of rows
  i64 row_bytes;     // of codes
  i64 stored_cols;   // of the scale matrix
  int layout;
  u32 depth_tiles;
  u32 row_tiles;
};

// Signs, exponents and mantissas of a pair.
constexpr u32 kPairBits = 0x81C081C0u;

// Pairs of a word, values times 2^-126. Prepared: (k0, k1), (k2, k3), (k4, k5), (k6, k7). Rows, the
// lowest nibble being k0: (k3, k7), (k2, k6), (k1, k5), (k0, k4). A product does two shifts at
// once.
template <int kForm>
FP4KIT_DEVICE void raw_pairs(u32 word, u32 (&pair)[4]) {
  if constexpr (kForm == kFormPrepared) {
    pair[0] = word & kPairBits;
    pair[1] = (word * 8u) & kPairBits;
    pair[2] = (word * 64u) & kPairBits;
    pair[3] = ((word >> 7 & 0x00D800D8u) * 2081u) & kPairBits;
  } else {
    const u32 upper = word >> 8;
    pair[0] = ((upper & 0x00F000F0u) * 0x104u) & kPairBits;
    pair[1] = ((upper & 0x000F000Fu) * 0x1040u) & kPairBits;
    pair[2] = ((word & 0x00F000F0u) * 0x104u) & kPairBits;
    pair[3] = ((word & 0x000F000Fu) * 0x1040u) & kPairBits;
  }
}

// Products of two pairs of bfloat16, exact here.
FP4KIT_DEVICE u32 mul_pairs(u32 a, u32 b) {
#ifdef __CUDA_ARCH__
  u32 result;
#if __CUDA_ARCH__ >= 900
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
#else
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(0x80008000u));
#endif
  return result;
#else
  const auto half = [](u32 x, u32 y) {
    return float_to_bfloat16(mul_rn(as_float(x << 16), as_float(y << 16)));
  };
  return half(a & 0xFFFFu, b & 0xFFFFu) | half(a >> 16, b >> 16) << 16;
#endif
}

// Tiles of 16 rows in a stage of shared memory: kChunks pieces of 128 of the depth each.
template <class Format, int kForm, int kChunksValue>
struct WeightStage {
  using Tile = PreparedTile<Format>;
  static constexpr int kChunks = kChunksValue;
  // Rows: a multiple of 128, so that the halves of a line of 128 bytes go to other banks.
  static constexpr int kChunkBytes = kForm == kFormPrepared ? Tile::kBytes : 1152;
  static constexpr int kBytes = kChunks * kChunkBytes;

  // Place of the codes of row 2 g + r of a lane, in piece c.
  static FP4KIT_DEVICE const uint4& codes(const u8* tile, u32 r, u32 c, u32 lane) {
    const u32 place = kForm == kFormPrepared ? lane : lane ^ ((c ^ r) * 4);
    return *reinterpret_cast<const uint4*>(tile + c * kChunkBytes + (r * 32 + place) * 16);
  }

  // Begins to copy the first `valid` pieces of a tile of rows, by all lanes of a warp.
  static FP4KIT_DEVICE void copy(
      u8* tile, const WeightSource& from, u32 row_tile, u32 chunk, u32 valid, u64 policy) {
    const u32 lane = threadIdx.x % 32;
    if constexpr (kForm == kFormPrepared) {
      const u8* source =
          from.codes + (static_cast<i64>(row_tile) * from.depth_tiles + chunk) * Tile::kBytes;
      constexpr u32 kPieces = kBytes / 16;
      const u32 pieces = valid * (Tile::kBytes / 16);
#pragma unroll
      for (u32 i = 0; i < (kPieces + 31) / 32; ++i) {
        const u32 place = 32 * i + lane;
        if (place < pieces) copy_async<16>(tile + place * 16, source + place * 16, policy);
      }
    } else {
      copy_codes(tile, from, row_tile, chunk, valid, policy);
      copy_scales(tile, from, row_tile, chunk, valid, policy);
    }
  }

 private:
  // Lanes beside each other take what lies beside each other: whole lines of 128 bytes.
  static FP4KIT_DEVICE void copy_codes(
      u8* tile, const WeightSource& from, u32 row_tile, u32 chunk, u32 valid, u64 policy) {
    constexpr u32 kRowPieces = 4 * kChunks;
    const u32 lane = threadIdx.x % 32;
    const u32 piece = lane % kRowPieces;
    const u32 c = piece / 4;
    if (c >= valid) return;
    const u32 first = lane / kRowPieces;
    const u8* source = from.codes +
                       (static_cast<i64>(row_tile) * kPreparedRows + first) * from.row_bytes +
                       (static_cast<i64>(chunk) * 4 + piece) * 16;
#pragma unroll
    for (u32 i = 0; i < 2 * kChunks; ++i) {
      const u32 row = i * (32 / kRowPieces) + first;
      const u32 place = row % 2 * 32 + ((row / 2 ^ c ^ row % 2) * 4) + piece % 4;
      copy_async<16>(tile + c * kChunkBytes + place * 16, source, policy);
      source += 32 / kRowPieces * from.row_bytes;
    }
  }

  // Scales of a row's piece lie beside each other: row after row.
  static FP4KIT_DEVICE void copy_scales(
      u8* tile, const WeightSource& from, u32 row_tile, u32 chunk, u32 valid, u64 policy) {
    const u32 lane = threadIdx.x % 32;
    const bool linear = from.layout == kLayoutLinear;
#pragma unroll
    for (u32 i = 0; i < (kPreparedRows * kChunks + 31) / 32; ++i) {
      const u32 place = 32 * i + lane;
      const u32 row = place / kChunks, c = place % kChunks;
      if (row >= kPreparedRows || c >= valid) continue;
      u8* target = tile + c * kChunkBytes + Tile::kCodeBytes + row * Tile::kBlocks;
      const i64 line = static_cast<i64>(row_tile) * kPreparedRows + row;
      const i64 col = (static_cast<i64>(chunk) + c) * Tile::kBlocks;
      if (linear) {
        copy_async<Tile::kBlocks>(target, from.scales + line * from.stored_cols + col, policy);
        continue;
      }
#pragma unroll
      for (u32 word = 0; word < Tile::kBlocks / 4; ++word) {
        const i64 offset = scale_offset(from.layout, line, col + 4 * word, from.stored_cols);
        copy_async<4>(target + 4 * word, from.scales + offset, policy);
      }
    }
  }
};

// ---- Scales that multiply codes: two of a row (MX: one twice), times 2^119, as pairs ----

// `odd` gathers what collects_odd understands.
template <class Format, class Stage, int kForm>
FP4KIT_DEVICE void load_scales(const u8* chunk, u32 r, u32 lane, u32 (&scale)[2], u32& odd) {
  const u8* scales = chunk + Stage::Tile::kCodeBytes;
  const u32 row = lane / 4 * 2 + r, t = lane % 4;
  if constexpr (Format::kIsMx) {
    const u32 byte = kForm == kFormPrepared ? scales[lane * 2 + r] : scales[row * 4 + t];
    if constexpr (kForm == kFormRows) odd |= byte > kMostScaleE8m0;
    // 2^(byte - 127 + 119) twice.
    scale[0] = scale[1] = byte * 0x00800080u + 0x3B803B80u;
  } else {
    const u32 word = kForm == kFormPrepared
                         ? *reinterpret_cast<const u32*>(scales + lane * 4)
                         : *reinterpret_cast<const u32*>(scales + row * 8 + t / 2 * 4);
    const u32 which = kForm == kFormPrepared ? r : t % 2;
    // Two bytes, each in the low part of a half.
    const u32 bytes = byte_perm(word, 0, which != 0 ? 0x4342u : 0x4140u);
    if constexpr (kForm == kFormRows) odd |= bytes | (bytes + 0x00010001u);
    // The bits of E4M3 in a bfloat16's place are the value times 2^-120; 2^127, then 2^112.
    const u32 both = mul_pairs(mul_pairs(bytes * 16u, 0x7F007F00u), 0x77807780u);
    scale[0] = byte_perm(both, both, 0x1010u);
    scale[1] = byte_perm(both, both, 0x3232u);
  }
}

// Whether some scale was negative or NaN (E4M3), or too large (E8M0).
template <class Format>
FP4KIT_DEVICE bool has_odd_scale(u32 odd) {
  return Format::kIsMx ? odd != 0 : (odd & 0x00800080u) != 0;
}

// ---- Scales that multiply sums: lane 4 g + t has sums of slices 2 (t % 2) and the next ----

// scale[r][j] of row 2 g + r, slice 2 (t % 2) + j; `block` of the two of a slice of nvfp4.
template <class Format, class Stage, int kForm>
FP4KIT_DEVICE void load_slice_scales(
    const u8* chunk, u32 block, u32 lane, float (&scale)[2][2], u32& odd) {
  const u8* scales = chunk + Stage::Tile::kCodeBytes;
  const u32 g = lane / 4, slice = lane % 2 * 2;
  if constexpr (Format::kIsMx) {
    u32 word[2];
    if constexpr (kForm == kFormPrepared) {
      // Slice after slice, the two rows beside each other.
      const u32 both = *reinterpret_cast<const u32*>(scales + (g * 4 + slice) * 2);
      word[0] = byte_perm(both, 0, 0x4420u);
      word[1] = byte_perm(both, 0, 0x4431u);
    } else {
#pragma unroll
      for (u32 r = 0; r < 2; ++r) {
        word[r] = *reinterpret_cast<const u16*>(scales + (2 * g + r) * 4 + slice);
      }
    }
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
      const u32 first = word[r] & 0xFFu, second = word[r] >> 8;
      if constexpr (kForm == kFormRows) odd |= (first > kMostScaleE8m0) | (second > kMostScaleE8m0);
      scale[r][0] = as_float(first << kF32MantissaBits);
      scale[r][1] = as_float(second << kF32MantissaBits);
    }
  } else {
    // word[i]: bytes 0 and 2 are wanted.
    u32 word[2];
    if constexpr (kForm == kFormPrepared) {
      const uint2 both = *reinterpret_cast<const uint2*>(scales + (g * 4 + slice) * 4);
      word[0] = both.x >> (8 * block);  // of the two rows, in the first slice
      word[1] = both.y >> (8 * block);
    } else {
#pragma unroll
      for (u32 r = 0; r < 2; ++r) {
        const u32 row = *reinterpret_cast<const u32*>(scales + (2 * g + r) * 8 + slice * 2);
        word[r] = row >> (8 * block);  // of the two slices
        odd |= word[r] | (word[r] + 0x00010001u);
      }
    }
    // The bits in a float's place are the value times 2^-120.
    const float up = as_float(static_cast<u32>(kF32Bias + 120) << kF32MantissaBits);
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      const float first = mul_rn(as_float(word[i] << 20 & 0x07F00000u), up);
      const float second = mul_rn(as_float(word[i] << 4 & 0x07F00000u), up);
      if constexpr (kForm == kFormPrepared) {
        scale[0][i] = first;
        scale[1][i] = second;
      } else {
        scale[i][0] = first;
        scale[i][1] = second;
      }
    }
  }
}

// ---- One value, for what is rare ----

template <class Format, int kForm>
FP4KIT_DEVICE float weight_value(const WeightSource& from, bool high_first, i64 row, u32 k) {
  using Tile = PreparedTile<Format>;
  u32 code, byte;
  if constexpr (kForm == kFormPrepared) {
    const i64 number = row / kPreparedRows * from.depth_tiles + k / kPreparedDepth;
    const u8* tile = from.codes + number * Tile::kBytes;
    const u32 inside = static_cast<u32>(row % kPreparedRows), at = k % kPreparedDepth;
    const u8* place = tile + Tile::word_place(inside, at / 8);
    code = restore_word(*reinterpret_cast<const u32*>(place)) >> (4 * (at % 8));
    byte = tile[Tile::scale_place(inside, at / Format::kBlockSize)];
  } else {
    const u32 pair = from.codes[row * from.row_bytes + k / 2];
    code = pair >> ((k % 2 != 0) != high_first ? 4 : 0);
    byte = from.scales[scale_offset(from.layout, row, k / Format::kBlockSize, from.stored_cols)];
  }
  const u32 sign = (code & 8u) << 28;
  const float magnitude = mul_rn(as_float((code & 7u) << 22),
      as_float(static_cast<u32>(2 * kF32Bias - E2m1::kBias) << kF32MantissaBits));
  const float value = as_float(as_bits(magnitude) | sign);
  const float scale = Format::kIsMx ? decode_e8m0(byte) : decode_e4m3(byte);
  return mul_rn(value, scale);
}

#endif  // FP4KIT_HAS_MMA
#endif  // __CUDACC__

}  // namespace fp4kit
