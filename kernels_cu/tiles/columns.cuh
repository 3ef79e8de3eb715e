// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// The columns of a tile: what its threads take, and where they store it.
#pragma once

#include "tiles/column_codes.cuh"
#include "tiles/remainder_rows.cuh"

namespace fp4kit {

template <class C>
FP4KIT_DEVICE void quantize_columns_fp4(TileShared<C>& shared, typename C::TileType& tile,
    const Task<typename C::T>& task, const Options& options) {
  using Format = typename C::Format;
  constexpr u32 kGroups = Format::kGroups;
  constexpr u32 kBlock = C::kBlock;
  constexpr u32 kHalves = C::TileType::kPerWord;
  constexpr u32 kGroupBytes = 4 * Format::kGroupWords;
  constexpr u32 kItems = C::TileType::kWords * C::kDown;
  constexpr u32 kEach = kItems < kThreads ? 1 : kItems / kThreads;
  constexpr u32 kStep = kThreads / C::kDown;  // words
  static_assert(kStep * kHalves % 32 == 0, "so that places of scales add up");
  const u32 b = threadIdx.x % C::kDown;
  const u32 first_w = threadIdx.x / C::kDown;
  const Strip strip = strip_of<C>(task, b);
  if (!C::kFull && (!strip.inside || (kItems < kThreads && threadIdx.x >= kItems))) return;
  const u32 above = strip.down * kBlock;
  const u32 left = task.rows_left > above ? task.rows_left - above : 0;
  u32 scales = 0;  // of a whole matrix, one byte each
  const i64 block0 = task.row0 / kBlock;
  const u64 pitch = static_cast<u64>(task.col.blocks);
  u64 piece = static_cast<u64>(strip.col0 + first_w * kHalves) * pitch +
              static_cast<u64>(block0 + strip.down);
  u8* out = task.col.packed + piece * (kGroups * kGroupBytes);
  const ScalePlace<C::kLayout> place(task.col, strip.col0, block0);
  u8* scale = place.at(first_w * kHalves, strip.down);
#pragma unroll 1
  for (u32 k = 0; k < kEach; ++k) {
    const u32 w = first_w + k * kStep;
    u32 word[kBlock];
    const u32* first_word = &tile.at(b * kBlock, w);
#pragma unroll
    for (u32 i = 0; i < kBlock; ++i) word[i] = column_word<C>(first_word, i);
    u32 code[2][kGroups][2];
    u32 byte[2];
    encode_columns<C>(shared, word, w, left, piece, pitch, task.stream, options, code, byte);
#pragma unroll
    for (u32 half = 0; half < kHalves; ++half) {
      if (!C::kFull && w * kHalves + half >= strip.cols_left) continue;
      u8* target = out + half * (pitch * (kGroups * kGroupBytes));
#pragma unroll
      for (u32 l = 0; l < kGroups; ++l) {
        store_group<C>(target + l * kGroupBytes, code[half][l], options);
      }
      if constexpr (C::kFull) {
        scales = scales >> 8 | byte[half] << 24;
      } else {
        scale[half * place.to_odd()] = static_cast<u8>(byte[half]);
      }
    }
    piece += kStep * kHalves * pitch;
    out += kStep * kHalves * pitch * (kGroups * kGroupBytes);
    scale += place.step(kStep * kHalves);
  }
  if constexpr (C::kFull) {
    static_assert(kEach * kHalves == 4, "four bytes of four lanes");
    const u32 column = (first_w + b % 4 / kHalves * kStep) * kHalves + b % kHalves;
    const u32 turned = transpose_scales(scales);
    if constexpr (C::kBuffersScales) {
      u8* target = place.at(column, 0) - task.part * kTileScales;
      store_buffered_scales(target, shared.buffered, turned, task.part, task.alone);
    } else {
      *reinterpret_cast<u32*>(place.at(column, b / 4 * 4)) = turned;
    }
  }
}

// Columnwise FP8 keeps the order of the elements: rows of codes come from a second pass over the
// words.
template <class C>
FP4KIT_DEVICE void quantize_columns_fp8(TileShared<C>& shared, typename C::TileType& tile,
    const Task<typename C::T>& task, const Options& options) {
  using Format = typename C::Format;
  using Element = typename Format::Element;
  using T = typename C::T;
  constexpr u32 kBlock = C::kBlock;
  constexpr u32 kWords = C::TileType::kWords;
  constexpr u32 kHalves = C::TileType::kPerWord;
  const i64 block0 = task.row0 / kBlock;
  const ScalePlace<C::kLayout> place(task.col, task.col0, block0);
  const u32 blocks_left = (task.rows_left + kBlock - 1) / kBlock;
#pragma unroll 1
  for (u32 index = threadIdx.x; index < kWords * C::kDown; index += kThreads) {
    const u32 b = index / kWords;
    const u32 w = index % kWords;
    const u32 col0 = w * kHalves;
    if (b >= blocks_left || col0 >= task.cols_left) continue;
    const u32* first_word = &tile.at(b * kBlock, w);
    const bool pair = kHalves == 2 && col0 + 1 < task.cols_left;
    MaxBits<T> maximum;
#pragma unroll
    for (u32 i = 0; i < kBlock; ++i) maximum.add(column_word<C>(first_word, i));
    const bool has_nan = maximum.result() > T::kInf;
    if (has_nan) {
      maximum = MaxBits<T>();
#pragma unroll 1
      for (u32 i = 0; i < kBlock; ++i) maximum.add_careful(column_word<C>(first_word, i));
    }
    u8* scale_at[2];
    float factor[2];
#pragma unroll
    for (u32 half = 0; half < kHalves; ++half) {
      const u32 col = col0 + half;
      u32 byte;
      if constexpr (C::V::kSquare) {
        byte = shared.square_byte[b][col / kBlock];
      } else {
        const u32 bits = kHalves == 1 ? maximum.result() : maximum.half(half);
        byte = block_scale_byte<Format, T, C::kRecipe, C::kSecond>(
            from_input_bits<T>(bits), Level{1.0f, 1.0f, 1.0f, 1.0f, false}, options.rule);
      }
      factor[half] = inverse_e8m0(byte);
      scale_at[half] = C::kLayout == kLayoutLinear
                           ? task.col.block_scale + (block0 + b) * task.cols + task.col0 + col
                           : place.at(col, b);
      if (half == 0 || pair) *scale_at[half] = static_cast<u8>(byte);
    }
    u8* out = task.col.packed + (task.row0 + b * kBlock) * task.cols + task.col0 + col0;
#pragma unroll 8
    for (u32 i = 0; i < kBlock; ++i) {
      const u32 word = column_word<C>(first_word, i);
      const float first = mul_rn(half_value<T>(word, 0), factor[0]);
      const float second =
          kHalves == 2 ? mul_rn(half_value<T>(word, kHalves - 1), factor[1]) : 0.0f;
      const u32 codes = has_nan ? encode_fp8_pair<Element, true>(first, second)
                                : encode_fp8_pair<Element, false>(first, second);
      if (C::kVector && kHalves == 2) {
        *reinterpret_cast<u16*>(out) = static_cast<u16>(codes);
      } else {
        out[0] = static_cast<u8>(codes);
        if (pair) out[1] = static_cast<u8>(codes >> 8);
      }
      out += task.cols;
    }
  }
}

// Byte j of four words, as word j.
FP4KIT_DEVICE void transpose_bytes(u32 a, u32 b, u32 c, u32 d, u32 (&out)[4]) {
  const u32 low_ab = byte_perm(a, b, 0x5140u);
  const u32 high_ab = byte_perm(a, b, 0x7362u);
  const u32 low_cd = byte_perm(c, d, 0x5140u);
  const u32 high_cd = byte_perm(c, d, 0x7362u);
  out[0] = byte_perm(low_ab, low_cd, 0x5410u);
  out[1] = byte_perm(low_ab, low_cd, 0x7632u);
  out[2] = byte_perm(high_ab, high_cd, 0x5410u);
  out[3] = byte_perm(high_ab, high_cd, 0x7632u);
}

// Columns of squares: the codes of the rows, transposed, eight rows and eight columns at a time.
template <class C>
FP4KIT_DEVICE void transpose_codes(TileShared<C>& shared, typename C::TileType& tile,
    const Task<typename C::T>& task, const Options& options) {
  constexpr u32 kVecs = kTileRows / 8;
  constexpr u32 kBlock = C::kBlock;
  constexpr u32 kWords = C::kColumns / 8;  // of a row of codes
  constexpr u32 kBlockCodes = kBlock / 8;  // words of a block's codes, and of its elements
  constexpr u32 kBlockWords = kBlock * C::T::kSize / 4;
  const i64 block0 = task.row0 / kBlock;
  const u32 blocks_left = (task.rows_left + kBlock - 1) / kBlock;
  const u64 pitch = static_cast<u64>(task.col.blocks) * (kBlock / 2);
  u8* packed = task.col.packed + task.col0 * pitch + task.row0 / 2;
  for (u32 index = threadIdx.x; index < kVecs * kWords; index += kThreads) {
    const u32 piece = index % kVecs;
    const u32 w = index / kVecs;
    if (!C::kFull && piece * 8 / kBlock >= blocks_left) continue;
    const u32* first = &tile.at(piece * 8, w / kBlockCodes * kBlockWords + w % kBlockCodes);
    u32 word[8];
#pragma unroll
    for (u32 i = 0; i < 8; ++i) word[i] = first[C::TileType::offset(i, 0)];
    u32 even[4], odd[4];
    transpose_bytes(word[0], word[2], word[4], word[6], even);
    transpose_bytes(word[1], word[3], word[5], word[7], odd);
    u8* out = packed + w * 8 * pitch + piece * 4;
#pragma unroll
    for (u32 j = 0; j < 4; ++j) {
      const u32 columns[2] = {(even[j] & 0x0F0F0F0Fu) | ((odd[j] << 4) & 0xF0F0F0F0u),
          ((even[j] >> 4) & 0x0F0F0F0Fu) | (odd[j] & 0xF0F0F0F0u)};
#pragma unroll
      for (u32 half = 0; half < 2; ++half) {
        const u32 codes[1] = {options.high_first ? swap_nibbles(columns[half]) : columns[half]};
        if (C::kFull || w * 8 + 2 * j + half < task.cols_left) {
          store_codes<C::kVector, C::kStreams>(out, codes);
        }
        out += pitch;
      }
    }
  }
  if (C::kFull) return;
  const ScalePlace<C::kLayout> place(task.col, task.col0, block0);
  constexpr u32 kStep = kThreads / C::kDown;
  static_assert(kStep % 32 == 0, "so that places of scales add up");
  const u32 b = threadIdx.x % C::kDown;
  u8* scale = place.at(threadIdx.x / C::kDown, b);
  if (b >= blocks_left) return;
  for (u32 col = threadIdx.x / C::kDown; col < task.cols_left; col += kStep) {
    *scale = shared.square_byte[b][col / kBlock];
    scale += place.step(kStep);
  }
}

template <class C>
FP4KIT_DEVICE void quantize_columns(TileShared<C>& shared, typename C::TileType& tile,
    const Task<typename C::T>& task, const Options& options) {
  if constexpr (C::kTransposes) {
    transpose_codes<C>(shared, tile, task, options);
  } else if constexpr (C::Format::kIsFp4) {
    quantize_columns_fp4<C>(shared, tile, task, options);
  } else {
    quantize_columns_fp8<C>(shared, tile, task, options);
  }
}

}  // namespace fp4kit
