// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// quantize to FP8 under float32 scales. Must equal fp4kit/reference/grid.py.
//
// Algorithms:
//   grid_scales_kernel: amaxes become scales, one a thread; given scales become usable ones
//   quantize_grid_kernel: scales are known; a thread takes kGridUnroll times 16 elements
//   quantize_grid_measured_kernel: what shares a scale is held in registers by a team of threads:
//     its amax (integer maxima of magnitude bits), its scale, its codes, from one read. A tile is a
//     row, or a block of 128 x 128
//   quantize_grid_any_kernel: the same for any alignment and length; a thread block reads its tile
//     twice
//
// Memory layout: x and packed (rows, cols), scale float32 in the order of tiles, row-major. The
// vector kernels need rows of whole 16 elements that start on 16 bytes.
// Launch: 256 threads; a thread for each 16 elements of a row, or a team for each tile.
#include "common/scale_layout.cuh"
#include "grid/scales.cuh"
#include "reduce/amax.cuh"
#include "reduce/team.cuh"

namespace fp4kit {

template <class T, class E, bool kFromAmax>
__global__ void __launch_bounds__(kThreads) grid_scales_kernel(const float* __restrict__ given,
    float* __restrict__ scale, i64 count, i64 rounds_scale, i64 largest, i64 zero_scale) {
  const i64 i = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
  const GridRules rules{rounds_scale != 0, static_cast<u32>(largest), static_cast<u32>(zero_scale)};
  if (i >= count) return;
  scale[i] = kFromAmax ? grid_scale<T, E>(given[i], rules) : usable_grid_scale(given[i], 1.0f);
}

template <class T, class E, bool kRounds, int kSpan, bool kVector>
__global__ void __launch_bounds__(kThreads)
    quantize_grid_kernel(const typename T::Bits* __restrict__ x, const float* __restrict__ scale,
        u8* __restrict__ packed, i64 cols, i64 row_groups, i64 magic, i64 shift, i64 groups,
        i64 across, i64 row_shift) {
  const i64 first = static_cast<i64>(blockIdx.x) * (kThreads * kGridUnroll) + threadIdx.x;
  const FastDivide divide(row_groups, magic, shift);
  Words<T> elements[kGridUnroll];
#pragma unroll
  for (int u = 0; u < kGridUnroll; ++u) {
    const i64 group = first + u * kThreads;
    if (group >= groups) break;
    const i64 row = divide(group);
    const i64 col = (group - row * row_groups) * kGroupSize;
    load_elements<kVector>(x + row * cols + col, cols - col, elements[u]);
  }
#pragma unroll
  for (int u = 0; u < kGridUnroll; ++u) {
    const i64 group = first + u * kThreads;
    if (group >= groups) return;
    const i64 row = divide(group);
    const i64 col = (group - row * row_groups) * kGroupSize;
    const GridScales<kSpan> scales(scale, row, col, cols, across, row_shift);
    u32 codes[4];
    encode_under_grid<T, E, kRounds, GridScales<kSpan>::kStep>(elements[u], scales.value, codes);
    u8* out = packed + row * cols + col;
    if constexpr (kVector) {
      store_codes<true>(out, codes);
    } else {
#pragma unroll
      for (int i = 0; i < kGroupSize; ++i) {
        if (i < cols - col) out[i] = static_cast<u8>(codes[i / 4] >> (8 * (i % 4)));
      }
    }
  }
}

template <class T, class E, bool kRounds, bool kSquare, class TeamType>
__global__ void __launch_bounds__(kThreads) quantize_grid_measured_kernel(
    const typename T::Bits* __restrict__ x, float* __restrict__ scale, u8* __restrict__ packed,
    i64 rows, i64 cols, i64 across, i64 tiles, i64 rounds_scale, i64 largest, i64 zero_scale) {
  __shared__ u32 slots[kThreads / 32];
  constexpr u32 kSize = TeamType::kSize;
  constexpr u32 kGroups = TeamType::kGroups;
  constexpr u32 kAcross = kGridBlock / kGroupSize;
  const i64 tile = static_cast<i64>(blockIdx.x) * (kThreads / kSize) + threadIdx.x / kSize;
  const u32 place = threadIdx.x % kSize;
  const i64 strip = kSquare ? tile / across : tile;
  const i64 row = kSquare ? strip * kGridBlock : tile;
  const i64 col = kSquare ? (tile - strip * across) * kGridBlock : 0;

  const auto offset = [&](u32 l) {  // of a group, or -1 if it lies outside
    const u32 i = l * kSize + place;
    const i64 r = row + (kSquare ? i / kAcross : 0);
    const i64 c = col + static_cast<i64>(kSquare ? i % kAcross : i) * kGroupSize;
    return tile < tiles && r < rows && c < cols ? r * cols + c : -1;
  };
  Words<T> elements[kGroups] = {};
#pragma unroll
  for (u32 l = 0; l < kGroups; ++l) {
    const i64 from = offset(l);
    if (from >= 0) load_elements<true>(x + from, kGroupSize, elements[l]);
  }
  u32 amax[kGroups];
  bool finite;
  const u32 own = amax_bits(elements, amax, finite);
  const u32 measured = team_max<kSize>(own, slots);
  const GridRules rules{rounds_scale != 0, static_cast<u32>(largest), static_cast<u32>(zero_scale)};
  const float divisor = grid_scale<T, E>(from_input_bits<T>(measured), rules);
  if (place == 0 && tile < tiles) scale[tile] = divisor;
#pragma unroll
  for (u32 l = 0; l < kGroups; ++l) {
    const i64 to = offset(l);
    if (to < 0) continue;
    u32 codes[4];
    encode_under_grid<T, E, kRounds>(elements[l], &divisor, codes);
    store_codes<true>(packed + to, codes);
  }
}

template <class T, class E, bool kRounds>
__global__ void __launch_bounds__(kThreads)
    quantize_grid_any_kernel(const typename T::Bits* __restrict__ x, float* __restrict__ scale,
        u8* __restrict__ packed, i64 rows, i64 cols, i64 across, i64 tile_rows, i64 tile_cols,
        i64 rounds_scale, i64 largest, i64 zero_scale) {
  const i64 strip = static_cast<i64>(blockIdx.x) / across;
  const i64 row = strip * tile_rows;
  const i64 col = (static_cast<i64>(blockIdx.x) - strip * across) * tile_cols;
  const i64 height = rows - row < tile_rows ? rows - row : tile_rows;
  const i64 width = cols - col < tile_cols ? cols - col : tile_cols;
  const typename T::Bits* from = x + row * cols + col;
  u32 bits = 0;
  for (i64 r = 0; r < height; ++r) {
    for (i64 c = threadIdx.x; c < width; c += kThreads) {
      const u32 magnitude = __ldg(from + r * cols + c) & (T::kSize == 4 ? kMagnitudeMask : 0x7FFFu);
      bits = max_u32(bits, magnitude > T::kInf ? 0u : magnitude);
    }
  }
  bits = block_max(bits);
  const GridRules rules{rounds_scale != 0, static_cast<u32>(largest), static_cast<u32>(zero_scale)};
  const float divisor = grid_scale<T, E>(from_input_bits<T>(bits), rules);
  if (threadIdx.x == 0) scale[blockIdx.x] = divisor;
  u8* to = packed + row * cols + col;
  for (i64 r = 0; r < height; ++r) {
    for (i64 c = threadIdx.x; c < width; c += kThreads) {
      const float value = from_input_bits<T>(__ldg(from + r * cols + c));
      to[r * cols + c] = static_cast<u8>(
          encode_fp8_pair<E, true>(grid_quotient<T, kRounds>(value, divisor), 0.0f) & 0xFFu);
    }
  }
}

}  // namespace fp4kit
