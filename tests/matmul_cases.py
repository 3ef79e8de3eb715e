# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Products in float64 from the public facts of tensors, and how far float32 sums may be off."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import fp4kit
from fp4kit.formats import ALL_FORMATS

F64 = np.float64
#: Bits of a result's significand.
SIGNIFICAND = {"float32": 24, "float16": 11, "bfloat16": 8}
SMALLEST = {"float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}


class Matrix(NamedTuple):
    """(rows, depth) values without the second level, and that of each row, in float64."""

    values: np.ndarray
    level: np.ndarray


def float_matrix(x: np.ndarray) -> Matrix:
    rows = x.reshape(-1, x.shape[-1]).astype(F64)
    return Matrix(rows, np.ones(len(rows)))


def matrix(q: Any) -> Matrix:
    """A tensor in host memory as a matrix, its blocks along the rows."""
    if isinstance(q, np.ndarray):
        return float_matrix(q)
    spec, columnwise = ALL_FORMATS[q.format], q.scheme.direction == "columnwise"
    codes = q.codes().reshape(-1, q.shape[-1])
    values = spec.element.values[codes].astype(F64)
    rows, cols = values.shape
    scales = np.asarray(q.block_scale_values(), F64)
    level: Any = 1.0
    if spec.has_scale_grid:
        if q.scheme.granularity == "block":
            scales = np.repeat(np.repeat(scales, 128, 0)[:rows], 128, 1)[:, :cols]
            values = values * scales
        else:
            level = scales.reshape(-1)
    elif columnwise:
        values = values * np.repeat(scales, spec.block_size, 0)[:rows]
    else:
        scales = scales.reshape(rows, spec.num_blocks(cols))
        values = values * np.repeat(scales, spec.block_size, 1)[:, :cols]
    if q.second_level is not None:
        name, stored = q.second_level
        level = np.asarray(stored, F64)
        if q.scheme.second_level == "per_token":
            level = np.maximum(level, 1e-12)
        if name == "amax":
            level = level / (6 * q.scheme.e4m3_max)
        elif name == "encode_scale":
            level = 1 / level
    values = values.T if columnwise else values
    return Matrix(values, np.repeat(level, len(values) // np.size(level)))


class Expected(NamedTuple):
    """An exact product, and the largest error that float32 sums of it may have."""

    exact: np.ndarray
    bound: np.ndarray

    def check(self, result: np.ndarray, what: str = "") -> None:
        """Asserts that a result is near enough."""
        assert result.shape == self.exact.shape, (result.shape, self.exact.shape)
        name = result.dtype.name
        values = result.astype(F64)
        rounding = np.abs(self.exact) * 2.0 ** -SIGNIFICAND[name] + SMALLEST[name] / 2
        error = np.abs(values - self.exact)
        allowed = self.bound * (1 + 2.0 ** -SIGNIFICAND[name]) + rounding
        worst = float(np.max(error / allowed, initial=0))
        assert worst <= 1, f"{what}: {worst:.3f} times the error that is allowed"


def expected(
    a: Any,
    b: Any,
    *,
    bias: Any = None,
    c: Any = None,
    alpha: float = 1.0,
    unit: float = 2.0**-24,
) -> Expected:
    """What `fp4kit.matmul` of host arrays and tensors is near.

    Args:
        a: float array or tensor.
        b: tensor.
        bias: float array.
        c: float array.
        alpha: factor.
        unit: of the sums: 2^-24, or 2^-23 on tensor cores, which cut instead of rounding.
    """
    first, second = matrix(a), matrix(b)
    factor = float(np.float32(alpha)) * np.outer(first.level, second.level)
    depth = first.values.shape[1]
    lead = a.shape[:-1] if isinstance(a, np.ndarray) else lead_of(a)
    with np.errstate(all="ignore"):
        exact = factor * (first.values @ second.values.T)
        size = np.abs(factor) * (np.abs(first.values) @ np.abs(second.values).T)
        added = np.zeros_like(exact)
        for one in (bias, c):
            if one is not None:
                part = one.astype(F64).reshape(-1, exact.shape[1])
                exact, added = exact + part, added + np.abs(part)
    bound = (depth + 8) * unit * size + 4 * unit * (added + np.abs(exact)) + depth * 2.0**-149
    shape = (*lead, len(second.values))
    return Expected(exact.reshape(shape), bound.reshape(shape))


def lead_of(q: Any) -> tuple[int, ...]:
    """Axes that a tensor gives to the product."""
    return q.shape[-1:] if q.scheme.direction == "columnwise" else q.shape[:-1]


def numbers(shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> np.ndarray:
    """Numbers of several magnitudes."""
    random = np.random.default_rng((seed, prod(shape)))
    x = random.standard_normal(shape) * np.exp(random.standard_normal(shape))
    return x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


#: Every kind of tensor that a product takes, as options of `fp4kit.quantize`.
KINDS: dict[str, dict[str, Any]] = {
    "nvfp4": {"scheme": "nvfp4"},
    "nvfp4-nvfuser": {"scheme": "nvfp4", "recipe": "nvfuser"},
    "nvfp4-one-level": {"scheme": "nvfp4", "recipe": "torchao", "second_level": "none"},
    "nvfp4-modelopt": {"scheme": "nvfp4", "recipe": "modelopt"},
    "nvfp4-compressed-tensors": {"scheme": "nvfp4", "recipe": "compressed-tensors"},
    "nvfp4-comfy": {"scheme": "nvfp4", "recipe": "comfy", "scale_layout": "swizzled_128x4"},
    "nvfp4-high-first": {"scheme": "nvfp4", "nibble_order": "high_first"},
    "nvfp4-8x4": {"scheme": "nvfp4", "scale_layout": "swizzled_8x4"},
    "nvfp4-row-scaled": {"scheme": "nvfp4", "second_level": "row_scaled"},
    "nvfp4-per-token": {"scheme": "nvfp4", "second_level": "per_token"},
    "nvfp4-256": {"scheme": "nvfp4", "scale_search": "four_over_six", "e4m3_max": 256},
    "nvfp4-2d": {"scheme": "nvfp4", "block_shape": "2d"},
    "nvfp4-columns": {"scheme": "nvfp4", "direction": "columnwise"},
    "mxfp4": {"scheme": "mxfp4"},
    "mxfp4-128x4": {"scheme": "mxfp4", "scale_layout": "swizzled_128x4"},
    "mxfp4-columns": {"scheme": "mxfp4", "direction": "columnwise"},
    "mxfp8": {"scheme": "mxfp8"},
    "mxfp8-128x4": {"scheme": "mxfp8", "scale_layout": "swizzled_128x4"},
    "mxfp8-columns": {"scheme": "mxfp8", "direction": "columnwise"},
    "mxfp8-columns-128x4": {
        "scheme": "mxfp8",
        "direction": "columnwise",
        "scale_layout": "swizzled_128x4",
    },
    "mxfp8-e5m2": {"scheme": "mxfp8_e5m2"},
    "fp8-tensor": {"scheme": "fp8"},
    "fp8-channel": {"scheme": "fp8", "granularity": "channel"},
    "fp8-channel-columns": {
        "scheme": "fp8",
        "granularity": "channel",
        "direction": "columnwise",
    },
    "fp8-block": {"scheme": "fp8", "granularity": "block"},
    "fp8-e5m2": {"scheme": "fp8_e5m2"},
}


def tensor(kind: str, rows: int, depth: int, seed: int = 0, dtype: str = "float32") -> Any:
    """A tensor of a kind whose product has `rows` rows over a depth, on the host."""
    options = KINDS[kind]
    columnwise = options.get("direction") == "columnwise"
    shape = (depth, rows) if columnwise else (rows, depth)
    x = numbers(shape, dtype, seed)
    return fp4kit.quantize(x, pad=True, backend="reference", **options)
