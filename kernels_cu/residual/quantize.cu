// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// quantize_residual: elements to codes and scales of main and residual blocks. Must equal
// ReferenceOperations.quantize_residual.
//
//   quantize_residual_kernel            channels in order: 16-byte accesses
//   quantize_residual_reordered_kernel  reordered ones (residual/quantize_reordered.cu)
//   quantize_residual_any_kernel        single accesses: everything, and few or long reordered rows
//
// Memory layout: x is (rows, main_blocks * 16), packed (rows, blocks * 8 bytes), block_scale
// stored_rows x stored_cols in the order of `layout`, every padding byte written 0. order[j] is the
// channel of x that stands at j.
#include "residual/places.cuh"

namespace fp4kit {

// ---- Channels in order ----

// Thread blocks per multiprocessor.
template <class T>
FP4KIT_HD constexpr int residual_blocks() {
  return T::kSize == 4 ? FP4KIT_RESIDUAL_BLOCKS_4 : FP4KIT_RESIDUAL_BLOCKS_2;
}

// A warp takes items: some rows down of a few blocks of the row, 32 side by side where scales are
// linear, else four of each row of a group, whose scales are a sector. `rotation` moves the items
// of a warp along the row: residual blocks are more work, and lie at its end.
//
// Launch: 256 threads, at most residual_blocks() blocks per multiprocessor. An item is `depth`
// groups (a divisor of 16) or single rows, `units` items make up a row; fewer than 2^31 items.
template <class T, bool kRounds>
__global__ void __launch_bounds__(kThreads, residual_blocks<T>())
    quantize_residual_kernel(const typename T::Bits* __restrict__ x,
        const float* __restrict__ encode_scale, const i64*, u8* __restrict__ packed,
        u8* __restrict__ block_scale, i64 item_count, i64 depth_count, i64 unit_blocks, i64 units,
        i64 magic, i64 shift, i64 rotation, i64 row_step, i64 x_step, i64 code_step, i64 scale_step,
        i64 row_count, i64 main_blocks, i64 first, i64 blocks, i64 stored_rows, i64 stored_cols,
        i64 layout_number, i64 interleaved, i64 copies, i64 high_first) {
  __shared__ ResidualFactors factors;
  if (threadIdx.x < sizeof(ResidualFactors) / sizeof(float)) factors.fill(threadIdx.x);
  __syncthreads();

  constexpr u32 kWarps = kThreads / 32;
  const BlockPlaces<u32> places(main_blocks, first, blocks, interleaved);
  const int layout = static_cast<int>(layout_number);
  const ScalePlaces scale_places(layout, static_cast<u32>(stored_cols));
  const FastDivide divide(units, magic, shift);
  const float scale = usable(__ldg(encode_scale));
  const u32 items = static_cast<u32>(item_count);
  const u32 depth = static_cast<u32>(depth_count);
  const u32 rows = static_cast<u32>(row_count);
  const u32 all_tasks = block_tasks(interleaved != 0, first % 2 == 0, copies != 0, high_first != 0);
  const bool wide = unit_blocks == 32;
  const u32 lane = threadIdx.x % 32;
  const u32 block_offset = wide ? lane : lane % kTileCols;
  const GroupRows group_rows(layout);
  const u32 local = wide ? 0 : group_rows.local(lane);

  Words<T> prefetched{};
  u32 row, block;  // of the item that is under way
  const typename T::Bits* from;
  const auto begin = [&](u32 item) {
    const u32 segment = small_quotient(item, divide);
    const u32 turned =
        item - segment * static_cast<u32>(units) + segment * static_cast<u32>(rotation);
    const u32 unit = turned - small_quotient(turned, divide) * static_cast<u32>(units);
    block = unit * static_cast<u32>(unit_blocks) + block_offset;
    row = wide ? segment * depth : group_rows.row(segment * depth, local);
    from = x + (static_cast<u64>(row) * places.main_blocks + block) * kGroupSize;
    if (item < items && block < places.main_blocks && row < rows)
      load_elements<true, T>(from, kGroupSize, prefetched);
  };
  u32 item = blockIdx.x * kWarps + threadIdx.x / 32;
  begin(item);
#pragma unroll 1
  while (item < items) {
    const bool stored = block < places.main_blocks;
    const u32 tasks = opaque(all_tasks | (block >= places.first ? kHasExtra : 0));
    const u32 main_place = places.main(block);
    const u32 extra_gap = places.extra(block) - main_place;
    u8* codes = packed + (static_cast<u64>(row) * places.blocks + main_place) * 8;
    u8* scales = block_scale + scale_places(row, main_place);
    const u32 scale_gap =
        static_cast<u32>(scale_places(row, main_place + extra_gap) - scale_places(row, main_place));
    u32 my_row = row;
    item += gridDim.x * kWarps;
#pragma unroll 1
    for (u32 left = depth; left > 0; --left) {
      const BlockElements elements = scale_block<kRounds>(prefetched, scale);
      if (left == 1) {
        begin(item);
      } else {
        from += x_step;
        if (stored && my_row + static_cast<u32>(row_step) < rows)
          load_elements<true, T>(from, kGroupSize, prefetched);
        // One row further comes to the L2 cache only.
        if (stored && left > 2 && my_row + 2 * static_cast<u32>(row_step) < rows) {
          prefetch_sector(from + x_step);
        }
      }
      if (stored) {
        CodedBlock main{}, extra{};
        if (my_row < rows) {
          quantize_with_residual<kRounds>(elements, tasks, factors, main, extra);
          store_both(codes, extra_gap, tasks, main, extra);
        }
        if (my_row < static_cast<u32>(stored_rows)) {
          *scales = static_cast<u8>(main.byte);
          if (tasks & kHasExtra) scales[scale_gap] = static_cast<u8>(extra.byte);
        }
      }
      my_row += static_cast<u32>(row_step);
      codes += code_step;
      scales += scale_step;
    }
  }
  // Padded rows were taken along; what is left lies beside the blocks.
  if (blocks != stored_cols) {
    clear_padding(block_scale, layout, stored_rows, blocks, stored_rows, stored_cols);
  }
}

// ---- Everything else ----

// Launch: 256 threads, a thread for each main block of each stored row. `order` may be null.
template <class T, bool kRounds>
__global__ void __launch_bounds__(kThreads) quantize_residual_any_kernel(
    const typename T::Bits* __restrict__ x, const float* __restrict__ encode_scale,
    const i64* __restrict__ order, u8* __restrict__ packed, u8* __restrict__ block_scale, i64 items,
    i64 rows, i64 main_blocks, i64 first, i64 blocks, i64 stored_rows, i64 stored_cols, i64 magic,
    i64 shift, i64 layout, i64 interleaved, i64 copies, i64 high_first) {
  __shared__ ResidualFactors factors;
  if (threadIdx.x < sizeof(ResidualFactors) / sizeof(float)) factors.fill(threadIdx.x);
  __syncthreads();
  const BlockPlaces<i64> places(main_blocks, first, blocks, interleaved);
  const FastDivide divide(main_blocks, magic, shift);
  const i64 item = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
  if (item < items) {
    const i64 row = divide(item);
    const i64 block = item - row * main_blocks;
    const bool has_extra = block >= first;
    const i64 main_place = places.main(block);
    const i64 extra_place = places.extra(block);
    CodedBlock main{}, extra{};
    if (row < rows) {
      const typename T::Bits* const elements = x + row * main_blocks * kGroupSize;
      const i64 start = block * kGroupSize;
      const auto at = [&](int i) -> u32 {
        if (order == nullptr) return __ldg(elements + start + i);
        return __ldg(elements + channel_inside(__ldg(order + start + i), main_blocks * kGroupSize));
      };
      Words<T> gathered;
#pragma unroll
      for (int i = 0; i < Words<T>::kWords; ++i) {
        if constexpr (T::kSize == 4) {
          gathered.word[i] = at(i);
        } else {
          gathered.word[i] = at(2 * i) | (at(2 * i + 1) << 16);
        }
      }
      const float scale = usable(__ldg(encode_scale));
      const u32 tasks = block_tasks(false, false, copies != 0, high_first != 0);
      quantize_with_residual<kRounds>(scale_block<kRounds>(gathered, scale),
          tasks | (has_extra ? kHasExtra : 0), factors, main, extra);
      store_codes<false>(packed + (row * blocks + main_place) * 8, main.code);
      if (has_extra) store_codes<false>(packed + (row * blocks + extra_place) * 8, extra.code);
    }
    const int order_of_scales = static_cast<int>(layout);
    block_scale[scale_offset(order_of_scales, row, main_place, stored_cols)] =
        static_cast<u8>(main.byte);
    if (has_extra) {
      block_scale[scale_offset(order_of_scales, row, extra_place, stored_cols)] =
          static_cast<u8>(extra.byte);
    }
  }
  if (blocks != stored_cols) {
    clear_padding(
        block_scale, static_cast<int>(layout), stored_rows, blocks, stored_rows, stored_cols);
  }
}

}  // namespace fp4kit
