# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Operands of products for tests of backends, and the bound that a sum in float32 keeps.

Run as a program it prints hashes of many products of the CPU backend: the environment decides the
processor that kernels are compiled for, and the number of threads.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np

from fp4kit.backend.matmul import FloatOperand, MatmulJob, Operand, QuantizedOperand
from fp4kit.formats import ALL_FORMATS, GRID_BLOCK, SCALE_LAYOUTS
from fp4kit.layout import padded_scale_shape
from fp4kit.reference import matmul as reference
from fp4kit.reference import scaling

#: Sums of magnitudes below this overflow in no order.
LARGEST_SUM = 2.0**127
RAW = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
#: Half a unit in the last place of an output, relative and (for subnormal results) absolute.
HALF_ULP = {
    "float32": (2.0**-24, 2.0**-150),
    "float16": (2.0**-11, 2.0**-25),
    "bfloat16": (2.0**-8, 2.0**-134),
}


def floats(shape: tuple[int, ...], dtype: str, rng: Any, *, spread: float = 1.0) -> np.ndarray:
    """Normal numbers as a backend gets them."""
    x = rng.standard_normal(shape, np.float32) * np.float32(spread)
    return (
        x.astype(ml_dtypes.bfloat16).view(np.uint16)
        if dtype == "bfloat16"
        else x.astype(RAW[dtype])
    )


def float_operand(rows: int, depth: int, dtype: str, rng: Any) -> FloatOperand:
    """A matrix of normal numbers."""
    return FloatOperand(floats((rows, depth), dtype, rng), dtype)


def quantized(
    name: str,
    rows: int,
    depth: int,
    rng: Any,
    *,
    wild: bool = False,
    grid: bool = False,
    **fields: Any,
) -> QuantizedOperand:
    """Random codes; scales of moderate size, or if `wild` any bytes, and any codes too."""
    spec = ALL_FORMATS[name]
    layout, transposed = fields.get("scale_layout", "linear"), fields.get("transposed", False)
    packed = rng.integers(0, 256, (rows, spec.packed_cols(depth)), np.uint8)
    if spec.element.bits == 8 and not wild:
        packed &= 0xBF  # exponents that leave NaN out
    blocks, scale = spec.num_blocks(depth), None
    if not spec.has_scale_grid:
        low, high = (0x30, 0x50) if spec.scale_type == "e4m3" else (120, 130)
        shape = padded_scale_shape(rows, blocks, layout) if rows and blocks else (rows, blocks)
        scale = rng.integers(*((0, 256) if wild else (low, high)), shape, np.uint8)
    numbers = None
    if grid:
        shape = (-(-rows // GRID_BLOCK), -(-depth // GRID_BLOCK))
        numbers = floats(shape, "float32", rng)
    if transposed:
        packed = np.ascontiguousarray(packed.T)
        scale = np.ascontiguousarray(scale.T) if scale is not None and layout == "linear" else scale
        numbers = None if numbers is None else np.ascontiguousarray(numbers.T)
    known = {
        "scale_layout": layout,
        "low_first": True,
        "transposed": False,
        "level": None,
        "level_name": "amax",
        "level_range": 1.0,
    } | fields
    return QuantizedOperand(spec, rows, depth, packed, scale, grid_scale=numbers, **known)


def job_of(a: Operand, b: Operand, out_dtype: str = "float32", **fields: Any) -> MatmulJob:
    """A job with an output of its own."""
    return MatmulJob(a, b, np.zeros((a.rows, b.rows), RAW[out_dtype]), out_dtype, **fields)


def as_float64(array: np.ndarray, dtype: str) -> np.ndarray:
    """Raw elements as float64."""
    if dtype == "bfloat16":
        array = array.view(ml_dtypes.bfloat16)
    return array.astype(np.float64)


def values_of(operand: Operand) -> np.ndarray:
    """Codes times block scales in float64, (rows, depth); infinite where float32 holds no more."""
    step = reference.step_of(operand)
    elements = reference.elements_of(operand, step)
    scales = reference.scales_of(operand, step)
    with scaling.quiet():
        if scales is not None:
            elements = elements * scales[:, :, None]
    return elements.reshape(operand.rows, -1)[:, : operand.depth].astype(np.float64)


def assert_close(job: MatmulJob) -> None:
    """The output is within what sums of float32 in any order may differ by, and NaN where it is."""
    with scaling.quiet():
        a, b = (values_of(one) for one in (job.a, job.b))
        factor = reference.factors(job).astype(np.float64)
        exact, size = factor * (a @ b.T), np.abs(factor) * (np.abs(a) @ np.abs(b).T)
        for array, dtype in ((job.bias, job.bias_dtype), (job.c, job.c_dtype)):
            if array is not None:
                exact, size = (
                    exact + as_float64(array, dtype),
                    size + np.abs(as_float64(array, dtype)),
                )
        relative, absolute = HALF_ULP[job.out_dtype]
        got = as_float64(job.out, job.out_dtype)
        steps = job.a.depth + 8
        # Each step may also round to a subnormal number.
        bound = steps * (2.0**-24 * size + 2.0**-150 * np.abs(factor))
        bound = bound + relative * np.abs(exact) + absolute
        known = size < LARGEST_SUM
        near = np.abs(got - exact) <= bound
    assert near[known].all(), (got[known & ~near][:3], exact[known & ~near][:3])
    assert np.isnan(got)[np.isnan(exact)].all()
    # What may overflow on the way may be anything but a number that is not known.
    assert (near | ~np.isfinite(got))[~known].all()


def many_jobs(names: Iterable[str]) -> list[MatmulJob]:
    """Products of formats, with few rows and many, tails of every kind, odd scales and codes."""
    rng = np.random.default_rng(5)
    jobs = []
    for name in names:
        for rows, depth, cols in (
            (1, 417, 39),
            (3, 256, 13),
            (7, 1040, 30),
            (18, 291, 27),
            (1, 5, 2),
        ):
            for wild in (False, True):
                order = bool(rng.integers(2))
                b = quantized(name, cols, depth, rng, wild=wild, low_first=order)
                jobs.append(job_of(float_operand(rows, depth, "float32", rng), b))
        layout = SCALE_LAYOUTS[1 + len(jobs) % 2]
        b = quantized(name, 150, 320, rng, scale_layout=layout)
        jobs.append(job_of(float_operand(2, 320, "bfloat16", rng), b, "float16"))
        a = quantized(name, 20, 320, rng, low_first=False)
        jobs.append(job_of(a, b, "bfloat16", alpha=0.5))
    return jobs


def main() -> None:
    """Prints a hash for each product."""
    from fp4kit.cpu.backend import CpuBackend

    backend = CpuBackend()
    for job in many_jobs(sys.argv[1:]):
        backend.matmul(job)
        print(hashlib.sha256(job.out.tobytes()).hexdigest()[:16])


if __name__ == "__main__":
    main()
