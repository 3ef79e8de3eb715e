// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Fused per-row amax and quantize (per_token, row_scaled): amax, second level and codes from one
// read. Must equal reduce/amax.cu, scales/second_level.cu and quantize/rowwise_any.cu (or
// tiles/quantize_tiles.cu) one after another.
//
// For each row:
//   1. a team of threads holds the whole row in registers, kGroups groups of 16 a thread
//   2. its amax, over the team by shuffles and, if it is more than a warp, one exchange through
//      shared memory, with two sets of slots in turn, so that one barrier a row is enough
//   3. the second level and what follows from it, by each thread for itself
//   4. scale and codes of each group, whose registers then take the same group of the next row
//
// Memory layout: as in quantize/rowwise_any.cu, every row whole 16-byte vecs that start on 16
// bytes; `second` is float32 (rows,), written. The launcher clears the scales of padded layouts
// first.
// Launch: 256 threads, at most as many blocks as the device holds at once. A row has at most kSize
// * kGroups groups, and more than kSize * (kGroups - 1): only the last of a thread's groups may be
// missing. Fewer than 2^31 rows.
#include "common/scale_layout.cuh"
#include "common/stochastic.cuh"
#include "reduce/team.cuh"

namespace fp4kit {

// Thread blocks per multiprocessor, by what a thread holds. A division for each element takes more.
template <class T, int kRecipe, class TeamType>
FP4KIT_HD constexpr int measured_blocks() {
  constexpr u32 kWords = TeamType::kGroups * Words<T>::kWords;
  if (kWords > 48) return 2;
  return kWords > 32 || recipe_divides(kRecipe) ? 3 : 4;
}

// Offset of a scale from that of the scale `cols` places before it in a row, a multiple of scale
// tiles.
template <int kLayout>
FP4KIT_HD constexpr u32 scale_distance(u32 cols) {
  if (kLayout == kLayoutLinear) return cols;
  return cols / kTileCols * (kLayout == kLayoutSwizzled128x4 ? kTileBytes128 : kTileBytes8);
}

// SeedWords: empty, or all that Seed holds, to round stochastically.
template <class T, int kRecipe, bool kPerToken, int kLayout, class TeamType, class... SeedWords>
__global__ void __launch_bounds__(kThreads, measured_blocks<T, kRecipe, TeamType>())
    quantize_per_token_kernel(const uint4* __restrict__ x, float* __restrict__ second,
        u8* __restrict__ packed, u8* __restrict__ block_scale, SeedWords... seed_words,
        i64 row_count, i64 row_vecs, i64 row_blocks, i64 stored_cols, i64 high_first,
        i64 smallest) {
  const Rounding<SeedWords...> rounding{seed_words...};
  constexpr u32 kSize = TeamType::kSize;
  constexpr u32 kGroups = TeamType::kGroups;
  constexpr u32 kTeams = kThreads / kSize;
  constexpr u32 kRowsOfWarp = kSize < 32 ? 32 / kSize : 1;
  constexpr u32 kGroupVecs = Words<T>::kWords / 4;
  constexpr u32 kCodeBytes = 4 * Nvfp4::kGroupWords;
  static_assert(kSize % kTileCols == 0, "groups of a thread are whole scale tiles apart");
  __shared__ u32 slots[2][kThreads / 32];

  // All that is counted fits 32 bits: few registers are held for addresses.
  const u32 rows = static_cast<u32>(row_count);
  const u32 vecs = static_cast<u32>(row_vecs);
  const u32 blocks = static_cast<u32>(row_blocks);
  const u32 team = threadIdx.x / kSize;
  // Where the last group is missing in half of a team, every other team turns its halves: the warps
  // of either half would all lie in the same quarters of a multiprocessor.
  const u32 turn = (kSize == 64 || kSize == 128) && team % 2 == 1 ? kSize / 2 : 0;
  const u32 place = threadIdx.x % kSize ^ turn;
  // Vecs that the row has from the thread's last group on.
  const int rest =
      static_cast<int>(vecs) - static_cast<int>(((kGroups - 1) * kSize + place) * kGroupVecs);

  Words<T> elements[kGroups] = {};
  const auto load = [&](u32 row, u32 l) {
    const uint4* start = x + (row * vecs + place * kGroupVecs);
#pragma unroll
    for (int i = 0; i < static_cast<int>(kGroupVecs); ++i) {
      if (l + 1 == kGroups && i >= rest) break;
      unpack_vec(__ldg(start + l * kSize * kGroupVecs + i), elements[l].word + 4 * i);
    }
  };

  const u32 stride = gridDim.x * kTeams;
  u32 row = blockIdx.x * kTeams + team;
  if (row < rows) {
#pragma unroll
    for (u32 l = 0; l < kGroups; ++l) load(row, l);
  }
  u32 parity = 0;
  // The teams of a warp leave together: they shuffle together.
#pragma unroll 1
  for (; row - team % kRowsOfWarp < rows; row += stride) {
    u32 amax[kGroups];
    bool finite;
    const u32 own = amax_bits(elements, amax, finite);
    const float measured = from_input_bits<T>(team_max<kSize>(own, slots[parity]));
    parity ^= 1;
    const float kept = second_level_from_amax<T>(measured, kRecipe);
    const bool inside = kRowsOfWarp == 1 || row < rows;
    if (place == 0 && inside) second[row] = kept;
    const float counted = kPerToken ? at_least(kept, as_float(static_cast<u32>(smallest))) : kept;
    const Level level = make_level<kRecipe, true>(counted);

    const u32 first = row * blocks + place;
    const u32 scale = static_cast<u32>(scale_offset(kLayout, row, place, stored_cols));
#pragma unroll
    for (u32 l = 0; l < kGroups; ++l) {
      if (inside && (l + 1 < kGroups || rest > 0)) {
        const u32 byte =
            block_scale_byte<Nvfp4, T, kRecipe, true>(from_input_bits<T>(amax[l]), level, 0);
        const float factor = kPerToken ? per_token_factor(byte, level)
                                       : element_factor<Nvfp4, kRecipe, true>(byte, level);
        const bool ordinary =
            finite && is_ordinary_scale<Nvfp4>(byte, 0) && is_ordinary_level<kRecipe>(level);
        u32 codes[Nvfp4::kGroupWords];
        rounding.template encode<Nvfp4, kRecipe>(
            elements[l], 0, ordinary, factor, first + l * kSize, codes);
        order_nibbles<Nvfp4>(codes, high_first != 0);
        // Opaque: the compiler would hold a pointer in two registers, or work `first` out anew.
        u8* const out = packed + static_cast<u64>(opaque(first)) * kCodeBytes;
        store_codes<true>(out + l * kSize * kCodeBytes, codes);
        (block_scale + scale)[scale_distance<kLayout>(l * kSize)] = static_cast<u8>(byte);
      }
      if (row + stride < rows) load(row + stride, l);
    }
  }
}

}  // namespace fp4kit
