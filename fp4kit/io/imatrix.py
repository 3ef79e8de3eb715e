# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Importance matrices of llama.cpp's `llama-imatrix`: moments by the names of GGUF tensors.

`imatrix.gguf` holds, for each weight NAME, `NAME.in_sum2` (F32, a row for each expert: the sum of
the squares of each channel) and `NAME.counts` (F32, one number for each expert: rows that were
added). The older `.dat` holds for each weight its name, a number of chunks, and sums that were
scaled to it; what no token reached has the moment 1 there, so that it cannot be told.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fp4kit.errors import FileFormatError, brief

from .containers import GGUF
from .read.files import InputFile
from .read.open import open_source
from .read.source import Source

SUMS, COUNTS = ".in_sum2", ".counts"
LEGACY = ".dat"
#: Suffixes of files that may be importance matrices.
SUFFIXES = (GGUF, LEGACY)
#: Bytes of a name in a .dat file at most.
_MAX_NAME = 4096


@dataclass(frozen=True)
class Importance:
    """What one weight of a GGUF model was given.

    Attributes:
        second: mean square of each channel, a row for each expert. Of a .dat file one row, all
            experts behind each other.
        counts: rows of input that each was taken from; None if the file does not say.
    """

    second: NDArray[np.float64]
    counts: NDArray[np.float64] | None

    def split(self, width: int) -> Importance:
        """The same with rows of so many channels, where the file does not cut them."""
        if self.counts is not None or not width or self.second.size % width:
            return self
        return Importance(self.second.reshape(-1, width), None)


def read_imatrix(path: Path) -> dict[str, Importance]:
    """What a file says of each weight, by names of GGUF.

    Raises:
        FileFormatError: if it is no importance matrix, or malformed.
    """
    found = _read_legacy(path) if path.suffix.lower() == LEGACY else _read_gguf(path)
    for name, each in found.items():
        if not (np.isfinite(each.second) & (each.second >= 0)).all():
            raise FileFormatError(
                f"{path}: the moments of {brief(name)} hold a value that is not finite and at "
                "least 0"
            )
    return found


def _read_gguf(path: Path) -> dict[str, Importance]:
    with open_source(path) as source:
        names = [name.removesuffix(SUMS) for name in source.tensors if name.endswith(SUMS)]
        if not names:
            raise FileFormatError(
                f"{path}: is no importance matrix: it has no tensor NAME{SUMS}; make one with "
                "llama-imatrix, or moments with `fp4kit calibrate`"
            )
        return {name: _entry(source, name) for name in names}


def _entry(source: Source, name: str) -> Importance:
    sums, counts = _floats(source, name + SUMS), _floats(source, name + COUNTS).reshape(-1)
    rows = sums.reshape(-1, sums.shape[-1])
    whole = np.isfinite(counts) & (counts >= 0)
    if not whole.all() or len(counts) not in (1, len(rows)):
        raise FileFormatError(
            f"{source.path}: tensor {brief(name + COUNTS)}: holds {len(counts)} counts for "
            f"{len(rows)} sums, or one that is not finite and at least 0"
        )
    counts = np.broadcast_to(counts, len(rows))
    return Importance(rows / np.maximum(counts, 1)[:, None], counts)


def _floats(source: Source, name: str) -> NDArray[np.float64]:
    tensor = source.tensors.get(name)
    if tensor is None:
        raise FileFormatError(f"{source.path}: lacks tensor {brief(name)}")
    spec = tensor.spec
    if spec.dtype != "F32" or not spec.shape or 0 in spec.shape:
        raise FileFormatError(
            f"{source.path}: tensor {brief(name)}: is {spec.dtype} {list(spec.shape)}, not float32 "
            "with elements"
        )
    data = np.empty(spec.shape, np.float32)
    source.read(name, 0, data.reshape(-1).view(np.uint8).data)
    return data.astype(np.float64)


class _Reader:
    """The bytes of a .dat file, one after another."""

    def __init__(self, file: InputFile) -> None:
        self._file, self._at = file, 0

    def take(self, count: int, what: str) -> bytes:
        if count < 0 or self._at + count > self._file.size:
            raise FileFormatError(
                f"{self._file.path}: is no importance matrix of llama.cpp: {what} would end "
                "beyond the end of the file"
            )
        self._at += count
        return self._file.read(self._at - count, count)

    def number(self, what: str) -> int:
        (value,) = struct.unpack("<i", self.take(4, what))
        return int(value)


def _read_legacy(path: Path) -> dict[str, Importance]:
    with InputFile(path) as file:
        reader = _Reader(file)
        found: dict[str, Importance] = {}
        count = reader.number("the number of its entries")
        for number in range(count):
            what = f"entry {number + 1} of {count}"
            length = reader.number(what)
            if length > _MAX_NAME:
                raise FileFormatError(
                    f"{path}: is no importance matrix of llama.cpp: {what} has a name of {length} "
                    "bytes"
                )
            name = reader.take(length, what).decode("utf-8", "replace")
            calls, values = reader.number(what), reader.number(what)
            if calls < 1 or values < 1 or name in found:
                raise FileFormatError(
                    f"{path}: {what}, {brief(name)}: {calls} chunks and {values} values; both are "
                    "at least 1, and a name comes once"
                )
            sums = np.frombuffer(reader.take(4 * values, what), "<f4").astype(np.float64)
            found[name] = Importance(sums[None, :] / calls, None)
        if not found:
            raise FileFormatError(f"{path}: is an importance matrix without entries")
    return found
