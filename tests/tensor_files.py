# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Files of tensors: what tests write, and what became of it."""

import numpy as np
import safetensors.numpy
from safetensors import safe_open

from fp4kit.io.source import open_source
from sample_arrays import NUMPY


def random_array(shape, dtype="bfloat16", seed=0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp(rng.standard_normal(shape))).astype(NUMPY[dtype])


def save(path, arrays, metadata=None):
    safetensors.numpy.save_file(arrays, path, metadata=metadata)
    return path


def read_all(path):
    """Every tensor of a file as (safetensors dtype, shape, bytes)."""
    with open_source(path) as source:
        result = {}
        for name, tensor in source.tensors.items():
            data = bytearray(tensor.spec.nbytes)
            source.read(name, 0, memoryview(data))
            result[name] = tensor.spec.dtype, tensor.spec.shape, bytes(data)
        return result


def metadata_of(path):
    with safe_open(path, "np") as file:
        return file.metadata()
