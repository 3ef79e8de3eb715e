// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// What a launch of tiles is given, and the configuration of an instance.
#pragma once

#include "common/scale_layout.cuh"
#include "common/stochastic.cuh"
#include "search/scale_search.cuh"
#include "tiles/tile.cuh"

namespace fp4kit {

// A matrix x (rows, cols), and the tile of it that begins at (row0, col0).
template <class T>
struct Task {
  const typename T::Bits* x;
  i64 rows;
  i64 cols;
  i64 row0;
  i64 col0;
  u32 rows_left;
  u32 cols_left;
  QuantizedView row;
  QuantizedView col;
  u32 stream;
  // With buffered scales: the tile's number in its stack, and whether the block takes no other of
  // it.
  u32 part = 0;
  bool alone = true;
  // What multiplies the results of some functions, of the shape of x.
  const typename T::Bits* factor = nullptr;
  // With packed rows: the first strip; what is left of the columns is that of all strips.
  u32 first_strip = 0;
};

struct Options {
  int rule;
  bool high_first;
  float range;
  u32 row_mask;
  u32 col_mask;
  Seed seed;
};

template <bool kSquareTiles, int kSearchKind, int kErrorKind, bool kStochasticRounding,
    bool kPerTokenFactor>
struct Variant {
  static constexpr bool kSquare = kSquareTiles;
  static constexpr int kSearch = kSearchKind;
  static constexpr int kError = kErrorKind;
  static constexpr bool kStochastic = kStochasticRounding;
  static constexpr bool kPerToken = kPerTokenFactor;
};

// kRows, kCols: the directions asked for. RowR, ColR: what their elements are after the rotation.
template <class FormatType, class ElementType, int kRecipeNumber, bool kHasSecond,
    bool kSharesSecond, class VariantType, int kScaleLayout, bool kWantsRows, bool kRotatesRows,
    class RowElement, bool kWantsCols, bool kRotatesCols, class ColElement, bool kVectors,
    int kTileWidth>
struct TileConfig {
  using Format = FormatType;
  using T = ElementType;
  using V = VariantType;
  using RowR = RowElement;
  using ColR = ColElement;
  static constexpr int kRecipe = kRecipeNumber;
  static constexpr bool kSecond = kHasSecond;
  static constexpr int kLayout = kScaleLayout;
  static constexpr bool kRows = kWantsRows;
  static constexpr bool kRotateRows = kRotatesRows;
  static constexpr bool kCols = kWantsCols;
  static constexpr bool kRotateCols = kRotatesCols;
  static constexpr bool kVector = kVectors;
  static constexpr u32 kColumns = kTileWidth;
  static constexpr u32 kHeight = kTileRows;
  static constexpr bool kIsWide = kColumns == kWide;
  using TileType = Tile<T, kColumns>;
  static constexpr u32 kBlock = Format::kBlockSize;
  static constexpr u32 kAcross = kColumns / kBlock;
  static constexpr u32 kDown = kHeight / kBlock;
  static constexpr u32 kEach = kTileRows * kAcross / kThreads;  // blocks of rows for a thread
  static constexpr bool kHasLevels = !Format::kIsMx && kSecond;
  static constexpr bool kOneLevel = !kHasLevels || kSharesSecond;
  static constexpr bool kSearches = V::kSearch != kSearchNone;
  // While one tile is worked on, the next one is on its way, where there is room.
  static constexpr int kBuffers = kCopiesAsync && kVector && T::kSize == 2 && !kSearches ? 2 : 1;
  // What is done to elements first, and tiles that it takes.
  static constexpr int kFunction = kNoFunction;
  static constexpr int kTiles = kBuffers;
  // Columns of squares are the rows' codes, turned.
  static constexpr bool kTransposes = V::kSquare && kCols && Format::kIsFp4;
  // What a launch asks for beyond 48 KiB.
  static constexpr u32 kSharedBytes = !kOneLevel ? FP4KIT_WIDE_BYTES_MOST : FP4KIT_WIDE_BYTES;
  // Candidates of a search are worked out once, where there is room.
  static constexpr bool kTabled = kSearches && kOneLevel && !(kTransposes && T::kSize == 4);
  static constexpr bool kStreams = false;
  // Full tiles: scales are stored as words.
  static constexpr bool kFull = false;
  // Column scales are kept over a stack of tiles.
  static constexpr bool kBuffersScales = false;
  // Tall tiles, with remainder rows packed.
  static constexpr bool kPacksRows = false;
  static constexpr bool kGathers = V::kSquare && !kSearches;
};

// The same for matrices of full tiles, with scales of 16 elements and the low nibble first.
template <class C>
struct Full : C {
  static_assert(C::kColumns == kWide && C::kBlock == 16 && C::kLayout != kLayoutSwizzled8x4, "");
  static constexpr bool kFull = true;
  static constexpr bool kBuffersScales = C::kCols && !C::V::kSquare && C::kLayout == kLayoutLinear;
};

}  // namespace fp4kit
