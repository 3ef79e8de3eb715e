# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The result of quantization: codes, scales, and everything needed to decode them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from fp4kit.arrays.frameworks import shape_of
from fp4kit.arrays.index_arrays import as_shape
from fp4kit.errors import OptionError, ShapeError
from fp4kit.formats import SECOND_LEVEL_SCALES
from fp4kit.plan import Plan
from fp4kit.scheme import Scheme, as_scheme

from .schemed import Schemed
from .stored_tensor import StoredTensor
from .tensor_parts import decoded_scales, unpacked_codes
from .tensor_slices import part_of


@lru_cache(maxsize=1024)
def _stored_scheme(scheme: Scheme, given: tuple[str, ...]) -> Scheme:
    """The scheme of a tensor from what its maker said and the second-level scales it has.

    Raises:
        OptionError: for fields or scales that contradict each other.
    """
    if len(scheme.parts) > 1:
        raise OptionError("a tensor has one direction; direction='both' gives a pair of tensors")
    (part,), recipe = scheme.parts, scheme.recipe_spec
    if recipe is None:
        if given:
            raise OptionError(f"{scheme.format} has no second-level scale, got {given[0]}")
        return part
    if len(given) > 1:
        raise OptionError(f"more than one second-level scale given: {', '.join(given)}")
    if given and given[0] != recipe.keeps:
        raise OptionError(
            f"recipe {recipe.name} keeps {recipe.keeps} as its second level, got {given[0]}; use "
            "fp4kit.convert_second_level"
        )
    if given and part.second_level == "none":
        return scheme.replace(second_level="tensor").parts[0]  # the arrays tell
    if given or part.second_level == "none":
        return part
    if not recipe.optional_second_level:
        raise OptionError(
            f"recipe {recipe.name} needs its second-level scale ({recipe.keeps}); without it every "
            "value would be off by a constant factor"
        )
    return scheme.replace(second_level="none").parts[0]


@lru_cache(maxsize=1024)
def _decoding_plan(scheme: Scheme, rows: int, cols: int, rows_per_scale: int) -> Plan:
    return Plan(scheme.decoding, rows, cols, rows_per_scale)


def plan_of_stored(scheme: Scheme, shape: tuple[int, ...], second: tuple[str, Any] | None) -> Plan:
    """The plan that decodes a tensor of a scheme, a logical shape and second-level scales.

    Raises:
        ShapeError: if these do not divide its rows or columns.
    """
    rows = prod(shape[:-1])
    count = prod(second[1].shape) if second is not None else 1
    columnwise = scheme.direction == "columnwise"
    vectors = shape[-1] if columnwise else rows
    if count == 0 or vectors % count:
        what = "columns" if columnwise else "rows"
        raise ShapeError(f"{count} second-level scales do not divide {vectors} {what}")
    return _decoding_plan(scheme, rows, shape[-1], max(vectors // count, 1))


@lru_cache(maxsize=1024)
def _stored_shapes(plan: Plan, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the codes and block scales of a tensor of a logical shape."""
    if plan.is_columnwise:
        return plan.packed_shape, plan.scale_shape
    lead = shape[:-1]
    return (*lead, plan.packed_shape[1]), plan.scale_shape_of(lead)


class _Kept(Schemed, StoredTensor):
    """Room for what `buffers` finds out about a tensor's arrays, outside its fields."""

    __slots__ = ("_decoding", "_operand", "_repeat", "_target", "_views")


@dataclass(frozen=True, eq=False, init=False, repr=False)
class QuantizedTensor(_Kept):
    """A block-quantized tensor of logical shape (..., K).

    The arrays live in the framework and on the device of the array that was quantized. At most
    one of the three second-level scales is set: the one that the recipe keeps; they are not exact
    inverses of each other in binary32, so converting is left to
    :func:`fp4kit.convert_second_level`.

    Attributes:
        packed: uint8 codes: (..., ceil16(K)/2) for nvfp4, (..., ceil32(K)/2) for mxfp4,
            (..., ceil32(K)) for mxfp8. Columnwise, M being the leading dimensions multiplied:
            (K, ceil16(M)/2), (K, ceil32(M)/2) and, not transposed, (ceil32(M), K).
        block_scale: uint8 scale bytes, raw E4M3 (nvfp4) or E8M0: (..., blocks) when linear, else
            (pad(rows), pad4(blocks)) in swizzled byte order, rows being the leading dimensions
            multiplied. Columnwise: (K, blocks), and (blocks, K) for linear mxfp8, whose swizzled
            scales are those of the transpose.
        scheme: how it was quantized: one direction, with every default filled in.
        shape: logical shape (..., K).
        amax: second level as float32 amax (recipe te), (1,), one per leading index, or one per
            column of a columnwise tensor.
        decode_scale: second level as amax/2688 (torchao, modelopt, comfy).
        encode_scale: second level as 2688/amax (nvfuser, compressed-tensors).
        source_dtype: element type that was quantized.
    """

    packed: Any
    block_scale: Any
    scheme: Scheme
    shape: tuple[int, ...]
    amax: Any
    decode_scale: Any
    encode_scale: Any
    source_dtype: str

    def __init__(
        self,
        packed: Any,
        block_scale: Any,
        scheme: Scheme | str = "nvfp4",
        shape: tuple[int, ...] = (),
        *,
        source_dtype: str = "float32",
        **options: Any,
    ) -> None:
        """A tensor from its arrays, which are checked against scheme and shape.

        Args:
            packed: codes.
            block_scale: scale bytes.
            scheme: a :class:`fp4kit.Scheme` of one direction, or the name of a format; options
                change fields of it.
            shape: logical shape (..., K).
            source_dtype: element type that was quantized.
            **options: one of `amax`, `decode_scale`, `encode_scale`; fields of a Scheme.

        Raises:
            OptionError: for unknown or contradictory fields.
            ShapeError: for an empty shape, or arrays that do not fit it.
        """
        values = {name: options.pop(name, None) for name in SECOND_LEVEL_SCALES}
        given = tuple(name for name, value in values.items() if value is not None)
        if isinstance(scheme, Scheme):
            stored = scheme.replace(**options) if options else scheme
        else:
            stored = as_scheme(scheme, options)
        own = _stored_scheme(stored, given)
        whole = as_shape(shape)
        if not whole:
            raise ShapeError("a quantized tensor has at least one dimension, got shape ()")
        self._set(packed, block_scale, own, whole, values, source_dtype)
        packed_is, scales_are = shape_of(packed, "packed"), shape_of(block_scale, "block_scale")
        for name in given:
            shape_of(values[name], "the second-level scale")
        packed_shape, scale_shape = _stored_shapes(self.plan(), whole)
        if packed_is != packed_shape:
            raise ShapeError(
                f"packed has shape {packed_is}, but {self.format} codes of shape {whole} take "
                f"{packed_shape}"
            )
        if scales_are != scale_shape:
            raise ShapeError(
                f"block_scale has shape {scales_are}, but the {self.scale_layout} scales of shape "
                f"{whole} take {scale_shape}"
            )

    def _set(
        self,
        packed: Any,
        block_scale: Any,
        scheme: Scheme,
        shape: tuple[int, ...],
        second: dict[str, Any],
        source_dtype: str,
    ) -> None:
        vars(self).update(
            packed=packed,
            block_scale=block_scale,
            scheme=scheme,
            shape=shape,
            amax=second.get("amax"),
            decode_scale=second.get("decode_scale"),
            encode_scale=second.get("encode_scale"),
            source_dtype=source_dtype,
        )

    @classmethod
    def made(
        cls,
        plan: Plan,
        packed: Any,
        block_scale: Any,
        shape: tuple[int, ...],
        second: dict[str, Any],
        source_dtype: str,
    ) -> QuantizedTensor:
        """A tensor of arrays that a plan made: nothing is checked."""
        tensor = cls.__new__(cls)
        tensor._set(packed, block_scale, plan.scheme, tuple(shape), second, source_dtype)
        return tensor

    def plan(self) -> Plan:
        """The plan that decodes this tensor."""
        return plan_of_stored(self.scheme, self.shape, self.second_level)

    def _named(self) -> list[str]:
        return [repr(self.format), *self.scheme.words()]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> QuantizedTensor:
        """The quantized tensor of some rows: views of codes and scales (copies in JAX).

        Leading dimensions take numbers, then one range, then whole axes; the last axis a range.
        Blocks stay whole: ranges along them are multiples of the block size. Swizzled scales are
        cut where their tiles end, at multiples of 128 (or 8) rows; second-level scales that rows
        share at multiples of these.

        Raises:
            OptionError: for parts that cut through any of these, with what is possible.
            IndexError: for numbers out of range, or too many.

        Example:
            >>> import numpy as np
            >>> from fp4kit import quantize
            >>> q = quantize(np.ones((4, 64), np.float32))
            >>> q[1:3, 16:].shape
            (2, 48)
        """
        return part_of(self, index)

    def codes(self) -> Any:
        """The codes one by one, in logical order: uint8 of the tensor's shape.

        0 .. 15 for E2M1, the byte of an FP8 element, whatever the direction and the nibble order;
        codes that pad the last block are left out. Their values are
        `fp4kit.ALL_FORMATS[q.format].element.values[codes]`.
        """
        return unpacked_codes(self)

    def block_scale_values(self) -> Any:
        """The decoded block scales in logical order, whatever their layout: float32.

        Rowwise (..., blocks): element (..., k) is scaled by number k // block_size of its row.
        Columnwise (blocks, K): element (m, k), leading dimensions flattened, by (m // block_size,
        k). The second level is not in them. Of fp8, they are the scales as they are stored.
        """
        return decoded_scales(self)

    def dequantize(
        self,
        dtype: Any = "float32",
        *,
        undo_rht: bool = False,
        backend: str | None = None,
        out: Any = None,
    ) -> Any:
        """The decoded values: see :func:`fp4kit.dequantize`."""
        import fp4kit

        return fp4kit.dequantize(self, dtype, undo_rht=undo_rht, backend=backend, out=out)


class DirectionPair(NamedTuple):
    """One array quantized in both directions.

    Attributes:
        rowwise: blocks along the last axis.
        columnwise: blocks along the rows.
    """

    rowwise: QuantizedTensor
    columnwise: QuantizedTensor

    def to(self, device: Any) -> DirectionPair:
        """Both tensors on another device: see :meth:`QuantizedTensor.to`."""
        return DirectionPair(self.rowwise.to(device), self.columnwise.to(device))
