# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Operations on scales alone: swizzle, unswizzle, and the second level's other directions."""

from __future__ import annotations

from math import prod
from typing import Any

from fp4kit import arrays
from fp4kit.arrays.index_arrays import as_shape
from fp4kit.arrays.overlap import places
from fp4kit.arrays.torch_rules import leave_uncompiled
from fp4kit.backend.interface import Request
from fp4kit.errors import OptionError, ShapeError
from fp4kit.formats import SCALE_LAYOUTS, SECOND_LEVEL_SCALES, SecondLevelScale, one_of
from fp4kit.layout import padded_scale_shape

from .backends import select
from .buffers import check_is_quantized, decoding_arrays, in_rows, result_buffer, rows_of
from .tensor import QuantizedTensor


@leave_uncompiled
def swizzle(
    scales: Any, layout: str = "swizzled_128x4", *, backend: str | None = None, out: Any = None
) -> Any:
    """Reorders block scales for block-scaled matrix products.

    Args:
        scales: uint8 (or 1-byte float) block scales (..., blocks), linear.
        layout: `swizzled_128x4` (cuBLASLt, CUTLASS), `swizzled_8x4`, or `linear` (a copy).
        backend: `reference`, `cpu`, `cuda`, or None for the default of the device.
        out: C-contiguous uint8 array of the result's shape to write into, apart from `scales`.

    Returns:
        uint8 (pad(rows), pad4(blocks)) in swizzled byte order, rows being the leading dimensions
        multiplied; padding bytes are 0 (or `out`, with these bytes).

    Raises:
        OptionError: for an unknown layout.
        ShapeError: for a 0-dimensional array, or if `out` does not fit.
        DtypeError: for elements that are not single bytes, or if `out` lies on another device.

    Examples:
        >>> import numpy as np
        >>> stored = swizzle(np.arange(1, 7, dtype=np.uint8).reshape(2, 3), "swizzled_8x4")
        >>> stored.shape, stored.ravel()[:8].tolist()
        ((8, 4), [1, 2, 3, 0, 4, 5, 6, 0])
    """
    one_of("layout", layout, SCALE_LAYOUTS)
    raw = arrays.ingest_bytes(scales, "scales")
    if not raw.data.shape:
        raise ShapeError("scales must have at least one dimension (blocks), got shape ()")
    rows, blocks = prod(raw.data.shape[:-1]), raw.data.shape[-1]
    engine = select(Request("swizzle", raw.origin.device, "uint8"), backend)
    with arrays.device_scope(raw.origin):
        shape = padded_scale_shape(rows, blocks, layout) if rows and blocks else (rows, blocks)
        result = result_buffer(out, shape, "uint8", raw.origin, places(scales=raw.data))
        if rows and blocks:
            engine.swizzle(rows_of(raw, rows, blocks), layout, result)
        return out if out is not None else arrays.emit(result, "uint8", raw.origin)


@leave_uncompiled
def unswizzle(
    scales: Any,
    shape: tuple[int, ...],
    layout: str = "swizzled_128x4",
    *,
    backend: str | None = None,
    out: Any = None,
) -> Any:
    """Inverse of :func:`swizzle`.

    Args:
        scales: uint8 swizzled scales, of any shape with the right number of bytes.
        shape: true linear shape (..., blocks): it cannot be inferred from a padded one.
        layout: the order `scales` is in.
        backend: `reference`, `cpu`, `cuda`, or None for the default of the device.
        out: C-contiguous uint8 array of `shape` to write into, apart from `scales`.

    Returns:
        uint8 array of `shape` (or `out`).

    Raises:
        OptionError: for an unknown layout.
        ShapeError: if `scales` does not hold exactly the bytes that `shape` takes in `layout`, or
            if `out` does not fit.
        DtypeError: for elements that are not single bytes, or if `out` lies on another device.

    Examples:
        >>> import numpy as np
        >>> scales = np.arange(1, 7, dtype=np.uint8).reshape(2, 3)
        >>> unswizzle(swizzle(scales), (2, 3)).tolist()
        [[1, 2, 3], [4, 5, 6]]
    """
    one_of("layout", layout, SCALE_LAYOUTS)
    raw = arrays.ingest_bytes(scales, "scales")
    shape = as_shape(shape)
    if not shape:
        raise ShapeError("shape must have at least one dimension (blocks), got ()")
    rows, blocks = prod(shape[:-1]), shape[-1]
    stored = padded_scale_shape(rows, blocks, layout) if rows and blocks else (rows, blocks)
    if prod(stored) != raw.data.size:
        raise ShapeError(
            f"{raw.data.size} bytes given, but {layout} scales of shape {tuple(shape)} take "
            f"{prod(stored)} ({stored[0]} x {stored[1]})"
        )
    engine = select(Request("unswizzle", raw.origin.device, "uint8"), backend)
    with arrays.device_scope(raw.origin):
        result = result_buffer(out, tuple(shape), "uint8", raw.origin, places(scales=raw.data))
        if rows and blocks:
            engine.unswizzle(rows_of(raw, *stored), layout, in_rows(result, (rows, blocks)))
        return out if out is not None else arrays.emit(result, "uint8", raw.origin)


@leave_uncompiled
def convert_second_level(q: QuantizedTensor, target: SecondLevelScale) -> Any:
    """The second-level scale of `q` as another one.

    amax, decode_scale (amax/2688) and encode_scale (2688/amax) are not exact inverses of each other
    in binary32; a tensor keeps the one it was made with, and this is the only place that converts.

    Args:
        q: an nvfp4 tensor with a second level.
        target: `amax`, `decode_scale` or `encode_scale`.

    Returns:
        float32 array in the framework and on the device of `q`. A scale that cannot be inverted
        (0, infinity, NaN) gives 1.

    Raises:
        OptionError: for an unknown target, or if `q` has no second level.

    Examples:
        >>> import numpy as np
        >>> from fp4kit import quantize
        >>> q = quantize(np.full((1, 16), 6, np.float32))
        >>> float(convert_second_level(q, "encode_scale")[0])
        448.0
    """
    one_of("target", target, SECOND_LEVEL_SCALES)
    check_is_quantized(q)
    second = q.second_level
    if second is None:
        raise OptionError(f"{q!r} has no second-level scale to convert")
    _, origin, _, _, scale, _ = decoding_arrays(q)
    engine = select(Request("dequantize", origin.device, "float32", q.scheme), None)
    with arrays.device_scope(origin):
        value = engine.convert_second_level(scale, second[0], target)
        return arrays.emit(value, "float32", origin)
