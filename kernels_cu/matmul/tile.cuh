// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// A tile of 64 x 64 elements of a product by a thread block, 64 of the depth at a time.
//
// 1. Each thread expands a group of 16 of a and of b to float32 in shared memory; the groups of the
//    next step are on their way meanwhile.
// 2. Eight warps multiply 16 x 32 elements each by mma.sync, or 16 x 16 or 16 x 8 where there are
// at
//    most 32 or 16 rows. Code times block scale has few bits and is exact in bfloat16; a float16
//    number is the sum of two bfloat16 and a float32 number of three, which are cut off one after
//    the other, and cost a product each.
// 3. A step that holds a number which is no such sum (the smallest of MX scales times codes, tiny
//    float32 numbers, and infinities where there are several parts, as infinity times 0 would be
//    NaN) is multiplied in float32 instead; so is everything where there is no such mma.
// 4. Scales of 128 x 128 are the same for two steps: their product multiplies the sums of these.
//
// The order of the sums depends on the depth alone, so that bytes are the same in every run.
#pragma once

#include "common/mma.cuh"
#include "matmul/product.cuh"

namespace fp4kit {

constexpr int kMatmulRows = 64, kMatmulCols = 64, kMatmulDepth = 64;
// Elements of the depth that share such scales.
constexpr int kMatmulPiece = FP4KIT_GRID_BLOCK;
static_assert(kMatmulPiece % kMatmulDepth == 0 && kMatmulPiece % kMatmulRows == 0,
    "a step of a tile lies under one scale");
// Floats from row to row: 8 rows of 4 lanes with 16 bytes each then meet all banks.
constexpr int kMatmulStride = kMatmulDepth + 8;
constexpr int kMatmulGroups = kMatmulDepth / kGroupSize;
static_assert(kMatmulRows * kMatmulGroups == kThreads && kMatmulCols == kMatmulRows,
    "a thread expands a group of each operand");

#ifdef __CUDACC__

// Where in a tile a product begins and how far it goes, along the rows of one operand.
struct MatmulSpan {
  i64 first;  // row of the operand
  i64 end;    // the row after the last

  FP4KIT_DEVICE bool has(int at) const { return first + at < end; }
};

// The part of an operand that a tile needs of one step. The numbers of all threads of the block.
template <class Source>
struct MatmulSide {
  const MatmulOperand& operand;
  MatmulSpan span;
  float* shared;
  typename Source::Group group;
  bool loaded;

  // Row and group of this thread: neighbours read what lies side by side.
  FP4KIT_DEVICE int row() const {
    const int thread = static_cast<int>(threadIdx.x);
    return operand.transposed() ? thread % kMatmulRows : thread / kMatmulGroups;
  }
  FP4KIT_DEVICE int column() const {
    const int thread = static_cast<int>(threadIdx.x);
    return (operand.transposed() ? thread / kMatmulRows : thread % kMatmulGroups) * kGroupSize;
  }

  FP4KIT_DEVICE void fetch(i64 depth, i64 k) {
    loaded = span.has(row()) && k + column() < depth;
    if (loaded) Source::fetch(operand, depth, span.first + row(), k + column(), group);
  }

  // Fills this thread's place, without a scale of 128 x 128.
  // Returns whether all of them are sums of kParts bfloat16 (see the head of this file).
  template <int kParts>
  FP4KIT_DEVICE bool expand(bool must_be_finite) {
    float value[kGroupSize] = {};
    if (loaded) {
      if constexpr (Source::kHasGrid) group.scale = 1.0f;
      Source::expand(operand, group, value);
    }
    u32 rest = 0;
    bool finite = true;
#pragma unroll
    for (int i = 0; i < kGroupSize; ++i) {
      float left = value[i];
      finite = finite && is_finite(left);
#pragma unroll
      for (int part = 1; part < kParts; ++part) {
        left = sub_rn(left, as_float(as_bits(left) & 0xFFFF0000u));
      }
      rest |= as_bits(left) & 0xFFFFu;
    }
    float* target = shared + row() * kMatmulStride + column();
#pragma unroll
    for (int i = 0; i < kGroupSize; i += 4) {
      *reinterpret_cast<uint4*>(target + i) = make_uint4(
          as_bits(value[i]), as_bits(value[i + 1]), as_bits(value[i + 2]), as_bits(value[i + 3]));
    }
    return (finite || !must_be_finite) && rest == 0;
  }
};

// Four floats of shared memory.
FP4KIT_DEVICE void load_quad(const float* from, float (&quad)[4]) {
  u32 word[4];
  unpack_vec(*reinterpret_cast<const uint4*>(from), word);
#pragma unroll
  for (int i = 0; i < 4; ++i) quad[i] = as_float(word[i]);
}

// The first bfloat16 parts of two numbers, as a pair.
FP4KIT_DEVICE u32 leading_pair(float first, float second) {
  return byte_perm(as_bits(first), as_bits(second), 0x7632u);
}

// A warp's part of a tile.
struct MatmulWarp {
  int g, t;     // of the lane: see common/mma.cuh
  int row;      // of its 16
  int col;      // the first of its columns
  int columns;  // times 8: 4, or fewer where warps share few rows

  FP4KIT_DEVICE explicit MatmulWarp(i64 rows) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    g = static_cast<int>(threadIdx.x) % 32 / 4;
    t = static_cast<int>(threadIdx.x) % 4;
    const int down = rows <= 16 ? 1 : rows <= 32 ? 2 : 4;
    row = warp % down * 16;
    columns = down;
    col = warp / down * 8 * columns;
  }
};
static_assert(kThreads / 32 * 8 == kMatmulCols && kMatmulRows == 64, "as warps divide a tile");

// Its sums: rows g and g + 8, columns 8 n + 2t and the next, as the fragments of D have them.
struct MatmulSums {
  static constexpr int kColumns = 4;  // times 8
  float value[kColumns][4];

  FP4KIT_DEVICE void clear() {
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) value[n][i] = 0.0f;
    }
  }

  // Adds another's sums times a scale.
  FP4KIT_DEVICE void add_scaled(const MatmulSums& other, float scale) {
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        value[n][i] = add_rn(value[n][i], mul_rn(scale, other.value[n][i]));
      }
    }
  }

  // Into rows of shared memory.
  FP4KIT_DEVICE void store(float* to, const MatmulWarp& warp) const {
    to += (warp.row + warp.g) * kMatmulStride + warp.col + 2 * warp.t;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      if (n >= warp.columns) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) to[i / 2 * 8 * kMatmulStride + n * 8 + i % 2] = value[n][i];
    }
  }

#ifdef FP4KIT_HAS_MMA
  // One step by mma. Lane t of four takes elements 4t .. 4t + 3 of 16 of the depth, where the
  // fragments say 2t, 2t + 1, 2t + 8 and 2t + 9: of both operands, so that the sum is the same.
  template <int kParts>
  FP4KIT_DEVICE void multiply(const float* a, const float* b, const MatmulWarp& warp) {
    a += (warp.row + warp.g) * kMatmulStride + 4 * warp.t;
    b += (warp.col + warp.g) * kMatmulStride + 4 * warp.t;
#pragma unroll
    for (int k = 0; k < kMatmulDepth; k += kMmaK) {
      float low[4], high[4];
      load_quad(a + k, low);
      load_quad(a + 8 * kMatmulStride + k, high);
      u32 columns[kColumns][2] = {};
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        if (n >= warp.columns) continue;
        float quad[4];
        load_quad(b + n * 8 * kMatmulStride + k, quad);
        columns[n][0] = leading_pair(quad[0], quad[1]);
        columns[n][1] = leading_pair(quad[2], quad[3]);
      }
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const u32 rows[4] = {leading_pair(low[0], low[1]), leading_pair(high[0], high[1]),
            leading_pair(low[2], low[3]), leading_pair(high[2], high[3])};
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
          if (n < warp.columns) mma_16816<Bf16>(value[n], rows, columns[n]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          low[i] = sub_rn(low[i], as_float(as_bits(low[i]) & 0xFFFF0000u));
          high[i] = sub_rn(high[i], as_float(as_bits(high[i]) & 0xFFFF0000u));
        }
      }
    }
  }
#endif

  // One step in float32.
  FP4KIT_DEVICE void multiply_float32(const float* a, const float* b, const MatmulWarp& warp) {
    a += (warp.row + warp.g) * kMatmulStride;
    b += (warp.col + 2 * warp.t) * kMatmulStride;
#pragma unroll 1
    for (int k = 0; k < kMatmulDepth; k += 4) {
      float low[4], high[4];
      load_quad(a + k, low);
      load_quad(a + 8 * kMatmulStride + k, high);
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        if (n >= warp.columns) continue;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float quad[4];
          load_quad(b + (n * 8 + j) * kMatmulStride + k, quad);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            value[n][j] = fma_rn(low[i], quad[i], value[n][j]);
            value[n][2 + j] = fma_rn(high[i], quad[i], value[n][2 + j]);
          }
        }
      }
    }
  }
};

// Scale of a step of an operand that may have such of 128 x 128, 1 otherwise.
template <class Source>
FP4KIT_DEVICE float step_scale(const MatmulOperand& operand, i64 depth, i64 row, i64 k) {
  if constexpr (Source::kHasGrid) {
    return Source::scale_of(operand, depth, row, k);
  } else {
    return 1.0f;
  }
}

// The shared memory of a tile: a, then b; at last the sums.
struct MatmulTile {
  uint4 pieces[(kMatmulRows + kMatmulCols) * kMatmulStride / 4];

  FP4KIT_DEVICE float* floats() { return reinterpret_cast<float*>(pieces); }
};

// Leaves the sums of a tile over depths from `begin` to before `end`, multiples of a step but for
// the operands' own end. All threads of the block must call it.
template <class A, class B>
FP4KIT_DEVICE void multiply_tile(const MatmulProduct& product, MatmulSpan rows, MatmulSpan cols,
    i64 begin, i64 end, MatmulTile& tile) {
  float* tile_a = tile.floats();
  float* tile_b = tile_a + kMatmulRows * kMatmulStride;
  MatmulSide<A> a{product.a, rows, tile_a, {}, false};
  MatmulSide<B> b{product.b, cols, tile_b, {}, false};
  MatmulSums sums;
  MatmulSums piece;  // of what shares scales of 128 x 128, if there are such
  const i64 depth = product.depth;
  constexpr bool kHasGrid = A::kHasGrid || B::kHasGrid;
  const MatmulWarp warp(rows.end - rows.first);
  // Warps beyond the ends only expand.
  const bool multiplies = rows.has(warp.row) && cols.has(warp.col);
  sums.clear();
  if constexpr (kHasGrid) piece.clear();
  // A round before the first one only fetches: code that loads groups is long, and stands once.
  for (i64 k = begin - kMatmulDepth; k < end; k += kMatmulDepth) {
    const bool filled = k >= begin;
    bool exact = true;
    if (filled) {
      const bool exact_a = a.template expand<A::kParts>(A::kParts > 1);
      const bool exact_b = b.template expand<1>(A::kParts > 1);
      exact = exact_a && exact_b;
    }
    const bool all_exact = __syncthreads_count(!exact) == 0;
    if (k + kMatmulDepth < end) {
      a.fetch(depth, k + kMatmulDepth);
      b.fetch(depth, k + kMatmulDepth);
    }
    if (filled && multiplies) {
      MatmulSums& target = kHasGrid ? piece : sums;
#ifdef FP4KIT_HAS_MMA
      if (all_exact) {
        target.template multiply<A::kParts>(tile_a, tile_b, warp);
      } else {
        target.multiply_float32(tile_a, tile_b, warp);
      }
#else
      target.multiply_float32(tile_a, tile_b, warp);
#endif
      if constexpr (kHasGrid) {
        if ((k + kMatmulDepth) % kMatmulPiece == 0 || k + kMatmulDepth >= end) {
          const float scale_a = step_scale<A>(product.a, depth, rows.first, k);
          const float scale_b = step_scale<B>(product.b, depth, cols.first, k);
          sums.add_scaled(piece, mul_rn(scale_a, scale_b));
          piece.clear();
        }
      }
    }
    __syncthreads();
  }
  sums.store(tile_a, warp);
  __syncthreads();
}

// Calls function(row, column, sum) for each element of a tile that exists, neighbours in a row by
// neighbouring threads.
template <class Function>
FP4KIT_DEVICE void for_sums(
    MatmulTile& tile, MatmulSpan rows, MatmulSpan cols, const Function& function) {
#pragma unroll 1
  for (int at = static_cast<int>(threadIdx.x); at < kMatmulRows * kMatmulCols; at += kThreads) {
    const int row = at / kMatmulCols;
    const int col = at % kMatmulCols;
    if (!rows.has(row)) return;
    if (!cols.has(col)) continue;
    function(rows.first + row, cols.first + col, tile.floats()[row * kMatmulStride + col]);
  }
}

#endif  // __CUDACC__

}  // namespace fp4kit
