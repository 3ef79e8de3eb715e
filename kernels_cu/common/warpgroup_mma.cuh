// SPDX-FileCopyrightText: 2026 the fp4kit authors
// SPDX-License-Identifier: Apache-2.0
//
// Products of small matrices by a warpgroup (four warps beside each other, sm_90a): PTX's
// wgmma.m64nNk16 of bfloat16 with float32 sums. Warp i of the four has rows 16 i .. 16 i + 15 of A
// in registers, in the fragments of mma.cuh, and of D likewise: of column group j, d[4 j .. 4 j +
// 3]. B lies in shared memory: of each column 64 elements of k in 128 bytes, whose pieces of 16 are
// swapped by the column's number, so that eight columns' pieces lie in different banks.
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

// Where 128 elements of k of all kN columns of B lie, in slices of 64: PTX's swizzling of 128
// bytes.
template <int kN>
struct ProductColumns {
  static constexpr u32 kRowBytes = 128;  // of a column in a slice
  static constexpr u32 kSliceBytes = kRowBytes * kN, kBytes = 2 * kSliceBytes;
  static constexpr u32 kStepBytes = 32;    // of 16 elements of k
  static constexpr u32 kAlignment = 1024;  // of a slice: of eight columns

  // Of the first two elements of a half of step s (16 of k) of a column.
  FP4KIT_DEVICE static u32 offset(u32 column, u32 s, u32 half) {
    const u32 unit = s % 4 * 2 + half;
    return s / 4 * kSliceBytes + column * kRowBytes + (unit ^ column % 8) * 16;
  }
#ifdef __CUDA_ARCH__
  // The low word of PTX's matrix descriptor, all in 16 bytes: the address. The high word has the
  // distance of groups of eight columns, and the kind of swizzling.
  static constexpr u32 kUnit = 16;
  static constexpr u32 kSharedWindow = 1u << 18;  // addresses name a thread block as well
  u32 low;

  FP4KIT_DEVICE explicit ProductColumns(SharedPlace place)
      : low(place.address % kSharedWindow / kUnit | 1u << 16) {}

  FP4KIT_DEVICE ProductColumns at(u32 offset) const {
    ProductColumns result = *this;
    result.low += offset / kUnit;
    return result;
  }
  FP4KIT_DEVICE ProductColumns step(u32 s) const {
    return at(s / 4 * kSliceBytes + s % 4 * kStepBytes);
  }

  FP4KIT_DEVICE u64 descriptor() const {
    constexpr u32 kHigh = 8 * kRowBytes / kUnit | 1u << 30;
    u64 result;
    asm("mov.b64 %0, {%1, %2};" : "=l"(result) : "r"(low), "r"(kHigh));
    return result;
  }
#else
  SharedPlace place;
  u32 number = 0;  // of the step

  explicit ProductColumns(SharedPlace first) : place(first) {}
  ProductColumns at(u32 offset) const { return ProductColumns(place.at(offset)); }
  ProductColumns step(u32 s) const {
    ProductColumns result = *this;
    result.number = s;
    return result;
  }
#endif
};

// Before the first product, and after registers of A or D have changed.
FP4KIT_DEVICE void fence_products() {
#ifdef __CUDA_ARCH__
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

// By all threads of a warpgroup: from here on they have so many registers, fewer or more than at
// the start. More are there once others have given theirs back.
template <u32 kRegisters>
FP4KIT_DEVICE void give_registers_back() {
#ifdef __CUDA_ARCH__
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}
template <u32 kRegisters>
FP4KIT_DEVICE void take_registers() {
#ifdef __CUDA_ARCH__
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
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
#define FP4KIT_D64(i) FP4KIT_D16(i), FP4KIT_D16(i + 16), FP4KIT_D16(i + 32), FP4KIT_D16(i + 48)
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
#define FP4KIT_N128                                                                        \
  FP4KIT_N64                                                                               \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "     \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "       \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, " \
  "%111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, "   \
  "%125, %126, %127"
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
  } else if constexpr (kN == 128) {
    FP4KIT_WGMMA("128", FP4KIT_N64, "%64", "%65", "%66", "%67", "%68", FP4KIT_D64(0));
  } else {
    static_assert(kN == 256);
    FP4KIT_WGMMA(
        "256", FP4KIT_N128, "%128", "%129", "%130", "%131", "%132", FP4KIT_D64(0), FP4KIT_D64(64));
  }
#else
  warp_mma_columns<from_input_bits<Bf16>, kN>(d, a, b.place.address, b.number);
#endif
}

#ifdef __CUDA_ARCH__
#undef FP4KIT_D4
#undef FP4KIT_D16
#undef FP4KIT_D64
#undef FP4KIT_WGMMA
#undef FP4KIT_N16
#undef FP4KIT_N32
#undef FP4KIT_N64
#undef FP4KIT_N128
#endif

#endif  // FP4KIT_HAS_WARPGROUP_MMA
#endif  // __CUDACC__

}  // namespace fp4kit
