// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Recipe te with another largest scale, and the search for a block's scale by its error
// (fp4kit/scale_search.py), equal bit by bit.
#pragma once

#include "lane.cuh"

namespace fp4kit {

constexpr int kErrorMse = 0;
constexpr int kErrorMae = 1;
constexpr int kErrorMseScaled = 2;
constexpr int kErrorMaeScaled = 3;

constexpr int kSearchNone = 0;
constexpr int kSearchFourOverSix = 1;
constexpr int kSearchSweep = 2;

FP4KIT_HD Level make_te_level(float second, float range) {
  return make_level<kRecipeTe, true>(second, range);
}

// scaling.te_decode_factor.
FP4KIT_HD float te_decode_factor(float q, const Level& level, float range) {
  return te_decode_factor_by(q, level, div_rn(1.0f, range));
}

FP4KIT_HD float te_factor(u32 byte, const Level& level) {
  return cap_finite(div_rn(1.0f, mul_rn(decode_fp8<E4m3>(byte), level.inverse)));
}

FP4KIT_HD constexpr bool is_scaled_error(int error) { return error >= kErrorMseScaled; }
FP4KIT_HD constexpr bool is_squared_error(int error) {
  return error == kErrorMse || error == kErrorMseScaled;
}

// What a magnitude code of value v decodes to where the error is measured.
template <int kSearch>
FP4KIT_HD float decode_for_error(float v, u32 byte, const Level& level, float range, int error) {
  const float q = decode_fp8<E4m3>(byte);
  if (is_scaled_error(error)) return mul_rn(v, q);
  if (kSearch == kSearchFourOverSix) return div_rn(mul_rn(mul_rn(v, q), level.second), range);
  return mul_rn(v, te_decode_factor(q, level, range));
}

// A scale to try: what elements are multiplied with, and what the codes of 1 and 1.5 decode to.
// Those of other codes are powers of two times one of these, unless that would overflow or reach
// subnormals: `by_two` is false then.
struct alignas(16) Candidate {
  float factor;
  float one;
  float three_halves;
  u32 by_two;
};

FP4KIT_HD bool far_from_limits(float value) {
  constexpr u32 kLeast = static_cast<u32>(kF32Bias - 100) << kF32MantissaBits;
  constexpr u32 kMost = static_cast<u32>(kF32Bias + 100) << kF32MantissaBits;
  return magnitude_bits(value) - kLeast < kMost - kLeast;
}

template <int kSearch>
FP4KIT_HD Candidate make_candidate(u32 byte, const Level& level, float range, int error) {
  Candidate candidate;
  candidate.factor = te_factor(byte, level);
  candidate.one = decode_for_error<kSearch>(1.0f, byte, level, range, error);
  candidate.three_halves = decode_for_error<kSearch>(1.5f, byte, level, range, error);
  candidate.by_two = far_from_limits(candidate.one) &&
                     far_from_limits(mul_rn(decode_fp8<E4m3>(byte), level.second));
  return candidate;
}

// Fills the table of what the eight magnitude codes decode to.
template <int kSearch, class Table>
FP4KIT_HD void fill_decoded(const Table& table, const Candidate& candidate, u32 byte,
                            const Level& level, float range, int error) {
  if (candidate.by_two) {
    table.set(0, 0.0f);
    table.set(1, mul_rn(candidate.one, 0.5f));
    table.set(2, candidate.one);
    table.set(3, candidate.three_halves);
    table.set(4, mul_rn(candidate.one, 2.0f));
    table.set(5, mul_rn(candidate.three_halves, 2.0f));
    table.set(6, mul_rn(candidate.one, 4.0f));
    table.set(7, mul_rn(candidate.three_halves, 4.0f));
  } else {
#pragma unroll 1
    for (u32 k = 0; k <= E2m1::kMaxCode; ++k) {
      const float v = as_float(opaque(e2m1_float_bits(k)));
      table.set(k, decode_for_error<kSearch>(v, byte, level, range, error));
    }
  }
}

// scale_search.total_error of one block: the elements' errors summed in order. Signs do not matter,
// as codes have that of their elements. `codes`: the magnitude codes, if asked for.
template <bool kCapped, bool kKeepCodes, class T, class Table>
FP4KIT_HD float block_error(const Words<T>& x, const Table& table, const Candidate& candidate,
                            const Level& level, int error, u32 (&codes)[2]) {
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kLaneElements; i += 4) {
    u32 code[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float value = x.value(i + k);
      code[k] = e2m1_magic<kCapped>(mul_magnitude_rn(value, candidate.factor));
      const float wanted = is_scaled_error(error) ? mul_rn(value, level.scale) : value;
      const float difference = sub_magnitude_rn(table.get(code[k]), wanted);
      total = is_squared_error(error) ? add_rn(total, mul_rn(difference, difference))
                                      : add_magnitude_rn(total, difference);
    }
    if constexpr (kKeepCodes) {
      const u32 four = e2m1_join4(code[0], code[1], code[2], code[3]);
      codes[i / 8] = i % 8 == 0 ? four : byte_perm(codes[i / 8], four, 0x5410u);
    }
  }
  return total;
}

// a < b for numbers that are not negative; false if either is NaN.
FP4KIT_HD bool less_positive(float a, float b) {
  return as_bits(a) < as_bits(b) && !is_nan(a) && !is_nan(b);
}

// The steps from te's own scale byte, in the order in which they are tried.
FP4KIT_HD constexpr int sweep_step(int k) {
  return k == 0 ? 0 : k < 7 ? (k % 2 ? -(k + 1) / 2 : k / 2) : k - 3;
}
constexpr int kSweepSteps = 10;

// What the rows of a tile sum up to; a block alone is its own sum.
struct AloneSum {
  FP4KIT_HD float operator()(float error) const { return error; }
};

// What a search found. four_over_six has the magnitude codes at hand.
struct Found {
  u32 byte;
  float factor;
  u32 codes[2];
};

// The scale that a search begins with, before it is rounded: four_over_six maps the amax onto 6.
template <int kSearch>
FP4KIT_HD float first_scale(float amax, const Level& level) {
  return kSearch == kSearchFourOverSix ? mul_rn(div_rn(amax, kE2m1Max), level.scale)
                                       : mul_rn(amax, level.multiplier);
}

// scale_search.search: the scale byte that leaves the lowest error. `first`: first_scale. kError:
// of kErrorMse and so on, known to the compiler. `candidate_of` gives what make_candidate does.
template <int kSearch, int kError, bool kCapped, class T, class Table, class Candidates, class Sum>
FP4KIT_HD Found search_scale(const Words<T>& x, float first, const Level& level, float range,
                             const Table& table, const Candidates& candidate_of, const Sum& sum) {
  Found best{};
  if constexpr (kSearch == kSearchFourOverSix) {
    const float six = first;
    const u32 bytes[2] = {encode_e4m3(six), encode_e4m3(mul_rn(six, 1.5f))};
    float least = 0.0f;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const Candidate candidate = candidate_of(bytes[k]);
      fill_decoded<kSearch>(table, candidate, bytes[k], level, range, kError);
      u32 codes[2];
      const float now = sum(block_error<kCapped, true>(x, table, candidate, level, kError, codes));
      if (k == 0 || less_positive(now, least)) {
        best = Found{bytes[k], candidate.factor, {codes[0], codes[1]}};
        least = now;
      }
    }
  } else {
    const u32 own = encode_e4m3(first);
    float least = 0.0f;
#pragma unroll 1
    for (int k = 0; k < kSweepSteps; ++k) {
      const u32 byte = own + sweep_step(k);
      // Every row of a tile has the same bytes, so that all take part in each sum or none does.
      if (k != 0 && byte - 1u >= E4m3::kMaxCode) continue;
      const Candidate candidate = candidate_of(byte);
      fill_decoded<kSearch>(table, candidate, byte, level, range, kError);
      const float now =
          sum(block_error<true, false>(x, table, candidate, level, kError, best.codes));
      if (k == 0 || less_positive(now, least)) {
        least = now;
        best.byte = byte;
        best.factor = candidate.factor;
      }
    }
  }
  return best;
}

}  // namespace fp4kit
