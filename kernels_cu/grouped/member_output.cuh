// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// One direction of a member of a group, as the kernels of tiles take it.
#pragma once

#include "grouped/members.cuh"
#include "tiles/config.cuh"

namespace fp4kit {

// A direction of a member; per_vector: it has a second level for each vector.
template <class Format>
__device__ __forceinline__ QuantizedView member_view(const Places& places, const float* second,
    u8* packed, u8* block_scale, i64 vectors, i64 length, bool per_vector, int layout) {
  const i64 blocks = (length + Format::kBlockSize - 1) / Format::kBlockSize;
  const i64 padded = (blocks + kTileCols - 1) / kTileCols * kTileCols;
  return {second + places.second, packed + places.packed, block_scale + places.block_scale, blocks,
      layout == kLayoutLinear ? blocks : padded, per_vector ? vectors : 1, 1};
}

}  // namespace fp4kit
