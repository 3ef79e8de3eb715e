// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// dequantize of columnwise codes, of a matrix or of the members of a group. Must equal
// ReferenceBackend.dequantize.
//
// FP4 codes are those of the transpose, which is undone in shared memory:
//   1. a thread loads the codes of 16 rows of the columns that share a word of the tile, and their
//      scale bytes; all loads are in flight before the first is used
//   2. meanwhile a table of what each scale byte stands for is worked out
//   3. the thread writes whole words, a warp without bank conflicts
//   4. the tile is written out along the rows, 16 bytes a thread
// FP8 codes lie as the elements do: a thread takes vecs below one another, all of one block of each
// column, and needs no shared memory.
//
// Launch: 256 threads, one block per tile of 128 x 64 elements; groups: of any member, which the
// table counts.
#include "common/members.cuh"
#include "quantize/rowwise.cuh"
#include "tiles/config.cuh"

namespace fp4kit {

// Scales of a tile by vector and block, counted from its first.
struct TileScales {
  const u8* base;
  u64 stride;  // of as many vectors as `shift` says
  u32 shift;
  u32 low_bytes;   // stride of the vectors among these
  u32 four_bytes;  // of four blocks

  FP4KIT_DEVICE TileScales(const QuantizedView& side, int layout, i64 vector0, i64 block0)
      : base(side.block_scale + scale_offset(layout, vector0, block0, side.stored_cols)),
        stride(static_cast<u64>(side.stored_cols)), shift(0), low_bytes(0), four_bytes(kTileCols) {
    if (layout == kLayoutLinear) return;
    const bool large = layout == kLayoutSwizzled128x4;
    stride = large ? kTileCols : stride * kTileRows8;
    shift = large ? 5 : 3;
    low_bytes = large ? 16 : kTileCols;
    four_bytes = large ? kTileBytes128 : kTileBytes8;
  }

  FP4KIT_DEVICE u32 load(u32 v, u32 b) const {
    const u32 low = v & ((1u << shift) - 1u);
    return __ldg(base + (v >> shift) * stride +
                 (low * low_bytes + b / kTileCols * four_bytes + b % kTileCols));
  }
};

struct Decoding {
  int layout;
  bool high_first;
  Range range;
};

template <class T>
FP4KIT_DEVICE bool is_aligned(const T* address, u64 size) {
  return (reinterpret_cast<u64>(address) & (size - 1)) == 0;
}

// Writes a tile to `out`, where it begins.
template <class Out>
FP4KIT_DEVICE void store_tile(Tile<Out>& tile, typename Out::Bits* __restrict__ out, i64 cols,
    u32 rows_left, u32 cols_left, bool vector) {
  if (vector) {
    constexpr u32 kVecs = Tile<Out>::kWords / 4;
    constexpr u32 kRowsAtOnce = kThreads / kVecs;
    const u32 first = threadIdx.x / kVecs;
    const u32 place = threadIdx.x % kVecs;
    if (place * (16 / Out::kSize) >= cols_left) return;
    const uint4* source = reinterpret_cast<const uint4*>(&tile.at(first, 4 * place));
    typename Out::Bits* target = out + first * cols + place * (16 / Out::kSize);
#pragma unroll
    for (u32 k = 0; k < kTileRows / kRowsAtOnce; ++k) {
      if (first + k * kRowsAtOnce < rows_left) {
        __stcs(reinterpret_cast<uint4*>(target), source[Tile<Out>::offset(k * kRowsAtOnce, 0) / 4]);
      }
      target += kRowsAtOnce * cols;
    }
  } else {
    const u32 col = threadIdx.x % kTileColumns;
    if (col >= cols_left) return;
#pragma unroll 4
    for (u32 row = threadIdx.x / kTileColumns; row < rows_left; row += kThreads / kTileColumns) {
      out[row * cols + col] = tile.get(row, col);
    }
  }
}

// kOneLevel: all columns have the same second level, if any.
template <class Format, class Out, int kRecipe, bool kSecond, bool kOneLevel>
FP4KIT_DEVICE void dequantize_transposed(const QuantizedView& side,
    typename Out::Bits* __restrict__ out, i64 cols, i64 row0, i64 col0, u32 rows_left,
    u32 cols_left, const Decoding& decoding, bool vector) {
  constexpr u32 kHalves = Tile<Out>::kPerWord;
  constexpr u32 kDown = kTileRows / kGroupSize;
  constexpr u32 kEach = Tile<Out>::kWords * kDown / kThreads;
  constexpr u32 kBytes = kGroupSize / 2;
  // The factor of an MX scale is a shift: only results are worth a table there.
  constexpr bool kTable = kOneLevel && (!Format::kIsMx || Out::kSize == 2);
  constexpr u32 kEntries = Format::kIsMx ? 256 : kScaleBytes;
  static_assert(kThreads >= kEntries, "a thread for each scale byte");
  using Decoder = DecoderOf<Format, Out>;
  __shared__ Tile<Out> tile;
  __shared__ Decoder table[kTable ? kEntries : 1];

  const TileScales scales(side, decoding.layout, col0, row0 / Format::kBlockSize);
  const i64 pitch = side.blocks * (Format::kBlockSize / 2);
  const u8* const codes_of_tile = side.packed + col0 * pitch + row0 / 2;
  const u32 b = threadIdx.x % kDown;
  const u32 first_w = threadIdx.x / kDown;
  const bool inside = b * kGroupSize < rows_left;
  u32 code[kEach][kHalves][2];
  u32 byte[kEach][kHalves];
  const auto load = [&](auto vector_codes) {
#pragma unroll
    for (u32 k = 0; k < kEach; ++k) {
#pragma unroll
      for (u32 half = 0; half < kHalves; ++half) {
        const u32 v = (first_w + k * (kThreads / kDown)) * kHalves + half;
        code[k][half][0] = code[k][half][1] = byte[k][half] = 0;
        if (inside && v < cols_left) {
          load_codes<decltype(vector_codes)::kValue != 0, kBytes>(
              codes_of_tile + v * pitch + b * kBytes, code[k][half]);
          byte[k][half] = scales.load(v, b / Format::kGroups);
        }
      }
    }
  };
  // Apart from each other, so that no load waits for another.
  if (is_aligned(codes_of_tile, kBytes)) {
    load(Number<1>());
  } else {
    load(Number<0>());
  }
  if constexpr (kTable) {
    if (threadIdx.x < kEntries) {
      const Level level =
          make_level<kRecipe, kSecond>(kSecond ? __ldg(side.second) : 1.0f, decoding.range.value);
      table[threadIdx.x] = make_decoder<Format, Out, kRecipe, kSecond>(
          threadIdx.x, level, decoding.range.reciprocal);
    }
    __syncthreads();
  }
  const Levels<kRecipe, kSecond> levels{
      side.second, side.scales, side.vectors_per_scale, decoding.range.value};  // without a table
#pragma unroll
  for (u32 k = 0; k < kEach; ++k) {
    const u32 w = first_w + k * (kThreads / kDown);
    Words<Out> result[kHalves];
#pragma unroll
    for (u32 half = 0; half < kHalves; ++half) {
      u32(&codes)[2] = code[k][half];
      const u32 number = byte[k][half];
      order_nibbles<Format>(codes, decoding.high_first);
      if constexpr (kTable) {
        if (number >= kEntries) {
          codes[0] = e2m1_negate(codes[0]);
          codes[1] = e2m1_negate(codes[1]);
        }
        decode_words<Format, kRecipe, kSecond>(codes, table[number % kEntries], result[half]);
      } else {
        const u32 v = w * kHalves + half;
        const Level level = levels.at(kSecond && v < cols_left ? col0 + v : 0);
        decode_words<Format, kRecipe, kSecond>(codes,
            make_decoder<Format, Out, kRecipe, kSecond>(number, level, decoding.range.reciprocal),
            result[half]);
      }
    }
    u32* const target = &tile.at(b * kGroupSize, w);
#pragma unroll
    for (u32 i = 0; i < kGroupSize; ++i) {
      u32 word;
      if constexpr (kHalves == 1) {
        word = result[0].word[i];
      } else {
        word = byte_perm(
            result[0].word[i / 2], result[kHalves - 1].word[i / 2], i % 2 == 0 ? 0x5410u : 0x7632u);
      }
      target[Tile<Out>::offset(i, 0)] = word;
    }
  }
  __syncthreads();
  store_tile(tile, out, cols, rows_left, cols_left, vector);
}

// Codes of neighbouring columns, each under a factor of its own: 2^n or NaN (`unusual`).
template <class Format, class Out, int kCount>
FP4KIT_DEVICE void decode_across(const u32 (&codes)[(kCount + 3) / 4],
    const float (&factor)[kCount], bool unusual, Words<Out, kCount>& result) {
  using Element = typename Format::Element;
  float value[kCount];
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    decode_fp8_4<Element>(codes[i], value + 4 * i);
    unusual = unusual || has_fp8_nan<Element>(codes[i]);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) value[i] = mul_rn(value[i], factor[i]);
  pack_words<Out, false>(value, result.word);
  if (unusual) pack_words<Out, true>(value, result.word);
}

// FP8. kVector: 16-byte accesses; else single columns.
template <class Format, class Out, bool kVector>
FP4KIT_DEVICE void dequantize_straight(const QuantizedView& side,
    typename Out::Bits* __restrict__ out, i64 cols, i64 row0, i64 col0, u32 rows_left,
    u32 cols_left, const Decoding& decoding) {
  constexpr int kCount = kVector ? 16 / Out::kSize : 1;
  constexpr u32 kAcross = kTileColumns / kCount;
  constexpr u32 kRows = kTileRows * kAcross / kThreads;  // of a thread
  constexpr int kWords = (kCount + 3) / 4;
  static_assert(Format::kBlockSize % kRows == 0, "rows of one block");
  const u32 col = threadIdx.x % kAcross * kCount;
  const u32 row = threadIdx.x / kAcross * kRows;
  if (col >= cols_left || row >= rows_left) return;
  const u32 rows = rows_left - row < kRows ? rows_left - row : kRows;
  const u8* from = side.packed + (row0 + row) * cols + col0 + col;
  const i64 block0 = row0 / Format::kBlockSize;
  const u32 b = row / Format::kBlockSize;
  u32 byte[kCount];
  if (decoding.layout == kLayoutLinear) {
    const u8* const scale = side.block_scale + (block0 + b) * cols + col0 + col;
#pragma unroll
    for (int i = 0; i < kCount; ++i) byte[i] = __ldg(scale + i);
  } else {
    const TileScales scales(side, decoding.layout, col0, block0);
#pragma unroll
    for (int i = 0; i < kCount; ++i) byte[i] = scales.load(col + i, b);
  }
  typename Out::Bits* target = out + row * cols + col;
  float factor[kCount];
  const auto set_factors = [&] {
    bool unusual = false;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      factor[i] = decode_e8m0(byte[i]);
      unusual = unusual || byte[i] == kE8m0Nan;
    }
    return unusual;
  };
  if constexpr (kVector) {
    u32 codes[kRows][kWords];
#pragma unroll
    for (u32 r = 0; r < kRows; ++r) {
      if (r < rows) load_codes<true, kCount>(from + r * cols, codes[r]);
    }
    const bool unusual = set_factors();
#pragma unroll
    for (u32 r = 0; r < kRows; ++r) {
      if (r < rows) {
        Words<Out, kCount> result;
        decode_across<Format, Out, kCount>(codes[r], factor, unusual, result);
        store_words(target + r * cols, result.word);
      }
    }
  } else {
    set_factors();
    for (u32 r = 0; r < rows; ++r) {
      const float value = decode_fp8<typename Format::Element>(__ldg(from + r * cols));
      target[r * cols] =
          static_cast<typename Out::Bits>(to_output_bits<Out>(mul_rn(value, factor[0])));
    }
  }
}

template <class Format, class Out, int kRecipe, bool kSecond, bool kOneLevel>
FP4KIT_DEVICE void dequantize_columnwise(const QuantizedView& side,
    typename Out::Bits* __restrict__ out, i64 rows, i64 cols, i64 row0, i64 col0,
    const Decoding& decoding) {
  const u32 rows_left = tile_rest(rows, row0, kTileRows);
  const u32 cols_left = tile_rest(cols, col0, kTileColumns);
  const bool vector =
      is_aligned(out, 16) && static_cast<u32>(cols) % static_cast<u32>(16 / Out::kSize) == 0;
  typename Out::Bits* const target = out + row0 * cols + col0;
  if constexpr (Format::kIsFp4) {
    dequantize_transposed<Format, Out, kRecipe, kSecond, kOneLevel>(
        side, target, cols, row0, col0, rows_left, cols_left, decoding, vector);
  } else if (vector && is_aligned(side.packed, 16 / Out::kSize)) {
    dequantize_straight<Format, Out, true>(
        side, target, cols, row0, col0, rows_left, cols_left, decoding);
  } else {
    dequantize_straight<Format, Out, false>(
        side, target, cols, row0, col0, rows_left, cols_left, decoding);
  }
}

template <class Format, class Out, int kRecipe, bool kSecond, bool kOneLevel>
__global__ void __launch_bounds__(kThreads) dequantize_columnwise_kernel(u8* packed,
    u8* block_scale, const float* second, typename Out::Bits* __restrict__ out, i64 rows, i64 cols,
    i64 tiles_across, i64 blocks, i64 stored_cols, i64 scales, i64 vectors_per_scale, i64 layout,
    i64 high_first, i64 range, i64 reciprocal) {
  const u32 across = static_cast<u32>(tiles_across);
  const u32 down = blockIdx.x / across;
  const QuantizedView side{
      second, packed, block_scale, blocks, stored_cols, scales, vectors_per_scale};
  dequantize_columnwise<Format, Out, kRecipe, kSecond, kOneLevel>(side, out, rows, cols,
      static_cast<i64>(down) * kTileRows,
      static_cast<i64>(blockIdx.x - down * across) * kTileColumns,
      {static_cast<int>(layout), high_first != 0, Range(range, reciprocal)});
}

template <class Format, class Out, int kRecipe, bool kSecond, bool kOneLevel, class Table>
__global__ void __launch_bounds__(kThreads)
    grouped_dequantize_columnwise_kernel(u8* packed, u8* block_scale, const float* second,
        typename Out::Bits* __restrict__ out, const __grid_constant__ Table table, i64 per_vector,
        i64 layout, i64 high_first, i64 range, i64 reciprocal) {
  __shared__ MemberTile found;
  find_tile(table, found, kTileRows, [](const Member&) -> i64 { return kTileColumns; });
  __syncthreads();
  const Member& member = found.member;
  const QuantizedView side = member_view<Format>(member.col, second, packed, block_scale,
      member.cols, member.rows, per_vector != 0, static_cast<int>(layout));
  dequantize_columnwise<Format, Out, kRecipe, kSecond, kOneLevel>(side, out + member.start,
      member.rows, member.cols, found.row0, found.col0,
      {static_cast<int>(layout), high_first != 0, Range(range, reciprocal)});
}

}  // namespace fp4kit
