// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// What the passes over a tile share: shared memory, second levels, places of scales, and one block.
#pragma once

#include "quantize/rowwise.cuh"
#include "rht/rht.cuh"
#include "search/tables.cuh"
#include "tiles/config.cuh"
#include "tiles/full_tile_scales.cuh"

namespace fp4kit {

// Element factors by scale byte if all vectors share one second level, else one level per vector or
// square.
template <class C, u32 kVectors>
struct TileLevels {
  float factor[C::kOneLevel && !C::Format::kIsMx ? kScaleBytes : 1];
  static constexpr u32 kEach = C::V::kSquare ? C::kBlock : 1;
  Level level[C::kOneLevel ? 1 : kVectors / kEach];
};

template <class C>
struct Decoded {
  Candidate candidate[C::kTabled ? kScaleBytes : 1];
  float value[table_entries<C::V::kSearch, !C::V::kSquare>() * kThreads];
};

struct Nothing {};
template <bool kCondition, class A>
using Maybe = typename Conditional<kCondition, A, Nothing>::Type;

template <class C>
struct TileShared {
  typename C::TileType tile[C::kTiles];
  TileLevels<C, kTileRows> rows;
  TileLevels<C, C::kColumns> cols;
  u32 next_tile[2];
  u8 square_byte[C::kDown][C::kAcross];
  u32 square_amax[2][C::kDown][C::kAcross];  // of this tile, and cleared for the next
  Maybe<C::kSearches, Decoded<C>> decoded;
  Maybe<C::kBuffersScales, BufferedScales> buffered;
  Maybe<C::kFull && C::V::kSquare, SquareScales> squares;
};

template <class C>
FP4KIT_DEVICE Level level_of(float second, float range) {
  if constexpr (C::kSearches) {
    return make_te_level(second, range);
  } else {
    return make_level<C::kRecipe, C::kSecond>(second);
  }
}

template <class C>
FP4KIT_DEVICE float factor_of(u32 byte, const Level& level) {
  if constexpr (C::V::kPerToken) return per_token_factor(byte, level);
  return element_factor<typename C::Format, C::kRecipe, C::kSecond>(byte, level);
}

template <class C, u32 kVectors>
FP4KIT_DEVICE void fill_levels(TileLevels<C, kVectors>& levels, const QuantizedView& side,
    i64 vector0, i64 vectors, float range, u32 thread) {
  if constexpr (C::kOneLevel) {
    if (thread < kScaleBytes) {
      const Level level = level_of<C>(C::kHasLevels ? __ldg(side.second) : 1.0f, range);
      if constexpr (!C::kSearches) levels.factor[thread] = factor_of<C>(thread, level);
      if (thread == 0) levels.level[0] = level;
    }
  } else if (thread < kVectors / levels.kEach) {
    const i64 vector = vector0 + thread * levels.kEach;
    if (vector < vectors) {
      const i64 each = side.vectors_per_scale;
      const i64 index = each == 1 ? vector : vector / each;
      levels.level[thread] = level_of<C>(__ldg(side.second + index), range);
    }
  }
}

template <class C, u32 kVectors>
FP4KIT_DEVICE const Level& level_at(const TileLevels<C, kVectors>& levels, u32 vector) {
  return levels.level[C::kOneLevel ? 0 : vector / levels.kEach];
}

template <class C, u32 kVectors>
FP4KIT_DEVICE float factor_at(const TileLevels<C, kVectors>& levels, u32 byte, const Level& level) {
  if constexpr (C::Format::kIsMx) {
    return inverse_e8m0(byte);
  } else if constexpr (C::kOneLevel) {
    return levels.factor[byte % kScaleBytes];
  } else {
    return factor_of<C>(byte, level);
  }
}

// Where a direction's block scales go, from the tile's first vector and block on.
template <int kLayout>
struct ScalePlace {
  u8* base;
  u64 stride;  // linear: bytes per vector; 8x4: per eight vectors
  u32 vector;  // of the first one in its layout tile
  u32 block;

  FP4KIT_DEVICE ScalePlace(const QuantizedView& side, i64 vector0, i64 block0) {
    const u64 tiles = static_cast<u64>(side.stored_cols) / kTileCols;
    const u64 v = static_cast<u64>(vector0);
    const u64 b = static_cast<u64>(block0);
    vector = 0;
    block = static_cast<u32>(b) % kTileCols;
    if constexpr (kLayout == kLayoutLinear) {
      stride = static_cast<u64>(side.stored_cols);
      base = side.block_scale + v * stride + b;
    } else if constexpr (kLayout == kLayoutSwizzled128x4) {
      stride = 0;
      vector = static_cast<u32>(v) % kTileRows128;
      base = side.block_scale + (v / kTileRows128 * tiles + b / kTileCols) * kTileBytes128;
    } else {
      stride = tiles * kTileBytes8;
      base = side.block_scale + (v / kTileRows8 * tiles + b / kTileCols) * kTileBytes8;
    }
  }

  FP4KIT_DEVICE u8* at(u32 v, u32 b) const {
    const u32 r = v + vector;
    const u32 c = b + block;
    if constexpr (kLayout == kLayoutLinear) {
      return base + v * stride + b;
    } else if constexpr (kLayout == kLayoutSwizzled128x4) {
      return base + (c / kTileCols * kTileBytes128 + place_in_tile(true, r, c));
    } else {
      return base + r / kTileRows8 * stride +
             (c / kTileCols * kTileBytes8 + place_in_tile(false, r, c));
    }
  }

  // From a vector's scale to that of one `vectors` below, a multiple of 32.
  FP4KIT_DEVICE u64 step(u32 vectors) const {
    if constexpr (kLayout == kLayoutLinear) {
      return vectors * stride;
    } else if constexpr (kLayout == kLayoutSwizzled128x4) {
      return vectors / 32 * kTileCols;
    } else {
      return vectors / kTileRows8 * stride;
    }
  }

  // From the scale of a vector of an even number to that of the next one.
  FP4KIT_DEVICE u64 to_odd() const {
    if constexpr (kLayout == kLayoutLinear) {
      return stride;
    } else {
      return kLayout == kLayoutSwizzled128x4 ? 16 : kTileCols;
    }
  }
};

// Sums over the rows of a square; the halves of a warp hold two squares.
struct SquareSum {
  static constexpr bool kAlone = false;
  FP4KIT_DEVICE float operator()(float error) const {
    const u32 half = 0xFFFFu << (threadIdx.x & 16u);
#pragma unroll
    for (int distance = kGroupSize / 2; distance > 0; distance /= 2) {
      error = add_rn(error, __shfl_xor_sync(half, error, distance));
    }
    return error;
  }
};

template <class Format>
struct Coded {
  u32 code[Format::kGroups][Format::kGroupWords];
  u32 byte;
};

template <class Format, class R>
FP4KIT_DEVICE float block_amax_of(
    const Words<R> (&x)[Format::kGroups], u32 (&raw)[Format::kGroups]) {
  u32 bits = 0;
#pragma unroll
  for (int l = 0; l < Format::kGroups; ++l) bits = max_u32(bits, group_amax_bits<R>(x[l], raw[l]));
  return from_input_bits<R>(bits);
}

// The groups of a block as they are quantized; past the first `left` elements they stay +0.0.
template <bool kRotate, class R, class T, int kGroups>
FP4KIT_DEVICE void maybe_rotate(
    const Words<T> (&x)[kGroups], u32 mask, u32 left, Words<R> (&result)[kGroups]) {
#pragma unroll
  for (int l = 0; l < kGroups; ++l) {
    if constexpr (kRotate) {
      if (kGroups == 1 || l * kGroupSize < left) {
        result[l] = rotate_group<R>(x[l], mask);
      } else {
        result[l] = Words<R>{};
      }
    } else {
      result[l] = x[l];
    }
  }
}

template <class C, class R>
FP4KIT_DEVICE Found search_block(TileShared<C>& shared, const Words<R>& x, float amax, u32 raw,
    const Level& level, float range) {
  using V = typename C::V;
  const auto search = [&](const auto& candidate_of) {
    return search_scale<V::kSearch, V::kError>(
        x, raw, [&] { return amax; }, level, range, SharedTable(shared.decoded.value), candidate_of,
        typename Conditional<V::kSquare, SquareSum, AloneSum>::Type());
  };
  if constexpr (C::kTabled) return search(SharedCandidates(shared.decoded.candidate));
  return search(
      [&](u32 byte) { return make_candidate<V::kSearch>(byte, level, range, V::kError); });
}

// `group`: the number of the block's first 16 elements.
template <class C, class R, u32 kVectors>
FP4KIT_DEVICE void encode_block(TileShared<C>& shared, const Words<R> (&x)[C::Format::kGroups],
    float amax, const u32 (&raw)[C::Format::kGroups], const TileLevels<C, kVectors>& levels,
    u32 vector, const Options& options, u64 group, u32 direction, u32 stream,
    Coded<typename C::Format>& coded) {
  using Format = typename C::Format;
  const Level& level = level_at(levels, vector);
  if constexpr (C::kSearches) {
    const Found found = search_block<C>(shared, x[0], amax, raw[0], level, options.range);
    coded.byte = found.byte;
#pragma unroll
    for (int i = 0; i < 2; ++i) coded.code[0][i] = found.codes[i];
  } else {
    coded.byte = block_scale_byte<Format, R, C::kRecipe, C::kSecond>(amax, level, options.rule);
    const float factor = factor_at(levels, coded.byte, level);
    const bool ordinary =
        is_ordinary_scale<Format>(coded.byte, options.rule) && is_ordinary_level<C::kRecipe>(level);
#pragma unroll
    for (int l = 0; l < Format::kGroups; ++l) {
      if constexpr (C::V::kStochastic) {
        const Random random = philox(group + l, direction, stream, options.seed);
        encode_group_stochastic(x[l], raw[l], ordinary, factor, random, coded.code[l]);
      } else {
        encode_group<Format, R, C::kRecipe>(x[l], raw[l], ordinary, factor, coded.code[l]);
      }
    }
  }
}

template <class C>
FP4KIT_DEVICE void store_group(
    u8* __restrict__ out, const u32 (&code)[C::Format::kGroupWords], const Options& options) {
  u32 ordered[C::Format::kGroupWords];
#pragma unroll
  for (int i = 0; i < C::Format::kGroupWords; ++i) ordered[i] = code[i];
  order_nibbles<typename C::Format>(ordered, options.high_first);
  store_codes<C::kVector, C::kStreams>(out, ordered);
}

}  // namespace fp4kit
