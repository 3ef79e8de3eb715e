# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Types of the keyword arguments of `quantize`, for type checkers only."""

from __future__ import annotations

from typing import Any, TypedDict

from .quantize_variants import Directions
from .tensor import QuantizedTensor


class QuantizeOptions(TypedDict, total=False):
    """Every keyword argument but `axis`, which decides the type of the result."""

    recipe: str
    scale_rule: str | None
    amax: Any
    decode_scale: Any
    encode_scale: Any
    second_level: bool
    scale_layout: str
    nibble_order: str
    pad: bool
    nonfinite: str
    block: str
    scale_search: str | None
    error: str | None
    e4m3_max: int
    rounding: str
    seed: int | None
    stream: int
    hadamard: bool | int | None
    hadamard_axis: str | None
    rht_rounding: str | None
    activation: str | None
    activation_input: Any
    dbias: Any
    backend: str | None
    out: QuantizedTensor | Directions | None
