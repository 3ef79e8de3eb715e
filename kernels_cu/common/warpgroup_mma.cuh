// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Products of small matrices by a warpgroup (four warps beside each other, sm_90a): PTX's
// wgmma.m64nNk16 of bfloat16 with float32 sums. Warp i of the four has rows 16 i .. 16 i + 15 of A
// in registers, in the fragments of mma.cuh, and of D likewise: of column group j, d[4 j .. 4 j +
// 3]. B lies in shared memory: of eight columns the first eight elements of k, 16 bytes a column,
// then their other eight elements, then the next eight columns: what is read at once lies in one
// stretch.
//
// wgmma is asynchronous: registers of A must not change before wait_products has said so.
#pragma once

#include "common/async_copy.cuh"
#include "common/mma.cuh"

#if defined(__CUDA_ARCH__) ? defined(__CUDA_ARCH_FEAT_SM90_ALL) : !defined(FP4KIT_TEST_WITHOUT_MMA)
#define FP4KIT_HAS_WARPGROUP_MMA 1
#endif

namespace fp4kit {

#ifdef __CUDACC__
#ifdef FP4KIT_HAS_WARPGROUP_MMA

// Where 16 elements of k of all kN columns of B lie.
template <int kN>
struct ProductColumns {
  static constexpr u32 kHalfBytes = 128;  // of eight columns and elements of k
  static constexpr u32 kGroupBytes = 2 * kHalfBytes;
  static constexpr u32 kBytes = kGroupBytes * kN / 8;

  // Of the first two elements of k of a column.
  FP4KIT_DEVICE static u32 offset(u32 column) { return column / 8 * kGroupBytes + column % 8 * 16; }
#ifdef __CUDA_ARCH__
  // The low word of PTX's matrix descriptor without swizzling, all in 16 bytes: the address, the
  // distance of halves of k. The high word has that of groups of eight columns.
  static constexpr u32 kUnit = 16;
  static constexpr u32 kSharedWindow = 1u << 18;  // addresses name a thread block as well
  u32 low;

  FP4KIT_DEVICE explicit ProductColumns(SharedPlace place)
      : low(place.address % kSharedWindow / kUnit | (kHalfBytes / kUnit) << 16) {}

  FP4KIT_DEVICE ProductColumns at(u32 offset) const {
    ProductColumns result = *this;
    result.low += offset / kUnit;
    return result;
  }

  FP4KIT_DEVICE u64 descriptor() const {
    u64 result;
    asm("mov.b64 %0, {%1, %2};" : "=l"(result) : "r"(low), "r"(kGroupBytes / kUnit));
    return result;
  }
#else
  SharedPlace place;

  explicit ProductColumns(SharedPlace first) : place(first) {}
  ProductColumns at(u32 offset) const { return ProductColumns(place.at(offset)); }
#endif
};

// Before the first product, and after registers of A or D have changed.
FP4KIT_DEVICE void fence_products() {
#ifdef __CUDA_ARCH__
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

// Ends a group of products.
FP4KIT_DEVICE void commit_products() {
#ifdef __CUDA_ARCH__
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

// Waits until at most kLeft groups are on their way.
template <int kLeft>
FP4KIT_DEVICE void wait_products() {
#ifdef __CUDA_ARCH__
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
#endif
}

#ifdef __CUDA_ARCH__
#define FP4KIT_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define FP4KIT_D16(i) FP4KIT_D4(i), FP4KIT_D4(i + 4), FP4KIT_D4(i + 8), FP4KIT_D4(i + 12)
#define FP4KIT_WGMMA(n, numbers, first, second, third, fourth, columns, ...)                       \
  asm volatile(                                                                                    \
      "{.reg .pred p;\nsetp.eq.u32 p, 0, 0;\n"                                                     \
      "wgmma.mma_async.sync.aligned.m64n" n "k16.f32.bf16.bf16 {" numbers "}, {" first ", " second \
      ", " third ", " fourth "}, " columns ", p, 1, 1, 0;}"                                        \
      : __VA_ARGS__                                                                                \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.descriptor()))
#define FP4KIT_N16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define FP4KIT_N32 \
  FP4KIT_N16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FP4KIT_N64                                                                     \
  FP4KIT_N32                                                                           \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#endif

// D += A B for 16 elements of k. All lanes of the four warps must call it.
template <int kN>
FP4KIT_DEVICE void multiply_warpgroup(
    float (&d)[kN / 2], const u32 (&a)[4], const ProductColumns<kN>& b) {
#ifdef __CUDA_ARCH__
  if constexpr (kN == 8) {
    FP4KIT_WGMMA("8", "%0, %1, %2, %3", "%4", "%5", "%6", "%7", "%8", FP4KIT_D4(0));
  } else if constexpr (kN == 16) {
    FP4KIT_WGMMA("16", "%0, %1, %2, %3, %4, %5, %6, %7", "%8", "%9", "%10", "%11", "%12",
        FP4KIT_D4(0), FP4KIT_D4(4));
  } else if constexpr (kN == 32) {
    FP4KIT_WGMMA("32", FP4KIT_N16, "%16", "%17", "%18", "%19", "%20", FP4KIT_D16(0));
  } else if constexpr (kN == 64) {
    FP4KIT_WGMMA(
        "64", FP4KIT_N32, "%32", "%33", "%34", "%35", "%36", FP4KIT_D16(0), FP4KIT_D16(16));
  } else {
    static_assert(kN == 128);
    FP4KIT_WGMMA("128", FP4KIT_N64, "%64", "%65", "%66", "%67", "%68", FP4KIT_D16(0),
        FP4KIT_D16(16), FP4KIT_D16(32), FP4KIT_D16(48));
  }
#else
  warp_mma_columns<from_input_bits<Bf16>, kN>(d, a, b.place.address);
#endif
}

#ifdef __CUDA_ARCH__
#undef FP4KIT_D4
#undef FP4KIT_D16
#undef FP4KIT_WGMMA
#undef FP4KIT_N16
#undef FP4KIT_N32
#undef FP4KIT_N64
#endif

#endif  // FP4KIT_HAS_WARPGROUP_MMA
#endif  // __CUDACC__

}  // namespace fp4kit
