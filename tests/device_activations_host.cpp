// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// The arithmetic of activations (kernels_cu/activations.cuh) as a host library, for
// tests/test_device_activations.py: plain loops over vecs of 16 bytes.
#include "activation/activations.cuh"

using namespace fp4kit;

namespace {

template <class T, int kFunction>
void activate(i64 vecs, int form, const u32* gate, const u32* factor, u32* out) {
  for (i64 i = 0; i < vecs; ++i) {
    Vec<T> gates, factors;
    for (int k = 0; k < 4; ++k) {
      gates.word[k] = gate[4 * i + k];
      factors.word[k] = factor[4 * i + k];
    }
    const Vec<T> result = form == 0 ? activate_all<T, kFunction>(gates, factors)
                                    : activate_words<T, kFunction, true>(gates, factors);
    for (int k = 0; k < 4; ++k) out[4 * i + k] = result.word[k];
  }
}

template <class T>
void activate_as(int function, i64 vecs, int form, const u32* gate, const u32* factor, u32* out) {
  using Run = void (*)(i64, int, const u32*, const u32*, u32*);
  const Run runs[] = {activate<T, kGelu>, activate<T, kSilu>, activate<T, kRelu>,
      activate<T, kSwiglu>, activate<T, kDgelu>, activate<T, kDsilu>, activate<T, kDrelu>};
  runs[function](vecs, form, gate, factor, out);
}

}  // namespace

extern "C" {

// form 0 chooses for each piece as the kernels do, 1 is the one for any value.
void activate_f32(int function, i64 vecs, int form, const u32* gate, const u32* factor, u32* out) {
  activate_as<F32>(function, vecs, form, gate, factor, out);
}
void activate_f16(int function, i64 vecs, int form, const u32* gate, const u32* factor, u32* out) {
  activate_as<F16>(function, vecs, form, gate, factor, out);
}
void activate_bf16(int function, i64 vecs, int form, const u32* gate, const u32* factor, u32* out) {
  activate_as<Bf16>(function, vecs, form, gate, factor, out);
}

// How many of the significands of x in [1, 2) do not get their reciprocal from a guess at most one
// unit in the last place away; `last` is the last of these.
i64 wrong_reciprocals(u32* last) {
  i64 wrong = 0;
  for (u32 significand = 0; significand < (1u << kF32MantissaBits); ++significand) {
    const float x = as_float(as_bits(1.0f) | significand);
    const float exact = 1.0f / x;
    const double unit = x > 1.0f ? 1.0 / 16777216.0 : 1.0 / 8388608.0;
    bool all = true;
    for (int step = -1; step <= 1; ++step) {
      const float guess = as_float(as_bits(exact) + static_cast<u32>(step));
      const double away = static_cast<double>(guess) - 1.0 / static_cast<double>(x);
      if (away > unit || away < -unit) continue;
      all = all && as_bits(refine_reciprocal(x, guess)) == as_bits(exact);
    }
    if (all) continue;
    ++wrong;
    *last = significand;
  }
  return wrong;
}

// How many x with these bits the two forms of the logistic function treat differently.
i64 different_logistics(u32 begin, u32 end, u32 step) {
  i64 different = 0;
  for (u64 bits = begin; bits < end; bits += step) {
    for (int negative = 0; negative < 2; ++negative) {
      const float x = as_float(static_cast<u32>(bits) | (negative ? kSignBit : 0u));
      different += as_bits(logistic<false>(x)) != as_bits(logistic<true>(x));
    }
  }
  return different;
}
}
