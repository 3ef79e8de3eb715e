// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// The arithmetic of variants (kernels_cu/variants.cuh) as a host library, for
// tests/test_device_variants.py: plain loops over groups of 16 elements.
#include "variants.cuh"

using namespace fp4kit;

namespace {

Words<F32> load(const u32* x) {
  Words<F32> result;
  for (int i = 0; i < kLaneElements; ++i) result.word[i] = x[i];
  return result;
}

template <int kSearch>
void search(i64 groups, const u32* x, const float* second, float range, int error, u8* byte,
            float* factor) {
  for (i64 g = 0; g < groups; ++g) {
    const Words<F32> elements = load(x + g * kLaneElements);
    u32 raw;
    const float amax = as_float(lane_amax_bits<F32>(elements.magnitudes(), raw));
    float v[kLaneElements];
    for (int i = 0; i < kLaneElements; ++i) v[i] = elements.value(i);
    const Level level = make_te_level(second[g], range);
    const Candidate best = search_scale<kSearch>(v, amax, level, range, error, AloneSum());
    byte[g] = static_cast<u8>(best.byte);
    factor[g] = best.factor;
  }
}

}  // namespace

extern "C" {

void rotate(i64 groups, const u32* x, u32 mask, int to_bf16, u32* out) {
  for (i64 g = 0; g < groups; ++g) {
    const Words<F32> elements = load(x + g * kLaneElements);
    const Words<F32> wide = rotate_lane<F32>(elements, mask);
    const Words<Bf16> narrow = rotate_lane<Bf16>(elements, mask);
    for (int i = 0; i < kLaneElements; ++i) {
      const float value = to_bf16 ? narrow.value(i) : wide.value(i);
      out[g * kLaneElements + i] = as_bits(value);
    }
  }
}

void uniform(i64 groups, u64 first, u64 key, u32 stream, u32 direction, float* out) {
  for (i64 g = 0; g < groups; ++g) {
    const Random random = philox(first + g, direction, stream, key);
    for (int i = 0; i < kLaneElements; ++i) out[g * kLaneElements + i] = random.uniform(i);
  }
}

void stochastic(i64 count, const float* scaled, const float* random, u8* code) {
  for (i64 i = 0; i < count; ++i) {
    code[i] = static_cast<u8>(round_stochastically(scaled[i], random[i]));
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

void search_scales(i64 groups, const u32* x, const float* second, float range, int error, int kind,
                   u8* byte, float* factor) {
  if (kind == kSearchFourOverSix) {
    search<kSearchFourOverSix>(groups, x, second, range, error, byte, factor);
  } else {
    search<kSearchSweep>(groups, x, second, range, error, byte, factor);
  }
}
}
