# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Variants at sizes that only a GPU holds. Skipped without one.

Byte parity over options and shapes is tested for all backends in test_variants_parity.py.
"""

import numpy as np
import pytest

import fp4kit
from fp4kit.api.backends import get_backend
from fp4kit.formats import SCALE_LAYOUTS

F32 = np.float32
REASON = get_backend("cuda").unavailable_reason()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=str(REASON))]


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_stochastic_rows(dtypes, dtype, format, layout):
    """Lanes that follow each other, several a thread, and what takes tiles: ragged, misaligned."""
    cupy = pytest.importorskip("cupy")
    options = {"rounding": "stochastic", "seed": 2**64 - 9, "pad": True, "scale_layout": layout}
    if format == "nvfp4":
        options["amax"] = 3.0
    rng = np.random.default_rng(2)
    for rows, cols, first in ((4111, 2048, 0), (3003, 2080, 0), (300, 2056, 0), (300, 2048, 1)):
        x = rng.standard_normal(first + rows * cols, F32).astype(dtypes[dtype])
        device = cupy.asarray(x.view(np.uint8)).view(x.dtype)
        got, want = (
            fp4kit.quantize(array[first:].reshape(rows, cols), format, subsequence=cols, **options)
            for array in (device, x)
        )
        np.testing.assert_array_equal(got.packed.get(), want.packed)
        np.testing.assert_array_equal(got.block_scale.get(), want.block_scale)


@pytest.mark.parametrize("direction", ["rowwise", "columnwise", "both"])
@pytest.mark.parametrize("block", ["1d", "2d"])
@pytest.mark.parametrize("layout", ["linear", "swizzled_128x4"])
def test_whole_tiles(dtypes, layout, block, direction):
    """Scales that are stored as words, and those of squares by a kernel of their own if many."""
    cupy = pytest.importorskip("cupy")
    rng = np.random.default_rng(4)
    for shape in ((512, 512), (640, 384), (4096, 8192)):
        x = rng.standard_normal(shape, F32)
        x[::3, ::5] *= 1e-3
        x = x.astype(dtypes["bfloat16"])
        device = cupy.asarray(x.view(np.uint8)).view(x.dtype)
        got, want = (
            fp4kit.quantize(array, direction=direction, block_shape=block, scale_layout=layout)
            for array in (device, x)
        )
        pairs = [(got, want)] if direction != "both" else zip(got, want, strict=True)
        for one, other in pairs:
            np.testing.assert_array_equal(one.packed.get(), other.packed)
            np.testing.assert_array_equal(one.block_scale.get(), other.block_scale)


#: 304 rows end within a tile, 512 do not.
@pytest.mark.slow
@pytest.mark.parametrize("last", [304, 512])
@pytest.mark.parametrize(
    "options", [{}, {"block_shape": "2d"}, {"rounding": "stochastic", "seed": 3}]
)
def test_both_directions_of_more_than_two_to_the_31_elements(options, last):
    """The last rows lie beyond 2^31 elements and have the bytes that they have alone."""
    cupy = pytest.importorskip("cupy")
    rows, cols = 1 << 20, 2048
    if cupy.cuda.runtime.memGetInfo()[0] < 16 << 30:
        pytest.skip("less than 16 GB free on the device")
    x = cupy.zeros((rows + last, cols), np.float16)
    host = np.random.default_rng(1).standard_normal((last, cols)).astype(np.float16)
    x[rows:] = cupy.asarray(host)
    assert x.size > 1 << 31
    got = fp4kit.quantize(x, direction="both", amax=6.0, nonfinite="propagate", **options)
    want = fp4kit.quantize(host, direction="both", amax=6.0, nonfinite="propagate", **options)
    assert int(cupy.count_nonzero(got.rowwise.packed[:rows])) == 0
    assert int(cupy.count_nonzero(got.columnwise.packed[:, : rows // 2])) == 0
    row_scale = got.rowwise.block_scale[rows:].get()
    column_scale = got.columnwise.block_scale[:, rows // 16 :].get()
    np.testing.assert_array_equal(row_scale, want.rowwise.block_scale)
    np.testing.assert_array_equal(column_scale, want.columnwise.block_scale)
    codes = got.rowwise.packed[rows:].get()
    turned = got.columnwise.packed[:, rows // 2 :].get()
    if "rounding" in options:
        # The random bits are numbered along the whole array: other codes than alone, next to them.
        assert (codes != want.rowwise.packed).any()
        for whole, alone in ((codes, want.rowwise.packed), (turned, want.columnwise.packed)):
            for shift in (0, 4):
                one, other = ((part >> shift & 7).astype(int) for part in (whole, alone))
                assert np.abs(one - other).max() <= 1
    else:
        np.testing.assert_array_equal(codes, want.rowwise.packed)
        np.testing.assert_array_equal(turned, want.columnwise.packed)
