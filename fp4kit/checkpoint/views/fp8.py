# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Weights of one byte, decoded to float32: value of the code times scale, rounded once to binary32.

A weight `M.weight` in FP8 has its scale in `M.weight_scale_inv` (DeepSeek and transformers; it
multiplies despite the name), `M.weight_scale` (compressed-tensors, ModelOpt, ComfyUI), `M.scale`
(DeepSeek-V4), `M.scale_weight` (ComfyUI's older files) or `M.qscale_weight` (Mistral). What it
spans follows from the two shapes: the tensor, each expert, each row, or blocks of rows and columns.
Files that were only cast to FP8 have no scale; that is taken only where it is asked for, as a scale
may also be lost. Integers count as weights where ComfyUI's marker says what they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace as with_changes
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4kit.checkpoint.read.code_names import (
    COMFY_FORMATS,
    ELEMENTS,
    EXPONENT_SCALES,
    FLOATS,
    FOREIGN,
    WEIGHT,
    is_block_scale,
    is_marker,
    scale_names,
)
from fp4kit.cpu.matrices import decode_float8
from fp4kit.errors import FileFormatError
from fp4kit.formats import GRANULARITIES, GRID_BLOCK, MXFP8
from fp4kit.io.containers import DTYPES
from fp4kit.io.read.source import Source, SourceTensor
from fp4kit.io.stream.chunks import rows_of
from fp4kit.scheme import Scheme, as_scheme

from .base import (
    READ_BYTES,
    Bytes,
    RowView,
    TensorView,
    ViewOptions,
    described,
    fetch,
    fetch_scales,
    where,
)

_SIGNED = np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32)
TABLES = {dtype: spec.values for dtype, spec in ELEMENTS.items()} | {"I8": _SIGNED}
#: Formats of fp4kit's own whose codes these are.
FORMATS = {"F8_E4M3": "fp8", "F8_E5M2": "fp8_e5m2"}
UNSCALED_OPTION = "--unscaled-fp8"
DEFAULT_BLOCK = (GRID_BLOCK, GRID_BLOCK)


@dataclass(frozen=True)
class Grid:
    """How the scales of a weight (matrices, O, I) are spread over it.

    Attributes:
        rows: rows of a matrix that share a scale.
        cols: columns that share a scale.
        row_count: rows of scales per matrix.
        col_count: scales in a row of them.
        matrix_rows: rows of a matrix.
        note: what it is called.
    """

    rows: int
    cols: int
    row_count: int
    col_count: int
    matrix_rows: int
    note: str


def _block_counts(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """Blocks along the rows and columns of a matrix, or of each of several."""
    return -(-shape[-2] // block[0]), -(-shape[-1] // block[1])


def _blocks(
    shape: tuple[int, ...], scale: tuple[int, ...], block: tuple[int, int], note: str
) -> Grid | None:
    """The grid of `block`, if that is what the scale's shape is."""
    rows = shape[-2]
    count = _block_counts(shape, block)
    if scale != (*shape[:-2], *count):
        return None
    return Grid(*block, *count, rows, note)


def grid_of(
    shape: tuple[int, ...], scale: tuple[int, ...], exponents: bool, block: tuple[int, int]
) -> Grid | None:
    """How scales of one shape are spread over a weight of another, None if they do not fit.

    Where two readings fit, they mean the same values.

    Args:
        shape: of the weight (.., O, I).
        scale: of the scale.
        exponents: the scale holds E8M0 bytes.
        block: rows and columns of a block.
    """
    if prod(scale) == 1 and len(scale) <= max(len(shape), 1):
        rows = rows_of(shape)
        return Grid(max(rows, 1), max(prod(shape[-1:]), 1), 1, 1, max(rows, 1), "scale per tensor")
    if len(shape) < 2:
        return None
    if len(scale) == len(shape) + 2 and scale[-3::2] == (1, 1):
        scale = (*scale[:-3], scale[-2])  # ModelOpt's blocks: [O / 128, 1, I / 128, 1]
    rows, cols = shape[-2:]
    if exponents:
        found = _blocks(shape, scale, (1, MXFP8.block_size), "MXFP8 blocks of 32")
        if found is not None:
            return found
    else:
        if scale in (shape[:-1], (*shape[:-1], 1)):
            return Grid(1, max(cols, 1), rows, 1, rows, "scale per channel")
        if len(shape) > 2 and scale in (shape[:-2], (*shape[:-2], 1, 1)):
            return Grid(max(rows, 1), max(cols, 1), 1, 1, rows, "scale per expert")
    return _blocks(shape, scale, block, f"FP8 blocks of {block[0]} x {block[1]}")


class Fp8View(RowView):
    """A weight of one byte times its scales, as float32."""

    def __init__(
        self, source: Source, weight: SourceTensor, scale: SourceTensor | None, grid: Grid
    ) -> None:
        """Shows a weight."""
        self._source = source
        self._scale = scale
        self._grid = grid
        self._dtype = weight.spec.dtype
        self._table = TABLES[weight.spec.dtype]
        self.consumed = (weight.name,) if scale is None else (weight.name, scale.name)
        self.tensor = described(
            weight.name,
            "F32",
            weight.spec.shape,
            weight.stored + (0 if scale is None else scale.stored),
            f"{DTYPES[weight.spec.dtype].name}, {grid.note}, decoded",
        )

    def _scales(self, first: int, last: int) -> NDArray[np.float32]:
        """Rows of scales, as float32."""
        shape = (last - first, self._grid.col_count)
        if self._scale is None:
            return np.ones(shape, np.float32)
        return fetch_scales(self._source, self._scale, first * shape[1], shape)

    @property
    def scheme(self) -> Scheme | None:
        """What the stored bytes are as a format of fp4kit's own, None if they are none.

        Scales in bfloat16 and float16 are float32 numbers as well.
        """
        format = FORMATS.get(self._dtype)
        if format is None or self._scale is None or self._scale.spec.dtype not in FLOATS:
            return None
        grid, shape, scales = self._grid, self.tensor.spec.shape, self._scale.spec.shape
        granularity = None
        if len(shape) == 2 and scales == _block_counts(shape, DEFAULT_BLOCK):
            granularity = "block"
        elif prod(scales) == 1:
            granularity = "tensor"
        elif (grid.rows, grid.col_count) == (1, 1):
            granularity = "channel"
        return None if granularity is None else as_scheme(format, {"granularity": granularity})

    @property
    def granularities(self) -> frozenset[str]:
        """What may share a scale of it: a finer grid repeats the one scale of a tensor."""
        grid = self._grid
        if self._scale is None or self._dtype not in FORMATS or len(self.tensor.spec.shape) != 2:
            return frozenset()
        if prod(self._scale.spec.shape) == 1:
            return frozenset(GRANULARITIES)
        names = {"channel": (grid.rows, grid.col_count) == (1, 1)}
        names["block"] = (grid.rows, grid.cols) == DEFAULT_BLOCK
        return frozenset(name for name, fits in names.items() if fits)

    @property
    def format(self) -> str:
        """The format of fp4kit's own whose codes these are; "" if they are none."""
        return FORMATS.get(self._dtype, "")

    def code_rows(
        self, first: int, last: int, granularity: str
    ) -> tuple[Bytes, NDArray[np.float32]]:
        """Codes of some rows as they are stored, and the scales of a granularity."""
        rows, cols = self.tensor.spec.shape
        codes = np.empty((last - first, cols), np.uint8)
        fetch(self._source, self.tensor.name, first * cols, codes)
        step = {"block": GRID_BLOCK, "channel": 1}.get(granularity, rows)
        span = first // step, -(-last // step)
        assert self._scale is not None
        if prod(self._scale.spec.shape) > 1:
            return codes, self._scales(*span)
        width = -(-cols // GRID_BLOCK) if granularity == "block" else 1
        return codes, np.full((span[1] - span[0], width), self._scales(0, 1)[0, 0])

    def codes(self) -> tuple[Bytes, NDArray[np.float32]]:
        """All codes as they are stored and all scales as float32, flat."""
        assert self._scale is not None
        codes = np.empty(prod(self.tensor.spec.shape), np.uint8)
        fetch(self._source, self.tensor.name, 0, codes)
        return codes, fetch_scales(self._source, self._scale, 0, (prod(self._scale.spec.shape),))

    def check(self) -> None:
        """Looks at every scale."""
        if self._scale is not None:
            count = prod(self._scale.spec.shape) // max(self._grid.col_count, 1)
            step = max(READ_BYTES // (4 * max(self._grid.col_count, 1)), 1)
            for first in range(0, count, step):
                self._scales(first, min(first + step, count))

    def rows(self, first: int, last: int, out: Bytes) -> None:  # noqa: D102
        grid = self._grid
        matrix, row = np.divmod(np.arange(first, last), grid.matrix_rows)
        scale_row = matrix * grid.row_count + row // grid.rows
        begin = int(scale_row[0])
        scales = self._scales(begin, int(scale_row[-1]) + 1)
        codes = np.empty((last - first, out.shape[1] // 4), np.uint8)
        fetch(self._source, self.tensor.name, first * codes.shape[1], codes)
        result = out.view(np.float32)
        decode_float8(codes, self._table, scales, scale_row - begin, grid.cols, result)


def configured_block(source: Source, config: dict[str, Any]) -> tuple[int, int]:
    """The block that config.json names, or 128 x 128."""
    quantization = config.get("quantization_config")
    block: object = None
    if isinstance(quantization, dict):
        block = quantization.get("weight_block_size")
        groups = quantization.get("config_groups")
        for group in groups.values() if isinstance(groups, dict) else ():
            weights = group.get("weights") if isinstance(group, dict) else None
            if block is None and isinstance(weights, dict):
                block = weights.get("block_structure")
    if block is None:
        return DEFAULT_BLOCK
    if isinstance(block, list) and len(block) == 2:
        rows, cols = block
        if type(rows) is int and type(cols) is int and rows > 0 and cols > 0:
            return rows, cols
    raise FileFormatError(
        f"{source.path}: config.json: the FP8 block {block!r} is not [rows, columns]"
    )


def _scale_of(source: Source, name: str, *, unscaled: bool) -> SourceTensor | None:
    """The scale of a weight, None if it may have none."""
    dtype = source.tensors[name].spec.dtype
    names = scale_names(name)
    found = [source.tensors[scale] for scale in names if scale in source.tensors]
    if len(found) > 1:
        both = ", ".join(repr(scale.name) for scale in found)
        raise FileFormatError(
            f"{where(source, name)} is {dtype} and has two scales, {both}; remove the wrong one"
        )
    if not found and not (unscaled and dtype in ELEMENTS):
        plain = (
            f". If the file was only cast to FP8, pass {UNSCALED_OPTION}"
            if dtype in ELEMENTS
            else ""
        )
        raise FileFormatError(
            f"{where(source, name)} is {dtype} and has no scale: neither {names[0]!r} nor "
            f"{names[1]!r} is there, nor one of another dialect. Complete the checkpoint (perhaps "
            f"a shard is missing){plain}"
        )
    return found[0] if found else None


def _view(
    source: Source, weight: SourceTensor, block: tuple[int, int], *, unscaled: bool
) -> Fp8View:
    name, shape = weight.name, weight.spec.shape
    scale = _scale_of(source, name, unscaled=unscaled)
    if scale is None:
        grid = grid_of(shape, (), False, block)
        assert grid is not None, "one scale fits every shape"
        return Fp8View(source, weight, None, with_changes(grid, note="cast without a scale"))
    dtype = scale.spec.dtype
    if dtype not in FLOATS + EXPONENT_SCALES:
        raise FileFormatError(
            f"{where(source, scale.name)} is {dtype}; the scale of an FP8 weight must be one of "
            f"{', '.join(FLOATS + EXPONENT_SCALES)}"
        )
    grid = grid_of(shape, scale.spec.shape, dtype in EXPONENT_SCALES, block)
    if grid is None:
        raise FileFormatError(
            f"{where(source, scale.name)} has shape {list(scale.spec.shape)}, which fits a weight "
            f"of shape {list(shape)} neither per tensor, per channel nor in blocks of {block[0]} x "
            f"{block[1]}; check weight_block_size in config.json"
        )
    return Fp8View(source, weight, scale, grid)


def find_views(source: Source, options: ViewOptions) -> list[TensorView]:
    """Views of every FP8 weight, and of integers whose marker says what they are."""
    block = configured_block(source, options.config)
    views: list[TensorView] = []
    for name, tensor in source.tensors.items():
        dtype = tensor.spec.dtype
        without = not any(scale in source.tensors for scale in scale_names(name))
        if (dtype in FOREIGN or (without and not options.unscaled_fp8)) and options.excluded(name):
            continue
        if dtype in FOREIGN:
            raise FileFormatError(
                f"{where(source, name)} is {dtype}, which cannot be decoded; convert it to F8_E4M3 "
                "or F8_E5M2 first"
            )
        said = options.layers.get(name.removesuffix(WEIGHT)) if name.endswith(WEIGHT) else None
        coded = COMFY_FORMATS.get(said or "")
        if coded is not None and dtype not in (coded, *FLOATS):
            raise FileFormatError(f"{where(source, name)} is {dtype}, its marker says {said}")
        is_float8 = dtype in ELEMENTS and not is_block_scale(source, name)
        if (is_float8 and not is_marker(name)) or dtype == coded == "I8":
            views.append(_view(source, tensor, block, unscaled=options.unscaled_fp8))
    return views
