// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// quantize of variants: along rows, along columns, or both from one read; blocks or square tiles;
// rotated, rounded stochastically, with a searched scale. Must equal ReferenceBackend.quantize.
//
// Algorithm: a thread block holds a tile of 128 rows and 64 columns in shared memory. Row blocks,
// then column blocks are taken from there, a whole block per thread: gathered into words as they
// would lie in memory along that direction, rotated if asked for, and quantized by the functions
// that the rowwise kernels use. Squares need their scale first: a square's rows sit in neighbouring
// lanes, which share it by shuffles; the column pass reads it from shared memory.
//
// Launch: 256 threads, one block per tile. Scales past the last vector or block are not written
// here: the launcher clears the scales of padded layouts first.
#include "scale_table.cuh"
#include "swizzle.cuh"
#include "tiles.cuh"
#include "variants.cuh"

namespace fp4kit {

// One direction of the result. A direction that is not asked for has no codes.
struct Output {
  const float* second;
  u8* packed;
  u8* block_scale;
  i64 vectors;      // rows, or columns
  i64 blocks;       // per vector
  i64 stored_cols;  // of the scale matrix, padding included
  i64 scales;       // second-level values
  i64 vectors_per_scale;
  i64 layout;
};

struct Options {
  i64 high_first;
  i64 rule;
  i64 error;
  float range;
  u32 mask;
  u64 key;
  u32 stream;
};

// What a kernel instance does; all known when it is compiled.
template <bool kSquareTiles, int kSearchKind, bool kStochasticRounding, bool kPerTokenFactor>
struct Variant {
  static constexpr bool kSquare = kSquareTiles;
  static constexpr int kSearch = kSearchKind;
  static constexpr bool kStochastic = kStochasticRounding;
  static constexpr bool kPerToken = kPerTokenFactor;
};

// Codes of a block, and its scale.
template <class Format>
struct Coded {
  u32 code[Format::kLanes][Format::kLaneWords];
  u32 byte;
};

// Sums over the rows of a square, pairs 8, 4, 2 and 1 apart. The halves of a warp hold two squares,
// which may try different numbers of scales.
struct SquareSum {
  __device__ __forceinline__ float operator()(float error) const {
    const u32 half = 0xFFFFu << (threadIdx.x & 16u);
#pragma unroll
    for (int distance = kLaneElements / 2; distance > 0; distance /= 2) {
      error = add_rn(error, __shfl_xor_sync(half, error, distance));
    }
    return error;
  }
};

template <class Format, class R>
__device__ __forceinline__ float lanes_amax(const Words<R> (&x)[Format::kLanes],
                                            u32 (&raw)[Format::kLanes]) {
  u32 bits = 0;
#pragma unroll
  for (int l = 0; l < Format::kLanes; ++l) {
    bits = max_u32(bits, lane_amax_bits<R>(x[l].magnitudes(), raw[l]));
  }
  return from_input_bits<R>(bits);
}

template <class R>
__device__ __forceinline__ void as_floats(const Words<R>& x, float (&v)[kLaneElements]) {
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) v[i] = x.value(i);
}

// Codes of a lane whose random bits are at hand, low nibble first.
template <class R>
__device__ __forceinline__ void encode_stochastic(const Words<R>& x, float factor,
                                                  const Random& random, u32 (&code)[2]) {
  code[0] = code[1] = 0;
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) {
    const u32 nibble = round_stochastically(mul_rn(x.value(i), factor), random.uniform(i));
    code[i / 8] |= nibble << (4 * (i % 8));
  }
}

// The scale of a block: byte and element factor.
struct Scale {
  u32 byte;
  float factor;
  bool ordinary;
};

template <class Format, int kRecipe, bool kSecond, class V>
__device__ __forceinline__ float factor_of(u32 byte, const Level& level) {
  if constexpr (V::kPerToken) {
    const float q = decode_fp8<E4m3>(byte);
    return is_zero(q) ? 0.0f : div_rn(level.scale, q);
  } else {
    return element_factor<Format, kRecipe, kSecond>(byte, level);
  }
}

// The second level of a vector, and the table of factors if all vectors share one.
template <class Format, int kRecipe, bool kSecond, class V>
struct Seconds {
  const ScaleTable& table;
  const Output& out;
  float range;

  __device__ __forceinline__ bool shared() const {
    return V::kSearch == kSearchNone && !V::kPerToken && out.scales == 1;
  }

  __device__ __forceinline__ Level level(i64 vector) const {
    if constexpr (Format::kIsMx || !kSecond) return Level{1.0f, 1.0f, 1.0f, 1.0f, false};
    if (shared()) return table.level;
    const i64 index = out.scales == 1 ? 0 : vector / out.vectors_per_scale;
    const float second = index < out.scales ? __ldg(out.second + index) : 1.0f;
    return V::kSearch != kSearchNone ? make_te_level(second, range)
                                     : make_level<kRecipe, kSecond>(second);
  }

  __device__ __forceinline__ float factor(u32 byte, const Level& level) const {
    if constexpr (!Format::kIsMx) {
      if (shared()) return table.factor[byte % kScaleBytes];
    }
    return factor_of<Format, kRecipe, kSecond, V>(byte, level);
  }
};

template <class Format, class R, int kRecipe, bool kSecond, class V>
__device__ __forceinline__ Scale find_scale(const Words<R> (&x)[Format::kLanes], float amax,
                                            const Level& level,
                                            const Seconds<Format, kRecipe, kSecond, V>& seconds,
                                            const Options& options) {
  if constexpr (V::kSearch != kSearchNone) {
    float v[kLaneElements];
    as_floats(x[0], v);
    const int error = static_cast<int>(options.error);
    Candidate best;
    if constexpr (V::kSquare) {
      best = search_scale<V::kSearch>(v, amax, level, options.range, error, SquareSum());
    } else {
      best = search_scale<V::kSearch>(v, amax, level, options.range, error, AloneSum());
    }
    return {best.byte, best.factor, false};
  } else {
    const int rule = static_cast<int>(options.rule);
    const u32 byte = block_scale_byte<Format, R, kRecipe, kSecond>(amax, level, rule);
    return {byte, seconds.factor(byte, level), is_ordinary_scale<Format>(byte, rule)};
  }
}

// Codes of a block under a known scale. `group` is the number of its first 16 elements.
template <class Format, class R, int kRecipe, class V>
__device__ __forceinline__ void encode_block(const Words<R> (&x)[Format::kLanes],
                                             const u32 (&raw)[Format::kLanes], const Scale& scale,
                                             const Options& options, u64 group, u32 direction,
                                             Coded<Format>& coded) {
#pragma unroll
  for (int l = 0; l < Format::kLanes; ++l) {
    if constexpr (V::kStochastic) {
      const Random random = philox(group + l, direction, options.stream, options.key);
      encode_stochastic(x[l], scale.factor, random, coded.code[l]);
    } else {
      encode_lane<Format, R, kRecipe>(x[l], x[l].magnitudes(), raw[l], scale.ordinary, scale.factor,
                                      coded.code[l]);
    }
    if (Format::kIsFp4 && options.high_first) {
#pragma unroll
      for (int i = 0; i < Format::kLaneWords; ++i) {
        coded.code[l][i] = swap_nibbles(coded.code[l][i]);
      }
    }
  }
  coded.byte = scale.byte;
}

// The lanes of a block as they are quantized; only those of the first `left` elements are rotated:
// what fills a block up stays +0.0.
template <bool kRotate, class R, class T, int kLanes>
__device__ __forceinline__ void maybe_rotate(const Words<T> (&x)[kLanes], u32 mask, i64 left,
                                             Words<R> (&result)[kLanes]) {
#pragma unroll
  for (int l = 0; l < kLanes; ++l) {
    if constexpr (kRotate) {
      if (kLanes == 1 || l * kLaneElements < left) {
        result[l] = rotate_lane<R>(x[l], mask);
      } else {
        result[l] = Words<R>{};
      }
    } else {
      result[l] = x[l];
    }
  }
}

template <bool kVector, class T>
__device__ __forceinline__ void load_tile(Tile<T>& tile, const typename T::Bits* __restrict__ x,
                                          i64 row0, i64 col0, i64 rows, i64 cols) {
  constexpr int kWords = Tile<T>::kWords;
  if constexpr (kVector) {
    constexpr int kPieces = kWords / 4;
    constexpr int kEach = kTileRows * kPieces / kThreads;
    constexpr int kElements = 16 / T::kSize;
    uint4 piece[kEach];
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const int index = k * kThreads + static_cast<int>(threadIdx.x);
      const i64 row = row0 + index / kPieces;
      const i64 col = col0 + index % kPieces * kElements;
      piece[k] = make_uint4(0, 0, 0, 0);
      if (row < rows && col < cols) {
        piece[k] = __ldg(reinterpret_cast<const uint4*>(x + row * cols + col));
      }
    }
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const int index = k * kThreads + static_cast<int>(threadIdx.x);
      u32* words = &tile.at(index / kPieces, index % kPieces * 4);
      words[0] = piece[k].x;
      words[1] = piece[k].y;
      words[2] = piece[k].z;
      words[3] = piece[k].w;
    }
  } else {
    constexpr int kHalves = 4 / T::kSize;
    for (int index = threadIdx.x; index < kTileRows * kWords; index += kThreads) {
      const i64 row = row0 + index / kWords;
      u32 word = 0;
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const i64 col = col0 + index % kWords * kHalves + half;
        if (row < rows && col < cols) {
          word |= static_cast<u32>(__ldg(x + row * cols + col)) << (16 * half);
        }
      }
      tile.at(index / kWords, index % kWords) = word;
    }
  }
}

// Thread blocks per multiprocessor: FP8 codes of a column take more registers than that leaves.
template <class Format>
FP4KIT_HD constexpr int tile_blocks() {
  return Format::kIsFp4 ? 5 : 1;
}

// kRows, kCols: the directions asked for. RowR, ColR: what their elements are after the rotation.
template <class Format, class T, int kRecipe, bool kSecond, class V, bool kRows, bool kRotateRows,
          class RowR, bool kCols, bool kRotateCols, class ColR, bool kVector>
__global__ void __launch_bounds__(kThreads, tile_blocks<Format>())
    quantize_tiles_kernel(const typename T::Bits* __restrict__ x, i64 rows, i64 cols,
                          i64 tiles_across, const float* row_second, u8* row_packed, u8* row_scale,
                          i64 row_blocks, i64 row_stored, i64 row_scales, i64 row_per_scale,
                          const float* col_second, u8* col_packed, u8* col_scale, i64 col_blocks,
                          i64 col_stored, i64 col_scales, i64 col_per_scale, i64 layout,
                          i64 high_first, i64 rule, i64 error, i64 range, i64 row_mask,
                          i64 col_mask, i64 key, i64 stream) {
  constexpr int kBlock = Format::kBlockSize;
  constexpr int kLanes = Format::kLanes;
  constexpr int kAcross = kTileColumns / kBlock;
  constexpr int kDown = kTileRows / kBlock;
  __shared__ Tile<T> tile;
  __shared__ ScaleTable row_table;
  __shared__ ScaleTable col_table;
  __shared__ u8 square_byte[kDown][kAcross];

  const i64 down = blockIdx.x / tiles_across;
  const i64 row0 = down * kTileRows;
  const i64 col0 = (blockIdx.x - down * tiles_across) * kTileColumns;
  const Output row_out{row_second, row_packed, row_scale,     rows,  row_blocks,
                       row_stored, row_scales, row_per_scale, layout};
  const Output col_out{col_second, col_packed, col_scale,     cols,  col_blocks,
                       col_stored, col_scales, col_per_scale, layout};
  const Options row_options{high_first,
                            rule,
                            error,
                            static_cast<float>(range),
                            static_cast<u32>(row_mask),
                            static_cast<u64>(key),
                            static_cast<u32>(stream)};
  const Options col_options{high_first,
                            rule,
                            error,
                            static_cast<float>(range),
                            static_cast<u32>(col_mask),
                            static_cast<u64>(key),
                            static_cast<u32>(stream)};
  using AllSeconds = Seconds<Format, kRecipe, kSecond, V>;
  const AllSeconds row_seconds{row_table, row_out, row_options.range};
  const AllSeconds col_seconds{col_table, col_out, col_options.range};

  load_tile<kVector, T>(tile, x, row0, col0, rows, cols);
  if constexpr (!Format::kIsMx && kSecond) {
    const u32 entry = threadIdx.x % kScaleBytes;
    if (kRows && row_seconds.shared() && threadIdx.x < kScaleBytes) {
      const Level level = make_level<kRecipe, kSecond>(__ldg(row_second));
      row_table.factor[entry] = element_factor<Format, kRecipe, kSecond>(entry, level);
      if (entry == 0) row_table.level = level;
    }
    if (kCols && col_seconds.shared() && threadIdx.x >= kThreads - kScaleBytes) {
      const Level level = make_level<kRecipe, kSecond>(__ldg(col_second));
      col_table.factor[entry] = element_factor<Format, kRecipe, kSecond>(entry, level);
      if (entry == 0) col_table.level = level;
    }
  } else if constexpr (!Format::kIsMx) {
    const u32 entry = threadIdx.x % kScaleBytes;
    const Level level = make_level<kRecipe, kSecond>(1.0f);
    row_table.factor[entry] = col_table.factor[entry] =
        element_factor<Format, kRecipe, kSecond>(entry, level);
    if (threadIdx.x == 0) row_table.level = col_table.level = level;
  }
  __syncthreads();

  if constexpr (kRows || V::kSquare) {
    // A square's scale is worked out along the rows, also if only the columns are asked for.
    const Output& out = kRows ? row_out : col_out;
    const AllSeconds& seconds = kRows ? row_seconds : col_seconds;
    constexpr int kEach = kTileRows * kAcross / kThreads;
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const int index = k * kThreads + static_cast<int>(threadIdx.x);
      int r, b;
      if constexpr (V::kSquare) {
        b = index / kBlock % kAcross;
        r = index / (kBlock * kAcross) * kBlock + index % kBlock;
      } else {
        b = index % kAcross;
        r = index / kAcross;
      }
      Words<T> elements[kLanes];
#pragma unroll
      for (int l = 0; l < kLanes; ++l) {
#pragma unroll
        for (int i = 0; i < Words<T>::kWords; ++i) {
          elements[l].word[i] = tile.at(r, (b * kLanes + l) * Words<T>::kWords + i);
        }
      }
      Words<RowR> rotated[kLanes];
      maybe_rotate<kRotateRows>(elements, row_options.mask, cols - col0 - b * kBlock, rotated);
      u32 raw[kLanes];
      float amax = lanes_amax<Format, RowR>(rotated, raw);
      if constexpr (V::kSquare) {
        u32 bits = as_bits(amax);
#pragma unroll
        for (int distance = kBlock / 2; distance > 0; distance /= 2) {
          bits = max_u32(bits, __shfl_xor_sync(0xFFFFFFFFu, bits, distance));
        }
        amax = as_float(bits);
      }
      const i64 row = row0 + r;
      const i64 block = col0 / kBlock + b;
      const Level level = seconds.level(V::kSquare && !kRows ? 0 : row);
      const Scale scale = find_scale<Format>(rotated, amax, level, seconds, row_options);
      if constexpr (V::kSquare) {
        if (r % kBlock == 0) square_byte[r / kBlock][b] = static_cast<u8>(scale.byte);
      }
      if constexpr (kRows) {
        if (row < rows && block < out.blocks) {
          const i64 piece = row * out.blocks + block;
          Coded<Format> coded;
          encode_block<Format, RowR, kRecipe, V>(rotated, raw, scale, row_options,
                                                 static_cast<u64>(piece) * kLanes, 0, coded);
#pragma unroll
          for (int l = 0; l < kLanes; ++l) {
            store_codes<kVector>(out.packed + (piece * kLanes + l) * (4 * Format::kLaneWords),
                                 coded.code[l]);
          }
          out.block_scale[scale_offset(static_cast<int>(layout), row, block, out.stored_cols)] =
              static_cast<u8>(coded.byte);
        }
      }
    }
  }
  if constexpr (!kCols) return;
  if constexpr (V::kSquare) __syncthreads();

  constexpr int kHalves = 4 / T::kSize;
  constexpr int kWords = Tile<T>::kWords;
  for (int index = threadIdx.x; index < kWords * kDown; index += kThreads) {
    // Transposed codes of one column lie together, others those of one row.
    const int b = Format::kIsFp4 ? index % kDown : index / kWords;
    const int w = Format::kIsFp4 ? index / kDown : index % kWords;
    u32 word[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i) word[i] = tile.at(b * kBlock + i, w);
    const i64 block = row0 / kBlock + b;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const i64 col = col0 + w * kHalves + half;
      Words<T> elements[kLanes];
#pragma unroll
      for (int l = 0; l < kLanes; ++l) {
#pragma unroll
        for (int i = 0; i < Words<T>::kWords; ++i) {
          if constexpr (T::kSize == 4) {
            elements[l].word[i] = word[l * kLaneElements + i];
          } else {
            elements[l].word[i] =
                byte_perm(word[l * kLaneElements + 2 * i], word[l * kLaneElements + 2 * i + 1],
                          half == 0 ? 0x5410u : 0x7632u);
          }
        }
      }
      if (col >= cols || block >= col_out.blocks) continue;
      Words<ColR> rotated[kLanes];
      maybe_rotate<kRotateCols>(elements, col_options.mask, rows - block * kBlock, rotated);
      u32 raw[kLanes];
      const float amax = lanes_amax<Format, ColR>(rotated, raw);
      const Level level = col_seconds.level(V::kSquare ? 0 : col);
      Scale scale;
      if constexpr (V::kSquare) {
        scale.byte = square_byte[b][(w * kHalves + half) / kBlock];
        if constexpr (V::kSearch != kSearchNone) {
          scale.factor = make_candidate(scale.byte, level, col_options.range).factor;
          scale.ordinary = false;
        } else {
          scale.factor = col_seconds.factor(scale.byte, level);
          scale.ordinary = is_ordinary_scale<Format>(scale.byte, static_cast<int>(rule));
        }
      } else {
        scale = find_scale<Format>(rotated, amax, level, col_seconds, col_options);
      }
      const i64 piece = col * col_out.blocks + block;
      Coded<Format> coded;
      if constexpr (V::kSquare && V::kStochastic) {
        // The codes are those of the rows: each element has the random bits of its row group.
        const i64 groups = (cols + kBlock - 1) / kBlock * kLanes;
#pragma unroll
        for (int l = 0; l < kLanes; ++l) {
          coded.code[l][0] = coded.code[l][1] = 0;
#pragma unroll 1
          for (int i = 0; i < kLaneElements; ++i) {
            const i64 row = block * kBlock + l * kLaneElements + i;
            const Random random = philox(static_cast<u64>(row * groups + col / kLaneElements), 0,
                                         col_options.stream, col_options.key);
            float u = 0.0f;
#pragma unroll
            for (int e = 0; e < kLaneElements; ++e) {
              if (e == static_cast<int>(col % kLaneElements)) u = random.uniform(e);
            }
            float v = 0.0f;
#pragma unroll
            for (int e = 0; e < kLaneElements; ++e) {
              if (e == i) v = rotated[l].value(e);
            }
            coded.code[l][i / 8] |= round_stochastically(mul_rn(v, scale.factor), u)
                                    << (4 * (i % 8));
          }
          if (high_first) {
            coded.code[l][0] = swap_nibbles(coded.code[l][0]);
            coded.code[l][1] = swap_nibbles(coded.code[l][1]);
          }
        }
      } else {
        encode_block<Format, ColR, kRecipe, V>(rotated, raw, scale, col_options,
                                               static_cast<u64>(piece) * kLanes, 1, coded);
      }
      if constexpr (Format::kIsFp4) {
#pragma unroll
        for (int l = 0; l < kLanes; ++l) {
          store_codes<kVector>(col_out.packed + (piece * kLanes + l) * (4 * Format::kLaneWords),
                               coded.code[l]);
        }
      } else {
#pragma unroll
        for (int i = 0; i < kBlock; ++i) {
          const u32 codes = coded.code[i / kLaneElements][i % kLaneElements / 4];
          col_out.packed[(block * kBlock + i) * cols + col] =
              static_cast<u8>(codes >> (8 * (i % 4)));
        }
      }
      // Scales of data that is not transposed are not either, where they are linear.
      const i64 at = !Format::kIsFp4 && layout == kLayoutLinear
                         ? block * cols + col
                         : scale_offset(static_cast<int>(layout), col, block, col_out.stored_cols);
      col_out.block_scale[at] = static_cast<u8>(scale.byte);
    }
  }
}

}  // namespace fp4kit
