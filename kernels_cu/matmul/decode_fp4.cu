// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// FP4 weights as rows of numbers for a GEMM: codes times block scales, without the second level
// (values() of fp4kit/reference/matmul.py), whatever the scales are. They lie in prepared tiles
// (prepared.cuh), or in rows of whole blocks with scales in any layout. Rows of numbers are
// `stride` elements long, a multiple of 8; what is behind the depth is what the tiles have there.
//
// A warp takes 16 rows x 128 of the depth. Words of tiles lie row after row, the even rows and then
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

// raw_pairs in the order of the elements.
template <int kForm>
FP4KIT_DEVICE void ordered_pairs(u32 word, u32 (&pair)[4]) {
  raw_pairs<kForm>(word, pair);
  if constexpr (kForm == kFormRows) {
    const u32 even[2] = {pair[3], pair[1]}, odd[2] = {pair[2], pair[0]};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      pair[i] = byte_perm(even[i], odd[i], 0x5410u);
      pair[i + 2] = byte_perm(even[i], odd[i], 0x7632u);
    }
  }
}

// Eight elements of a word.
template <class Out, int kForm>
FP4KIT_DEVICE void decode_word(u32 codes, u32 scale, typename Out::Bits* out) {
  constexpr u32 kUp = 0x7E807E80u;  // 2^126
  u32 pair[4], word[2 * Out::kSize];
  ordered_pairs<kForm>(codes, pair);
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
template <class Format, int kForm>
struct TilePart {
  using Tile = PreparedTile<Format>;
  static constexpr u32 kHalf = kPreparedRows / 4;  // turns of a warp for the even rows, or the odd
  u32 codes[2 * kHalf], scales[2 * kHalf];

  // Row of a tile that a lane has in turn j.
  static FP4KIT_DEVICE u32 row(u32 j) {
    return j % kHalf * 4 + threadIdx.x % 32 / 16 * 2 + j / kHalf;
  }

  FP4KIT_DEVICE void load_tile(const u8* tile) {
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

  // Of a word of each row: those from `top` on, which are `valid` (the last one again beyond).
  FP4KIT_DEVICE void load_rows(const u8* packed, const u8* block_scale, const ScalePlaces& places,
      u32 row_bytes, i64 top, u32 valid, u32 word, bool high_first) {
    const u32 block = word * 8 / Format::kBlockSize;
    const u8* source = packed + top * row_bytes + static_cast<i64>(word) * 4;
#pragma unroll
    for (u32 j = 0; j < 2 * kHalf; ++j) {
      const u32 down = min_u32(row(j), valid - 1);
      const u8* of_row = source + static_cast<u64>(down) * row_bytes;
      codes[j] = __ldcs(reinterpret_cast<const unsigned int*>(of_row));
      scales[j] = __ldg(block_scale + places(static_cast<u32>(top) + down, block));
    }
    if (!high_first) return;
#pragma unroll
    for (u32& word_of_row : codes) word_of_row = swap_nibbles(word_of_row);
  }
};

#endif

// Rows `first` .. `first + rows`. codes: tiles, or rows of `row_bytes` with scales in a layout.
template <class Format, class Out, class Form>
__global__ void __launch_bounds__(kThreads) decode_fp4_kernel(const u8* __restrict__ codes,
    const u8* __restrict__ scales, typename Out::Bits* __restrict__ out, i64 first, i64 rows,
    i64 depth_tiles, i64 stride, i64 row_bytes, i64 stored_cols, i64 layout, i64 high_first) {
#ifdef FP4KIT_HAS_MMA
  constexpr int kForm = Form::kValue;
  using Part = TilePart<Format, kForm>;
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
  const i64 top = kForm == kFormPrepared ? tile_row * kPreparedRows - first : down * kPreparedRows;
  const i64 k = across * kPreparedDepth + threadIdx.x % 16 * 8;
  if (top >= rows || k >= stride) return;
  Part part;
  if constexpr (kForm == kFormPrepared) {
    part.load_tile(codes + (tile_row * depth_tiles + across) * Part::Tile::kBytes);
  } else {
    const ScalePlaces places(static_cast<int>(layout), static_cast<u32>(stored_cols));
    const i64 left = rows - top;
    part.load_rows(codes, scales, places, static_cast<u32>(row_bytes), first + top,
        left < kPreparedRows ? static_cast<u32>(left) : kPreparedRows, static_cast<u32>(k / 8),
        high_first != 0);
  }
  typename Out::Bits* target = out + (top + Part::row(0)) * stride + k;
  const auto decode = [&](u32 j, u32 row) {
    const u32 scale = scale_pair<Format>(part.scales[j]);
    // Strides are below 2^31.
    const u64 place = static_cast<u64>(row) * static_cast<u32>(stride);
    decode_word<Out, kForm>(part.codes[j], scale, target + place);
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
