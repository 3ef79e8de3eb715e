# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What tensors, single and grouped, say of themselves by their scheme."""

from __future__ import annotations

from typing import Any

from fp4kit.formats import SECOND_LEVEL_SCALES
from fp4kit.scheme import Scheme


class Schemed:
    """Something that was quantized under a scheme."""

    __slots__ = ()
    scheme: Scheme

    @property
    def format(self) -> str:
        """Name of the format."""
        return self.scheme.format

    @property
    def recipe(self) -> str | None:
        """NVFP4 recipe, None for MX formats."""
        return self.scheme.recipe

    @property
    def scale_rule(self) -> str | None:
        """MX scale rule, None for nvfp4."""
        return self.scheme.scale_rule

    @property
    def direction(self) -> str:
        """`rowwise` or `columnwise`."""
        return self.scheme.direction

    @property
    def scale_layout(self) -> str:
        """Order of the block scales."""
        return self.scheme.scale_layout

    @property
    def nibble_order(self) -> str:
        """Which nibble the even element takes."""
        return self.scheme.nibble_order

    @property
    def second_level(self) -> tuple[str, Any] | None:
        """(name, float32 array) of the second-level scale, or None; of all members of a group."""
        for name in SECOND_LEVEL_SCALES:
            value = getattr(self, name)
            if value is not None:
                return name, value
        return None
