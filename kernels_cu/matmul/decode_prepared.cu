// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Prepared weights (prepared.cuh) as rows of numbers for a GEMM: codes times block scales, without
// the second level (values() of fp4kit/reference/matmul.py), whatever the scales are. Rows of
// numbers are `stride` elements long, a multiple of 8; what is behind the depth is what the tiles
// have there.
//
// A warp takes 16 rows x 128 of the depth. Words lie row after row, the even rows and then
// the odd ones, 16 of each row: lanes beside each other load what lies side by side, and store it
// side by side, 8 elements each. Products are those of bfloat16, so that each value must be one
// (see raw_pairs).
//
// Launch: 256 threads, a warp for each tile that has some of the rows.
#include "common/e2m1.cuh"
#include "common/elements.cuh"
#include "matmul/weights.cuh"

namespace fp4kit {

#if defined(__CUDACC__) && defined(FP4KIT_HAS_MMA)

// A scale byte as a pair of bfloat16, which holds all of them.
template <class Format>
FP4KIT_DEVICE u32 scale_pair(u32 byte) {
  const u32 bits = as_bits(Format::kIsMx ? decode_e8m0(byte) : decode_e4m3(byte));
  return byte_perm(bits, bits, 0x3232u);
}

// Eight elements of a word.
template <class Out>
FP4KIT_DEVICE void decode_word(u32 codes, u32 scale, typename Out::Bits* out) {
  constexpr u32 kUp = 0x7E807E80u;  // 2^126
  u32 pair[4], word[2 * Out::kSize];
  raw_pairs<kFormPrepared>(codes, pair);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pair[i] = mul_pairs(mul_pairs(pair[i], kUp), scale);
    const float first = as_float(pair[i] << 16), second = as_float(pair[i] & 0xFFFF0000u);
    if constexpr (SameType<Out, Bf16>::kValue) {
      word[i] = pair[i];
    } else if constexpr (SameType<Out, F16>::kValue) {
      word[i] = pack_pair<F16>(first, second);
    } else {
      word[2 * i] = as_bits(first);
      word[2 * i + 1] = as_bits(second);
    }
  }
  store_words(out, word);
}

// What a lane has of a tile: words of the even rows and then of the odd ones, and their scales.
template <class Format>
struct TilePart {
  using Tile = PreparedTile<Format>;
  static constexpr u32 kHalf = kPreparedRows / 4;  // turns of a warp for the even rows, or the odd
  u32 codes[2 * kHalf], scales[2 * kHalf];

  // Row of a tile that a lane has in turn j.
  static FP4KIT_DEVICE u32 row(u32 j) {
    return j % kHalf * 4 + threadIdx.x % 32 / 16 * 2 + j / kHalf;
  }

  FP4KIT_DEVICE void load(const u8* tile) {
    const u32 lane = threadIdx.x % 32, place = lane % 16;
#pragma unroll
    for (u32 j = 0; j < 2 * kHalf; ++j) {
      codes[j] = __ldcs(reinterpret_cast<const unsigned int*>(tile) + 32 * j + lane);
    }
#pragma unroll
    for (u32 j = 0; j < kHalf; ++j) {
      // A lane's blocks of an even row and of the one below lie beside each other.
      const u8* both = tile + Tile::scale_place(row(j), place / 4 * Tile::kLaneBlocks);
      if constexpr (Tile::kLaneBlocks == 2) {
        const u32 word = __ldg(reinterpret_cast<const unsigned int*>(both));
        scales[j] = word >> (place / 2 % 2 * 8) & 0xFFu;
        scales[j + kHalf] = word >> (place / 2 % 2 * 8 + 16) & 0xFFu;
      } else {
        const u32 word = __ldg(reinterpret_cast<const unsigned short*>(both));
        scales[j] = word & 0xFFu;
        scales[j + kHalf] = word >> 8;
      }
    }
  }
};

#endif

// Rows `first` .. `first + rows`.
template <class Format, class Out>
__global__ void __launch_bounds__(kThreads) decode_prepared_kernel(const u8* __restrict__ tiles,
    typename Out::Bits* __restrict__ out, i64 first, i64 rows, i64 depth_tiles, i64 stride) {
#ifdef FP4KIT_HAS_MMA
  using Part = TilePart<Format>;
  const i64 warp = (static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x) / 32;
  i64 down;
  if ((warp | depth_tiles) >> 32 == 0) {  // a division of 64 bits takes longer
    down = static_cast<u32>(warp) / static_cast<u32>(depth_tiles);
  } else {
    down = warp / depth_tiles;
  }
  const i64 across = warp - down * depth_tiles;
  // Tiles lie where they lie, rows are counted from the first.
  const i64 tile_row = first / kPreparedRows + down;
  const i64 top = tile_row * kPreparedRows - first;
  const i64 k = across * kPreparedDepth + threadIdx.x % 16 * 8;
  if (top >= rows || k >= stride) return;
  Part part;
  part.load(tiles + (tile_row * depth_tiles + across) * Part::Tile::kBytes);
  typename Out::Bits* target = out + (top + Part::row(0)) * stride + k;
  const auto decode = [&](u32 j, u32 row) {
    const u32 scale = scale_pair<Format>(part.scales[j]);
    // Strides are below 2^31.
    const u64 place = static_cast<u64>(row) * static_cast<u32>(stride);
    decode_word<Out>(part.codes[j], scale, target + place);
  };
  constexpr u32 kTurns = 2 * Part::kHalf;
  if (top >= 0 && top + kPreparedRows <= rows) {
#pragma unroll
    for (u32 j = 0; j < kTurns; ++j) decode(j, j % Part::kHalf * 4 + j / Part::kHalf);
  } else {
#pragma unroll
    for (u32 j = 0; j < kTurns; ++j) {
      const i64 at = top + Part::row(j);
      if (at >= 0 && at < rows) decode(j, j % Part::kHalf * 4 + j / Part::kHalf);
    }
  }
#endif
}

}  // namespace fp4kit
