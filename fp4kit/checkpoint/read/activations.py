# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The largest magnitudes of modules' inputs, from the file that a user gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fp4kit.errors import OptionError
from fp4kit.io.imatrix import SUFFIXES as IMATRIX_SUFFIXES
from fp4kit.io.moments import read_moments

from .json_files import read_json


def read_amaxes(path: Path) -> dict[str, Any]:
    """What a file says of each module: JSON of amaxes, or moments that `calibrate` wrote.

    Raises:
        FileFormatError: if it is neither.
        OptionError: for an importance matrix, which has none.
    """
    if path.suffix.lower() in IMATRIX_SUFFIXES:
        raise OptionError(
            f"activations: {path}: an importance matrix of llama.cpp holds the mean squares of "
            "inputs and not their largest magnitudes; make them with `fp4kit calibrate`"
        )
    if path.suffix.lower() == ".safetensors":
        return dict(read_moments(path).amax)
    return read_json(path)
