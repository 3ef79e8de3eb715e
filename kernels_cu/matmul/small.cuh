// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// The parts of multiply_small_kernel (small.cu): its shape, the rings of the weights, the sums of a
// warp.
#pragma once

#include "matmul/activations.cuh"
#include "matmul/weights.cuh"

namespace fp4kit {

#ifdef __CUDACC__
#ifdef FP4KIT_HAS_MMA

// How a thread block divides a product. It takes kRows = 16 kGroups kTiles rows of the weights at a
// time, and all of the depth. kGroups x kSlices warps: a warp has kTiles tiles of 16 rows, and of
// every kSlices kChunks pieces of 128 of the depth its own kChunks, in a ring of kStages stages.
// kTokens: room for tokens, which are columns of products: 4, 8, 16, 32 or 64; or 1 or 2, whose
// other columns are slices of the depth, so that scales multiply sums instead of codes. kStaged:
// activations come step by step, else all of them at first. kBulk: prepared weights are copied in
// stretches, where the architecture can.
template <int kGroupsValue, int kTilesValue, int kSlicesValue, int kChunksValue, int kStagesValue,
    int kTokensValue, int kStagedValue, int kBulkValue>
struct SmallShape {
  static constexpr int kGroups = kGroupsValue, kTiles = kTilesValue, kSlices = kSlicesValue;
  static constexpr int kChunks = kChunksValue, kStages = kStagesValue, kTokens = kTokensValue;
  static constexpr bool kStaged = kStagedValue != 0;
  static constexpr bool kSliced = kTokens <= 2;
  static constexpr bool kBulk = kBulkValue != 0;
  static constexpr int kWarps = kGroups * kSlices;
  static constexpr int kSmallThreads = 32 * kWarps;
  static constexpr int kWarpRows = kPreparedRows * kTiles;
  static constexpr int kRows = kGroups * kWarpRows;
  static constexpr int kStepChunks = kSlices * kChunks;
  static constexpr int kColumns = kTokens < kMmaN ? 1 : kTokens / kMmaN;  // B fragments of a word
  static constexpr int kSums = kSliced ? 2 : 4;                           // of a lane and tile
  // Places of an image for a word of a lane: see activations.cuh.
  static constexpr int kSlots = 4 * (kSliced ? 2 : kTokens);
  // Sums of warps: of both halves of memory in turn, unless every step synchronizes anyway.
  static constexpr int kSumRow = kRows + 8;
  static constexpr int kSumFloats = kSlices > 1 ? kSlices * kTokens * kSumRow : 0;
  static constexpr int kSumBuffers = kStaged ? 1 : 2;
};

// Whether rings are filled by copies of stretches.
template <int kForm, class Shape>
constexpr bool uses_bulk() {
#ifdef FP4KIT_HAS_BULK_COPIES
  return kForm == kFormPrepared && Shape::kBulk;
#else
  return false;
#endif
}

// Where a warp is in the steps of its thread block: tile of rows and step of the depth.
struct Position {
  u32 tile, step, stage, phase;
};

// A warp's ring of weights.
template <class Format, int kForm, class Shape>
struct Ring {
  using Stage = WeightStage<Format, kForm, Shape::kChunks>;
  static constexpr bool kBulk = uses_bulk<kForm, Shape>();
  static constexpr int kStageBytes = Shape::kTiles * Stage::kBytes;

  u8* memory;
#ifdef FP4KIT_HAS_BULK_COPIES
  CopyBarrier* barriers;
#endif
  u64 policy;

  FP4KIT_DEVICE u8* stage(u32 number) const { return memory + number * kStageBytes; }

  // Begins to copy a step's weights, if there are some: tiles from row_tile on, pieces from chunk.
  FP4KIT_DEVICE void copy(const WeightSource& from, u32 number, u32 row_tile, u32 chunk) const {
    const u32 lane = threadIdx.x % 32;
    const u32 left = chunk < from.depth_tiles ? from.depth_tiles - chunk : 0;
    const u32 valid = min_u32(left, Shape::kChunks);
    u8* const target = stage(number);
    if constexpr (kBulk) {
#ifdef FP4KIT_HAS_BULK_COPIES
      const u32 bytes = valid * Stage::Tile::kBytes;
      if (lane == 0) expect_bytes(barriers[number], bytes * Shape::kTiles);
      if (lane < Shape::kTiles && bytes != 0) {
        const i64 tile = min_u32(row_tile + lane, from.row_tiles - 1);
        const u8* source = from.codes + (tile * from.depth_tiles + chunk) * Stage::Tile::kBytes;
        copy_bulk(target + lane * Stage::kBytes, source, bytes, barriers[number], policy);
      }
#endif
    } else {
      if (valid == 0) return;
#pragma unroll
      for (u32 i = 0; i < Shape::kTiles; ++i) {
        const u32 tile = min_u32(row_tile + i, from.row_tiles - 1);
        Stage::copy(target + i * Stage::kBytes, from, tile, chunk, valid, policy);
      }
    }
  }

  // Ends a step's copies of this thread, whether there were some or not.
  FP4KIT_DEVICE void commit() const {
    if constexpr (!kBulk) commit_copies();
  }

  // Waits for the oldest of kStages - 1 steps on their way, and for the other lanes.
  FP4KIT_DEVICE void wait(const Position& at) const {
    if constexpr (kBulk) {
#ifdef FP4KIT_HAS_BULK_COPIES
      wait_bytes(barriers[at.stage], at.phase);
#endif
    } else {
      wait_copies<Shape::kStages - 2>();
      __syncwarp();
    }
  }
};

// The 16 bytes of a lane as words.
FP4KIT_DEVICE u32 word_of(const uint4& codes, int i) {
  return i == 0 ? codes.x : i == 1 ? codes.y : i == 2 ? codes.z : codes.w;
}

// A fragments of both steps of 16 of a word of two rows.
FP4KIT_DEVICE void join_rows(const u32 (&first)[4], const u32 (&second)[4], u32 (&a)[2][4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    a[i][0] = first[2 * i];
    a[i][1] = second[2 * i];
    a[i][2] = first[2 * i + 1];
    a[i][3] = second[2 * i + 1];
  }
}

// Both steps of a word: sums += weights times activations.
FP4KIT_DEVICE void multiply_word(float (&sums)[4], const u32 (&a)[2][4], const uint4& x) {
  const u32 first[2] = {x.x, x.y}, second[2] = {x.z, x.w};
  mma_16816<Bf16>(sums, a[0], first);
  mma_16816<Bf16>(sums, a[1], second);
}

// Adds the products of one piece of 128 of the depth. `weights`: the first tile's piece; c: its
// number in the stage; image: of the activations of the piece.
template <class Format, int kForm, class Shape>
FP4KIT_DEVICE void multiply_chunk(float (&sums)[Shape::kTiles][Shape::kColumns][4],
    const u8* weights, u32 c, const uint4* image, bool has_token, u32& odd) {
  using Stage = typename Ring<Format, kForm, Shape>::Stage;
  constexpr int kTiles = Shape::kTiles;
  const u32 lane = threadIdx.x % 32;
  uint4 codes[kTiles][2];
  u32 scale[kTiles][2][2];
#pragma unroll
  for (u32 i = 0; i < kTiles; ++i) {
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
      const u8* tile = weights + i * Stage::kBytes;
      codes[i][r] = Stage::codes(tile, r, c, lane);
      load_scales<Format, Stage, kForm>(tile + c * Stage::kChunkBytes, r, lane, scale[i][r], odd);
    }
  }
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    uint4 x[Shape::kColumns];
#pragma unroll
    for (int m = 0; m < Shape::kColumns; ++m) {
      x[m] = make_uint4(0, 0, 0, 0);
      if (has_token) x[m] = image[w * Shape::kSlots + 32 * m + (lane ^ (2 * w))];
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      u32 pair[2][4], a[2][4];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        raw_pairs<kForm>(word_of(codes[i][r], w), pair[r]);
#pragma unroll
        for (int j = 0; j < 4; ++j) pair[r][j] = mul_pairs(pair[r][j], scale[i][r][w / 2]);
      }
      join_rows(pair[0], pair[1], a);
#pragma unroll
      for (int m = 0; m < Shape::kColumns; ++m) multiply_word(sums[i][m], a, x[m]);
    }
  }
}

// The same with columns that are slices: column n of one token is slice n % 4 (what lane t = n % 4
// of a row has) of the first (n < 4) or second block, of two tokens slice n % 4 of token n / 4.
// Other lanes' activations are 0. sums[tile][0][r]: of row 2 g + r.
template <class Format, int kForm, class Shape>
FP4KIT_DEVICE void multiply_chunk_sliced(
    float (&sums)[Shape::kTiles][1][2], const u8* weights, u32 c, const uint4* image, u32& odd) {
  using Stage = typename Ring<Format, kForm, Shape>::Stage;
  constexpr int kTiles = Shape::kTiles;
  constexpr bool kPair = Shape::kTokens == 2;
  static_assert(kPair || !Format::kIsMx, "a scale of 32 is one of a slice");
  // Words after which sums meet their scale: a block's last.
  constexpr int kScaleEvery = kPair && !Format::kIsMx ? 2 : 4;
  const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  uint4 codes[kTiles][2];
#pragma unroll
  for (u32 i = 0; i < kTiles; ++i) {
#pragma unroll
    for (u32 r = 0; r < 2; ++r) codes[i][r] = Stage::codes(weights + i * Stage::kBytes, r, c, lane);
  }
  const bool early = kPair ? g % 4 == t : g == t;
  const bool late = kPair ? early : g == t + 4;
  const u32 slot = kPair ? g / 4 * 4 + t : t;
  uint4 first = make_uint4(0, 0, 0, 0), second = make_uint4(0, 0, 0, 0);
  float part[kTiles][4];
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    // What is not loaded stays 0.
    uint4& x = w < 2 || kPair ? first : second;
    if (w < 2 ? early : late) x = image[w * Shape::kSlots + (slot ^ (2 * w))];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      u32 pair[2][4], a[2][4];
#pragma unroll
      for (int r = 0; r < 2; ++r) raw_pairs<kForm>(word_of(codes[i][r], w), pair[r]);
      join_rows(pair[0], pair[1], a);
      if (w % kScaleEvery == 0) {
#pragma unroll
        for (float& each : part[i]) each = 0.0f;
      }
      multiply_word(part[i], a, x);
      if (w % kScaleEvery != kScaleEvery - 1) continue;
      const u8* chunk = weights + i * Stage::kBytes + c * Stage::kChunkBytes;
      const u32 block = kPair ? w / 2 : t / 2;
      float scale[2][2];
      load_slice_scales<Format, Stage, kForm>(chunk, block, lane, scale, odd);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        sums[i][0][r] = fma_rn(
            scale[r][0], part[i][2 * r], fma_rn(scale[r][1], part[i][2 * r + 1], sums[i][0][r]));
      }
    }
  }
}

#endif  // FP4KIT_HAS_MMA
#endif  // __CUDACC__

}  // namespace fp4kit
