# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The numba backend: each operation in a file of its name, its kernel beside what calls it.

=====================  ==========================================================================
backend                which file serves which operation
quantize, dequantize   rowwise; tile by tile over the blocks of an array (blocks)
quantize_panels,       columnwise, both directions, 2-D, rotated, searched, stochastic; by tiles
dequantize_columnwise  (tiles) of panels of an array (panels)
amax, error_sums,      the other operations
swizzle, rotation,
activations, residual
grid                   FP8 under float32 scales
matrices               what checkpoints do with matrices outside of quantization
scaling, scale_search, formulas: those of the files of the same name in :mod:`fp4kit.reference`
codecs, philox
elements, intrinsics   elements of arrays in kernels; functions of single numbers
buffers, threads       arrays as kernels take them; ranges over all cores
jit, kernel_cache      how kernels are compiled, and kept between runs
=====================  ==========================================================================

Kernels take NamedTuples of arrays, and numbers of a plan as an array of one record. They are
annotated nowhere, since numba infers their types; functions that Python calls are.
"""
