# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Types of the keyword arguments of quantizing functions, for type checkers only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypedDict

from fp4kit.options import DirectionlessFields

from .tensor import DirectionPair, QuantizedTensor

Backend = Literal["reference", "cpu", "cuda"]
Nonfinite = Literal["raise", "propagate"]


class _AnyCallData(TypedDict, total=False):
    amax: Any
    decode_scale: Any
    encode_scale: Any
    seed: int | None
    subsequence: int
    activation_input: Any
    dbias: Any
    nonfinite: Nonfinite
    backend: Backend | None


class CallData(_AnyCallData, total=False):
    """What belongs to a call of `quantize` and not to its scheme."""

    out: QuantizedTensor | DirectionPair | None


class GroupData(_AnyCallData, total=False):
    """The same of `quantize_grouped`."""

    members: int | None
    first_dims: Sequence[int] | None
    last_dims: Sequence[int] | None
    offsets: Sequence[int] | None
    row_offsets: Sequence[int] | None


class CallOptions(CallData, DirectionlessFields, total=False):
    """Every keyword argument of `quantize` but the direction, which decides the result's type."""


class GroupOptions(GroupData, DirectionlessFields, total=False):
    """Every keyword argument of `quantize_grouped` but the direction."""
