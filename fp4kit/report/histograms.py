# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The codes and block scales of a few tensors, counted in a second read of what was written.

Only for pages: nothing of it is in the path of who asked for none. A part is read in pieces, so
that memory stays bounded whatever the size of a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4kit.checkpoint.compare import opened_side
from fp4kit.checkpoint.read.components import is_pipeline
from fp4kit.formats import E4M3, E8M0_BIAS, E8M0_NAN, ElementType
from fp4kit.io.compare import Side
from fp4kit.io.storage import QuantizedEntry

#: Bytes that are counted together: np.bincount takes eight times as many.
PIECE = 4 << 20
#: Binades of float32, subnormal ones included.
LOWEST, HIGHEST = -149, 127

#: Counts of numbers: how many there are of each value.
Counts = list[tuple[float, int]]


def count_codes(path: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Histograms of tensors of a quantized file or checkpoint.

    Args:
        path: file, model directory, or diffusers pipeline.
        names: tensors; those of a pipeline begin with their folder.

    Returns:
        For each name `codes` and `scales`, as plain data: the type, how many there are, and bars
        from the smallest value to the largest. A tensor that is not stored as codes and scales
        of a known format is left out.
    """
    if is_pipeline(path):
        folders: dict[str, list[str]] = {}
        for name in names:
            folder, _, rest = name.partition("/")
            folders.setdefault(folder, []).append(rest)
        return {
            f"{folder}/{name}": found
            for folder, members in folders.items()
            for name, found in count_codes(path / folder, members).items()
        }
    with opened_side(path) as side:
        return {
            name: _histograms(side, entry)
            for name in names
            if isinstance(entry := _tensor(side, name), QuantizedEntry)
        }


def _tensor(side: Side, name: str) -> object:
    # An .npy has no name for its tensor, so that its only one may be called anything.
    return next(iter(side.tensors.values())) if len(side.tensors) == 1 else side.tensors.get(name)


def _histograms(side: Side, entry: QuantizedEntry) -> dict[str, Any]:
    plan, names = entry.plan, entry.names
    element, packed = plan.format.element, side.coded.tensors[names.packed].spec.nbytes
    counts = _byte_counts(side, names.packed)
    if plan.format.codes_per_byte == 2:
        nibbles = counts.reshape(16, 16)
        counts = nibbles.sum(axis=0) + nibbles.sum(axis=1)
    # Rows are filled up to whole blocks, and rows up to whole tiles, by codes that are 0.
    counts[0] -= packed * plan.format.codes_per_byte - plan.rows * plan.cols
    if element.bits == 4:
        bars = _every_code(element, counts)
    else:
        values = list(zip(element.values.tolist(), counts.tolist(), strict=True))
        bars = _by_binade(values, least=2.0 ** (1 - element.bias), largest=element.max)
    return {
        "codes": {"type": element.name, "count": plan.rows * plan.cols, "bars": bars},
        "scales": _scales(side, entry),
        "second_level": None if entry.second is None else float(entry.second[0]),
    }


def _scales(side: Side, entry: QuantizedEntry) -> dict[str, Any]:
    plan, name, kind = entry.plan, entry.names.scale, entry.plan.format.scale_type
    if kind == "float32":
        powers = np.zeros(HIGHEST - LOWEST + 1, np.int64)
        zeros = total = 0
        for piece in _pieces(side, name):
            scales = np.abs(piece.view("<f4"))
            _, exponents = np.frexp(scales[np.isfinite(scales) & (scales > 0)])
            powers += np.bincount(exponents - 1 - LOWEST, minlength=len(powers))
            zeros, total = zeros + int((scales == 0).sum()), total + len(scales)
        rest = total - zeros - int(powers.sum())
        values: Counts = [(0.0, zeros), (float("nan"), rest)]
        values += [(2.0 ** (LOWEST + at), count) for at, count in enumerate(powers.tolist())]
        bars = _by_binade(values, least=2.0**-126, largest=None)
        return {"type": kind, "count": total, "bars": bars}
    counts = _byte_counts(side, name)
    blocks = plan.vectors * plan.blocks
    counts[0] -= counts.sum() - blocks  # swizzled scales are filled up to whole tiles
    largest: float | None
    if kind == "e4m3":
        numbers = E4M3.values.tolist()
        least, largest = 2.0 ** (1 - E4M3.bias), plan.scheme.e4m3_max
    else:
        numbers = [2.0 ** (code - E8M0_BIAS) for code in range(E8M0_NAN)] + [float("nan")]
        least, largest = 2.0 ** (1 - E8M0_BIAS), None
    values = list(zip(numbers, counts.tolist(), strict=True))
    bars = _by_binade(values, least=least, largest=largest)
    return {"type": kind, "count": blocks, "bars": bars}


def _pieces(side: Side, name: str) -> Iterator[NDArray[np.uint8]]:
    """The bytes of a stored tensor."""
    size = side.coded.tensors[name].spec.nbytes
    for start in range(0, size, PIECE):
        piece = np.empty(min(PIECE, size - start), np.uint8)
        side.coded.read(name, start, piece.data)
        yield piece


def _byte_counts(side: Side, name: str) -> NDArray[np.int64]:
    """How often each byte occurs in a stored tensor."""
    pairs, rest = np.zeros(1 << 16, np.int64), np.zeros(256, np.int64)
    for piece in _pieces(side, name):
        even = len(piece) // 2 * 2
        # Two at a time: np.bincount takes as long for any number.
        pairs += np.bincount(piece[:even].view("<u2"), minlength=1 << 16)
        rest += np.bincount(piece[even:], minlength=256)
    table = pairs.reshape(256, 256)
    rest += table.sum(axis=0)
    rest += table.sum(axis=1)
    return rest


def _every_code(element: ElementType, counts: NDArray[np.int64]) -> list[dict[str, Any]]:
    """A bar for each code of few, from the most negative value to the largest."""
    codes = [*range(len(counts) - 1, len(counts) // 2 - 1, -1), *range(len(counts) // 2)]
    return [
        {
            "label": f"{element.values[code]:g}",
            "count": int(counts[code]),
            "kind": _kind(abs(float(element.values[code])), least=0.0, largest=element.max),
        }
        for code in codes
    ]


def _by_binade(values: Counts, *, least: float, largest: float | None) -> list[dict[str, Any]]:
    """A bar for each power of two between the smallest and the largest magnitude that occurs.

    Args:
        values: numbers and how many there are.
        least: smallest normal number.
        largest: largest finite number, which has a bar of its own; None if it says nothing.
    """
    powers: dict[int, int] = {}
    special = {"0": 0, "max": 0, "not finite": 0}
    for value, count in values:
        size = abs(value)
        if not np.isfinite(size):
            special["not finite"] += count
        elif size == 0:
            special["0"] += count
        elif largest is not None and size >= largest:
            special["max"] += count
        elif count:
            power = int(np.frexp(size)[1]) - 1
            powers[power] = powers.get(power, 0) + count
    bars: list[dict[str, Any]] = []
    if any(value == 0 for value, _ in values):
        bars.append({"label": "0", "count": special["0"], "kind": "zero"})
    for power in range(min(powers, default=0), max(powers, default=-1) + 1):
        kind = _kind(2.0**power, least=least, largest=None)
        bars.append({"label": f"2^{power}", "count": powers.get(power, 0), "kind": kind})
    if largest is not None:
        bars.append({"label": f"{largest:g}", "count": special["max"], "kind": "max"})
    if special["not finite"]:
        bars.append({"label": "not finite", "count": special["not finite"], "kind": "max"})
    return bars


def _kind(size: float, *, least: float, largest: float | None) -> str:
    if size == 0:
        return "zero"
    if size < least:
        return "subnormal"
    return "max" if largest is not None and size >= largest else "normal"
