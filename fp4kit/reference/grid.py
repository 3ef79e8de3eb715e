# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""FP8 elements under float32 scales of a tensor, of channels or of blocks: the ground truth.

All arithmetic is binary32, one rounding per operation in the order written. `a` is the amax of what
shares a scale, NaN ignored and infinity counted as the largest finite number of the input's type;
`max` is the largest element, 448 or 57344; r rounds to the input's type (float32: not at all).

- modelopt: `s = a / max`, `code = E4M3(r(x / s))`
- compressed-tensors: `s = r(a / max)`, `code = E4M3(r(x / s))`
- deepseek: `s = a / max`, `code = E4M3(x / s)`

Where s is 0 or no number it becomes 1, in compressed-tensors the epsilon of the input's type: zeros
have codes of zero then. A given scale that is not above 0 and finite counts as 1. Encoding
saturates, NaN becomes the NaN code. An element is code * s.
Sources: compressed_tensors/quantization/utils/helpers.py (calculate_qparams) and
lifecycle/forward_helpers.py (_quantize); modelopt/torch/export/quant_utils.py
(get_scaling_factor, to_quantized_weight); DeepSeek-V3 inference/kernel.py (act_quant).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fp4kit.backend.grid import GridBackend
from fp4kit.backend.interface import Job, Plan, RawArray
from fp4kit.backend.operations import Operations
from fp4kit.float_mode import computes_by_ieee
from fp4kit.formats import ElementType, GridRecipe

from . import codecs, scaling
from .backend import ReferenceBackend

Floats = NDArray[np.float32]
#: (largest finite number, epsilon) of each input type.
LIMITS: dict[str, tuple[np.float32, np.float32]] = {
    "float32": (np.float32(np.finfo(np.float32).max), np.float32(2.0**-23)),
    "float16": (np.float32(65504), np.float32(2.0**-10)),
    "bfloat16": (np.float32(2.0**127 * (2 - 2.0**-7)), np.float32(2.0**-7)),
}


def zero_scale(recipe: GridRecipe, dtype: str) -> np.float32:
    """The scale of what has no usable one."""
    return LIMITS[dtype][1] if recipe.zero_is_epsilon else scaling.ONE


def scales_of(amax: Floats, recipe: GridRecipe, element: ElementType, dtype: str) -> Floats:
    """Scales from amaxes, for input of an element type."""
    with scaling.quiet():
        capped = np.minimum(amax, LIMITS[dtype][0])
        scale: Floats = (capped / np.float32(element.max)).astype(np.float32)
        if recipe.rounds_scale:
            scale = codecs.round_to(scale, dtype)
        usable = (scale > 0) & np.isfinite(scale)
    return np.where(usable, scale, zero_scale(recipe, dtype)).astype(np.float32)


def amaxes(plan: Plan, values: Floats) -> Floats:
    """float32 (plan.scale_shape): the largest magnitude of what shares each scale, NaN ignored."""
    assert plan.grid is not None
    rows, cols = plan.grid
    magnitudes = np.abs(values)
    known = np.where(np.isnan(magnitudes), np.float32(0), magnitudes)
    of_rows = np.maximum.reduceat(known, np.arange(0, plan.rows, rows), axis=0)
    result: Floats = np.maximum.reduceat(of_rows, np.arange(0, plan.cols, cols), axis=1)
    return result


def spread(plan: Plan, scale: Floats) -> Floats:
    """The scale of each element, (rows, cols)."""
    assert plan.grid is not None
    rows, cols = plan.grid
    of_rows = np.repeat(scale.reshape(plan.scale_shape), rows, axis=0)[: plan.rows]
    result: Floats = np.repeat(of_rows, cols, axis=1)[:, : plan.cols]
    return result


@computes_by_ieee(Operations)
class ReferenceGridBackend(GridBackend, ReferenceBackend):
    """The reference for formats with float32 scales."""

    def second_level(self, amax: RawArray, plan: Plan, dtype: str) -> RawArray:
        return scales_of(amax, plan.grid_recipe, plan.format.element, dtype)

    def _fill(self, job: Job) -> None:
        plan, recipe, element = job.plan, job.plan.grid_recipe, job.plan.format.element
        values = codecs.to_float32(job.x, job.dtype)
        if job.second is None:
            job.block_scale[...] = scales_of(amaxes(plan, values), recipe, element, job.dtype)
        else:
            job.block_scale[...] = scaling.usable(job.second).reshape(plan.scale_shape)
        with scaling.quiet():
            quotient = values / spread(plan, job.block_scale)
            if recipe.rounds_quotient:
                quotient = codecs.round_to(quotient, job.dtype)
            job.packed[...] = codecs.encode(quotient, element)

    def dequantize(self, job: Job, out: RawArray, dtype: str) -> None:
        with scaling.quiet():
            values = codecs.decode(job.packed, job.plan.format.element)
            values = values * spread(job.plan, job.block_scale)
            out[...] = codecs.from_float32(values, dtype)
