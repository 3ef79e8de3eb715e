// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Recipe te with another largest scale, and the search for a block's scale by its error
// (fp4kit/reference/scale_search.py), equal bit by bit.
#pragma once

#include "common/group16.cuh"

namespace fp4kit {

constexpr int kErrorMse = 0, kErrorMae = 1, kErrorMseScaled = 2, kErrorMaeScaled = 3;
constexpr int kSearchNone = 0, kSearchFourOverSix = 1, kSearchSweep = 2;

FP4KIT_HD Level make_te_level(float second, float range) {
  return make_level<kRecipeTe, true>(second, range);
}

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
struct alignas(16) Candidate {
  float factor;
  float one;
  float three_halves;
  u32 traits;
};

// What other codes decode to are powers of two times one of these, exactly.
constexpr u32 kByTwo = 1;
// That, and the scale is neither subnormal nor the largest, which saturated ones are rounded to.
constexpr u32 kOrdinary = 2;

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
  const bool by_two = far_from_limits(candidate.one) &&
                      far_from_limits(mul_rn(decode_fp8<E4m3>(byte), level.second));
  const bool ordinary = is_ordinary_scale<Nvfp4>(byte, 0);
  candidate.traits = by_two ? kByTwo | (ordinary ? kOrdinary : 0) : 0;
  return candidate;
}

// Fills entries 1 .. kLast; 8 is for elements that e2m1_magic did not cut to 7.
template <u32 kLast, class Table>
FP4KIT_HD void fill_by_two(const Table& table, const Candidate& candidate) {
  table.set(1, mul_rn(candidate.one, 0.5f));
  table.set(2, candidate.one);
  table.set(3, candidate.three_halves);
  table.set(4, mul_rn(candidate.one, 2.0f));
  table.set(5, mul_rn(candidate.three_halves, 2.0f));
  table.set(6, mul_rn(candidate.one, 4.0f));
  const float six = mul_rn(candidate.three_halves, 4.0f);
  if constexpr (kLast >= 7) table.set(7, six);
  if constexpr (kLast >= 8) table.set(8, six);
}

template <int kSearch, class Table>
FP4KIT_HD void fill_decoded(const Table& table, const Candidate& candidate, u32 byte,
    const Level& level, float range, int error) {
  if (candidate.traits != 0) {
    table.set(0, 0.0f);
    fill_by_two<7>(table, candidate);
  } else {
#pragma unroll 1
    for (u32 k = 0; k <= E2m1::kMaxCode; ++k) {
      const float v = as_float(opaque(e2m1_float_bits(k)));
      table.set(k, decode_for_error<kSearch>(v, byte, level, range, error));
    }
  }
}

struct Values {
  float value[kGroupSize];

  template <class T>
  FP4KIT_HD explicit Values(const Words<T>& x) {
#pragma unroll
    for (int i = 0; i < kGroupSize; ++i) value[i] = as_float(opaque(as_bits(x.value(i))));
  }
};

// How large scaled elements may be: anything, below 9 (e2m1_magic), or at most 4.5.
constexpr int kReachAny = 0, kReachNine = 1, kReachFour = 2;

template <int kReach>
FP4KIT_HD u32 magic_within(float y) {
  return kReach == kReachFour ? e2m1_magic_to_four(y) : e2m1_magic<kReach == kReachAny>(y);
}

FP4KIT_HD void join_codes(const u32 (&code)[4], int i, u32 (&codes)[2]) {
  const u32 four = e2m1_join4(code[0], code[1], code[2], code[3]);
  codes[i / 8] = i % 8 == 0 ? four : byte_perm(codes[i / 8], four, 0x5410u);
}

// scale_search.total_error of one block. `codes`: the magnitude codes, if asked for.
template <int kError, int kReach, bool kKeepCodes, class Table>
FP4KIT_HD float block_error(
    const Values& x, const Table& table, float factor, const Level& level, u32 (&codes)[2]) {
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kGroupSize; i += 4) {
    u32 code[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float value = x.value[i + k];
      code[k] = magic_within<kReach>(mul_magnitude_rn(value, factor));
      const float wanted = is_scaled_error(kError) ? mul_rn(value, level.scale) : value;
      const float difference = sub_magnitude_rn(table.get(code[k]), wanted);
      // Hidden, or NVRTC 12.9 makes it the absolute value of a float, which flushes subnormals.
      const float error = is_squared_error(kError) ? mul_rn(difference, difference)
                                                   : as_float(opaque(magnitude_bits(difference)));
      if (i + k == 0) {
        total = error;
      } else {
        total = is_squared_error(kError) ? add_rn(total, error) : add_magnitude_rn(total, error);
      }
    }
    if constexpr (kKeepCodes) join_codes(code, i, codes);
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
  static constexpr bool kAlone = true;
  FP4KIT_HD float operator()(float error) const { return error; }
};

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

// ---- Any block ----

// scale_search.search: the scale byte that leaves the lowest error. `candidate_of` gives what
// make_candidate does.
template <int kSearch, int kError, class Table, class Candidates, class Sum>
FP4KIT_HD Found search_any(const Values& x, float amax, const Level& level, float range,
    const Table& table, const Candidates& candidate_of, const Sum& sum) {
  Found best{};
  float least = 0.0f;
  const float first = first_scale<kSearch>(amax, level);
  if constexpr (kSearch == kSearchFourOverSix) {
    const u32 bytes[2] = {encode_e4m3(first), encode_e4m3(mul_rn(first, 1.5f))};
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const Candidate candidate = candidate_of(bytes[k]);
      fill_decoded<kSearch>(table, candidate, bytes[k], level, range, kError);
      u32 codes[2];
      const float now =
          sum(block_error<kError, kReachAny, true>(x, table, candidate.factor, level, codes));
      if (k == 0 || less_positive(now, least)) {
        best = Found{bytes[k], candidate.factor, {codes[0], codes[1]}};
        least = now;
      }
    }
  } else {
    const u32 own = encode_e4m3(first);
#pragma unroll 1
    for (int k = 0; k < kSweepSteps; ++k) {
      const u32 byte = own + sweep_step(k);
      // Every row of a tile has the same bytes, so that all take part in each sum or none does.
      if (k != 0 && byte - 1u >= E4m3::kMaxCode) continue;
      const Candidate candidate = candidate_of(byte);
      fill_decoded<kSearch>(table, candidate, byte, level, range, kError);
      const float now =
          sum(block_error<kError, kReachAny, false>(x, table, candidate.factor, level, best.codes));
      if (k == 0 || less_positive(now, least)) {
        least = now;
        best.byte = byte;
        best.factor = candidate.factor;
      }
    }
  }
  return best;
}

// Ordinary blocks: finite elements whose sizes under each scale are known, and so are those of what
// their codes decode to. No sum of errors is NaN, and +infinity is the largest.

constexpr u32 kLeastOrdinary = static_cast<u32>(kF32Bias - 100) << kF32MantissaBits;

// amax / 6, rounded as the division would be: the product is off by less than a unit of its last
// place and its remainder is exact (Markstein's theorem).
FP4KIT_HD float sixth(float amax) {
  const float quotient = mul_rn(amax, kReciprocalE2m1Max);
  return fma_rn(fma_rn(-kE2m1Max, quotient, amax), kReciprocalE2m1Max, quotient);
}

// Both scales of four_over_six: they leave the largest element below 6.4 and below 4.3.
template <int kError, class Table>
FP4KIT_HD Found choose_four_or_six(const Values& x, const u32 (&bytes)[2],
    const Candidate (&candidate)[2], const Level& level, const Table& table) {
  u32 six[2], four[2];
  table.set(0, 0.0f);
  fill_by_two<7>(table, candidate[0]);
  const float error_six =
      block_error<kError, kReachNine, true>(x, table, candidate[0].factor, level, six);
  fill_by_two<6>(table, candidate[1]);
  const float error_four =
      block_error<kError, kReachFour, true>(x, table, candidate[1].factor, level, four);
  const bool takes_four = as_bits(error_four) < as_bits(error_six);
  return {takes_four ? bytes[1] : bytes[0], takes_four ? candidate[1].factor : candidate[0].factor,
      {takes_four ? four[0] : six[0], takes_four ? four[1] : six[1]}};
}

// No scale that is tried may be subnormal, and the own one not saturated.
FP4KIT_HD bool sweeps_ordinary(u32 own) {
  constexpr u32 kLeast = (1u << E4m3::kMantissaBits) + 3;
  return own - kLeast < E4m3::kMaxCode - kLeast;
}

// Whether the scales that are tried then have kByTwo, whatever they are.
FP4KIT_HD bool is_ordinary_second(float second) {
  constexpr u32 kLeast = static_cast<u32>(kF32Bias - 80) << kF32MantissaBits;
  constexpr u32 kMost = static_cast<u32>(kF32Bias + 80) << kF32MantissaBits;
  return magnitude_bits(second) - kLeast < kMost - kLeast;
}

// The own scale leaves the largest element below 6.4, that three steps lower below 8.8, that five
// steps higher below 4.4.
template <int kError, class Table, class Candidates>
FP4KIT_HD Found sweep_ordinary(const Values& x, u32 own, const Level& level, const Table& table,
    const Candidates& candidate_of) {
  Found best{};
  u32 least = ~0u;
  table.set(0, 0.0f);
  const auto attempt = [&](u32 byte, auto reach) {
    constexpr int kReach = decltype(reach)::kValue;
    const Candidate candidate = candidate_of(byte);
    fill_by_two<kReach == kReachFour ? 6 : 8>(table, candidate);
    const u32 now =
        as_bits(block_error<kError, kReach, false>(x, table, candidate.factor, level, best.codes));
    if (now < least) {
      least = now;
      best.byte = byte;
      best.factor = candidate.factor;
    }
  };
  // The largest scale again is no better than it was.
  const auto above = [&](u32 step) { return min_u32(own + step, E4m3::kMaxCode); };
  attempt(own, Number<kReachNine>());
#pragma unroll 1
  for (u32 step = 1; step <= 3; ++step) {
    attempt(own - step, Number<kReachNine>());
    attempt(above(step), Number<kReachNine>());
  }
  attempt(above(4), Number<kReachNine>());
#pragma unroll 1
  for (u32 step = 5; step <= 6; ++step) attempt(above(step), Number<kReachFour>());
#pragma unroll
  for (int i = 0; i < kGroupSize; i += 4) {
    u32 code[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      code[k] = e2m1_magic<true>(mul_magnitude_rn(x.value[i + k], best.factor));
    }
    join_codes(code, i, best.codes);
  }
  return best;
}

template <class T>
FP4KIT_HD Found with_signs(const Words<T>& x, Found found) {
#pragma unroll
  for (int i = 0; i < 2; ++i) found.codes[i] |= sign_nibbles<T>(x.word + i * 2 * T::kSize);
  return found;
}

// scale_search.search for a group whose largest magnitude, NaN included, is `raw`, and its codes.
template <int kSearch, int kError, class T, class Amax, class Table, class Candidates, class Sum>
FP4KIT_HD Found search_scale(const Words<T>& words, u32 raw, const Amax& amax_of,
    const Level& level, float range, const Table& table, const Candidates& candidate_of,
    const Sum& sum) {
  const Values x(words);
  if constexpr (Sum::kAlone) {
    const float largest = from_input_bits<T>(raw);
    const bool ordinary = as_bits(largest) - kLeastOrdinary < kInfBits - kLeastOrdinary;
    if constexpr (kSearch == kSearchFourOverSix) {
      const float six = mul_rn(sixth(largest), level.scale);
      const u32 pair = encode_fp8_pair<E4m3, true>(six, mul_rn(six, 1.5f));
      const u32 bytes[2] = {pair & 0xFFu, pair >> 8};
      const Candidate candidate[2] = {candidate_of(bytes[0]), candidate_of(bytes[1])};
      const bool both = (candidate[0].traits & candidate[1].traits & kOrdinary) != 0;
      if (ordinary & both) {
        return with_signs(words, choose_four_or_six<kError>(x, bytes, candidate, level, table));
      }
    } else {
      const u32 own = encode_e4m3(first_scale<kSearch>(largest, level));
      if (ordinary & is_ordinary_second(level.second) & sweeps_ordinary(own)) {
        return with_signs(words, sweep_ordinary<kError>(x, own, level, table, candidate_of));
      }
    }
  }
  Found found = search_any<kSearch, kError>(x, amax_of(), level, range, table, candidate_of, sum);
  if (kSearch == kSearchFourOverSix && raw < T::kInf) return with_signs(words, found);
  encode_group<Nvfp4, T, kRecipeTe>(words, raw, found.factor, found.codes);
  return found;
}

}  // namespace fp4kit
