# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Every public function by the arrays that it takes."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np

import fp4kit
from sample_arrays import F32, gaussian

SHAPE = (4, 64)
SAMPLE = gaussian(SHAPE)
QUANTIZED = fp4kit.quantize(SAMPLE, backend="reference")
RESIDUAL = fp4kit.quantize_residual(SAMPLE, 16, backend="reference")
GROUP = fp4kit.quantize_grouped(SAMPLE, members=2, backend="reference")


def _with(q, decode, name):
    return lambda x: decode(dataclasses.replace(q, **{name: x}))


#: Functions of one array of floats, of SHAPE.
FLOATS = {
    "quantize": fp4kit.quantize,
    "quantize both": partial(fp4kit.quantize, direction="both", pad=True),
    "quantize mxfp8": partial(fp4kit.quantize, format="mxfp8"),
    "quantize silu": partial(fp4kit.quantize, activation="silu"),
    "quantize_dequantize": fp4kit.quantize_dequantize,
    "amax": fp4kit.amax,
    "error_stats": lambda x: fp4kit.error_stats(x, x),
    "hadamard_transform": fp4kit.hadamard_transform,
    "quantize_grouped": partial(fp4kit.quantize_grouped, members=2),
    "quantize_residual": lambda x: fp4kit.quantize_residual(x, 16),
}
#: Functions of one array of bytes of QUANTIZED's or another tensor's shapes.
BYTES = {
    "swizzle": (fp4kit.swizzle, QUANTIZED.block_scale),
    "unswizzle": (
        lambda x: fp4kit.unswizzle(x, QUANTIZED.block_scale.shape),
        fp4kit.swizzle(QUANTIZED.block_scale, backend="reference"),
    ),
    "packed": (_with(QUANTIZED, fp4kit.dequantize, "packed"), QUANTIZED.packed),
    "block_scale": (_with(QUANTIZED, fp4kit.dequantize, "block_scale"), QUANTIZED.block_scale),
    "packed residuals": (_with(RESIDUAL, fp4kit.dequantize, "packed"), RESIDUAL.packed),
    "packed group": (_with(GROUP, fp4kit.dequantize_grouped, "packed"), GROUP.packed),
}
#: Functions of one float32 array of a single value, with the other arrays in NumPy.
SCALES = {
    "amax=": lambda x: fp4kit.quantize(SAMPLE, amax=x),
    "encode_scale=": lambda x: fp4kit.quantize_residual(SAMPLE, 16, encode_scale=x),
    "second level": _with(QUANTIZED, fp4kit.dequantize, "amax"),
    "second level of residuals": _with(RESIDUAL, fp4kit.dequantize, "encode_scale"),
}
#: Functions that write to one float32 array of SHAPE.
OUTPUTS = {
    "dequantize": lambda out: fp4kit.dequantize(QUANTIZED, out=out),
    "quantize_dequantize": lambda out: fp4kit.quantize_dequantize(SAMPLE, out=out),
    "hadamard_transform": lambda out: fp4kit.hadamard_transform(SAMPLE, out=out),
    "dequantize_grouped": lambda out: fp4kit.dequantize_grouped(GROUP, out=out),
    "dequantize_residual": lambda out: fp4kit.dequantize(RESIDUAL, out=out),
    "dbias": lambda out: fp4kit.quantize(SAMPLE, dbias=out),
    "dbias grouped": lambda out: fp4kit.quantize_grouped(SAMPLE, members=2, dbias=out),
}
#: Result shapes of those of OUTPUTS that are not SHAPE.
OUTPUT_SHAPES = {"dbias": (64,), "dbias grouped": (2, 64)}
VALUE = np.array([3.0], F32)


def every_function():
    """(name, function, array that it takes) for each array argument that is read."""
    yield from ((name, function, SAMPLE) for name, function in FLOATS.items())
    yield from ((name, function, array) for name, (function, array) in BYTES.items())
    yield from ((name, function, VALUE) for name, function in SCALES.items())


def flattened(result):
    """Every array and number of a result, as bytes."""
    if isinstance(result, tuple):
        return [part for one in result for part in flattened(one)]
    if dataclasses.is_dataclass(result):
        names = [field.name for field in dataclasses.fields(result)]
        return flattened(tuple(getattr(result, name) for name in names))
    if hasattr(result, "detach"):
        result = result.detach().numpy()
    if isinstance(result, (np.ndarray, np.generic)):
        return [np.asarray(result).tobytes()]
    return [result]
