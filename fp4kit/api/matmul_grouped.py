# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Products of ranges of rows with a weight of their own each: the experts of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from fp4kit import arrays
from fp4kit.arrays.dtypes import dtype_name
from fp4kit.arrays.frameworks import Origin
from fp4kit.arrays.index_arrays import host_integers, ingest_integers
from fp4kit.arrays.overlap import Place
from fp4kit.arrays.torch_rules import leave_uncompiled, refuse_gradient
from fp4kit.backend.matmul import FloatOperand, MatmulJob, QuantizedOperand, RaggedMatmulJob
from fp4kit.errors import OptionError, ShapeError
from fp4kit.scheme import Scheme

from .backends import engine_for
from .buffers import result_of
from .grouped_tensor import GroupedTensor
from .matmul import factor_of
from .matmul_operands import (
    Opened,
    addend,
    check_depth,
    check_rotation,
    open_float,
    open_quantized,
    open_weights,
    same_device,
)
from .prepared import PreparedTensor
from .tensor import QuantizedTensor


class Weights(NamedTuple):
    """The weights of a group: alike but for their arrays, unless sizes of members differ."""

    members: tuple[QuantizedOperand, ...]
    cols: int
    origin: Origin
    read: tuple[Place, ...]
    scheme: Scheme | None


class Rows(NamedTuple):
    """Rows of a group: an operand and a range of rows of the result for each member."""

    members: tuple[Any, ...]
    offsets: tuple[int, ...]


@leave_uncompiled
def matmul_grouped(
    a: Any,
    b: Any,
    *,
    first_dims: Sequence[int] | None = None,
    row_offsets: Any = None,
    out_dtype: Any = None,
    bias: Any = None,
    alpha: float = 1.0,
    backend: str | None = None,
    out: Any = None,
) -> Any:
    """:func:`fp4kit.matmul` of each member of a group: the experts of a mixture.

    Each member's rows are those that :func:`fp4kit.matmul` gives of it alone, but for the order of
    the sums on a GPU.

    Args:
        a: float32, float16 or bfloat16 array (T, K), whose rows are those of all members, one
            after the other; (n, M, K) with members of equal size; or a rowwise
            :class:`GroupedTensor` with n members of one K.
        b: n weights of one shape, format and layout: a rowwise :class:`QuantizedTensor` (n, N, K)
            with linear scales, a sequence of tensors as :func:`fp4kit.matmul` takes them, or a
            :class:`GroupedTensor`.
        first_dims: rows of each member, numbers on the host.
        row_offsets: instead, n + 1 rows where members begin, and the end. An integer array on the
            GPU of a is read there: nothing waits, so the call can be captured in a CUDA graph; it
            must rise, which nobody looks at, and rows beyond those of a do not count.
        out_dtype: see :func:`fp4kit.matmul`.
        bias: array (n, N) to add to the rows of each member.
        alpha: factor of the products.
        backend: `reference`, `cpu`, `cuda`, or None for the default of the device.
        out: C-contiguous array of the result's shape and type to write into; rows of no member are
            left as they are.

    Returns:
        Array (T, N), or (n, M, N), in the framework and on the device of a (or `out`). Rows of no
        member are 0.

    Raises:
        OptionError: for sizes that are no numbers, weights that are not alike, and as
            :func:`fp4kit.matmul`.
        ShapeError: for shapes that do not fit each other.
        DtypeError: as :func:`fp4kit.matmul`.
        BackendUnavailableError: if the backend cannot serve the request, with the reason.

    Examples:
        >>> import numpy as np
        >>> from fp4kit import quantize
        >>> experts = quantize(np.float32([[[3]], [[6]]]) * np.ones((2, 32, 16), np.float32))
        >>> y = matmul_grouped(np.ones((3, 16), np.float32), experts, first_dims=[1, 2])
        >>> y[:, 0].round(3).tolist()
        [48.0, 96.0, 96.0]
    """
    refuse_gradient(a, "matmul_grouped", "a")
    refuse_gradient(bias, "matmul_grouped", "bias")
    if first_dims is not None and row_offsets is not None:
        raise OptionError("pass first_dims or row_offsets, not both")
    if isinstance(a, GroupedTensor) and (first_dims is not None or row_offsets is not None):
        raise OptionError("a is a group, which knows its members' rows: leave the sizes out")
    weights = _weights(b)
    whole, of_group = (None, a) if isinstance(a, GroupedTensor) else (open_float(a, "a"), None)
    if of_group is not None:
        rows, first = _rows_of_group(of_group, weights)
        lead: tuple[int, ...] = (rows.offsets[-1],)
        on_device = None
    else:
        assert whole is not None
        first, lead = whole, whole.lead
        on_device = _device_offsets(row_offsets, whole.origin)
        if on_device is None:
            rows = _rows_of_array(whole, weights, first_dims, row_offsets)
    same_device(first.origin, weights.origin, ("a", "b"))
    check_depth(first.operand.depth, weights.members[0].depth, "a", "b")
    origin, factor = first.origin, factor_of(alpha)
    name = first.dtype if out_dtype is None else dtype_name(out_dtype, "out_dtype")
    operation = "matmul_grouped" if on_device is None else "matmul_ragged"
    engine = engine_for(operation, origin.device, first.dtype, weights.scheme, backend)
    with arrays.device_scope(origin):
        read, biases, bias_dtype = (*first.read, *weights.read), None, "float32"
        if bias is not None:
            shape = (len(weights.members), weights.cols)
            biases, bias_dtype, place = addend(bias, "bias", shape, origin)
            read = (*read, place)
        result, returned = result_of(out, (*lead, weights.cols), name, origin, read)
        flat = result.reshape(-1, weights.cols) if result.size else result
        if on_device is not None:
            if len(on_device) != len(weights.members) + 1:
                raise ShapeError(
                    f"row_offsets has {len(on_device)} numbers, {len(weights.members)} members "
                    f"take {len(weights.members) + 1}"
                )
            if out is None:
                result[...] = 0
            if result.size:
                assert isinstance(first.operand, FloatOperand)
                engine.matmul_ragged(
                    RaggedMatmulJob(
                        first.operand, weights.members, on_device, flat, name, factor, biases,
                        bias_dtype,
                    )
                )  # fmt: skip
        else:
            covered = rows.offsets[0] == 0 and rows.offsets[-1] == len(flat)
            if out is None and not covered:
                result[...] = 0
            if result.size:
                jobs = _jobs(rows, weights, flat, (name, factor, biases, bias_dtype))
                engine.matmul_grouped(jobs)
        return arrays.emit(result, name, origin) if returned is None else returned


def _jobs(
    rows: Rows, weights: Weights, flat: Any, rest: tuple[str, float, Any, str]
) -> tuple[MatmulJob, ...]:
    """The products of the members that have rows."""
    name, factor, biases, bias_dtype = rest
    return tuple(
        MatmulJob(
            operand,
            weights.members[number],
            flat[rows.offsets[number] : rows.offsets[number + 1]],
            name,
            factor,
            None if biases is None else biases[number],
            bias_dtype,
        )
        for number, operand in enumerate(rows.members)
        if operand.rows
    )


def _weights(b: Any) -> Weights:
    """Opens the weights.

    Raises:
        OptionError: for none, or weights that are not alike.
        ShapeError: for shapes that cannot be members.
    """
    if isinstance(b, QuantizedTensor):
        if len(b.shape) != 3 or b.scheme.direction == "columnwise":
            raise ShapeError(
                f"b is one {b.scheme.direction} tensor of shape {b.shape}; it must be rowwise "
                "(n, N, K), or a sequence of n tensors"
            )
        if b.scale_layout != "linear":
            raise OptionError(
                f"the scales of one tensor (n, N, K) in layout {b.scale_layout} are tiled across "
                "members: use linear scales, a sequence of tensors or a GroupedTensor"
            )
        opened = open_quantized(b)
        return _stack(opened, b.shape[0])
    if isinstance(b, PreparedTensor):
        b = [b[number] for number in range(len(b))]
    if not isinstance(b, (GroupedTensor, list, tuple)):
        raise OptionError(
            f"b is a {type(b).__name__}; it must be a QuantizedTensor (n, N, K), a sequence of "
            "QuantizedTensors or a GroupedTensor"
        )
    members = []
    for number, one in enumerate(b):
        if not isinstance(one, (QuantizedTensor, PreparedTensor)):
            raise OptionError(f"b[{number}] is a {type(one).__name__}, not a QuantizedTensor")
        members.append(open_weights(one))
    if not members:
        raise OptionError("b has no members; a group has at least one weight")
    first = members[0]
    for number, one in enumerate(members):
        if (one.scheme, one.operand.rows, one.operand.depth, len(one.lead)) != (
            first.scheme, first.operand.rows, first.operand.depth, 1,
        ):  # fmt: skip
            raise OptionError(
                f"b[{number}] is {one.operand.rows} x {one.operand.depth} as {one.scheme!r}, b[0] "
                f"{first.operand.rows} x {first.operand.depth} as {first.scheme!r}: the weights of "
                "a group have two axes and are alike"
            )
        same_device(first.origin, one.origin, ("b[0]", f"b[{number}]"))
    operands: Any = tuple(one.operand for one in members)
    read = tuple(place for one in members for place in one.read)
    return Weights(operands, first.operand.rows, first.origin, read, first.scheme)


def _stack(opened: Opened, count: int) -> Weights:
    """The members of one tensor: views of its arrays."""
    whole = opened.operand
    assert isinstance(whole, QuantizedOperand)
    if not count:
        raise OptionError("b has no members; a group has at least one weight")
    rows, level, grid = whole.rows // count, whole.level, whole.grid_scale
    if grid is not None and rows % 128:
        raise ShapeError(f"blocks of 128 rows go across members of {rows} rows")
    levels = 0 if level is None else level.size
    if levels > 1 and levels % count:
        raise ShapeError(f"{levels} second-level scales do not divide {count} members")
    members = []
    for number in range(count):
        part = slice(number * rows, (number + 1) * rows)
        own = None if level is None else level
        if level is not None and levels > 1:
            own = level[number * (levels // count) : (number + 1) * (levels // count)]
        scales = whole.block_scale
        members.append(
            whole._replace(
                rows=rows,
                packed=whole.packed[part],
                block_scale=None if scales is None else scales[part],
                grid_scale=None if grid is None else grid[part.start // 128 : -(-part.stop // 128)],
                level=own,
            )
        )
    return Weights(tuple(members), rows, opened.origin, opened.read, opened.scheme)


def _device_offsets(row_offsets: Any, origin: Origin) -> Any:
    """Offsets that lie on the GPU, raw; None for those on the host."""
    if row_offsets is None or isinstance(row_offsets, (list, tuple)):
        return None
    if origin.device_kind == "cpu" or not hasattr(row_offsets, "__dlpack__"):
        return None
    return ingest_integers(row_offsets, "row_offsets", origin)


def _rows_of_array(
    a: Opened, weights: Weights, first_dims: Sequence[int] | None, row_offsets: Any
) -> Rows:
    """The members of a float array.

    Raises:
        OptionError: for sizes that are missing.
        ShapeError: for sizes that do not fit.
    """
    count, total = len(weights.members), a.operand.rows
    if first_dims is None and row_offsets is None:
        if len(a.lead) != 2 or a.lead[0] != count:
            raise OptionError(
                f"a has shape {(*a.lead, a.operand.depth)} for {count} members; pass (n, M, K), "
                "or first_dims or row_offsets with their rows"
            )
        offsets = tuple(range(0, total + 1, a.lead[1])) if a.lead[1] else (0,) * (count + 1)
    elif row_offsets is not None:
        offsets = tuple(int(one) for one in host_integers(row_offsets, "row_offsets"))
    else:
        assert first_dims is not None
        sizes = [int(one) for one in host_integers(first_dims, "first_dims")]
        offsets = tuple(accumulate(sizes, initial=0))
    if len(offsets) != count + 1:
        raise ShapeError(f"{len(offsets) - 1} sizes are given for {count} members")
    if (
        offsets[0] < 0
        or offsets[-1] > total
        or any(one > other for one, other in pairwise(offsets))
    ):
        raise ShapeError(f"members begin at rows {offsets} of {total}: they must rise within them")
    assert isinstance(a.operand, FloatOperand)
    data, dtype = a.operand.data, a.operand.dtype
    members = tuple(FloatOperand(data[begin:end], dtype) for begin, end in pairwise(offsets))
    return Rows(members, offsets)


def _rows_of_group(a: GroupedTensor, weights: Weights) -> tuple[Rows, Opened]:
    """The members of a quantized group, and what stands for them all.

    Raises:
        OptionError: for another number of members, columns, or another rotation.
        ShapeError: for members of several K.
    """
    if a.scheme.direction != "rowwise":
        raise OptionError("a is a columnwise group; its rows are not those of a product")
    if len(a) != len(weights.members):
        raise OptionError(f"a has {len(a)} members, b {len(weights.members)}")
    if len({cols for _, cols in a.dims}) > 1:
        raise ShapeError(f"the members of a have several K: {sorted({k for _, k in a.dims})}")
    check_rotation(a.scheme, weights.scheme)
    opened = [open_quantized(one) for one in a]
    read = tuple(place for one in opened for place in one.read)
    offsets = tuple(accumulate((rows for rows, _ in a.dims), initial=0))
    first = opened[0]._replace(read=read, dtype=a.source_dtype, scheme=a.scheme)
    return Rows(tuple(one.operand for one in opened), offsets), first
