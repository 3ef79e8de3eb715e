# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The JSON report of an earlier run, for a page that shows both."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from fp4kit.errors import FileFormatError, brief

#: What is taken of the statistics.
STATS = ("sqnr", "relative_rms", "max_abs_error")


def read_before(path: Path) -> dict[str, Any]:
    """Reads what `--report` wrote or `--json` printed.

    Args:
        path: of `quantize` or `compare`.

    Returns:
        Where it came from, its `total`, and `tensors` by name.

    Raises:
        FileFormatError: if there is no such file, or it holds something else.
    """
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"{path}: is no JSON report: {brief(str(error))}") from None
    try:
        return {
            "path": str(path),
            "source": str(content["source"]),
            "target": None if content["target"] is None else str(content["target"]),
            "total": _entry(content["total"]),
            "tensors": {str(tensor["name"]): _entry(tensor) for tensor in content["tensors"]},
        }
    except (KeyError, TypeError, ValueError) as error:
        raise FileFormatError(
            f"{path}: is no report of quantize or compare, as --report and --json give it: "
            f"{type(error).__name__}: {brief(str(error))}"
        ) from None


def _entry(entry: dict[str, Any]) -> dict[str, Any]:
    stats = entry["stats"]
    return {
        "format": entry.get("format"),
        "bytes_after": int(entry["bytes_after"]),
        **{name: None if stats is None else _number(stats[name]) for name in STATS},
        "exact": bool(stats and entry["exact"]),
        "overflow": bool(stats and entry["overflow"]),
    }


def _number(value: Any) -> float | None:
    if value is None:
        return None
    if not math.isfinite(value):
        raise ValueError(f"{value} among the statistics")
    return float(value)
