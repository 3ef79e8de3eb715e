// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// What a thread block does to one tile: quantize it along rows, along columns, or both. Must equal
// ReferenceBackend.quantize.
//
// The tile lies in shared memory (tiles/tile.cuh). Each thread takes blocks of a row
// (tiles/rows.cuh), then of columns (tiles/columns.cuh). What follows from the second level is
// worked out before: once for all scale bytes, or once per row and column. Squares (16x16 or 32x32
// blocks) need their scale first: their rows gather the amax in shared memory; their columns have
// the codes of the rows, transposed there.
#pragma once

#include "activation/activations.cuh"
#include "tiles/columns.cuh"
#include "tiles/rows.cuh"

namespace fp4kit {

// A configuration with a function of its elements: the tile of factors takes the place of the next
// one.
template <class C, int kFunctionNumber>
struct Activated : C {
  static_assert(C::kColumns == kWide && !C::kFull, "");
  static constexpr int kFunction = kFunctionNumber;
  static constexpr int kBuffers = has_factor(kFunction) ? 1 : C::kBuffers;
  static constexpr int kTiles = has_factor(kFunction) ? 2 : kBuffers;
};

template <class C>
FP4KIT_DEVICE void load_activated(typename C::TileType* tiles, const Task<typename C::T>& task) {
  const i64 pitch = C::kFunction == kSwiglu ? 2 * task.cols : task.cols;
  const i64 start = task.row0 * pitch + task.col0;
  load_tile<C::kVector>(tiles[0], task.x + start, pitch, task.rows_left, task.cols_left);
  if constexpr (has_factor(C::kFunction)) {
    const typename C::T::Bits* factor = C::kFunction == kSwiglu ? task.x + task.cols : task.factor;
    load_tile<C::kVector>(tiles[1], factor + start, pitch, task.rows_left, task.cols_left);
  }
}

// A barrier must follow. What lies outside of the matrix stays +0.0.
template <class C>
FP4KIT_DEVICE void activate_tile(typename C::TileType* tiles) {
  using T = typename C::T;
  constexpr u32 kVecs = C::TileType::kWords / 4;  // in a row
  const auto load = [](const u32* from) {
    const uint4 piece = *reinterpret_cast<const uint4*>(from);
    return Vec<T>{{piece.x, piece.y, piece.z, piece.w}};
  };
#pragma unroll 1
  for (u32 i = threadIdx.x; i < kTileRows * kVecs; i += kThreads) {
    u32* const own = &tiles[0].at(i / kVecs, i % kVecs * 4);
    Vec<T> factor{};
    if constexpr (has_factor(C::kFunction)) {
      factor = load(&tiles[1].at(i / kVecs, i % kVecs * 4));
    }
    const Vec<T> result = activate_all<T, C::kFunction>(load(own), factor);
    *reinterpret_cast<uint4*>(own) = pack_vec(result.word);
  }
}

template <class C>
FP4KIT_DEVICE void fill_candidates(TileShared<C>& shared, const QuantizedView& side, float range) {
  if (C::kTabled && threadIdx.x < kScaleBytes) {
    const Level level = level_of<C>(__ldg(side.second), range);
    shared.decoded.candidate[threadIdx.x] =
        make_candidate<C::V::kSearch>(threadIdx.x, level, range, C::V::kError);
  }
}

template <class C>
FP4KIT_DEVICE void load_task(typename C::TileType* tile, const Task<typename C::T>& task) {
  if constexpr (C::kFunction != kNoFunction) {
    load_activated<C>(tile, task);
  } else if constexpr (C::kPacksRows) {
    load_tall<C>(*tile, task);
  } else {
    load_tile<C::kVector>(*tile, task.x + (task.row0 * task.cols + task.col0), task.cols,
        task.rows_left, task.cols_left);
  }
}

template <class C>
FP4KIT_DEVICE void fill_tables(
    TileShared<C>& shared, const Task<typename C::T>& task, const Options& options) {
  if constexpr (!C::Format::kIsMx) {
    // Each half of a thread block takes a direction if there are enough threads.
    constexpr u32 kOther = kThreads >= 2 * kScaleBytes ? kScaleBytes : 0;
    if (C::kRows) {
      fill_levels(shared.rows, task.row, task.row0, task.rows, options.range, threadIdx.x);
    }
    if (C::kCols) {
      fill_levels(shared.cols, task.col, task.col0, task.cols, options.range, threadIdx.x - kOther);
    }
  }
  if constexpr (C::kSearches) {
    fill_candidates(shared, C::kRows ? task.row : task.col, options.range);
  }
}

template <class C>
FP4KIT_DEVICE void clear_squares(TileShared<C>& shared, u32 parity) {
  constexpr u32 kSquares = C::kDown * C::kAcross;
  if (C::kGathers && threadIdx.x < kSquares) {
    shared.square_amax[parity][threadIdx.x / C::kAcross][threadIdx.x % C::kAcross] = 0;
  }
}

template <class C>
FP4KIT_DEVICE void store_all_squares(const TileShared<C>& shared, const Task<typename C::T>& task) {
  constexpr int kLayout = C::kLayout;
  if constexpr (C::kRows) {
    const ScalePlace<kLayout> place(task.row, task.row0, task.col0 / C::kBlock);
    store_squares<kLayout>(place.base, place.stride, shared.squares.down);
  }
  if constexpr (C::kCols) {
    const ScalePlace<kLayout> place(task.col, task.col0, task.row0 / C::kBlock);
    store_squares<kLayout>(place.base, place.stride, shared.squares.across);
  }
}

template <class C>
FP4KIT_DEVICE void quantize_tile(TileShared<C>& shared, typename C::TileType& tile,
    const Task<typename C::T>& task, const Options& options, u32 parity) {
  if constexpr (C::kRows || C::V::kSquare) quantize_rows<C>(shared, tile, task, options, parity);
  if constexpr (C::V::kSquare && (C::kCols || C::kFull)) __syncthreads();
  if constexpr (C::V::kSquare && C::kFull) store_all_squares<C>(shared, task);
  if constexpr (C::kCols) {
    if constexpr (C::kSearches && C::kRows && !C::V::kSquare) {
      __syncthreads();
      fill_candidates(shared, task.col, options.range);
      __syncthreads();
    }
    quantize_columns<C>(shared, tile, task, options);
  }
}

template <class C>
FP4KIT_HD constexpr int tile_blocks() {
  return C::kIsWide && C::kTiles == 2 ? FP4KIT_WIDE_BLOCKS : FP4KIT_TILE_BLOCKS;
}

// Shared memory: what a launch grants without being asked, or what it was asked for.
template <class C>
FP4KIT_DEVICE TileShared<C>& tile_shared() {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(TileShared<C>) > 48 * 1024) {
    extern __shared__ uint4 asked_for[];
    static_assert(sizeof(TileShared<C>) <= C::kSharedBytes, "as the launcher counts");
    static_assert(C::kIsWide, "for others the launcher asks for nothing");
    return *reinterpret_cast<TileShared<C>*>(asked_for);
  } else
#endif
  {
    __shared__ TileShared<C> shared;
    return shared;
  }
}

// The number of a tile that no block has taken, or one beyond all: `taken` counts those after the
// first of each block. Without it blocks stride over the tiles, and do not stay side by side: lines
// to which several tiles write leave the L2 cache half written.
FP4KIT_DEVICE u32 request_tile(u32* taken, u32 tile) {
  return gridDim.x + (taken == nullptr ? tile : atomicAdd(taken, 1u));
}

// All tiles of a thread block. A cursor tells of one after the other: `valid`, `task` and `stays`
// (in the same matrix). Which tile follows is asked for early (`request`, by one thread) and told
// to all (`advance`) when the tile before it is there.
template <class C, class Cursor>
FP4KIT_DEVICE void quantize_all_tiles(
    TileShared<C>& shared, Cursor cursor, const Options& options) {
  bool fills = true;
  u32 parity = 0;
  load_task<C>(shared.tile, cursor.task());
  end_copies();
  clear_squares(shared, parity);
  if (threadIdx.x == 0) shared.next_tile[parity] = cursor.request();
  while (true) {
    const Task<typename C::T> task = cursor.task();
    await_copies();
    // The tile is there, and everyone is done with the one before it.
    __syncthreads();
    cursor.advance(shared.next_tile[parity]);
    const bool more = cursor.valid();
    const bool stays = cursor.stays();
    u32 requested = 0;
    if (more && threadIdx.x == 0) requested = cursor.request();
    if (fills) {
      fill_tables(shared, task, options);
      __syncthreads();
    }
    clear_squares(shared, 1 - parity);
    if (C::kBuffers == 2 && more) load_task<C>(shared.tile + (1 - parity), cursor.task());
    end_copies();
    const u32 own = C::kBuffers == 2 ? parity : 0;
    if constexpr (C::kFunction != kNoFunction) {
      activate_tile<C>(shared.tile + own);
      __syncthreads();
    }
    quantize_tile(shared, shared.tile[own], task, options, parity);
    if (!more) break;
    parity = 1 - parity;
    // Stored only now: nobody waits for the answer.
    if (threadIdx.x == 0) shared.next_tile[parity] = requested;
    if constexpr (C::kBuffers == 1) {
      __syncthreads();
      load_task<C>(shared.tile, cursor.task());
      end_copies();
    }
    constexpr bool kKeeps = C::Format::kIsMx || C::kOneLevel;
    fills = !kKeeps || (!C::Format::kIsMx && !stays) ||
            (C::kSearches && C::kRows && C::kCols && !C::V::kSquare);
  }
}

}  // namespace fp4kit
