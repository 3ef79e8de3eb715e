// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// float32 scales of a tensor, of channels or of blocks of rows and columns, and FP8 codes under
// them. Must equal fp4kit/reference/grid.py, where the orders of operations are named.
#pragma once

#include "common/group16.cuh"

namespace fp4kit {

// What a GridRecipe comes to for an input type.
struct GridRules {
  bool rounds_scale;
  u32 largest;     // bits of the largest finite number of the input's type
  u32 zero_scale;  // bits of the scale of what has no usable one
};

// A scale, or another one instead of what is not positive and finite.
FP4KIT_HD float usable_grid_scale(float scale, float other) {
  return as_bits(scale) - 1 < kMaxFiniteBits ? scale : other;
}

// grid.scales_of.
template <class T, class E>
FP4KIT_HD float grid_scale(float amax, const GridRules& rules) {
  // NaN and negative numbers have larger bits than infinity, and become no usable scale.
  const u32 bits = as_bits(amax);
  const float capped = bits > rules.largest && bits <= kInfBits ? as_float(rules.largest) : amax;
  float scale = div_rn(capped, E::kMax);
  if (rules.rounds_scale) scale = round_to<T>(scale);
  return usable_grid_scale(scale, as_float(rules.zero_scale));
}

template <class T, bool kRounds>
FP4KIT_HD float grid_quotient(float value, float scale) {
  const float quotient = div_rn(value, scale);
  return kRounds ? round_to<T>(quotient) : quotient;
}

// Codes of 16 elements; scale[i * kStep] is that of element i.
template <class T, class E, bool kRounds, int kStep = 0>
FP4KIT_HD void encode_under_grid(const Words<T>& x, const float* scale, u32 (&codes)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float y[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      y[k] = grid_quotient<T, kRounds>(x.value(4 * i + k), scale[(4 * i + k) * kStep]);
    }
    codes[i] = encode_fp8_pair<E, true>(y[0], y[1]) | (encode_fp8_pair<E, true>(y[2], y[3]) << 16);
  }
}

// What a scale spans: everything, a column, or `1 << row_shift` rows of one row of scales.
constexpr int kSpanAll = 0;
constexpr int kSpanColumn = 1;
constexpr int kSpanTile = 2;
// Rows and columns of a block.
constexpr int kGridBlock = FP4KIT_GRID_BLOCK;
// Groups of 16 that a thread has in flight (cuda/grid.py).
constexpr int kGridUnroll = FP4KIT_GRID_UNROLL;

// The scales of 16 elements that start at a column which is a multiple of 16.
template <int kSpan>
struct GridScales {
  static constexpr int kStep = kSpan == kSpanColumn ? 1 : 0;
  float value[kSpan == kSpanColumn ? kGroupSize : 1];

  FP4KIT_HD GridScales(
      const float* __restrict__ scale, i64 row, i64 col, i64 cols, i64 across, i64 row_shift) {
    if constexpr (kSpan == kSpanColumn) {
#pragma unroll
      for (int i = 0; i < kGroupSize; ++i) value[i] = col + i < cols ? scale[col + i] : 1.0f;
    } else if constexpr (kSpan == kSpanAll) {
      value[0] = scale[0];
    } else {
      const i64 place = across > 1 ? col / kGridBlock : 0;
      value[0] = scale[(row >> row_shift) * across + place];
    }
  }
};

}  // namespace fp4kit
