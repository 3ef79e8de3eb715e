// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// quantize of variants, of a matrix or of the members of a group: along rows, along columns, or
// both from one read; vectors or square blocks; rotated, rounded stochastically, with a searched
// scale.
//
// Launch: 256 threads; at most as many blocks as the device holds at once, and no more than tiles,
// which are fewer than 2^31. The launcher clears `taken` (tiles/quantize_tile.cuh) and the scales
// of padded layouts.
#include "common/members.cuh"
#include "tiles/quantize_tile.cuh"

namespace fp4kit {

// The tiles of one matrix in row-major order.
template <class C>
struct MatrixTiles {
  using T = typename C::T;
  Task<T> matrix;
  FastDivide across;
  u32 total;
  u32* taken;
  u32 last_down;
  u32 last_col;
  u32 tile;
  u32 down;
  u32 col;

  FP4KIT_DEVICE MatrixTiles(
      const Task<T>& matrix_, const FastDivide& across_, i64 total_, u32* taken_)
      : matrix(matrix_), across(across_), total(static_cast<u32>(total_)), taken(taken_),
        last_down(static_cast<u32>((matrix_.rows - 1) / kTileRows)),
        last_col(static_cast<u32>(across_.divisor) - 1) {
    advance(blockIdx.x);
  }

  FP4KIT_DEVICE bool valid() const { return tile < total; }
  FP4KIT_DEVICE bool stays() const { return true; }
  FP4KIT_DEVICE u32 request() const { return request_tile(taken, tile); }

  FP4KIT_DEVICE void advance(u32 next) {
    tile = next;
    down = small_quotient(tile, across);
    col = tile - down * static_cast<u32>(across.divisor);
  }

  FP4KIT_DEVICE Task<T> task() const {
    Task<T> result = matrix;
    result.row0 = static_cast<i64>(down) * kTileRows;
    result.col0 = static_cast<i64>(col) * C::kColumns;
    // Only the last tile of a column or row can be less than whole.
    const bool low = !C::kFull && down == last_down;
    const bool right = !C::kFull && col == last_col;
    result.rows_left = low ? static_cast<u32>(matrix.rows - result.row0) : kTileRows;
    result.cols_left = right ? static_cast<u32>(matrix.cols - result.col0) : C::kColumns;
    return result;
  }
};

// The tiles of a matrix of full stacks: a block takes a stack, from above, until half a stack is
// left for each block; those are taken tile by tile, so that all blocks end together.
template <class C>
struct StacksOfTiles {
  using T = typename C::T;
  Task<T> matrix;
  FastDivide across;
  u32* taken;
  u32 whole;   // stacks that are taken as such
  u32 end;     // these, and the tiles of the others
  u32 number;  // below `end`
  u32 part;
  u32 stack_row;
  u32 col;

  FP4KIT_DEVICE StacksOfTiles(
      const Task<T>& matrix_, const FastDivide& across_, i64 total, u32* taken_)
      : matrix(matrix_), across(across_), taken(taken_) {
    const u32 stacks = static_cast<u32>(total) / kStack;
    const u32 last = gridDim.x / 2;
    whole = stacks > last ? stacks - last : 0;
    end = whole + (stacks - whole) * kStack;
    take(blockIdx.x);
  }

  FP4KIT_DEVICE bool valid() const { return number < end; }
  FP4KIT_DEVICE bool stays() const { return true; }
  FP4KIT_DEVICE bool alone() const { return number >= whole; }
  FP4KIT_DEVICE bool goes_on() const { return !alone() && part != kStack - 1; }

  // Within a stack what follows is known.
  FP4KIT_DEVICE u32 request() const { return goes_on() ? 0 : request_tile(taken, number); }

  FP4KIT_DEVICE void advance(u32 next) {
    if (goes_on()) {
      ++part;
    } else {
      take(next);
    }
  }

  FP4KIT_DEVICE void take(u32 next) {
    number = next;
    const u32 beyond = next - whole;
    const u32 stack = alone() ? whole + beyond / kStack : next;
    part = alone() ? beyond % kStack : 0;
    stack_row = small_quotient(stack, across);
    col = stack - stack_row * static_cast<u32>(across.divisor);
  }

  FP4KIT_DEVICE Task<T> task() const {
    Task<T> result = matrix;
    result.row0 = static_cast<i64>(kStack * stack_row + part) * kTileRows;
    result.col0 = static_cast<i64>(col) * C::kColumns;
    result.rows_left = kTileRows;
    result.cols_left = C::kColumns;
    result.part = part;
    result.alone = alone();
    return result;
  }
};

template <class C, class... SeedWords>
__global__ void __launch_bounds__(kThreads, tile_blocks<C>())
    quantize_tiles_kernel(u32* taken, const typename C::T::Bits* __restrict__ x,
        const typename C::T::Bits* __restrict__ factor, const float* row_second, u8* row_packed,
        u8* row_scale, const float* col_second, u8* col_packed, u8* col_scale, SeedWords... seed,
        i64 rows, i64 cols, i64 across, i64 total, i64 row_blocks, i64 row_stored, i64 row_scales,
        i64 row_per_scale, i64 col_blocks, i64 col_stored, i64 col_scales, i64 col_per_scale,
        i64 high_first, i64 rule, i64 range, i64 row_mask, i64 col_mask, i64 magic, i64 shift) {
  using Tiles = typename Conditional<C::kBuffersScales, StacksOfTiles<C>, MatrixTiles<C>>::Type;
  TileShared<C>& shared = tile_shared<C>();
  const Options options{static_cast<int>(rule), !C::kFull && static_cast<u32>(high_first) != 0,
      static_cast<float>(range), static_cast<u32>(row_mask), static_cast<u32>(col_mask), {seed...}};
  Task<typename C::T> matrix{x, rows, cols, 0, 0, 0, 0,
      {row_second, row_packed, row_scale, row_blocks, row_stored, row_scales, row_per_scale},
      {col_second, col_packed, col_scale, col_blocks, col_stored, col_scales, col_per_scale},
      static_cast<u32>(options.seed.stream)};
  matrix.factor = factor;
  const FastDivide divide(across, magic, shift);
  quantize_all_tiles<C>(shared, Tiles(matrix, divide, total, taken), options);
}

struct GroupView {
  const float* second;
  u8* packed;
  u8* block_scale;
  i64 per_vector;
};

// The tiles of all members, one after the other.
template <class C, class Table>
struct GroupTiles {
  using T = typename C::T;
  const typename T::Bits* x;
  const typename T::Bits* factor;
  const Table& table;
  u32 total;
  GroupView row;
  GroupView col;
  u32 stream;
  u32* taken;
  u32 at = 0;  // the member that the tile belongs to
  u32 tile = 0;
  u32 begin = 0;  // its member's first tile, and the next one's
  u32 next = 0;
  u32 across = 1;
  u32 tile_row = 0;
  u32 tile_col = 0;
  u32 strip = 0;
  bool same_member = false;

  FP4KIT_DEVICE u32 first_tile(u32 member) const { return static_cast<u32>(table.first(member)); }

  // To the member of the tile, `low` or a later one: most likely the next, so that steps grow.
  FP4KIT_DEVICE void find_member_from(u32 low) {
    const u32 count = table.count();
    u32 step = 1;
    while (low + step < count && first_tile(low + step) <= tile) {
      low += step;
      step *= 2;
    }
    u32 high = low + step < count ? low + step : count;
    while (high - low > 1) {
      const u32 middle = (low + high) / 2;
      (first_tile(middle) <= tile ? low : high) = middle;
    }
    at = low;
    begin = first_tile(at);
    next = first_tile(at + 1);
    const i64 cols = table.member(at).cols;
    across = static_cast<u32>((cols + C::kColumns - 1) / C::kColumns);
  }

  FP4KIT_DEVICE bool valid() const { return tile < total; }
  FP4KIT_DEVICE bool stays() const { return same_member; }
  FP4KIT_DEVICE u32 request() const { return request_tile(taken, tile); }

  FP4KIT_DEVICE void advance(u32 number) {
    tile = number;
    if (tile >= total) return;
    same_member = tile < next;
    if (!same_member) find_member_from(at);
    tile_row = (tile - begin) / across;
    tile_col = tile - begin - tile_row * across;
    if constexpr (C::kPacksRows) pack_rows();
  }

  // The place of a tile that may be of remainder rows: those of full rows of tiles come first.
  FP4KIT_DEVICE void pack_rows() {
    strip = 0;
    const i64 rows = table.member(at).rows;
    const u32 whole = static_cast<u32>(rows / C::kHeight);
    if (tile_row < whole) return;
    const u32 height = remainder_blocks<C>(static_cast<u32>(rows % C::kHeight));
    const u32 strips = (tile - begin - whole * across) * C::kDown;
    tile_row = whole;
    tile_col = strips / height;
    strip = strips - tile_col * height;
  }

  FP4KIT_DEVICE Task<T> task() const {
    using Format = typename C::Format;
    const Member member = table.member(at);
    const i64 row0 = static_cast<i64>(tile_row) * C::kHeight;
    const i64 col0 = static_cast<i64>(tile_col) * C::kColumns;
    const i64 start = C::kFunction == kSwiglu ? 2 * member.start : member.start;
    return {x + start, member.rows, member.cols, row0, col0,
        tile_rest(member.rows, row0, C::kHeight),
        tile_rest(member.cols, col0, C::kPacksRows ? C::kDown * C::kColumns : C::kColumns),
        member_view<Format>(member.row, row.second, row.packed, row.block_scale, member.rows,
            member.cols, row.per_vector != 0, C::kLayout),
        member_view<Format>(member.col, col.second, col.packed, col.block_scale, member.cols,
            member.rows, col.per_vector != 0, C::kLayout),
        stream + static_cast<u32>(member.number), 0, true, factor + start, strip};
  }
};

template <class C, class Table, class... SeedWords>
__global__ void __launch_bounds__(kThreads, tile_blocks<C>())
    grouped_quantize_tiles_kernel(u32* taken, const typename C::T::Bits* __restrict__ x,
        const typename C::T::Bits* __restrict__ factor, const __grid_constant__ Table table,
        i64 total, const float* row_second, u8* row_packed, u8* row_scale, i64 row_per_vector,
        const float* col_second, u8* col_packed, u8* col_scale, i64 col_per_vector, i64 high_first,
        i64 rule, i64 range, i64 row_mask, i64 col_mask, SeedWords... seed) {
  TileShared<C>& shared = tile_shared<C>();
  const Options options{static_cast<int>(rule), static_cast<u32>(high_first) != 0,
      static_cast<float>(range), static_cast<u32>(row_mask), static_cast<u32>(col_mask), {seed...}};
  GroupTiles<C, Table> tiles{x, factor, table, static_cast<u32>(total),
      {row_second, row_packed, row_scale, row_per_vector},
      {col_second, col_packed, col_scale, col_per_vector}, static_cast<u32>(options.seed.stream),
      taken};
  tiles.advance(blockIdx.x);
  quantize_all_tiles<C>(shared, tiles, options);
}

}  // namespace fp4kit
