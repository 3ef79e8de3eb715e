# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Stored tensors in memory, for tests of what is computed from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from fp4kit.io.containers import DTYPES, TensorSpec
from fp4kit.io.read.source import Source, SourceTensor


class ArraySource(Source):
    """A source of {name: (dtype, array of raw elements)}; it records what was read."""

    def __init__(self, tensors):
        self.path = Path("model")
        self.metadata = {}
        self.arrays = {name: np.ascontiguousarray(array) for name, (_, array) in tensors.items()}
        self.tensors = {}
        for name, (dtype, array) in tensors.items():
            spec = TensorSpec(name, dtype, array.shape)
            assert spec.nbytes == array.nbytes, name
            self.tensors[name] = SourceTensor(spec, DTYPES[dtype].name, array.nbytes)
        self.reads = []

    def read(self, name, offset, out):
        flat = self.arrays[name].reshape(-1).view(np.uint8)
        assert 0 <= offset <= offset + len(out) <= len(flat), "read beyond the tensor"
        self.reads.append((name, offset, len(out)))
        out[:] = flat[offset : offset + len(out)].data

    def close(self):
        pass


def read_range(view, offset, count, misaligned=0):
    """Bytes of a view, read into a buffer that may begin at an odd address."""
    buffer = np.empty(count + misaligned, np.uint8)
    view.read(offset, buffer[misaligned:].data)
    return buffer[misaligned:]


def read_all(view, dtype=np.float32):
    """The whole view as an array of its logical shape."""
    spec = view.tensor.spec
    return read_range(view, 0, spec.nbytes).view(dtype).reshape(spec.shape)


def check_ranges(data, view, expected):
    """Any range of a view is that range of the whole."""
    flat = np.ascontiguousarray(expected).reshape(-1).view(np.uint8)
    first = data.draw(st.integers(0, len(flat)))
    last = data.draw(st.integers(first, len(flat)))
    misaligned = data.draw(st.integers(0, 3))
    assert (read_range(view, first, last - first, misaligned) == flat[first:last]).all()
