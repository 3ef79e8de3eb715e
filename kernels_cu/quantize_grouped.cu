// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// quantize_tiles.cu for all members of a group at once. Must equal ReferenceBackend.quantize of
// each member.
//
// Algorithm: the tiles of all members are one sequence, of which each thread block takes a stretch.
// So it looks its first member up, and meets the others one after the other; most tiles follow one
// of the same member, whose tables are still good.
//
// Launch: 256 threads; at most as many blocks as the device holds at once, and no more than tiles,
// which are fewer than 2^31. `first` counts the tiles of members. The launcher clears the scales if
// some member's are padded.
#include "member_side.cuh"
#include "quantize_tile.cuh"

namespace fp4kit {

// The arrays of one direction of all members.
struct GroupSide {
  const float* second;
  u8* packed;
  u8* block_scale;
  i64 per_vector;
};

// A stretch of the tiles of all members, from `begin` to before `end`; `begin` belongs to member
// `at`.
template <class C>
struct GroupTiles {
  using T = typename C::T;
  const typename T::Bits* x;
  const i64* first;
  const Member* members;
  GroupSide row;
  GroupSide col;
  u32 stream;
  u32 at;
  u32 tile;
  u32 end;
  u32 next;  // the first tile of the next member
  u32 across;
  u32 tile_row;
  u32 tile_col;
  bool same_member = true;

  __device__ __forceinline__ GroupTiles(const typename T::Bits* x_, const i64* first_,
                                        const Member* members_, const GroupSide& row_,
                                        const GroupSide& col_, u32 stream_, u32 at_, u32 begin,
                                        u32 end_)
      : x(x_),
        first(first_),
        members(members_),
        row(row_),
        col(col_),
        stream(stream_),
        at(at_),
        tile(begin),
        end(end_) {
    enter();
    const u32 place = begin - static_cast<u32>(__ldg(first + at));
    tile_row = place / across;
    tile_col = place - tile_row * across;
  }

  __device__ __forceinline__ void enter() {
    next = static_cast<u32>(__ldg(first + at + 1));
    const i64 cols = load_member(members + at).cols;
    across = static_cast<u32>((cols + C::kColumns - 1) / C::kColumns);
    tile_row = tile_col = 0;
  }

  __device__ __forceinline__ bool valid() const { return tile < end; }
  __device__ __forceinline__ bool stays() const { return same_member; }

  __device__ __forceinline__ void advance() {
    ++tile;
    same_member = tile != next;
    if (same_member) {
      ++tile_col;
      if (tile_col == across) {
        tile_col = 0;
        ++tile_row;
      }
    } else if (tile < end) {
      ++at;
      enter();
    }
  }

  __device__ __forceinline__ Task<T> task() const {
    using Format = typename C::Format;
    const Member member = load_member(members + at);
    const i64 row0 = static_cast<i64>(tile_row) * kTileRows;
    const i64 col0 = static_cast<i64>(tile_col) * C::kColumns;
    return {x + member.start,
            member.rows,
            member.cols,
            row0,
            col0,
            tile_rest(member.rows, row0, kTileRows),
            tile_rest(member.cols, col0, C::kColumns),
            side_of<Format>(member.row, row.second, row.packed, row.block_scale, member.rows,
                            member.cols, row.per_vector != 0, C::kLayout),
            side_of<Format>(member.col, col.second, col.packed, col.block_scale, member.cols,
                            member.rows, col.per_vector != 0, C::kLayout),
            stream + static_cast<u32>(member.number)};
  }
};

// SeedWords: empty, or all that Seed holds.
template <class C, class... SeedWords>
__global__ void __launch_bounds__(kThreads, tile_blocks<C>())
    quantize_grouped_kernel(const typename C::T::Bits* __restrict__ x,
                            const i64* __restrict__ first, const Member* __restrict__ members,
                            i64 count, i64 total, const float* row_second, u8* row_packed,
                            u8* row_scale, i64 row_per_vector, const float* col_second,
                            u8* col_packed, u8* col_scale, i64 col_per_vector, i64 high_first,
                            i64 rule, i64 range, i64 row_mask, i64 col_mask, SeedWords... seed) {
  TileShared<C>& shared = tile_shared<C>();
  __shared__ u32 first_member;
  const i64 begin = blockIdx.x * total / gridDim.x;
  const i64 end = (blockIdx.x + 1ll) * total / gridDim.x;
  const i64 at = find_member(first, count, begin);
  if (at >= 0) first_member = static_cast<u32>(at);
  __syncthreads();
  const Options options{static_cast<int>(rule),     high_first != 0,
                        static_cast<float>(range),  static_cast<u32>(row_mask),
                        static_cast<u32>(col_mask), {seed...}};
  const GroupTiles<C> tiles(x, first, members, {row_second, row_packed, row_scale, row_per_vector},
                            {col_second, col_packed, col_scale, col_per_vector},
                            static_cast<u32>(options.seed.stream), first_member,
                            static_cast<u32>(begin), static_cast<u32>(end));
  quantize_all_tiles<C>(shared, tiles, options);
}

}  // namespace fp4kit
