# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The random Hadamard transform as a public function; its arithmetic is in the reference."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from fp4kit import arrays
from fp4kit.arrays.dtypes import dtype_name
from fp4kit.arrays.overlap import places
from fp4kit.arrays.torch_rules import leave_uncompiled, refuse_gradient
from fp4kit.backend.interface import Backend, Rotation
from fp4kit.errors import ShapeError
from fp4kit.formats import flag, one_of
from fp4kit.options import (
    DIRECTIONS,
    RHT_ROUNDINGS,
    Direction,
    RhtRounding,
    check_groups,
    sign_mask,
)
from fp4kit.scheme import Scheme

from .backends import engine_for
from .buffers import in_rows, result_buffer, rows_of


def undo_rotation(
    engine: Backend, scheme: Scheme, decode: Callable[[Any, str], None], out: Any, dtype: str
) -> None:
    """Fills `out` with values rotated back from the float32 ones that `decode` writes."""
    assert scheme.rht is not None
    rotated = engine.scratch(out.shape, np.float32)
    decode(rotated, "float32")
    rotation = Rotation(scheme.direction, scheme.rht, "none", True)
    engine.rotate(rotated, "float32", rotation, out, dtype)


@leave_uncompiled
def hadamard_transform(
    x: Any,
    mask: bool | int = True,
    *,
    direction: Direction = "rowwise",
    rounding: RhtRounding = "none",
    inverse: bool = False,
    dtype: Any = None,
    backend: str | None = None,
    out: Any = None,
) -> Any:
    """Rotates groups of 16 elements by a Hadamard matrix with random signs.

    Every group keeps its Euclidean length, and an outlier is spread over its group. This is the
    rotation that `quantize(..., rht=)` applies (NVIDIA Transformer Engine, NVFP4 recipe).

    Args:
        x: float32, float16 or bfloat16 array (..., K).
        mask: 16 sign bits, bit i = 1 negating element i; True is Transformer Engine's 0xD7E8,
            0 (or False) the plain Hadamard matrix.
        direction: `rowwise` rotates along the last axis, `columnwise` along the rows (all leading
            dimensions flattened).
        rounding: `bf16` rounds the float32 sums to bfloat16, `none` only to `dtype`.
        inverse: apply the inverse rotation.
        dtype: element type of the result; None is that of `x`.
        backend: `reference`, `cpu`, `cuda`, or None for the default of the device.
        out: C-contiguous array of the shape of `x` and of `dtype` to write into.

    Returns:
        Array of the shape of `x` in its framework and on its device (or `out`).

    Raises:
        OptionError: for unknown options.
        ShapeError: if the rotated axis is not a multiple of 16, or `out` does not fit.
        DtypeError: for a torch tensor that requires a gradient (:mod:`fp4kit.torch` has one), and
            for other element types.
        BackendUnavailableError: if the backend cannot serve the array, with the reason.

    Examples:
        >>> import numpy as np
        >>> x = np.eye(16, dtype=np.float32)[:1] * 4
        >>> hadamard_transform(x, 0).ravel().tolist() == [1.0] * 16
        True
    """
    raw = arrays.ingest(x)
    refuse_gradient(x, "hadamard_transform")
    one_of("direction", direction, DIRECTIONS)
    one_of("rounding", rounding, RHT_ROUNDINGS)
    bits, inverse = sign_mask(mask), flag("inverse", inverse)
    out_dtype = raw.dtype if dtype is None else dtype_name(dtype)
    shape = raw.data.shape
    if not shape:
        raise ShapeError("a rotation needs an array of at least one dimension, got shape ()")
    rows, cols = prod(shape[:-1]), shape[-1]
    check_groups(cols if direction == "rowwise" else rows, direction, shape)
    engine = engine_for("hadamard_transform", raw.origin.device, raw.dtype, None, backend)
    with arrays.device_scope(raw.origin):
        result = result_buffer(out, shape, out_dtype, raw.origin, places(x=raw.data))
        if rows and cols:
            rotation = Rotation(direction, bits, rounding, inverse)
            source, target = rows_of(raw, rows, cols), in_rows(result, (rows, cols))
            engine.rotate(source, raw.dtype, rotation, target, out_dtype)
        return out if out is not None else arrays.emit(result, out_dtype, raw.origin)
