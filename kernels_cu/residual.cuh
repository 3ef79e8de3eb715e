// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Residual channels: the arithmetic of a block (fp4kit/residual_blocks.py), and where its parts lie.
// Symbols as there: g encode scale, y = x g, q a block's decoded scale.
#pragma once

#include "lane.cuh"
#include "swizzle.cuh"

namespace fp4kit {

// ---------------------------------------------------------------------------------------------
// Encode
// ---------------------------------------------------------------------------------------------

// No block scale is 0: residual_blocks.SCALE_MIN, the smallest E4M3 value.
constexpr u32 kSmallestScaleBits = kModeloptScaleMinBits;
// Recipe te scales elements as residual blocks do: by a product, the sign of zeros kept.
constexpr int kResidualRecipe = kRecipeTe;

// fl(amax / 6) wherever that is at least kSmallestScaleBits, without a division: the quotient by
// the rounded reciprocal, corrected by its exact remainder, is the rounded one. An infinity counts
// as FLT_MAX, whose scale saturates as well.
FP4KIT_HD float amax_by_six(float amax) {
  const float a = as_float(min_u32(as_bits(amax), kMaxFiniteBits));
  const float quotient = mul_rn(a, kReciprocalE2m1Max);
  return fma_rn(fma_rn(quotient, -kE2m1Max, a), kReciprocalE2m1Max, quotient);
}

FP4KIT_HD u32 residual_scale_byte(float amax) {
  return encode_e4m3(at_least(amax_by_six(amax), as_float(kSmallestScaleBits)));
}

// What multiplies the elements of a block: fl(1 / q), by scale byte; one for each thread to fill in.
struct FactorTable {
  float factor[1 << (E4m3::kBits - 1)];

  FP4KIT_HD void fill(u32 byte) { factor[byte] = div_rn(1.0f, decode_fp8<E4m3>(byte)); }
  FP4KIT_HD float operator()(u32 byte) const { return factor[byte]; }
};

// y in binary32, worked out whenever it is read: signs are those of x, as g is positive.
template <class T>
struct Scaled : Words<T> {
  float scale;

  FP4KIT_HD Scaled(const Words<T>& x, float g) : Words<T>(x), scale(g) {}
  FP4KIT_HD float value(int i) const { return mul_rn(Words<T>::value(i), scale); }
  FP4KIT_HD Scaled magnitudes() const { return Scaled(Words<T>::magnitudes(), scale); }
};

// Rounding keeps the order of magnitudes, so that the largest x gives the largest y.
template <class T>
FP4KIT_HD float amax_of(const Scaled<T>& magnitude, u32& raw) {
  return mul_rn(from_input_bits<T>(lane_amax_bits<T>(magnitude, raw)), magnitude.scale);
}
template <class T>
FP4KIT_HD float amax_of(const Words<T>& magnitude, u32& raw) {
  return from_input_bits<T>(lane_amax_bits<T>(magnitude, raw));
}

// Sixteen floats as elements: rounded to bfloat16, or as they are.
template <bool kRounds>
struct Kept {
  using Type = F32;
};
template <>
struct Kept<true> {
  using Type = Bf16;
};

template <bool kRounds, class Value>
FP4KIT_HD Words<typename Kept<kRounds>::Type> keep(const Value& value) {
  Words<typename Kept<kRounds>::Type> result;
#pragma unroll
  for (int i = 0; i < result.kWords; ++i) {
    if constexpr (kRounds) {
      result.word[i] = pack_pair<Bf16>(value(2 * i), value(2 * i + 1));
    } else {
      result.word[i] = as_bits(value(i));
    }
  }
  return result;
}

// Codes of a block, low nibble first, and its scale.
struct CodedBlock {
  u32 code[2];
  u32 byte;

  FP4KIT_HD void swap() {
    code[0] = swap_nibbles(code[0]);
    code[1] = swap_nibbles(code[1]);
  }
};

// residual_blocks.encode_blocks. T: whose bits the words of Y are.
template <class T, class Y, class Factors>
FP4KIT_HD CodedBlock encode_residual_block(const Y& y, const Factors& factors) {
  const Y magnitude = y.magnitudes();
  u32 raw;
  CodedBlock block;
  block.byte = residual_scale_byte(amax_of(magnitude, raw));
  const bool ordinary = is_ordinary_scale<Nvfp4>(block.byte, 0);
  encode_lane<Nvfp4, T, kResidualRecipe>(y, magnitude, raw, ordinary, factors(block.byte),
                                         block.code);
  return block;
}

// The block of what the codes of `main` lose of y. value * q is exact, so that one fused sum is the
// difference, rounded once.
template <bool kRounds, class Y, class Factors>
FP4KIT_HD CodedBlock encode_loss(const Y& y, const CodedBlock& main, const Factors& factors) {
  const float minus_q = mul_rn(decode_fp8<E4m3>(main.byte), -1.0f);
  float value[kLaneElements];
  e2m1_decode<8>(main.code[0], value);
  e2m1_decode<8>(main.code[1], value + 8);
  const auto loss = keep<kRounds>([&](int i) { return fma_rn(value[i], minus_q, y.value(i)); });
  return encode_residual_block<typename Kept<kRounds>::Type>(loss, factors);
}

template <class T, bool kRounds, class Y, class Factors>
FP4KIT_HD void encode_both(const Y& y, bool wants_extra, bool copies, const Factors& factors,
                           CodedBlock& main, CodedBlock& extra) {
  main = encode_residual_block<T>(y, factors);
  extra = main;
  if (wants_extra && !copies) extra = encode_loss<kRounds>(y, main, factors);
}

// The main block of sixteen elements and, if `wants_extra`, its residual block: a copy of the main
// block in weight mode (`copies`).
template <class T, bool kRounds, class Factors>
FP4KIT_HD void quantize_with_residual(const Words<T>& x, float scale, bool wants_extra, bool copies,
                                      const Factors& factors, CodedBlock& main, CodedBlock& extra) {
  if constexpr (kRounds) {
    const Words<Bf16> y = keep<true>([&](int i) { return mul_rn(x.value(i), scale); });
    encode_both<Bf16, true>(y, wants_extra, copies, factors, main, extra);
  } else {
    encode_both<T, false>(Scaled<T>(x, scale), wants_extra, copies, factors, main, extra);
  }
}

// ---------------------------------------------------------------------------------------------
// Decode
// ---------------------------------------------------------------------------------------------

// Whether some result may be a NaN, beside those of block scales that are: zero times infinity.
FP4KIT_HD bool is_unusual_inverse(float inverse) { return as_bits(inverse) >= kInfBits; }

// What the codes of a block without a residual decode to under fl(1 / g): fl(fl(value q) inverse).
// A zero code is no exception here.
template <class Out>
FP4KIT_HD E2m1Table residual_table(float q, float inverse) {
  float value[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    value[i] = mul_rn(mul_rn(as_float(e2m1_float_bits(i)), q), inverse);
  }
  u32 word[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) word[i] = pack_canonical<Out>(value[2 * i], value[2 * i + 1]);
  return pack_table(word);
}

// kCount elements of fl(m inverse), m = fl(value q + extra value * extra q); four codes lie in the
// low half of their word. Products are exact, so that the fused sum rounds as the plain one does.
template <class Out, int kCount>
FP4KIT_HD Words<Out, kCount> decode_sum(const u32* codes, float q, const u32* extra_codes,
                                        float extra_q, float inverse) {
  constexpr int kEach = kCount == 4 ? 4 : 8;
  float value[kCount];
#pragma unroll
  for (int i = 0; i < kCount / kEach; ++i) {
    float extra[kEach];
    e2m1_decode<kEach>(codes[i], value + 8 * i);
    e2m1_decode<kEach>(extra_codes[i], extra);
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const float sum = fma_rn(value[8 * i + k], q, mul_rn(extra[k], extra_q));
      value[8 * i + k] = mul_rn(sum, inverse);
    }
  }
  Words<Out, kCount> out;
#pragma unroll
  for (int i = 0; i < Words<Out, kCount>::kWords; ++i) {
    if constexpr (Out::kSize == 4) {
      out.word[i] = as_bits(value[i]);
    } else {
      out.word[i] = pack_pair<Out>(value[2 * i], value[2 * i + 1]);
    }
  }
  if (is_nan(q) || is_nan(extra_q) || is_unusual_inverse(inverse)) {
#pragma unroll
    for (int i = 0; i < Words<Out, kCount>::kWords; ++i) {
      if constexpr (Out::kSize == 4) {
        out.word[i] = to_output_bits<Out>(value[i]);
      } else {
        out.word[i] = pack_canonical<Out>(value[2 * i], value[2 * i + 1]);
      }
    }
  }
  return out;
}

// The same without an extra block. `table` has an entry for each scale byte and is only looked at
// where results are 16 bits wide.
template <class Out, int kCount>
FP4KIT_HD Words<Out, kCount> decode_alone(const u32* codes, u32 byte, const E2m1Table* table,
                                          float inverse) {
  Words<Out, kCount> out;
  if constexpr (Out::kSize == 2) {
    decode_words<Nvfp4, kResidualRecipe, false>(codes, table[byte], out);
  } else {
    constexpr int kEach = kCount == 4 ? 4 : 8;
    const float q = decode_fp8<E4m3>(byte);
    float value[kCount];
#pragma unroll
    for (int i = 0; i < kCount / kEach; ++i) e2m1_decode<kEach>(codes[i], value + 8 * i);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      out.word[i] = to_output_bits<Out>(mul_rn(mul_rn(value[i], q), inverse));
    }
  }
  return out;
}

// ---------------------------------------------------------------------------------------------
// Places
// ---------------------------------------------------------------------------------------------

// Where main and residual blocks stand in a row: operations.ResidualPlan.
template <class Index>
struct BlockPlaces {
  Index main_blocks;
  Index first;  // the first main block that has a residual block
  Index blocks;
  bool interleaved;

  FP4KIT_HD Index main(Index block) const {
    return block + (interleaved && block > first ? block - first : 0);
  }
  FP4KIT_HD Index extra(Index block) const {
    return interleaved ? main(block) + 1 : main_blocks + block - first;
  }
};

// Kernels work on groups of eight rows whose scales fill whole 32-byte sectors where four of their
// blocks come together: in the 128x4 tile these are neighbours and the same rows 32, 64, 96 below.
constexpr u32 kGroupRows = 8;
constexpr u32 kSectorBytes = kGroupRows * kTileCols;
constexpr u32 kTileGroups128 = kTileRows128 / kGroupRows;

// The tensor's row that is row `local` of a group.
FP4KIT_HD u32 group_row(int layout, u32 group, u32 local) {
  if (layout != kLayoutSwizzled128x4) return group * kGroupRows + local;
  return group / kTileGroups128 * kTileRows128 + group % kTileGroups128 * 2 + local % 2 +
         local / 2 * 32;
}

// Where the scale (local, col) stands among those of its group: linear by rows, else by sectors.
FP4KIT_HD u32 group_scale(int layout, u32 local, u32 col, u32 blocks) {
  if (layout == kLayoutLinear) return local * blocks + col;
  const u32 inside =
      layout == kLayoutSwizzled128x4 ? local % 2 * 16 + local / 2 * kTileCols : local * kTileCols;
  return col / kTileCols * kSectorBytes + inside + col % kTileCols;
}

// Where byte `inside` of sector `sector` of a group is stored, `across` tiles in a row of them.
FP4KIT_HD u64 sector_offset(int layout, u32 group, u32 sector, u32 across, u32 inside) {
  if (layout != kLayoutSwizzled128x4) {
    return (static_cast<u64>(group) * across + sector) * kSectorBytes + inside;
  }
  const u64 tile = static_cast<u64>(group / kTileGroups128) * across + sector;
  return tile * kTileBytes128 + group % kTileGroups128 * kSectorBytes + inside;
}

// Which (row, main block) thread `item` takes: where scales are linear one after the other, else a
// warp takes four blocks of the rows of a group, a sector of scales. `units` are what `divide`
// divides by: blocks of a row, or fours of them.
FP4KIT_HD void spread(int layout, u32 item, const FastDivide& divide, u32& row, u32& block) {
  const u32 units = static_cast<u32>(divide.divisor);
  if (layout == kLayoutLinear) {
    row = small_quotient(item, divide);
    block = item - row * units;
    return;
  }
  const u32 unit = item / kSectorBytes;
  const u32 place = item % kSectorBytes;
  const u32 group = small_quotient(unit, divide);
  const u32 local = layout == kLayoutSwizzled128x4 ? place / 16 + place % 16 / kTileCols * 2
                                                   : place / kTileCols;
  row = group_row(layout, group, local);
  block = (unit - group * units) * kTileCols + place % kTileCols;
}

// Kernels that reorder channels stage rows in shared memory: a word holds a channel of two rows of
// a 16-bit type, so that one access fetches both. Channels lie such that the words of a 16-byte
// piece of a row, as well as those of the pieces beside it, meet every bank once.
template <class T>
FP4KIT_HD u32 staged_place(u32 channel, u32 cols) {
  if constexpr (T::kSize == 4) return channel;
  return channel / 8 * 4 + channel % 4 + (channel % 8 / 4) * (cols / 2);
}

// Where the staged place of a block's channel i is kept, for the same reason.
FP4KIT_HD u32 index_place(u32 block, u32 i, u32 main_blocks) {
  return (i / 8 * main_blocks + block) * 8 + i % 8;
}

}  // namespace fp4kit
