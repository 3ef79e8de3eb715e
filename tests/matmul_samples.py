# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Operands of products for tests, and what a product may differ from exact arithmetic by."""

from __future__ import annotations

import numpy as np

from fp4kit.backend.matmul import PreparedOperand, QuantizedOperand
from fp4kit.backend.prepared import tile_shape
from fp4kit.formats import get_format
from fp4kit.layout import padded_scale_shape, scale_offsets
from fp4kit.reference import codecs
from fp4kit.reference import matmul as reference
from fp4kit.reference import prepared as reference_prepared

#: Half a unit in the last place, relative.
HALF_ULP = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
#: Half of the smallest subnormal.
HALF_STEP = {"float32": 2.0**-150, "float16": 2.0**-25, "bfloat16": 2.0**-134}


def weights(name, rows, depth, *, layout="linear", low_first=True, seed=0, level=None, **of_level):
    """A quantized operand of every code and of every plain scale byte."""
    rng = np.random.default_rng(seed)
    spec = get_format(name)
    codes = rng.integers(0, 256, (rows, spec.packed_cols(depth)), np.uint8)
    blocks = spec.num_blocks(depth)
    # E8M0: so that sums are neither lost nor infinite, which the bound does not know.
    least, most = (0, 127) if name == "nvfp4" else (100, 136)
    linear = rng.integers(least, most, (rows, blocks)).astype(np.uint8)
    stored = np.zeros(padded_scale_shape(rows, blocks, layout), np.uint8)
    stored.reshape(-1)[scale_offsets(rows, blocks, layout)] = linear
    return QuantizedOperand(
        format=spec,
        rows=rows,
        depth=depth,
        packed=codes,
        block_scale=stored,
        scale_layout=layout,
        low_first=low_first,
        transposed=False,
        grid_scale=None,
        level=level,
        level_name=of_level.get("level_name", "amax"),
        level_range=of_level.get("level_range", 1.0),
    )


def prepared(operand):
    """The same operand in tiles."""
    tiles = np.empty(tile_shape(operand.format, operand.rows, operand.depth), np.uint8)
    job = PreparedOperand(
        *(operand.format, operand.rows, operand.depth, tiles, True),
        *(operand.level, operand.level_name, operand.level_range),
    )
    given = job.weights_job(operand.packed, operand.block_scale)
    given = given._replace(scale_layout=operand.scale_layout, low_first=operand.low_first)
    return job._replace(is_plain=reference_prepared.prepare(given))


def placed(operand, put):
    """An operand with its arrays where `put` puts them."""
    arrays = {
        name: put(value)
        for name, value in operand._asdict().items()
        if isinstance(value, np.ndarray)
    }
    return operand._replace(**arrays)


def values_of(operand):
    """Codes times block scales, float32 (rows, depth)."""
    operand = reference.in_rows(operand)
    step = reference.step_of(operand)
    elements, scales = reference.elements_of(operand, step), reference.scales_of(operand, step)
    if scales is not None:
        elements = elements * scales[:, :, None]
    return elements.reshape(operand.rows, -1)[:, : operand.depth]


def check_product(job, got):
    """That a result is as near to exact arithmetic as the order of its sums allows."""
    with np.errstate(all="ignore"):
        a, b = (values_of(each).astype(np.float64) for each in (job.a, job.b))
        factor = reference.factors(job).astype(np.float64)
        exact, magnitude = a @ b.T * factor, np.abs(a) @ np.abs(b).T * np.abs(factor)
        if job.bias is not None:
            exact = exact + codecs.to_float32(job.bias, job.bias_dtype)
            magnitude = magnitude + np.abs(codecs.to_float32(job.bias, job.bias_dtype))
        if job.c is not None:
            exact = exact + codecs.to_float32(job.c, job.c_dtype)
            magnitude = magnitude + np.abs(codecs.to_float32(job.c, job.c_dtype))
        result = codecs.to_float32(np.asarray(got), job.out_dtype).astype(np.float64)
        bound = (job.a.depth + 8) * 2.0**-23 * magnitude
        bound += HALF_ULP[job.out_dtype] * np.abs(exact) + HALF_STEP[job.out_dtype]
    finite = np.isfinite(exact)
    assert finite.all(), "only for finite results"
    wrong = np.abs(result - exact) > bound
    worst = np.argwhere(wrong)[:4].tolist()
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size} wrong, among them {worst}"
