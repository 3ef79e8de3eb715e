// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// dequantize_residual: codes and scales of main and residual blocks to elements. Must equal
// ReferenceOperations.dequantize_residual, with every NaN written as the canonical positive one.
//
//   dequantize_residual_kernel            channels in order: 16-byte stores, as
//                                         dequantize/rowwise.cu
//   dequantize_residual_reordered_kernel  reordered ones: scattered over rows in shared memory,
//                                         which then are stored
//   dequantize_residual_any_kernel        single accesses: everything, and few or long reordered
//                                         rows
//
// Memory layout: as in residual/quantize.cu. `adds`: residual blocks are added (activation mode).
#include "residual/places.cuh"

namespace fp4kit {

template <class Out>
struct ByteTable {
  static constexpr bool kUsed = Out::kSize == 2;
  static constexpr int kEntries = kUsed ? kThreads : 1;
  static_assert(kThreads == 256, "a thread for each scale byte");

  static FP4KIT_DEVICE void fill(E2m1Table* table, float inverse) {
    if constexpr (kUsed) {
      table[threadIdx.x] = residual_table<Out>(decode_fp8<E4m3>(threadIdx.x), inverse);
    }
  }
};

template <class Out, int kCount, int kWords>
FP4KIT_DEVICE Words<Out, kCount> decode_either(u32 (&codes)[kWords], u32 byte,
    u32 (&extra_codes)[kWords], u32 extra_byte, bool has_extra, bool high_first,
    const E2m1Table* table, float inverse) {
  order_nibbles<Nvfp4>(codes, high_first);
  order_nibbles<Nvfp4>(extra_codes, high_first);
  if (!has_extra) return decode_alone<Out, kCount>(codes, byte, table, inverse);
  return decode_sum<Out, kCount>(
      codes, decode_fp8<E4m3>(byte), extra_codes, decode_fp8<E4m3>(extra_byte), inverse);
}

// ---- Channels in order ----

// Launch: 256 threads, a block for each tile of 256 * unroll vecs; fewer than 2^31 rows, 2^30 vecs
// of a row, 2^24 stored columns.
template <class Out>
__global__ void __launch_bounds__(kThreads)
    dequantize_residual_kernel(const u8* __restrict__ packed, const u8* __restrict__ block_scale,
        const float* __restrict__ encode_scale, const i64*, typename Out::Bits* __restrict__ out,
        i64 vecs, i64 main_blocks, i64 first, i64 blocks, i64 stored_cols, i64 row_vecs, i64 magic,
        i64 shift, i64 layout, i64 interleaved, i64 adds, i64 high_first) {
  constexpr int kUnroll = FP4KIT_DEQUANTIZE_UNROLL;
  constexpr int kCount = 16 / Out::kSize;
  constexpr int kBlockPieces = kGroupSize / kCount;
  constexpr int kBytes = kCount / 2;
  constexpr int kTile = kThreads * kUnroll;
  __shared__ E2m1Table table[ByteTable<Out>::kEntries];

  const u32 thread = threadIdx.x;
  const FastDivide divide(row_vecs, magic, shift);
  const BlockPlaces<u32> places(main_blocks, first, blocks, interleaved);
  const ScalePlaces scale_places(static_cast<int>(layout), static_cast<u32>(stored_cols));
  const i64 base = static_cast<i64>(blockIdx.x) * kTile;
  const u32 count = vecs - base < kTile ? static_cast<u32>(vecs - base) : kTile;
  const u32 first_row = static_cast<u32>(
      base >> 31 == 0 ? small_quotient(static_cast<u32>(base), divide) : base / row_vecs);
  const u32 first_chunk = static_cast<u32>(base - first_row * row_vecs);

  const auto load = [&](u32 row, u32 place, u32 part, u32& codes, u32& byte) {
    const u64 block = static_cast<u64>(row) * places.blocks + place;
    const u8* const from = packed + block * 8 + part * kBytes;
    if constexpr (kBytes == 4) {
      codes = __ldg(reinterpret_cast<const unsigned int*>(from));
    } else {
      codes = __ldg(reinterpret_cast<const unsigned short*>(from));
    }
    byte = __ldg(block_scale + scale_places(row, place));
  };
  u32 codes[kUnroll][1], extra_codes[kUnroll][1];
  u32 byte[kUnroll], extra_byte[kUnroll];
  bool has_extra[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    codes[u][0] = extra_codes[u][0] = byte[u] = extra_byte[u] = 0;
    has_extra[u] = false;
    if (u * kThreads + thread < count) {
      const u32 piece = first_chunk + u * kThreads + thread;
      const u32 rows_down = small_quotient(piece, divide);
      const u32 chunk = piece - rows_down * static_cast<u32>(row_vecs);
      const u32 row = first_row + rows_down;
      const u32 block = chunk / kBlockPieces;
      load(row, places.main(block), chunk % kBlockPieces, codes[u][0], byte[u]);
      has_extra[u] = adds && block >= places.first;
      if (has_extra[u]) {
        load(row, places.extra(block), chunk % kBlockPieces, extra_codes[u][0], extra_byte[u]);
      }
    }
  }
  const float inverse = div_rn(1.0f, usable(__ldg(encode_scale)));
  ByteTable<Out>::fill(table, inverse);
  if constexpr (ByteTable<Out>::kUsed) __syncthreads();
  typename Out::Bits* const my_out = out + (base + thread) * kCount;
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (u * kThreads + thread < count) {
      const Words<Out, kCount> result = decode_either<Out, kCount>(codes[u], byte[u],
          extra_codes[u], extra_byte[u], has_extra[u], high_first != 0, table, inverse);
      store_words(my_out + u * (kThreads * kCount), result.word);
    }
  }
}

// ---- Channels in another order, staged ----

// A thread block takes groups of eight rows, in steps of `together` rows (or pairs of rows of a
// 16-bit type). order[j] is the channel that j goes to.
//
// Launch: 256 threads, as many blocks as run at once; shared memory: the byte table (16-bit types),
// `together` words and 2 bytes for each channel. Fewer than 2^31 rows, at most 2^16 columns.
template <class Out>
__global__ void __launch_bounds__(kThreads, FP4KIT_RESIDUAL_DEQUANTIZE_STAGED)
    dequantize_residual_reordered_kernel(const u8* __restrict__ packed,
        const u8* __restrict__ block_scale, const float* __restrict__ encode_scale,
        const i64* __restrict__ order, typename Out::Bits* __restrict__ out, i64 group_count,
        i64 row_count, i64 main_blocks, i64 first, i64 blocks, i64 stored_cols, i64 together_count,
        i64 magic, i64 shift, i64 layout_number, i64 interleaved, i64 adds, i64 high_first) {
  constexpr u32 kRows = 4 / Out::kSize;  // rows that a word holds a channel of
  constexpr u32 kChannels = 16 / Out::kSize;
  constexpr u32 kVecs = kGroupSize / kChannels;
  extern __shared__ uint4 memory[];
  const u32 groups = static_cast<u32>(group_count);
  const u32 rows = static_cast<u32>(row_count);
  const u32 together = static_cast<u32>(together_count);
  const int layout = static_cast<int>(layout_number);
  const BlockPlaces<u32> places(main_blocks, first, blocks, interleaved);
  const ScalePlaces scale_places(layout, static_cast<u32>(stored_cols));
  const GroupRows group_rows(layout);
  const FastDivide divide(main_blocks, magic, shift);
  const u32 cols = places.main_blocks * kGroupSize;
  const u32 chunks = cols / kChannels;
  const u32 half = together * (cols / 2);
  const u32 steps = kGroupRows / kRows / together;
  E2m1Table* const table = reinterpret_cast<E2m1Table*>(memory);
  u32* const word = reinterpret_cast<u32*>(memory) +
                    (ByteTable<Out>::kUsed ? sizeof(E2m1Table) / sizeof(u32) * kThreads : 0);
  u16* const index = reinterpret_cast<u16*>(word + together * cols);

  const float inverse = div_rn(1.0f, usable(__ldg(encode_scale)));
  ByteTable<Out>::fill(table, inverse);
#pragma unroll 4
  for (u32 j = threadIdx.x; j < cols; j += kThreads) {
    const u32 channel = static_cast<u32>(channel_inside(__ldg(order + j), cols));
    index[index_place(j / kGroupSize, j % kGroupSize, places.main_blocks)] =
        static_cast<u16>(staged_place<Out>(channel, half));
  }

  const auto load = [&](u32 row, u32 place, u32(&codes)[2], u32& byte) {
    const u64 block = static_cast<u64>(row) * places.blocks + place;
    const uint2 both = __ldg(reinterpret_cast<const uint2*>(packed + block * 8));
    codes[0] = both.x;
    codes[1] = both.y;
    byte = __ldg(block_scale + scale_places(row, place));
  };
  u32 step = 0;
#pragma unroll 1
  for (u32 group = blockIdx.x; group < groups;) {
    __syncthreads();  // the step before has stored its rows
#pragma unroll 1
    for (u32 item = threadIdx.x; item < together * places.main_blocks; item += kThreads) {
      const u32 my_set = small_quotient(item, divide);
      const u32 block = item - my_set * places.main_blocks;
      const u32 local = (step * together + my_set) * kRows;
      const bool has_extra = adds && block >= places.first;
      u32 codes[kRows][2], extra_codes[kRows][2];
      u32 byte[kRows], extra_byte[kRows];
#pragma unroll
      for (u32 r = 0; r < kRows; ++r) {
        codes[r][0] = codes[r][1] = extra_codes[r][0] = extra_codes[r][1] = 0;
        byte[r] = extra_byte[r] = 0;
        const u32 row = group_rows.row(group, local + r);
        if (row < rows) {
          load(row, places.main(block), codes[r], byte[r]);
          if (has_extra) load(row, places.extra(block), extra_codes[r], extra_byte[r]);
        }
      }
      Words<Out> decoded[kRows];
#pragma unroll
      for (u32 r = 0; r < kRows; ++r) {
        decoded[r] = decode_either<Out, kGroupSize>(codes[r], byte[r], extra_codes[r],
            extra_byte[r], has_extra, high_first != 0, table, inverse);
      }
      const u32 base = my_set * staged_row<Out>(cols) * 4;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint4 eight =
            *reinterpret_cast<const uint4*>(index + index_place(block, h * 8, places.main_blocks));
        const u32 kept[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = 4 * h + i;  // of two neighbouring channels
          u32& low = word_at(word, place_in<false>(kept[i], base));
          u32& high = word_at(word, place_in<true>(kept[i], base));
          if constexpr (kRows == 1) {
            low = decoded[0].word[2 * at];
            high = decoded[0].word[2 * at + 1];
          } else {
            low = byte_perm(decoded[0].word[at], decoded[1].word[at], 0x5410u);
            high = byte_perm(decoded[0].word[at], decoded[1].word[at], 0x7632u);
          }
        }
      }
    }
    __syncthreads();
#pragma unroll 2
    for (u32 piece = threadIdx.x; piece < together * chunks; piece += kThreads) {
      const u32 my_set = small_quotient(piece / kVecs, divide);
      const u32 chunk = piece - my_set * chunks;
      const u32 local = (step * together + my_set) * kRows;
      const u32* const staged = word + piece * 4;
      const uint4 low = *reinterpret_cast<const uint4*>(staged);
      u32 result[kRows][4];
      if constexpr (kRows == 1) {
        unpack_vec(low, result[0]);
      } else {
        const uint4 high = *reinterpret_cast<const uint4*>(staged + half);
        const u32 w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          result[0][i] = byte_perm(w[2 * i], w[2 * i + 1], 0x5410u);
          result[1][i] = byte_perm(w[2 * i], w[2 * i + 1], 0x7632u);
        }
      }
#pragma unroll
      for (u32 r = 0; r < kRows; ++r) {
        const u32 row = group_rows.row(group, local + r);
        if (row < rows) {
          store_words(out + static_cast<u64>(row) * cols + chunk * kChannels, result[r]);
        }
      }
    }
    if (++step == steps) {
      step = 0;
      group += gridDim.x;
    }
  }
}

// ---- Everything else ----

// Launch: 256 threads, a thread for each main block. `order` may be null.
template <class Out>
__global__ void __launch_bounds__(kThreads) dequantize_residual_any_kernel(
    const u8* __restrict__ packed, const u8* __restrict__ block_scale,
    const float* __restrict__ encode_scale, const i64* __restrict__ order,
    typename Out::Bits* __restrict__ out, i64 items, i64 main_blocks, i64 first, i64 blocks,
    i64 stored_cols, i64 magic, i64 shift, i64 layout, i64 interleaved, i64 adds, i64 high_first) {
  __shared__ E2m1Table table[ByteTable<Out>::kEntries];
  const float inverse = div_rn(1.0f, usable(__ldg(encode_scale)));
  ByteTable<Out>::fill(table, inverse);
  if constexpr (ByteTable<Out>::kUsed) __syncthreads();
  const BlockPlaces<i64> places(main_blocks, first, blocks, interleaved);
  const FastDivide divide(main_blocks, magic, shift);
  const i64 item = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
  if (item >= items) return;
  const i64 row = divide(item);
  const i64 block = item - row * main_blocks;
  const auto load = [&](i64 place, u32(&codes)[2], u32& byte) {
    load_codes<false, 8>(packed + (row * blocks + place) * 8, codes);
    byte = __ldg(block_scale + scale_offset(static_cast<int>(layout), row, place, stored_cols));
  };
  const bool has_extra = adds && block >= first;
  u32 codes[2] = {0, 0};
  u32 extra_codes[2] = {0, 0};
  u32 byte, extra_byte = 0;
  load(places.main(block), codes, byte);
  if (has_extra) load(places.extra(block), extra_codes, extra_byte);
  const Words<Out> result = decode_either<Out, kGroupSize>(
      codes, byte, extra_codes, extra_byte, has_extra, high_first != 0, table, inverse);
  typename Out::Bits* const row_out = out + row * main_blocks * kGroupSize;
  const i64 start = block * kGroupSize;
#pragma unroll
  for (int i = 0; i < kGroupSize; ++i) {
    const i64 channel = order == nullptr
                            ? start + i
                            : channel_inside(__ldg(order + start + i), main_blocks * kGroupSize);
    row_out[channel] = static_cast<typename Out::Bits>(result.bits(i));
  }
}

}  // namespace fp4kit
