# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Types of the keyword arguments of quantizing functions, for type checkers only."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from fp4kit.scheme import DirectionlessFields

from .tensor import DirectionPair, QuantizedTensor

Backend = Literal["reference", "cpu", "cuda"]
Nonfinite = Literal["raise", "propagate"]


class CallData(TypedDict, total=False):
    """What belongs to a call of `quantize` and not to its scheme."""

    amax: Any
    decode_scale: Any
    encode_scale: Any
    seed: int | None
    subsequence: int
    activation_input: Any
    dbias: Any
    nonfinite: Nonfinite
    backend: Backend | None
    out: QuantizedTensor | DirectionPair | None


class CallOptions(CallData, DirectionlessFields, total=False):
    """Every keyword argument of `quantize` but the direction, which decides the result's type."""
