// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// quantize of variants: along rows, along columns, or both from one read; blocks or square tiles;
// rotated, rounded stochastically, with a searched scale.
//
// Launch: 256 threads; at most as many blocks as the device holds at once, and no more than tiles,
// which are fewer than 2^31. The launcher clears `taken` (tiles/quantize_tile.cuh). Scales past the
// last vector or block are not written here: the launcher clears the scales of padded layouts
// first.
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

  __device__ __forceinline__ MatrixTiles(
      const Task<T>& matrix_, const FastDivide& across_, i64 total_, u32* taken_)
      : matrix(matrix_),
        across(across_),
        total(static_cast<u32>(total_)),
        taken(taken_),
        last_down(static_cast<u32>((matrix_.rows - 1) / kTileRows)),
        last_col(static_cast<u32>(across_.divisor) - 1) {
    advance(blockIdx.x);
  }

  __device__ __forceinline__ bool valid() const { return tile < total; }
  __device__ __forceinline__ bool stays() const { return true; }

  __device__ __forceinline__ u32 request() const { return request_tile(taken, tile); }

  __device__ __forceinline__ void advance(u32 next) {
    tile = next;
    down = small_quotient(tile, across);
    col = tile - down * static_cast<u32>(across.divisor);
  }

  __device__ __forceinline__ Task<T> task() const {
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

// The tiles of a matrix that is whole stacks: a block takes all of a stack, from above, until half
// a stack is left for each block. Those are taken tile by tile, so that all blocks end together.
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

  __device__ __forceinline__ StacksOfTiles(
      const Task<T>& matrix_, const FastDivide& across_, i64 total, u32* taken_)
      : matrix(matrix_), across(across_), taken(taken_) {
    const u32 stacks = static_cast<u32>(total) / kStack;
    const u32 last = gridDim.x / 2;
    whole = stacks > last ? stacks - last : 0;
    end = whole + (stacks - whole) * kStack;
    take(blockIdx.x);
  }

  __device__ __forceinline__ bool valid() const { return number < end; }
  __device__ __forceinline__ bool stays() const { return true; }
  __device__ __forceinline__ bool alone() const { return number >= whole; }
  __device__ __forceinline__ bool goes_on() const { return !alone() && part != kStack - 1; }

  // Within a stack what follows is known.
  __device__ __forceinline__ u32 request() const {
    return goes_on() ? 0 : request_tile(taken, number);
  }

  __device__ __forceinline__ void advance(u32 next) {
    if (goes_on()) {
      ++part;
    } else {
      take(next);
    }
  }

  __device__ __forceinline__ void take(u32 next) {
    number = next;
    const u32 beyond = next - whole;
    const u32 stack = alone() ? whole + beyond / kStack : next;
    part = alone() ? beyond % kStack : 0;
    stack_row = small_quotient(stack, across);
    col = stack - stack_row * static_cast<u32>(across.divisor);
  }

  __device__ __forceinline__ Task<T> task() const {
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

template <class C, bool kBuffersScales>
struct TilesOf {
  using Type = MatrixTiles<C>;
};
template <class C>
struct TilesOf<C, true> {
  using Type = StacksOfTiles<C>;
};

// SeedWords: empty, or all that Seed holds.
template <class C, class... SeedWords>
__global__ void __launch_bounds__(kThreads, tile_blocks<C>())
    quantize_tiles_kernel(u32* taken, const typename C::T::Bits* __restrict__ x,
        const typename C::T::Bits* __restrict__ factor, const float* row_second, u8* row_packed,
        u8* row_scale, const float* col_second, u8* col_packed, u8* col_scale, SeedWords... seed,
        i64 rows, i64 cols, i64 across, i64 total, i64 row_blocks, i64 row_stored, i64 row_scales,
        i64 row_per_scale, i64 col_blocks, i64 col_stored, i64 col_scales, i64 col_per_scale,
        i64 high_first, i64 rule, i64 range, i64 row_mask, i64 col_mask, i64 magic, i64 shift) {
  using Tiles = typename TilesOf<C, C::kBuffersScales>::Type;
  TileShared<C>& shared = tile_shared<C>();
  const Options options{static_cast<int>(rule), !C::kFull && static_cast<u32>(high_first) != 0,
      static_cast<float>(range), static_cast<u32>(row_mask), static_cast<u32>(col_mask), {seed...}};
  Task<typename C::T> matrix{x, rows, cols, 0, 0, 0, 0,
      {row_second, row_packed, row_scale, row_blocks, row_stored, row_scales, row_per_scale},
      {col_second, col_packed, col_scale, col_blocks, col_stored, col_scales, col_per_scale},
      static_cast<u32>(options.seed.stream)};
  matrix.factor = factor;
  const FastDivide divide{across, static_cast<u32>(magic), static_cast<u32>(shift)};
  quantize_all_tiles<C>(shared, Tiles(matrix, divide, total, taken), options);
}

}  // namespace fp4kit
