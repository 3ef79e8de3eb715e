# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Plans of one direction from a scheme's fields, for tests that call backends directly."""

from __future__ import annotations

from typing import Any

from fp4kit.plan import Plan
from fp4kit.scheme import as_scheme


def sample_plan(
    rows: int, cols: int, format: str = "nvfp4", *, rows_per_scale: int = 1, **fields: Any
) -> Plan:
    """The plan of (rows, cols) under the fields of a scheme; recipes only where they apply."""
    if format != "nvfp4":
        fields = {name: value for name, value in fields.items() if name != "recipe"}
    return Plan(as_scheme(format, fields).parts[0], rows, cols, rows_per_scale)
