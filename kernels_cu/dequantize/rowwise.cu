// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// dequantize of rowwise codes, of a matrix or of the members of a group. Must equal
// ReferenceBackend.dequantize, with every NaN written as the canonical positive one.
//
// For each vec of 16 output bytes (8 elements of 16 bits, 4 of 32):
//   1. load its codes and the scale byte of its block; all loads of a thread are in flight before
//      the first is used
//   2. meanwhile each thread works out what one of the 256 scale bytes stands for (factors, or all
//      results of its codes), where the second level is one and that pays
//   3. E2M1 to 16 bits: look the results up; else value, one or two multiplications, one rounding
//   4. one 16-byte store, next to those of the neighbouring lanes
//
// Memory layout: as in quantize/rowwise_any.cu; a row of `out` ends at cols, within its last block.
// Launch: 256 threads, a block for each tile of 256 * unroll vecs, rows * ceil(cols / vec) of them
// (groups: of any member, which the table counts). Persistent blocks would share a table, but were
// slower by 5 %.
#include "common/group16.cuh"
#include "common/members.cuh"

namespace fp4kit {

// How a kernel finds and moves its vecs; the launcher takes the first that fits.
constexpr int kAccessContiguous =
    0;  // vectors, linear scales, whole blocks: no rows; one second level
constexpr int kAccessAnyLayout = 1;  // vectors, any scale layout; one second level
constexpr int kAccessRows = 2;       // vectors, any scale layout, second levels by rows
constexpr int kAccessSingle = 3;     // single elements and bytes, everything

// Vecs in flight per thread: fewer where each moves more bytes and needs no table for long.
template <class Format, class Out, int kAccess>
FP4KIT_HD constexpr int dequantize_unroll() {
  if (kAccess == kAccessSingle) return 1;
  const bool heavy = Out::kSize == 4 || !Format::kIsFp4;
  return kAccess == kAccessContiguous && heavy ? FP4KIT_DEQUANTIZE_UNROLL_HEAVY
                                               : FP4KIT_DEQUANTIZE_UNROLL;
}

struct PlainDivide {
  i64 divisor;

  FP4KIT_HD i64 operator()(i64 n) const {
    if ((n | divisor) >> 32 != 0) return n / divisor;
    return static_cast<u32>(n) / static_cast<u32>(divisor);
  }
};

FP4KIT_HD u32 small_quotient(u32 n, const PlainDivide& divide) {
  return n / static_cast<u32>(divide.divisor);
}

// Codes of a matrix, of vecs = rows * ceil(cols / vec).
template <class DivideType>
struct Rowwise {
  QuantizedView view;
  i64 vecs;
  i64 cols;
  DivideType divide;  // by the vecs of a row
  int layout;
  bool high_first;
};

template <class Format, class Out, int kAccess>
FP4KIT_HD constexpr int dequantize_tile_vecs() {
  return kThreads * dequantize_unroll<Format, Out, kAccess>();
}

// Decodes the tile of vecs from `base` on.
template <class Format, class Out, int kRecipe, bool kSecond, int kAccess, class Divide>
FP4KIT_DEVICE void dequantize_rowwise(const Rowwise<Divide>& source,
    typename Out::Bits* __restrict__ out, i64 base, const Range& range) {
  constexpr bool kVector = kAccess != kAccessSingle;
  constexpr bool kContiguous = kAccess == kAccessContiguous;
  // The factor of an MX scale is a shift: only results are worth a table there.
  constexpr bool kTable = (kContiguous || kAccess == kAccessAnyLayout) && Format::kIsFp4 &&
                          (!Format::kIsMx || Out::kSize == 2);
  constexpr int kUnroll = dequantize_unroll<Format, Out, kAccess>();
  constexpr int kCount = 16 / Out::kSize;
  constexpr int kBlockPieces = Format::kBlockSize / kCount;
  constexpr int kWords = code_words<Format, kCount>();
  constexpr int kBytes = kCount * Format::Element::kBits / 8;
  constexpr int kTile = dequantize_tile_vecs<Format, Out, kAccess>();
  using Decoder = DecoderOf<Format, Out>;

  const u32 thread = threadIdx.x;
  const u8* const __restrict__ packed = source.view.packed;
  const u8* const __restrict__ block_scale = source.view.block_scale;
  const float* const __restrict__ second = source.view.second;
  const Divide divide = source.divide;
  const i64 row_vecs = divide.divisor;
  const i64 packed_cols = source.view.blocks * (Format::kBlockSize * Format::Element::kBits / 8);
  const Levels<kRecipe, kSecond> levels{
      second, source.view.scales, source.view.vectors_per_scale, range.value};  // without a table
  __shared__ Decoder table[kTable ? kThreads : 1];

  const i64 left = source.vecs - base;
  const u32 count = left < kTile ? static_cast<u32>(left) : kTile;
  u32 codes[kUnroll][kWords];
  u32 byte[kUnroll];
  i64 row[kUnroll];
  i64 col = 0;
  if constexpr (kContiguous) {
    const u8* const my_codes = packed + (base + thread) * kBytes;
    const u8* const my_scales = block_scale + base / kBlockPieces + thread / kBlockPieces;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (u * kThreads + thread < count) {
        load_codes<true, kBytes>(my_codes + u * (kThreads * kBytes), codes[u]);
        byte[u] = __ldg(my_scales + u * (kThreads / kBlockPieces));
      }
    }
  } else if constexpr (kVector) {
    // 32 bits do: the launcher takes another access where they would not.
    const ScalePlaces places(source.layout, static_cast<u32>(source.view.stored_cols));
    const u32 first_row = static_cast<u32>(
        base >> 31 == 0 ? small_quotient(static_cast<u32>(base), divide) : base / row_vecs);
    const u32 first_chunk = static_cast<u32>(base - first_row * row_vecs);
    const i64 gap = packed_cols - row_vecs * kBytes;
    const u8* const my_codes = packed + (base + thread) * kBytes;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (u * kThreads + thread < count) {
        const u32 place = first_chunk + u * kThreads + thread;
        const u32 rows_down = small_quotient(place, divide);
        const u32 chunk = place - rows_down * static_cast<u32>(row_vecs);
        row[u] = first_row + rows_down;
        load_codes<true, kBytes>(my_codes + u * (kThreads * kBytes) + row[u] * gap, codes[u]);
        byte[u] = __ldg(block_scale + places(static_cast<u32>(row[u]), chunk / kBlockPieces));
      }
    }
  } else if (thread < count) {
    const i64 piece = base + thread;
    row[0] = divide(piece);
    const i64 chunk = piece - row[0] * row_vecs;
    col = chunk * kCount;
    load_codes<false, kBytes>(packed + row[0] * packed_cols + chunk * kBytes, codes[0]);
    byte[0] = __ldg(block_scale + scale_offset(source.layout, row[0], chunk / kBlockPieces,
                                      source.view.stored_cols));
  }

  if constexpr (kTable) {
    static_assert(kThreads == 256, "a thread for each scale byte");
    const Level level = make_level<kRecipe, kSecond>(kSecond ? __ldg(second) : 1.0f, range.value);
    table[thread] = make_decoder<Format, Out, kRecipe, kSecond>(thread, level, range.reciprocal);
    __syncthreads();
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) order_nibbles<Format>(codes[u], source.high_first);
  typename Out::Bits* const my_out = out + (base + thread) * kCount;
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (u * kThreads + thread < count) {
      Words<Out, kCount> result;
      if constexpr (kTable) {
        decode_words<Format, kRecipe, kSecond>(codes[u], table[byte[u]], result);
      } else {
        const Level level = levels.at(kSecond ? row[u] : 0);
        decode_words<Format, kRecipe, kSecond>(codes[u],
            make_decoder<Format, Out, kRecipe, kSecond>(byte[u], level, range.reciprocal), result);
      }
      if constexpr (kVector) {
        store_words(my_out + u * (kThreads * kCount), result.word);
      } else {
        store_elements<false, Out>(out + row[u] * source.cols + col, source.cols - col, result);
      }
    }
  }
}

template <class Format, class Out, int kRecipe, bool kSecond, int kAccess>
__global__ void __launch_bounds__(kThreads) dequantize_rowwise_kernel(u8* packed, u8* block_scale,
    const float* second, typename Out::Bits* __restrict__ out, i64 vecs, i64 cols, i64 blocks,
    i64 stored_cols, i64 row_vecs, i64 magic, i64 shift, i64 scales, i64 rows_per_scale, i64 layout,
    i64 high_first, i64 range, i64 reciprocal) {
  const FastDivide divide(row_vecs, magic, shift);
  const Rowwise<FastDivide> source{
      {second, packed, block_scale, blocks, stored_cols, scales, rows_per_scale}, vecs, cols,
      divide, static_cast<int>(layout), high_first != 0};
  const i64 base = static_cast<i64>(blockIdx.x) * dequantize_tile_vecs<Format, Out, kAccess>();
  dequantize_rowwise<Format, Out, kRecipe, kSecond, kAccess>(
      source, out, base, Range(range, reciprocal));
}

struct MemberVecs {
  Member member;
  i64 base;
};

template <class Format, class Out, int kRecipe, bool kSecond, int kAccess, class Table>
__global__ void __launch_bounds__(kThreads)
    grouped_dequantize_rowwise_kernel(u8* packed, u8* block_scale, const float* second,
        typename Out::Bits* __restrict__ out, const __grid_constant__ Table table, i64 per_vector,
        i64 layout, i64 high_first, i64 range, i64 reciprocal) {
  constexpr int kCount = 16 / Out::kSize;
  __shared__ MemberVecs found;
  const i64 at = find_member(table, blockIdx.x);
  if (at >= 0) {
    const u32 number = static_cast<u32>(at);
    found = {table.member(number),
        (blockIdx.x - table.first(number)) * dequantize_tile_vecs<Format, Out, kAccess>()};
  }
  __syncthreads();
  const Member& member = found.member;
  const QuantizedView view = member_view<Format>(member.row, second, packed, block_scale,
      member.rows, member.cols, per_vector != 0, static_cast<int>(layout));
  const PlainDivide divide{(member.cols + kCount - 1) / kCount};
  const Rowwise<PlainDivide> source{view, member.rows * divide.divisor, member.cols, divide,
      static_cast<int>(layout), high_first != 0};
  dequantize_rowwise<Format, Out, kRecipe, kSecond, kAccess>(
      source, out + member.start, found.base, Range(range, reciprocal));
}

}  // namespace fp4kit
