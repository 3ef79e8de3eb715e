# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Variants on the CPU: plans as the numbers that the kernels take, threads and scale layouts."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from fp4kit.backend.interface import NO_SEED, Backend, Job, Plan, RawArray, Rotation, Seed
from fp4kit.formats import SCALE_RULES
from fp4kit.reference import codecs, scaling
from fp4kit.scheme import SCALE_SEARCHES, SEARCH_ERRORS

from .load import read_only
from .threads import run

#: Sign-cleared bits of everything, and of infinity (NaN lies above), by element type.
MAGNITUDE_AND_INFINITY = {
    "float32": (0x7FFFFFFF, 0x7F800000),
    "float16": (0x7FFF, 0x7C00),
    "bfloat16": (0x7FFF, 0x7F80),
}


@cache
def kernels() -> ModuleType:
    """The quantizing kernels; importing them imports numba."""
    return importlib.import_module("fp4kit.cpu.variant_kernels")


@cache
def decoders() -> ModuleType:
    """The decoding kernels; importing them imports numba."""
    return importlib.import_module("fp4kit.cpu.variant_decode")


@cache
def _kinds() -> ModuleType:
    """The kinds of kernels; importing them imports numba."""
    return importlib.import_module("fp4kit.cpu.kinds")


def elements(x: np.ndarray, dtype: str) -> np.ndarray:
    """Raw (rows, cols) data as flat elements whose type names the element type."""
    tiles = importlib.import_module("fp4kit.cpu.tiles")
    flat = x.reshape(-1)
    if flat.ctypes.data % flat.itemsize:
        flat = flat.copy()
    result: np.ndarray = flat.view(tiles.ELEMENT_TYPES[dtype])
    return result


def how(plan: Plan, dtype: str, seed: Seed = NO_SEED) -> Any:
    """A plan as numbers; see `cpu_variant_kernels.How`."""
    scales = importlib.import_module("fp4kit.cpu.scales")
    scheme, recipe, element = plan.scheme, plan.recipe, plan.format.element
    transposed_scales = plan.is_columnwise and not plan.transposes
    linear = transposed_scales and plan.scale_layout == "linear"
    search = scheme.scale_search
    return kernels().How(
        rows=plan.rows,
        cols=plan.cols,
        columnwise=plan.is_columnwise,
        tiled=scheme.block_shape == "2d",
        size=plan.format.block_size,
        bits=element.bits,
        recipe=recipe.index if recipe is not None else -1,
        rule=SCALE_RULES.index(plan.scale_rule) if plan.scale_rule else 0,
        dtype=scales.DTYPE_INDEX[dtype],
        divides=recipe.divides if recipe is not None else False,
        keeps_zero=recipe.keeps_negative_zero if recipe is not None else True,
        low_first=plan.nibble_order == "low_first",
        mantissa_bits=element.mantissa_bits,
        bias=element.bias,
        largest_code=np.float32(element.max),
        max_exponent=element.max_exponent,
        has_second=plan.has_second_level,
        per_scale=plan.rows_per_scale,
        largest=scaling.second_level_range(scheme.e4m3_max),
        per_token=scheme.second_level == "per_token",
        search=SCALE_SEARCHES.index(search) + 1 if search is not None else 0,
        error=SEARCH_ERRORS.index(scheme.search_error) if scheme.search_error is not None else 0,
        rotated=scheme.rht is not None,
        mask=scheme.rht or 0,
        to_bfloat=scheme.rht_rounding == "bf16",
        stochastic=scheme.rounding == "stochastic",
        key=np.uint64(seed[0]),
        stream=seed[1],
        scale_vector=1 if linear else plan.blocks,
        scale_block=plan.cols if linear else 1,
    )


def _words(packed: np.ndarray) -> np.ndarray:
    """Packed codes as a flat array whose words of 32 bits can be written, or a new one."""
    flat = packed.reshape(-1)
    if flat.size % 4 or flat.ctypes.data % 4:
        return np.empty(-(-flat.size // 4) * 4, np.uint8)
    return flat


class Target:
    """Where a plan's codes and scales go: the outputs, or buffers that are copied to them."""

    def __init__(self, plan: Plan, packed: np.ndarray, block_scale: np.ndarray) -> None:
        self.plan, self.packed, self.block_scale = plan, packed, block_scale
        self.codes = _words(packed)
        linear = plan.scale_layout == "linear"
        shape = (plan.vectors, plan.blocks)
        self.scales = block_scale if linear else np.empty(shape, np.uint8)

    def finish(self, backend: Any) -> None:
        """Copies what was buffered, and swizzles the scales."""
        if self.codes.base is None:
            self.packed[...] = self.codes[: self.packed.size].reshape(self.packed.shape)
        if self.scales is not self.block_scale:
            backend.swizzle(self.scales, self.plan.scale_layout, self.block_scale)


def quantize(backend: Any, jobs: list[Job]) -> None:
    """`Backend.quantize` of one job, or `quantize_both` of two, reading the array once."""
    first = jobs[0]
    module, flat = kernels(), read_only(elements(first.x, first.dtype))
    targets = [Target(job.plan, job.packed, job.block_scale) for job in jobs]
    number = [0, len(jobs) - 1]
    none = read_only(np.empty(0, np.float32))
    scales = [
        none if job.second is None else read_only(np.ascontiguousarray(job.second)) for job in jobs
    ]
    arguments = (
        len(jobs),
        tuple(how(jobs[i].plan, first.dtype, first.seed) for i in number),
        tuple(scales[i] for i in number),
        tuple(targets[i].codes.view(np.uint32) for i in number),
        tuple(targets[i].codes for i in number),
        tuple(targets[i].scales.reshape(-1) for i in number),
    )
    each_panel(
        first.plan, flat, True, lambda x, row, col: module.quantize_panel(x, row, col, *arguments)
    )
    for target in targets:
        target.finish(backend)


def dequantize(backend: Any, job: Job, out: np.ndarray, dtype: str) -> None:
    """`Backend.dequantize` of a columnwise plan."""
    plan, byte = job.plan, job.block_scale
    module, facts = decoders(), how(plan, dtype)._replace(recipe=_kinds().recipe_number(plan))
    if plan.scale_layout != "linear":
        byte = np.empty((plan.vectors, plan.blocks), np.uint8)
        backend.unswizzle(job.block_scale, plan.scale_layout, byte)
    codes, recipe = job.packed.reshape(-1), plan.recipe
    if codes.size % 4 or codes.ctypes.data % 4:
        codes = np.concatenate([codes, np.zeros(-codes.size % 4, np.uint8)])
    given = np.empty(0, np.float32) if job.second is None else np.ascontiguousarray(job.second)
    arguments = (
        read_only(codes.view(np.uint32)),
        read_only(codes),
        read_only(byte.reshape(-1)),
        read_only(given),
        recipe.decodes_negative_zero if recipe is not None else True,
        plan.format.element.values,
    )
    fill_panels(
        plan.rows, plan.cols, None, out, dtype,
        lambda panel, row, col: module.decode_panel(facts, row, col, *arguments, panel),
    )  # fmt: skip


def rotate(x: np.ndarray, dtype: str, rotation: Rotation, out: np.ndarray, out_dtype: str) -> None:
    """`Backend.rotate`."""
    columns, to_bfloat = rotation.direction == "columnwise", rotation.rounding == "bf16"
    module, (rows, cols) = decoders(), x.shape
    height, width = kernels().PANEL_ROWS, kernels().PANEL_COLS

    def work(panel: np.ndarray, row: int, col: int) -> None:
        shape = (min(height, rows - row), min(width, cols - col))
        module.rotate_panel(panel, *shape, columns, rotation.mask, to_bfloat, rotation.inverse)

    fill_panels(rows, cols, read_only(elements(x, dtype)), out, out_dtype, work)


def fill_panels(
    rows: int,
    cols: int,
    source: np.ndarray | None,
    out: np.ndarray,
    dtype: str,
    work: Callable[[np.ndarray, int, int], None],
) -> None:
    """Fills `out` panel by panel with what work(panel, row, column) leaves in the panel.

    The panel holds the elements of `source` before, if there is one.
    """
    module, height, width = decoders(), kernels().PANEL_ROWS, kernels().PANEL_COLS
    whole = out if out.ctypes.data % out.itemsize == 0 else np.empty(out.shape, out.dtype)
    result, across = elements(whole, dtype), -(-cols // width)

    def some(begin: int, end: int) -> None:
        panel = np.empty(height * width, np.float32)
        for number in range(begin, end):
            row, col = number // across * height, number % across * width
            if source is not None:
                kernels().widen_panel(source, rows, cols, row, col, panel)
            work(panel, row, col)
            module.narrow_panel(panel, rows, cols, row, col, result)

    run(some, -(-rows // height) * across, height * width)
    if whole is not out:
        out[...] = whole


def plan_amax(plan: Plan, x: np.ndarray, dtype: str) -> np.ndarray:
    """`Backend.plan_amax`."""
    rotated = plan.scheme.rht is not None
    vectors = np.zeros(plan.vectors, np.float32)
    if x.size:
        vectors = rotated_amaxes(plan, x, dtype) if rotated else vector_amaxes(plan, x, dtype)
    values = vectors.reshape(plan.scales, -1)
    largest: np.ndarray = values.max(axis=1, initial=np.float32(0))
    return largest


def vector_amaxes(plan: Plan, x: np.ndarray, dtype: str) -> np.ndarray:
    """float32 amax of each row or column, NaN ignored, from the bits of the elements."""
    encode = importlib.import_module("fp4kit.cpu.encode")
    data = read_only(x.reshape(-1).view(np.uint32 if dtype == "float32" else np.uint16))
    number: Any = data.dtype.type
    mask, infinity = (number(n) for n in MAGNITUDE_AND_INFINITY[dtype])
    out, rows, cols = np.zeros(plan.vectors, data.dtype), plan.rows, plan.cols
    if plan.is_columnwise:
        run(
            lambda b, e: encode.column_magnitudes(data, b, e, rows, cols, mask, infinity, out),
            cols,
            rows,
        )
    else:
        run(lambda b, e: encode.row_magnitudes(data, b, e, cols, mask, infinity, out), rows, cols)
    return codecs.to_float32(out if dtype == "bfloat16" else out.view(dtype), dtype)


def rotated_amaxes(plan: Plan, x: np.ndarray, dtype: str) -> np.ndarray:
    """float32 amax of each row or column after the plan's rotation, NaN ignored."""
    vectors = np.zeros(plan.vectors, np.uint32)
    # Amaxes are those of vectors, whatever shares a block scale.
    module, facts = kernels(), how(plan, dtype)._replace(tiled=False)
    # Panels that share vectors are left to one thread.
    each_panel(
        plan,
        read_only(elements(x, dtype)),
        False,
        lambda panel, row, col: module.amax_panel(panel, row, col, facts, vectors),
    )
    return vectors.view(np.float32)


def each_panel(
    plan: Plan, x: np.ndarray, free: bool, work: Callable[[np.ndarray, int, int], None]
) -> None:
    """Calls work(panel, row, column) for each panel of an array, on all cores.

    Args:
        plan: rows, columns and direction.
        x: flat elements.
        free: whether any panels may be worked on at once; otherwise only those that share no
            vector of the plan.
        work: gets float32 elements in rows of PANEL_COLS, releases the GIL.
    """
    module = kernels()
    height, width = module.PANEL_ROWS, module.PANEL_COLS
    down, across = -(-plan.rows // height), -(-plan.cols // width)
    units, inside = down * across, 1
    if not free:
        units, inside = (across, down) if plan.is_columnwise else (down, across)

    def some(begin: int, end: int) -> None:
        panel = np.empty(height * width, np.float32)
        for number in range(begin * inside, end * inside):
            i, j = divmod(number, across)
            if not free and plan.is_columnwise:
                j, i = divmod(number, down)
            row, col = i * height, j * width
            module.widen_panel(x, plan.rows, plan.cols, row, col, panel)
            work(panel, row, col)

    run(some, units, inside * height * width)


def as_rows(
    plan: Plan, x: np.ndarray, packed: np.ndarray, byte: np.ndarray
) -> tuple[Plan, np.ndarray, np.ndarray, np.ndarray]:
    """A columnwise tensor as the rowwise one of the transpose: plan, array, codes, scales."""
    scheme = plan.scheme.replace(direction="rowwise", scale_layout="linear")
    rowwise = replace(plan, rows=plan.cols, cols=plan.rows, scheme=scheme)
    codes = packed if plan.transposes else np.ascontiguousarray(packed.T)
    return rowwise.decoding, np.ascontiguousarray(x.T), codes, np.ascontiguousarray(byte)


class VariantOperations(Backend):
    """The operations of a backend that only variants need."""

    def quantize_both(self, rowwise: Job, columnwise: Job) -> None:
        quantize(self, [rowwise, columnwise])

    def rotate(
        self, x: RawArray, dtype: str, rotation: Rotation, out: RawArray, out_dtype: str
    ) -> None:
        rotate(x, dtype, rotation, out, out_dtype)

    def plan_amax(self, plan: Plan, x: RawArray, dtype: str) -> RawArray:
        if plan.has_plain_amax:
            return self.amax(x, dtype, 1)
        return plan_amax(plan, x, dtype)
