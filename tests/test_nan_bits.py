# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Dequantized NaN has one bit pattern on every backend, whatever made it."""

import numpy as np
import pytest

import fp4kit

INFINITY = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}
NAN = {"float32": 0x7FC00000, "float16": 0x7E00, "bfloat16": 0x7FC0}


def check(q, backend, dtype, nans):
    result = backend.dequantize(q, dtype)
    bits = result.view({2: np.uint16, 4: np.uint32}[result.dtype.itemsize])
    magnitude = bits & bits.dtype.type(np.iinfo(bits.dtype).max >> 1)
    is_nan = magnitude > INFINITY[dtype]
    assert is_nan.sum() >= nans
    assert set(np.unique(bits[is_nan])) == {NAN[dtype]}


@pytest.mark.parametrize("dtype", NAN)
def test_zero_scale_under_infinite_amax(backend, dtype):
    """0 * infinity, which x86 gives a negative NaN."""
    x = np.full((2, 32), 1e-4, np.float32)
    x[1, 3] = np.inf
    check(fp4kit.quantize(x, nonfinite="propagate"), backend, dtype, 16)


@pytest.mark.parametrize("dtype", NAN)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8", "mxfp8_e5m2"])
def test_nan_scale(format, backend, dtype):
    q = fp4kit.quantize(np.ones((4, 64), np.float32) * -3, format)
    q.block_scale[1] = 0x7F if format == "nvfp4" else 0xFF
    check(q, backend, dtype, 64)


@pytest.mark.parametrize("dtype", NAN)
@pytest.mark.parametrize("format", ["mxfp8", "mxfp8_e5m2"])
def test_nan_codes_of_both_signs(format, backend, dtype):
    q = fp4kit.quantize(np.ones((4, 64), np.float32), format)
    q.packed[0] = 0x7F
    q.packed[1] = 0xFF
    check(q, backend, dtype, 128)
