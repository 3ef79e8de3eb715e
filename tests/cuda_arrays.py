# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Arrays for tests that only a GPU can run: made, moved, compared."""

import numpy as np

from fp4kit.reference import codecs
from sample_arrays import NUMPY


def as_dtype(values, dtype):
    """Host float32 values as a host array of an element type."""
    raw = codecs.from_float32(np.ascontiguousarray(values, np.float32), dtype)
    return raw.view(NUMPY[dtype])


def to_device(cupy, host):
    """A device copy; bfloat16 travels as bits."""
    if host.dtype.name != "bfloat16":
        return cupy.asarray(host)
    return cupy.asarray(host.view(np.uint16)).view(host.dtype)


def normal(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def assert_same(got, wanted):
    """A device result equals the host's, byte for byte."""
    np.testing.assert_array_equal(got.packed.get(), wanted.packed)
    np.testing.assert_array_equal(got.block_scale.get(), wanted.block_scale)
    if wanted.second_level is not None:
        np.testing.assert_array_equal(got.second_level[1].get(), wanted.second_level[1])


def floats(array, dtype):
    """float32 values of a host or device array."""
    host = array.get() if hasattr(array, "get") else array
    raw = host.view(np.uint16) if dtype == "bfloat16" else host
    return codecs.to_float32(raw, dtype)
