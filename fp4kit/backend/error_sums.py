# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The sums that error statistics are made of."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class ErrorSums:
    """Sums over elements and blocks from which error statistics follow; they add up over slabs.

    All sums are float64. `x` is the original, `y` the dequantized value. Counts of codes and
    scales stay 0 when no codes are at hand.
    """

    elements: int = 0
    sum_x2: float = 0.0
    sum_y2: float = 0.0
    sum_xy: float = 0.0
    sum_d2: float = 0.0
    max_abs_error: float = 0.0
    saturated: int = 0
    zero_codes: int = 0
    blocks: int = 0
    scale_underflow: int = 0
    scale_subnormal: int = 0

    def __iadd__(self, other: ErrorSums) -> ErrorSums:
        for name in self.__dataclass_fields__:
            if name != "max_abs_error":
                setattr(self, name, getattr(self, name) + getattr(other, name))
        # NaN wins in either place; max() would keep it or lose it by the order of its arguments.
        if not self.max_abs_error >= other.max_abs_error:
            known = not math.isnan(self.max_abs_error)
            self.max_abs_error = other.max_abs_error if known else self.max_abs_error
        return self


@dataclass(frozen=True)
class PendingSums:
    """Error sums that a device may still be working on.

    Attributes:
        result: waits for them.
    """

    result: Callable[[], ErrorSums]
