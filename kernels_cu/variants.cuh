// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// The arithmetic of variants for one block of 16 elements: rotation (fp4kit/rotation.py), random
// bits and stochastic rounding (fp4kit/philox.py), and the search for a scale by its error
// (fp4kit/scale_search.py), operation by operation.
#pragma once

#include "lane.cuh"

namespace fp4kit {

// Signs are changed on the bits, and the result is hidden from the compiler: it would turn the pair
// into a negation or an absolute value of floats, which flush subnormals (seen in PTX of
// NVRTC 12.9).
FP4KIT_HD float flip_sign(float value, u32 sign) { return as_float(opaque(as_bits(value) ^ sign)); }
FP4KIT_HD float negate(float value) { return flip_sign(value, kSignBit); }
FP4KIT_HD float magnitude(float value) { return as_float(opaque(magnitude_bits(value))); }

// ---------------------------------------------------------------------------------------------
// Rotation
// ---------------------------------------------------------------------------------------------

// Four butterfly stages of sums and differences, then / 4.
FP4KIT_HD void butterfly(float (&v)[kLaneElements]) {
#pragma unroll
  for (int h = 1; h < kLaneElements; h *= 2) {
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) {
      if ((i & h) == 0) {
        const float a = v[i];
        const float b = v[i + h];
        v[i] = add_rn(a, b);
        v[i + h] = add_rn(a, negate(b));
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) v[i] = mul_rn(v[i], 0.25f);
}

// Negates the elements whose bit in `mask` is 1.
FP4KIT_HD void flip_signs(float (&v)[kLaneElements], u32 mask) {
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) {
    v[i] = flip_sign(v[i], ((mask >> i) & 1u) << 31);
  }
}

// The rotated elements as R: Bf16 rounds them, F32 does not.
template <class R, class T>
FP4KIT_HD Words<R> rotate_lane(const Words<T>& x, u32 mask) {
  float v[kLaneElements];
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) v[i] = x.value(i);
  flip_signs(v, mask);
  butterfly(v);
  Words<R> result;
#pragma unroll
  for (int i = 0; i < Words<R>::kWords; ++i) {
    if constexpr (R::kSize == 4) {
      result.word[i] = as_bits(v[i]);
    } else {
      result.word[i] = pack_canonical<R>(v[2 * i], v[2 * i + 1]);
    }
  }
  return result;
}

// ---------------------------------------------------------------------------------------------
// Stochastic rounding
// ---------------------------------------------------------------------------------------------

struct Random {
  u32 word[4];

  // A number in [0, 1) of 24 bits for element e of the group.
  FP4KIT_HD float uniform(int e) const {
    const u32 w = word[e / 4];
    const int turn = 8 * (e % 4);
    const u32 bits = turn == 0 ? w : (w >> turn) | (w << (32 - turn));
    return mul_rn(static_cast<float>(bits >> 8), 1.0f / 16777216.0f);
  }
};

FP4KIT_HD void multiply_wide(u32 a, u32 b, u32& high, u32& low) {
  const u64 product = static_cast<u64>(a) * b;
  high = static_cast<u32>(product >> 32);
  low = static_cast<u32>(product);
}

// Philox4x32-10 of the counter (group, direction, stream).
FP4KIT_HD Random philox(u64 group, u32 direction, u32 stream, u64 key) {
  u32 c0 = static_cast<u32>(group);
  u32 c1 = static_cast<u32>(group >> 32);
  u32 c2 = direction;
  u32 c3 = stream;
  u32 k0 = static_cast<u32>(key);
  u32 k1 = static_cast<u32>(key >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    u32 high0, low0, high1, low1;
    multiply_wide(0xD2511F53u, c0, high0, low0);
    multiply_wide(0xCD9E8D57u, c2, high1, low1);
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// floor(t) of 0 <= t < 2^23 as a float, without a comparison of floats.
FP4KIT_HD float floor_small(float t) {
#ifdef __CUDA_ARCH__
  float result;
  asm("cvt.rmi.f32.f32 %0, %1;" : "=f"(result) : "f"(t));
  return result;
#else
  return __builtin_floorf(t);
#endif
}

// The integer that a small non-negative float is; the plain conversion would flush subnormals.
FP4KIT_HD u32 to_integer(float whole) {
#ifdef __CUDA_ARCH__
  u32 result;
  asm("cvt.rzi.u32.f32 %0, %1;" : "=r"(result) : "f"(whole));
  return result;
#else
  return static_cast<u32>(whole);
#endif
}

// philox.round_stochastically: one of the two neighbours of `scaled`, NaN -> code 7.
FP4KIT_HD u32 round_stochastically(float scaled, float random) {
  const u32 magnitude = magnitude_bits(scaled);
  if (magnitude > kInfBits) return E2m1::kNanCode;
  const u32 capped = min_u32(magnitude, as_bits(kE2m1Max));
  // Bits of positive floats order as the floats do.
  const bool below_2 = capped < as_bits(2.0f);
  const bool below_4 = capped < as_bits(4.0f);
  const float steps = mul_rn(as_float(opaque(capped)), below_2 ? 2.0f : below_4 ? 1.0f : 0.5f);
  const float whole = floor_small(steps);
  const float fraction = add_rn(steps, negate(whole));
  const bool up = as_bits(random) < magnitude_bits(fraction);
  const u32 first = below_2 ? 0u : below_4 ? 2u : 4u;
  const u32 code = first + to_integer(whole) + (up ? 1u : 0u);
  return code | ((as_bits(scaled) >> 28) & 8u);
}

// ---------------------------------------------------------------------------------------------
// Recipe te with another largest scale, and the search for a block's scale
// ---------------------------------------------------------------------------------------------

constexpr int kErrorMse = 0;
constexpr int kErrorMae = 1;
constexpr int kErrorMseScaled = 2;
constexpr int kErrorMaeScaled = 3;

constexpr int kSearchNone = 0;
constexpr int kSearchFourOverSix = 1;
constexpr int kSearchSweep = 2;

// scaling.te_encode_scale for a second level that maps the amax onto `range`.
FP4KIT_HD float te_encode_scale_of(float amax, float range) {
  const float scale = div_rn(range, amax);
  if (is_nan(scale)) return as_float(kMaxFiniteBits);
  const u32 bits = as_bits(scale);
  return is_zero(amax) || bits == 0 || bits >= kSignBit ? 1.0f : cap_finite(scale);
}

FP4KIT_HD Level make_te_level(float second, float range) {
  Level level{second, 1.0f, 1.0f, 1.0f, false};
  level.scale = te_encode_scale_of(second, range);
  level.multiplier = mul_rn(level.scale, kReciprocalE2m1Max);
  level.clamped = as_bits(div_rn(range, second)) == kInfBits && !is_zero(second);
  level.inverse = div_rn(1.0f, level.scale);
  return level;
}

// scaling.te_decode_factor.
FP4KIT_HD float te_decode_factor(float q, const Level& level, float range) {
  if (level.clamped) return div_rn(q, level.scale);
  return mul_rn(mul_rn(q, level.second), div_rn(1.0f, range));
}

// What a candidate needs for its error: the factor of elements, and what decodes them.
struct Candidate {
  u32 byte;
  float factor;
  float q;
  float decode;
};

FP4KIT_HD Candidate make_candidate(u32 byte, const Level& level, float range) {
  Candidate candidate;
  candidate.byte = byte;
  candidate.q = decode_fp8<E4m3>(byte);
  candidate.factor = cap_finite(div_rn(1.0f, mul_rn(candidate.q, level.inverse)));
  candidate.decode = te_decode_factor(candidate.q, level, range);
  return candidate;
}

// The E2M1 value of fl(x * factor), signed.
FP4KIT_HD float nearest_e2m1(float scaled) {
  const bool nan = is_nan(scaled);
  const u32 code = nan ? E2m1::kNanCode : e2m1_magic<true>(magnitude(scaled)) - kMagic23;
  const u32 sign = nan ? 0u : as_bits(scaled) & kSignBit;
  return as_float(opaque(e2m1_float_bits(code) | sign));
}

// scale_search.total_error of one block: the elements' errors summed in order.
template <int kSearch>
FP4KIT_HD float block_error(const float (&x)[kLaneElements], const Candidate& candidate,
                            const Level& level, float range, int error) {
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) {
    float decoded = nearest_e2m1(mul_rn(x[i], candidate.factor));
    float wanted = x[i];
    if (error >= kErrorMseScaled) {
      wanted = mul_rn(x[i], level.scale);
      decoded = mul_rn(decoded, candidate.q);
    } else if (kSearch == kSearchFourOverSix) {
      decoded = div_rn(mul_rn(mul_rn(decoded, candidate.q), level.second), range);
    } else {
      decoded = mul_rn(decoded, candidate.decode);
    }
    const float difference = add_rn(decoded, negate(wanted));
    const bool squared = error == kErrorMse || error == kErrorMseScaled;
    total = add_rn(total, squared ? mul_rn(difference, difference) : magnitude(difference));
  }
  return total;
}

// a < b for numbers that are not negative; false if either is NaN.
FP4KIT_HD bool less_positive(float a, float b) {
  return as_bits(a) < as_bits(b) && !is_nan(a) && !is_nan(b);
}

FP4KIT_HD constexpr int sweep_step(int k) {
  return k == 0 ? 0 : k < 7 ? (k % 2 ? -(k + 1) / 2 : k / 2) : k - 3;
}
constexpr int kSweepSteps = 10;

// What the rows of a tile sum up to; a block alone is its own sum.
struct AloneSum {
  FP4KIT_HD float operator()(float error) const { return error; }
};

// scale_search.search: the scale byte that leaves the lowest error, and its factor.
template <int kSearch, class Sum>
FP4KIT_HD Candidate search_scale(const float (&x)[kLaneElements], float amax, const Level& level,
                                 float range, int error, const Sum& sum) {
  if constexpr (kSearch == kSearchFourOverSix) {
    const float six = mul_rn(div_rn(amax, kE2m1Max), level.scale);
    const Candidate first = make_candidate(encode_e4m3(six), level, range);
    const Candidate second = make_candidate(encode_e4m3(mul_rn(six, 1.5f)), level, range);
    const float error_first = sum(block_error<kSearch>(x, first, level, range, error));
    const float error_second = sum(block_error<kSearch>(x, second, level, range, error));
    return less_positive(error_second, error_first) ? second : first;
  } else {
    const u32 own = encode_e4m3(mul_rn(amax, level.multiplier));
    Candidate best = make_candidate(own, level, range);
    float least = sum(block_error<kSearch>(x, best, level, range, error));
#pragma unroll 1
    for (int k = 1; k < kSweepSteps; ++k) {
      const u32 byte = own + sweep_step(k);
      // Every row of a tile has the same bytes, so that all take part in each sum or none does.
      if (byte - 1u >= E4m3::kMaxCode) continue;
      const Candidate candidate = make_candidate(byte, level, range);
      const float now = sum(block_error<kSearch>(x, candidate, level, range, error));
      if (less_positive(now, least)) {
        least = now;
        best = candidate;
      }
    }
    return best;
  }
}

}  // namespace fp4kit
