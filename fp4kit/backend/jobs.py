# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What a backend is handed: plans with the raw arrays that they read and write."""

from __future__ import annotations

from typing import Any, NamedTuple

RawArray = Any
"""A C-contiguous NumPy or CuPy array of float32, float16, uint8, or uint16 (bfloat16 bits)."""

Seed = tuple[int, int]
"""(key of 64 bits, subsequence of 32 bits) of random numbers: :mod:`fp4kit.reference.philox`."""

NO_SEED: Seed = (0, 0)


class Job(NamedTuple):
    """One direction of a quantization, or what decodes one.

    Attributes:
        plan: what to do: a `Plan`, `GroupedPlan` or `ResidualPlan`. Neither its rows nor its
            columns are 0, but for members of groups.
        x: elements (rows, cols), flat for groups; None to decode.
        dtype: element type of `x`.
        second: float32 (plan.scales,) in what the recipe keeps, or None; for per-token schemes
            already raised to the smallest amax that they count with.
        packed: uint8 codes (plan.packed_shape), flat for groups; those past the end of a vector
            are codes of +0.0. None where the values alone are wanted.
        block_scale: scales (plan.scale_shape), flat for groups; padding of the layout is 0.
        seed: of stochastic rounding.
        weights: float32 (plan.cols,): what an error of each column counts in a search of scales;
            None where all count alike.
    """

    plan: Any
    x: RawArray
    dtype: str
    second: RawArray
    packed: RawArray
    block_scale: RawArray
    seed: Seed = NO_SEED
    weights: RawArray | None = None


class Prologue(NamedTuple):
    """What happens to an array before it is quantized.

    Attributes:
        activation: one of `scheme.ACTIVATIONS`, or None.
        x: (rows, n), or (rows, 2 n) for swiglu; the incoming gradient for derivatives; flat for
            groups.
        dtype: element type of all arrays.
        other: input of the forward activation for derivatives, like `x`; else None.
        sums: float32 array for the column sums of what is quantized, or None.
    """

    activation: str | None
    x: RawArray
    dtype: str
    other: RawArray | None = None
    sums: RawArray | None = None


class Rotation(NamedTuple):
    """A Hadamard rotation: see :mod:`fp4kit.reference.rotation`."""

    direction: str
    mask: int
    rounding: str
    inverse: bool
