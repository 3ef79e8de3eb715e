# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""FP4 weights in the order of tensor cores' fragments, for products that read them once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fp4kit import arrays
from fp4kit.arrays.frameworks import shape_of
from fp4kit.arrays.torch_rules import leave_uncompiled
from fp4kit.backend.prepared import WeightsJob, tile_shape
from fp4kit.errors import OptionError, ShapeError
from fp4kit.formats import BLOCK_FORMATS, SECOND_LEVEL_SCALES
from fp4kit.plan import Plan
from fp4kit.scheme import Scheme

from .backends import engine_for
from .buffers import decoding_arrays
from .schemed import Schemed
from .stored_tensor import StoredTensor
from .tensor import QuantizedTensor, plan_of_stored
from .tensor_slices import part_of_prepared


@dataclass(frozen=True, eq=False, repr=False)
class PreparedTensor(Schemed, StoredTensor):
    """A quantized FP4 tensor whose codes and scales lie in tiles: what :func:`prepare` returns.

    Attributes:
        tiles: uint8 (row tiles, depth tiles, bytes of a tile): tiles of 16 rows x 128 elements
            along the blocks, codes and block scales together. Rows are those of the flattened
            leading dimensions, or the columns of a columnwise tensor. Where each byte lies is
            documented in :mod:`fp4kit.backend.prepared`; every backend makes the same bytes.
        scheme: how the tensor was quantized, with linear scales.
        shape: logical shape (..., K).
        is_plain: whether no block scale is negative, NaN, or (mxfp4) above 2^8 or, of a block that
            is not zero, below 2^-125. The fast kernels of
            products take only such.
        amax: second level, as of a :class:`QuantizedTensor`; at most one of these three is set.
        decode_scale: likewise.
        encode_scale: likewise.
        source_dtype: element type that was quantized.
    """

    _ARRAYS: ClassVar[tuple[str, ...]] = ("tiles", *SECOND_LEVEL_SCALES)
    _CODES: ClassVar[str] = "tiles"

    tiles: Any
    scheme: Scheme
    shape: tuple[int, ...]
    is_plain: bool
    amax: Any = None
    decode_scale: Any = None
    encode_scale: Any = None
    source_dtype: str = "float32"

    def __post_init__(self) -> None:
        plan = self.plan()
        wanted = tile_shape(plan.format, plan.vectors, plan.length)
        given = shape_of(self.tiles, "tiles")
        if given != wanted:
            raise ShapeError(
                f"tiles have shape {given}, but those of {self.format} of shape {self.shape} take "
                f"{wanted}"
            )

    def plan(self) -> Plan:
        """The plan that decodes this tensor."""
        return plan_of_stored(self.scheme, self.shape, self.second_level)

    def _named(self) -> list[str]:
        return [repr(self.format), *self.scheme.words()]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> PreparedTensor:
        """The prepared tensor of some rows, in multiples of 16: a view of the tiles.

        Leading dimensions take numbers, then one range, then whole axes; the last axis is whole. Of
        a columnwise tensor the last axis takes the range, and the others are whole.

        Raises:
            OptionError: for parts that cut through tiles.
            IndexError: for numbers out of range, or too many.

        Example:
            >>> import numpy as np
            >>> from fp4kit import prepare, quantize
            >>> prepare(quantize(np.ones((64, 32), np.float32)))[16:48].shape
            (32, 32)
        """
        return part_of_prepared(self, index)

    def restore(self, *, backend: str | None = None) -> QuantizedTensor:
        """The quantized tensor that was prepared: the same bytes, its scales in linear order.

        Args:
            backend: `reference`, `cpu`, `cuda`, or None for the default of the device.

        Raises:
            BackendUnavailableError: if the backend cannot serve the request, with the reason.
        """
        plan = self.plan()
        raw = arrays.ingest_bytes(self.tiles, "tiles")
        origin = raw.origin
        engine = engine_for("restore_weights", origin.device, "uint8", self.scheme, backend)
        with arrays.device_scope(origin):
            xp = arrays.array_module(origin)
            packed = xp.empty(plan.packed_shape, np.uint8)
            scales = xp.empty(plan.scale_shape, np.uint8)
            if plan.vectors and plan.length:
                tiles = arrays.contiguous(raw.data, origin)
                engine.restore_weights(_job(plan, packed, scales, tiles))
            if not plan.is_columnwise:
                lead = self.shape[:-1]
                packed = packed.reshape(*lead, plan.packed_shape[1])
                scales = scales.reshape(plan.scale_shape_of(lead))
            stored = [arrays.emit(data, "uint8", origin) for data in (packed, scales)]
        levels = {name: getattr(self, name) for name in SECOND_LEVEL_SCALES}
        return QuantizedTensor(
            *(*stored, self.scheme, self.shape), source_dtype=self.source_dtype, **levels
        )

    def dequantize(
        self, dtype: Any = "float32", *, backend: str | None = None, out: Any = None
    ) -> Any:
        """The decoded values, of :meth:`restore`: see :func:`fp4kit.dequantize`."""
        return self.restore(backend=backend).dequantize(dtype, backend=backend, out=out)


def _job(plan: Plan, packed: Any, block_scale: Any, tiles: Any) -> WeightsJob:
    return WeightsJob(
        *(plan.format, plan.vectors, plan.length, packed, block_scale, plan.scale_layout),
        *(plan.nibble_order == "low_first", tiles),
    )


@leave_uncompiled
def prepare(q: QuantizedTensor, *, backend: str | None = None) -> PreparedTensor:
    """Repacks an FP4 tensor once, so that products with few rows read it at full speed.

    Codes and block scales move to where tensor cores want them, and keep their size: 4.5 bits an
    element (nvfp4) or 4.25 (mxfp4), rows padded to 16 and blocks to 128 elements. They are weights
    of products, b of :func:`fp4kit.matmul`, and come back as they were by
    :meth:`PreparedTensor.restore`. On a GPU this call waits for the device.

    Args:
        q: nvfp4 or mxfp4, of any recipe, scale layout, nibble order and direction.
        backend: `reference`, `cpu`, `cuda`, or None for the default of the device.

    Returns:
        A :class:`PreparedTensor` in the framework and on the device of `q.packed`, which shares the
        second-level scale with q.

    Raises:
        OptionError: for other formats, whose products take them as they are.
        BackendUnavailableError: if the backend cannot serve the request, with the reason.

    Examples:
        >>> import numpy as np
        >>> from fp4kit import quantize
        >>> w = prepare(quantize(np.ones((32, 256), np.float32)))
        >>> w.tiles.shape, w.restore().packed.shape
        ((2, 2, 1152), (32, 128))
    """
    if isinstance(q, PreparedTensor):
        return q
    if not isinstance(q, QuantizedTensor) or not q.scheme.spec.packs_nibbles:
        what = q.format if isinstance(q, QuantizedTensor) else f"a {type(q).__name__}"
        names = " and ".join(name for name, spec in BLOCK_FORMATS.items() if spec.packs_nibbles)
        raise OptionError(
            f"only QuantizedTensors of {names} are prepared, this is {what}; pass it to "
            "fp4kit.matmul as it is"
        )
    plan, origin, packed, block_scale, _, _ = decoding_arrays(q)
    engine = engine_for("prepare_weights", origin.device, "uint8", plan.scheme, backend)
    plain = True
    with arrays.device_scope(origin):
        shape = tile_shape(plan.format, plan.vectors, plan.length)
        tiles = arrays.array_module(origin).empty(shape, np.uint8)
        if plan.vectors and plan.length:
            plain = engine.prepare_weights(_job(plan, packed, block_scale, tiles))
        levels = {name: getattr(q, name) for name in SECOND_LEVEL_SCALES}
        return PreparedTensor(
            *(
                arrays.emit(tiles, "uint8", origin),
                q.scheme.replace(scale_layout="linear").parts[0],
            ),
            *(q.shape, plain),
            source_dtype=q.source_dtype,
            **levels,
        )
