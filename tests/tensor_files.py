# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Files of tensors: what tests write, and what became of it."""

import json

import numpy as np
import safetensors.numpy
from safetensors import safe_open

from fp4kit.io.read.open import open_source
from fp4kit.io.write.safetensors import SafetensorsWriter
from sample_arrays import NUMPY


def random_array(shape, dtype="bfloat16", seed=0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp(rng.standard_normal(shape))).astype(NUMPY[dtype])


def save(path, arrays, metadata=None):
    safetensors.numpy.save_file(arrays, path, metadata=metadata)
    return path


def read_one(source, name):
    """Bytes of a tensor of an open file."""
    data = bytearray(source.tensors[name].spec.nbytes)
    source.read(name, 0, memoryview(data))
    return bytes(data)


def read_all(path):
    """Every tensor of a file as (safetensors dtype, shape, bytes)."""
    with open_source(path) as source:
        return {
            name: (tensor.spec.dtype, tensor.spec.shape, read_one(source, name))
            for name, tensor in source.tensors.items()
        }


def metadata_of(path):
    with safe_open(path, "np") as file:
        return file.metadata()


def write_file(path, tensors, metadata=()):
    """Writes (spec, bytes) pairs."""
    with SafetensorsWriter(path, [spec for spec, _ in tensors], dict(metadata)) as writer:
        for spec, data in tensors:
            writer.write(spec.name, 0, data)
        writer.finish()


def file_bytes(header, data=b"", *, length=None):
    """A safetensors file from a header (object, or text as it is) and data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype="U8", shape=(4,), offsets=(0, 4)):
    """What a header says of a tensor."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}
