// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// quantize_dequantize: what dequantize(quantize(x)) gives, in one pass and without packed memory.
// Must equal ReferenceBackend.quantize_dequantize.
//
// The contiguous instance takes whole blocks under at most one second-level value, with tables in
// shared memory (quantize/rowwise.cuh, dequantize/rowwise.cu) and a persistent grid-stride loop
// over tiles of groups; two neighbouring threads exchange half of their codes, so that a store of
// both writes 32 contiguous bytes. The other one works everything out for each group.
//
// Memory layout: x and out are (rows, cols) of one element type, both on 16 bytes with rows of
// whole 16-byte vecs. The launcher runs the two separate kernels for everything else.
// Launch: 256 threads; contiguous: at most FUSED_BLOCKS blocks per multiprocessor, tiles of 256 *
// unroll groups; else ceil(groups / 256) blocks. groups = rows * blocks * block / 16.
#include "common/scale_layout.cuh"
#include "quantize/rowwise.cuh"

namespace fp4kit {

template <class T>
FP4KIT_HD constexpr int fused_unroll() {
  return T::kSize == 4 ? FP4KIT_FUSED_UNROLL_4 : FP4KIT_FUSED_UNROLL_2;
}

// The codes of a group's even (0) or odd (1) output vecs.
template <class Format, class T>
FP4KIT_DEVICE void codes_of_vecs(
    const u32 (&codes)[Format::kGroupWords], u32 odd, u32 (&half)[Format::kGroupWords / 2]) {
  if constexpr (T::kSize == 2) {
#pragma unroll
    for (int i = 0; i < Format::kGroupWords / 2; ++i) {
      half[i] = odd ? codes[Format::kGroupWords / 2 + i] : codes[i];
    }
  } else if constexpr (Format::kIsFp4) {
    half[0] = byte_perm(codes[0], codes[1], odd ? 0x7632u : 0x5410u);
  } else {
#pragma unroll
    for (int i = 0; i < Format::kGroupWords / 2; ++i) {
      half[i] = odd ? codes[2 * i + 1] : codes[2 * i];
    }
  }
}

template <class Format, class T, int kRecipe, bool kSecond, bool kContiguous>
__global__ void __launch_bounds__(kThreads, kContiguous ? FP4KIT_FUSED_BLOCKS : 1)
    quantize_dequantize_kernel(const typename T::Bits* __restrict__ x,
        const float* __restrict__ second, typename T::Bits* __restrict__ out, i64 groups, i64 tiles,
        i64 cols, i64 blocks, i64 magic, i64 shift, i64 scales, i64 rows_per_scale, i64 rule) {
  if constexpr (kContiguous) {
    constexpr int kUnroll = fused_unroll<T>();
    constexpr int kVec = 16 / T::kSize;
    constexpr int kHalfWords = Format::kGroupWords / 2;
    constexpr int kHalfElements = kGroupSize / 2;
    // The factor of an MX scale is a shift: only results are worth a table there.
    constexpr bool kTable = Format::kIsFp4 && (!Format::kIsMx || T::kSize == 2);
    constexpr int kEntries = !kTable ? 1 : Format::kIsMx ? 256 : kScaleBytes;
    static_assert(kEntries <= kThreads, "a thread for each scale byte");
    __shared__ FactorTable table;
    __shared__ DecoderOf<Format, T> decoders[kEntries];
    if (kTable && threadIdx.x < kEntries) {
      decoders[threadIdx.x] = make_decoder<Format, T, kRecipe, kSecond>(
          threadIdx.x, make_level<kRecipe, kSecond>(kSecond ? __ldg(second) : 1.0f));
    }
    const Level level = fill_factor_table<Format, kRecipe, kSecond>(table, second);
    __syncthreads();

    const u32 odd = threadIdx.x % 2;
    for (i64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      const i64 base = tile * (kThreads * kUnroll);
      constexpr u32 kTile = kThreads * kUnroll;
      const u32 left = groups - base < kTile ? static_cast<u32>(groups - base) : kTile;
      const typename T::Bits* __restrict__ source = x + base * kGroupSize;
      typename T::Bits* __restrict__ target = out + base * kGroupSize;
      Words<T> elements[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const u32 group = threadIdx.x + u * kThreads;
        load_elements<true, T>(
            source + group * kGroupSize, group < left ? kGroupSize : 0, elements[u]);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        u32 codes[Format::kGroupWords];
        const u32 byte = quantize_group<Format, T, kRecipe, kSecond>(
            elements[u], table, level, Rounding<>(), 0, static_cast<int>(rule), false, codes);
        u32 kept[kHalfWords], sent[kHalfWords], received[kHalfWords];
        codes_of_vecs<Format, T>(codes, odd, kept);
        codes_of_vecs<Format, T>(codes, odd ^ 1, sent);
#pragma unroll
        for (int i = 0; i < kHalfWords; ++i) {
          received[i] = __shfl_xor_sync(0xFFFFFFFFu, sent[i], 1);
        }
        const u32 other = Format::kGroups == 2 ? byte : __shfl_xor_sync(0xFFFFFFFFu, byte, 1);
#pragma unroll
        for (u32 from = 0; from < 2; ++from) {
          const u32 group = (threadIdx.x & ~1u) + from + u * kThreads;
          u32 half[kHalfWords];
#pragma unroll
          for (int i = 0; i < kHalfWords; ++i) half[i] = odd == from ? kept[i] : received[i];
          const u32 scale = odd == from ? byte : other;
          Words<T, kHalfElements> result;
          if constexpr (kTable) {
            decode_words<Format, kRecipe, kSecond>(half, decoders[scale % kEntries], result);
          } else {
            decode_words<Format, kRecipe, kSecond>(
                half, make_decoder<Format, T, kRecipe, kSecond>(scale, level), result);
          }
          if (group < left) {
#pragma unroll
            for (int i = 0; i < kHalfElements / kVec; ++i) {
              const u32 piece[4] = {result.word[4 * i], result.word[4 * i + 1],
                  result.word[4 * i + 2], result.word[4 * i + 3]};
              store_words(target + group * kGroupSize + (2 * i + odd) * kVec, piece);
            }
          }
        }
      }
    }
  } else {
    const FastDivide divide(blocks, magic, shift);
    const i64 group = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
    const i64 scale = group / Format::kGroups;
    const i64 row = divide(scale);
    const i64 col =
        (scale - row * blocks) * Format::kBlockSize + group % Format::kGroups * kGroupSize;
    const i64 valid = group < groups ? cols - col : 0;
    const i64 offset = row * cols + col;

    Words<T> elements;
    load_elements<true, T>(x + offset, valid, elements);
    u32 raw;
    const float amax = block_amax<Format, T>(elements, raw);
    if (valid <= 0) return;

    const Levels<kRecipe, kSecond> levels{second, scales, rows_per_scale};
    const Level level = levels.at(row);
    const u32 byte =
        block_scale_byte<Format, T, kRecipe, kSecond>(amax, level, static_cast<int>(rule));
    u32 codes[Format::kGroupWords];
    encode_group<Format, T, kRecipe>(
        elements, raw, element_factor<Format, kRecipe, kSecond>(byte, level), codes);
    Words<T> result;
    decode_words<Format, kRecipe, kSecond>(
        codes, make_decoder<Format, T, kRecipe, kSecond>(byte, level), result);
    store_elements<true, T>(out + offset, valid, result);
  }
}

}  // namespace fp4kit
