# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The largest magnitudes of modules' inputs, from the file that a user gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fp4kit.io.moments import read_moments

from .json_files import read_json


def read_amaxes(path: Path) -> dict[str, Any]:
    """What a file says of each module: JSON of amaxes, or moments that `calibrate` wrote.

    Raises:
        FileFormatError: if it is neither.
    """
    if path.suffix.lower() == ".safetensors":
        return dict(read_moments(path).amax)
    return read_json(path)
