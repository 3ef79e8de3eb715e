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
  u32 scale_stride;  // bytes to the next four blocks of a row
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

// The 16 bytes of a lane as words.
FP4KIT_DEVICE u32 word_of(const uint4& codes, int i) {
  return i == 0 ? codes.x : i == 1 ? codes.y : i == 2 ? codes.z : codes.w;
}

// A fragments of both steps of 16 of a word of two rows.
FP4KIT_DEVICE void join_rows(const u32 (&first)[4], const u32 (&second)[4], u32 (&a)[2][4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    a[i][0] = first[2 * i];
    a[i][1] = second[2 * i];
    a[i][2] = first[2 * i + 1];
    a[i][3] = second[2 * i + 1];
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

// Pairs of word w of two rows times their scales (load_scales).
template <int kForm>
FP4KIT_DEVICE void scaled_pairs(
    const uint4 (&codes)[2], const u32 (&scale)[2][2], int w, u32 (&pair)[2][4]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    raw_pairs<kForm>(word_of(codes[r], w), pair[r]);
#pragma unroll
    for (int j = 0; j < 4; ++j) pair[r][j] = mul_pairs(pair[r][j], scale[r][w / 2]);
  }
}

// Tiles of 16 rows in a stage of shared memory: kChunks pieces of 128 of the depth each.
template <class Format, int kForm, int kChunksValue>
struct WeightStage {
  using Tile = PreparedTile<Format>;
  static constexpr int kChunks = kChunksValue;
  // Rows: a multiple of 128, so that the halves of a line of 128 bytes go to other banks.
  static constexpr int kChunkBytes = kForm == kFormPrepared ? Tile::kBytes : 1152;
  static constexpr int kBytes = kChunks * kChunkBytes;
};

// Where a lane has its codes and scales in a stage; what is beside that are constants.
template <class Stage, int kForm>
struct LaneView {
  using Tile = typename Stage::Tile;
  static constexpr bool kPrepared = kForm == kFormPrepared;
  SharedPlace codes[2];  // of rows: pieces are swapped by c ^ r
  SharedPlace scales;
  u32 lane;
  u32 selector;  // of the bytes of a lane's two scales in a word, of rows

  // Of a stage's first byte. `sliced`: scales of neighbouring slices, see load_slice_scales.
  FP4KIT_DEVICE LaneView(SharedPlace stage, bool sliced) {
    lane = kept(threadIdx.x % 32);
    const u32 g = lane / 4, t = lane % 4;
    selector = kPrepared ? 0 : kept(t % 2 != 0 ? 0x4342u : 0x4140u);
    codes[0] = kept(stage.at(lane * 16));
    codes[1] = kPrepared ? codes[0] : kept(stage.at((lane ^ 4) * 16));
    constexpr u32 kLane = Tile::kLaneBlocks;
    const u32 first = sliced ? t % 2 * 2 : t;  // slice
    u32 place = Tile::kCodeBytes;
    if (kPrepared) {
      place += (g * 4 + first) * 2 * kLane;
    } else {
      // Words of nvfp4 are those of two slices.
      place += 2 * g * Tile::kBlocks + (kLane == 2 && !sliced ? t / 2 * 4 : first * kLane);
    }
    scales = kept(stage.at(place));
  }

  FP4KIT_DEVICE LaneView(const LaneView& first, u32 offset)
      : codes{first.codes[0].at(offset), first.codes[1].at(offset)},
        scales(first.scales.at(offset)), lane(first.lane), selector(first.selector) {}

  // Row 2 g + r of the piece `c` at an offset.
  FP4KIT_DEVICE uint4 load_codes(u32 offset, u32 r, u32 c) const {
    return codes[(c ^ r) % 2].at(offset + r * 512).load_vec();
  }
};

// Where a lane copies rows to in a tile of a stage: codes, and scales of its rows and pieces. Lanes
// beside each other take what lies beside each other in memory: whole lines of 128 bytes.
template <class Stage, int kForm>
struct LaneTarget {
  using Tile = typename Stage::Tile;
  static constexpr u32 kChunks = Stage::kChunks;
  static constexpr u32 kRowPieces = 4 * (kChunks < 2 ? kChunks : 2);  // of 16 bytes in a row
  static constexpr u32 kRowsAtOnce = 32 / kRowPieces;                 // an even number
  static constexpr u32 kTurns = kPreparedRows / kRowsAtOnce;
  static constexpr u32 kTurnBytes = kRowsAtOnce / 2 * 64;
  static_assert(
      kForm == kFormPrepared || kChunks <= 2, "a lane for the scales of each row of each piece");
  SharedPlace codes, scales;

  FP4KIT_DEVICE explicit LaneTarget(SharedPlace stage) : codes(stage), scales(stage) {
    if constexpr (kForm == kFormPrepared) {
      codes = kept(stage.at(threadIdx.x % 32 * 16));
    } else {
      const u32 lane = threadIdx.x % 32;
      const u32 piece = lane % kRowPieces, row = lane / kRowPieces, c = piece / 4;
      const u32 place = row % 2 * 32 + (row / 2 ^ c ^ row % 2) * 4 + piece % 4;
      codes = kept(stage.at(c * Stage::kChunkBytes + place * 16));
      scales = kept(stage.at(
          lane % kChunks * Stage::kChunkBytes + Tile::kCodeBytes + lane / kChunks * Tile::kBlocks));
    }
  }
};

// What a lane copies next of a tile of 16 rows.
template <class Stage, int kForm>
struct TileCursor {
  using Tile = typename Stage::Tile;
  using Target = LaneTarget<Stage, kForm>;
  static constexpr u32 kChunks = Stage::kChunks;
  const u8* codes;
  const u8* scales;

  // To a tile of rows, at a piece of 128 of the depth.
  FP4KIT_DEVICE void start(const WeightSource& from, u32 row_tile, u32 chunk) {
    const u32 lane = threadIdx.x % 32;
    if constexpr (kForm == kFormPrepared) {
      const i64 number = static_cast<i64>(row_tile) * from.depth_tiles + chunk;
      codes = from.codes + number * Tile::kBytes;
    } else {
      const i64 line = static_cast<i64>(row_tile) * kPreparedRows;
      codes = from.codes + (line + lane / Target::kRowPieces) * from.row_bytes +
              (static_cast<i64>(chunk) * 4 + lane % Target::kRowPieces) * 16;
      const i64 col = (static_cast<i64>(chunk) + lane % kChunks) * Tile::kBlocks;
      const i64 row = line + lane / kChunks % kPreparedRows;
      scales = from.scales + scale_offset(from.layout, row, col, from.stored_cols);
    }
  }

  FP4KIT_DEVICE void advance(const WeightSource& from, u32 chunks) {
    if constexpr (kForm == kFormPrepared) {
      codes += static_cast<u32>(Tile::kBytes) * chunks;
    } else {
      codes += 64 * chunks;
      scales += from.scale_stride * (Tile::kBlocks / 4) * chunks;
    }
  }

  // Begins to copy the first `valid` pieces of the step to a place in the ring, by all lanes.
  FP4KIT_DEVICE void copy(
      const Target& target, u32 offset, const WeightSource& from, u32 valid) const {
    const u32 lane = threadIdx.x % 32;
    if constexpr (kForm == kFormPrepared) {
      constexpr u32 kPieces = Stage::kBytes / 16;
      const u32 pieces = valid * (Tile::kBytes / 16);
      const u8* source = codes + lane * 16;
#pragma unroll
      for (u32 i = 0; i < kPieces; i += 32) {
        if (i + lane < pieces) {
          copy_async<16>(target.codes.at(offset + i * 16), source + i * 16);
        }
      }
    } else {
      if (lane % Target::kRowPieces / 4 < valid) {
        const u8* source = codes;
#pragma unroll
        for (u32 i = 0; i < Target::kTurns; ++i) {
          copy_async<16>(target.codes.at(offset + i * Target::kTurnBytes), source);
          source += Target::kRowsAtOnce * from.row_bytes;
        }
      }
      if (lane % kChunks >= valid || lane / kChunks >= kPreparedRows) return;
      const SharedPlace place = target.scales.at(offset);
      if (Tile::kBlocks == 4 || from.scale_stride == 4) {
        copy_async<Tile::kBlocks>(place, scales);
      } else {
        copy_async<4>(place, scales);
        copy_async<4>(place.at(4), scales + from.scale_stride);
      }
    }
  }
};

// ---- Scales that multiply codes: two of a row (MX: one twice), times 2^119, as pairs ----

// Those of row 2 g + r of a lane's tile; the other row's are beside them. `odd` gathers what
// has_odd_scale asks for.
template <class Format, int kForm>
FP4KIT_DEVICE void load_scales(SharedPlace scales, u32 r, u32 selector, u32 (&scale)[2], u32& odd) {
  if constexpr (Format::kIsMx) {
    const u32 byte = scales.at(kForm == kFormPrepared ? r : 4 * r).load_byte();
    if constexpr (kForm == kFormRows) odd |= byte > kMostScaleE8m0;
    // 2^(byte - 127 + 119) twice.
    scale[0] = scale[1] = byte * 0x00800080u + 0x3B803B80u;
  } else {
    const u32 word = scales.at(kForm == kFormPrepared ? 0 : 8 * r).load_word();
    if constexpr (kForm == kFormPrepared) selector = r != 0 ? 0x4342u : 0x4140u;
    // Two bytes, each in the low part of a half.
    const u32 bytes = byte_perm(word, 0, selector);
    if constexpr (kForm == kFormRows) odd |= bytes | (bytes + 0x00010001u);
    // The bits of E4M3 in a bfloat16's place are the value times 2^-120; 2^127, then 2^112.
    const u32 both = mul_pairs(mul_pairs(bytes * 16u, 0x7F007F00u), 0x77807780u);
    scale[0] = byte_perm(both, both, 0x1010u);
    scale[1] = byte_perm(both, both, 0x3232u);
  }
}

// The same of a row's codes, one block of MX, and its scale as `load_scales` left it.
template <class Format, int kForm>
FP4KIT_DEVICE void find_lost(const uint4& codes, const u32 (&scale)[2], u32& odd) {
  if constexpr (Format::kIsMx && kForm == kFormRows) {
    constexpr u32 kLeast = kLeastScaleE8m0 * 0x00800080u + 0x3B803B80u;
    if (scale[0] < kLeast) odd |= (codes.x | codes.y | codes.z | codes.w) & kCodeMagnitudes;
  }
}

// Whether some scale was negative or NaN (E4M3), or too large or too small (E8M0).
template <class Format>
FP4KIT_DEVICE bool has_odd_scale(u32 odd) {
  return Format::kIsMx ? odd != 0 : (odd & 0x00800080u) != 0;
}

// ---- Scales that multiply sums: lane 4 g + t has sums of slices 2 (t % 2) and the next ----

// scale[r][j] of row 2 g + r, slice 2 (t % 2) + j; `block` of the two of a slice of nvfp4.
template <class Format, int kForm>
FP4KIT_DEVICE void load_slice_scales(
    SharedPlace scales, u32 block, float (&scale)[2][2], u32& odd) {
  if constexpr (Format::kIsMx) {
    u32 word[2];
    if constexpr (kForm == kFormPrepared) {
      // Slice after slice, the two rows beside each other.
      const u32 both = scales.load_word();
      word[0] = byte_perm(both, 0, 0x4420u);
      word[1] = byte_perm(both, 0, 0x4431u);
    } else {
#pragma unroll
      for (u32 r = 0; r < 2; ++r) word[r] = scales.at(4 * r).load_half();
    }
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
      const u32 first = word[r] & 0xFFu, second = word[r] >> 8;
      if constexpr (kForm == kFormRows) odd |= (first > kMostScaleE8m0) | (second > kMostScaleE8m0);
      // Times 2^30, so that what is multiplied by 2^-30 is not lost.
      scale[r][0] = as_float((first + 30) << kF32MantissaBits);
      scale[r][1] = as_float((second + 30) << kF32MantissaBits);
    }
  } else {
    // word[i]: bytes 0 and 2 are wanted.
    u32 word[2];
    if constexpr (kForm == kFormPrepared) {
      const uint2 both = scales.load_pair();
      word[0] = both.x >> (8 * block);  // of the two rows, in the first slice
      word[1] = both.y >> (8 * block);
    } else {
#pragma unroll
      for (u32 r = 0; r < 2; ++r) {
        word[r] = scales.at(8 * r).load_word() >> (8 * block);  // of the two slices
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
