// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// The arithmetic of variants as a host library, for tests/test_device_variants.py: plain loops over
// groups of 16 elements.
#include "common/stochastic.cuh"
#include "rht/rht.cuh"
#include "search/scale_search.cuh"

using namespace fp4kit;

namespace {

Words<F32> load(const u32* x) {
  Words<F32> result;
  for (int i = 0; i < kGroupSize; ++i) result.word[i] = x[i];
  return result;
}

Seed load_seed(const i64* words) {
  Seed result{words[0], {}};
  for (int i = 0; i < kPhiloxRounds; ++i) result.key[i] = words[1 + i];
  return result;
}

struct Table {
  float* values;
  void set(u32 k, float value) const { values[k] = value; }
  float get(u32 sum) const { return values[sum - kMagic23]; }
};

template <int kSearch, int kError>
void search(i64 groups, const u32* x, const float* second, float range, u8* byte, float* factor,
    u32* codes) {
  for (i64 g = 0; g < groups; ++g) {
    const Words<F32> elements = load(x + g * kGroupSize);
    u32 raw;
    const float amax = as_float(group_amax_bits<F32>(elements, raw));
    const Level level = make_te_level(second[g], range);
    const auto candidate_of = [&](u32 of) {
      return make_candidate<kSearch>(of, level, range, kError);
    };
    float values[9];
    const Table table{values};
    const Found best = search_scale<kSearch, kError>(
        elements, raw, [&] { return amax; }, level, range, table, candidate_of, AloneSum());
    byte[g] = static_cast<u8>(best.byte);
    factor[g] = best.factor;
    codes[2 * g] = best.codes[0];
    codes[2 * g + 1] = best.codes[1];
  }
}

template <int kSearch>
void search(i64 groups, const u32* x, const float* second, float range, int error, u8* byte,
    float* factor, u32* codes) {
  switch (error) {
    case kErrorMse:
      return search<kSearch, kErrorMse>(groups, x, second, range, byte, factor, codes);
    case kErrorMae:
      return search<kSearch, kErrorMae>(groups, x, second, range, byte, factor, codes);
    case kErrorMseScaled:
      return search<kSearch, kErrorMseScaled>(groups, x, second, range, byte, factor, codes);
    default:
      return search<kSearch, kErrorMaeScaled>(groups, x, second, range, byte, factor, codes);
  }
}

}  // namespace

extern "C" {

void rotate(i64 groups, const u32* x, u32 mask, int to_bf16, u32* out) {
  for (i64 g = 0; g < groups; ++g) {
    const Words<F32> elements = load(x + g * kGroupSize);
    const Words<F32> wide = rotate_group<F32>(elements, mask);
    const Words<Bf16> narrow = rotate_group<Bf16>(elements, mask);
    for (int i = 0; i < kGroupSize; ++i) {
      const float value = to_bf16 ? narrow.value(i) : wide.value(i);
      out[g * kGroupSize + i] = as_bits(value);
    }
  }
}

void random_bits(i64 groups, u64 first, const i64* words, u32 direction, u32* out) {
  const Seed seed = load_seed(words);
  for (i64 g = 0; g < groups; ++g) {
    const Random random = philox(first + g, direction, static_cast<u32>(seed.stream), seed);
    for (int i = 0; i < kGroupSize; ++i) out[g * kGroupSize + i] = random.bits(i);
  }
}

// Codes of elements that one group holds, and those of single values with given bits.
void stochastic_groups(i64 groups, const u32* x, const float* factor, int ordinary, u64 first,
    const i64* words, u32* codes) {
  const Seed seed = load_seed(words);
  for (i64 g = 0; g < groups; ++g) {
    const Words<F32> elements = load(x + g * kGroupSize);
    u32 raw;
    group_amax_bits<F32>(elements, raw);
    u32 own[2];
    encode_group_stochastic(elements, raw, ordinary != 0, factor[g],
        philox(first + g, 0, static_cast<u32>(seed.stream), seed), own);
    codes[2 * g] = own[0];
    codes[2 * g + 1] = own[1];
  }
}

void stochastic(i64 count, const float* scaled, const u32* random, int careful, u8* code) {
  for (i64 i = 0; i < count; ++i) {
    const float y = as_float(magnitude_bits(scaled[i]));
    u32 sum[8] = {};
    sum[0] = careful ? stochastic_sum<true>(y, random[i]) : stochastic_sum<false>(y, random[i]);
    const u32 sign = is_nan(scaled[i]) ? 0u : (as_bits(scaled[i]) >> 28) & 8u;
    code[i] = static_cast<u8>((stochastic_join8(sum) & 7u) | sign);
  }
}

// Decode factors of every E4M3 byte under every second-level value: factor (count, 256).
void te_factors(i64 count, const float* second, float range, float* factor) {
  for (i64 i = 0; i < count; ++i) {
    const Level level = make_te_level(second[i], range);
    for (u32 byte = 0; byte < 256; ++byte) {
      factor[256 * i + byte] = te_decode_factor(decode_fp8<E4m3>(byte), level, range);
    }
  }
}

void sixths(i64 count, const float* amax, float* out) {
  for (i64 i = 0; i < count; ++i) out[i] = sixth(amax[i]);
}

void search_scales(i64 groups, const u32* x, const float* second, float range, int error, int kind,
    u8* byte, float* factor, u32* codes) {
  if (kind == kSearchFourOverSix) {
    search<kSearchFourOverSix>(groups, x, second, range, error, byte, factor, codes);
  } else {
    search<kSearchSweep>(groups, x, second, range, error, byte, factor, codes);
  }
}
}
