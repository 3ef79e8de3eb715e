# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Listing a file's tensors, and measuring how far those of one file are from another's."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np

from fp4kit.api.metrics import ErrorStats
from fp4kit.backend.interface import ErrorSums
from fp4kit.errors import FileFormatError, ShapeError
from fp4kit.float_mode import by_ieee
from fp4kit.formats import DTYPES
from fp4kit.io.dequantize import entry_parts
from fp4kit.io.metadata import find_quantized, logical_tensors
from fp4kit.io.read.cast import with_cast
from fp4kit.io.read.open import open_source
from fp4kit.io.read.source import Source, SourceTensor
from fp4kit.io.report import FileReport, TensorReport, difference_warnings
from fp4kit.io.storage import Logical, QuantizedEntry
from fp4kit.io.stream.chunks import (
    ByteRange,
    Bytes,
    Chunk,
    Progress,
    Tally,
    byte_ranges,
    chunk_plan,
    plan_ranges,
)
from fp4kit.io.stream.device import DeviceBackend
from fp4kit.io.stream.pipeline import read_ahead


@dataclass
class ComparedPair:
    """A tensor of the original and what became of it.

    Attributes:
        original: tensor of the first file.
        other: the same of the second one.
        measured: floats whose distance is measured; other tensors must be equal.
        sums: error sums so far.
        differing: elements whose bytes are found unequal so far, for plain tensors of one type.
    """

    original: SourceTensor
    other: Logical
    measured: bool
    sums: ErrorSums = field(default_factory=ErrorSums)
    differing: int = 0

    @property
    def same_type(self) -> bool:
        """Whether both are plain and of one element type, so that their bytes can be compared."""
        other = self.other
        return isinstance(other, SourceTensor) and other.spec.dtype == self.original.spec.dtype

    def report(self) -> TensorReport:
        """The report of the pair."""
        other, elements = self.other, prod(self.original.shape)
        after = other.stored if isinstance(other, QuantizedEntry) else other.spec.nbytes
        if not self.measured:
            differ = f"{self.differing} of {elements} elements differ"
            reason = differ if self.differing else "equal"
            return TensorReport.of(self.original, "keep", reason, after)
        sums = self.sums
        if self.same_type and not self.differing:
            # A mask of -inf is equal to itself, whatever the difference of the two is.
            sums = ErrorSums(elements=elements)
        stats = ErrorStats.from_sums(sums, after if other.format else None)
        more = {"format": other.format, "stats": stats, "sums": sums}
        return TensorReport.of(self.original, "compare", "", after, **more)


@dataclass(frozen=True)
class Side:
    """What is compared with something: the logical tensors of a file or checkpoint.

    Attributes:
        path: the file or directory.
        tensors: logical tensors by name.
        source: where those that are not quantized are read.
        coded: where the parts of quantized ones are read.
    """

    path: Path
    tensors: dict[str, Logical]
    source: Source
    coded: Source


def file_side(source: Source) -> Side:
    """The logical tensors of a file."""
    found = logical_tensors(source, find_quantized(source))
    tensors: dict[str, Logical] = {
        name: tensor
        for name, tensor in found.items()
        if isinstance(tensor, QuantizedEntry) or tensor.readable
    }
    return Side(source.path, tensors, source, source)


def _originals(side: Side) -> dict[str, SourceTensor]:
    plain = {
        name: tensor for name, tensor in side.tensors.items() if isinstance(tensor, SourceTensor)
    }
    if len(plain) < len(side.tensors):
        raise FileFormatError(
            f"{side.path}: is quantized itself; the first of the two must be the original (swap "
            "them?)"
        )
    return plain


def _missing(names: list[str], path: Path) -> None:
    if names:
        listed = ", ".join(repr(name) for name in names[:3])
        plural = "tensors are" if len(names) > 1 else "tensor is"
        raise FileFormatError(f"{path}: {len(names)} {plural} missing, the first: {listed}")


def _pairs(a: Side, b: Side) -> list[ComparedPair]:
    """Tensors of equal name (or the only ones there are), checked for equal shape and kind."""
    originals = _originals(a)
    others = b.tensors
    if len(originals) == len(others) == 1:
        # An .npy file has no tensor name to go by.
        others = dict(zip(originals, others.values(), strict=True))
    _missing([name for name in originals if name not in others], b.path)
    _missing([name for name in others if name not in originals], a.path)
    pairs = []
    for name, original in originals.items():
        other = others[name]
        if other.shape != original.shape:
            raise ShapeError(
                f"{b.path}: tensor {name!r} has shape {list(other.shape)}, in {a.path} "
                f"{list(original.shape)}"
            )
        measured = original.dtype in DTYPES and (
            isinstance(other, QuantizedEntry) or other.dtype in DTYPES
        )
        if not measured and (
            isinstance(other, QuantizedEntry) or other.spec.dtype != original.spec.dtype
        ):
            raise FileFormatError(
                f"{b.path}: tensor {name!r} is {other.dtype}, in {a.path} {original.dtype}; only "
                "float32, float16 and bfloat16 are compared with each other"
            )
        pairs.append(ComparedPair(original, other, measured))
    return pairs


def _chunks(a: Side, b: Side, pairs: Sequence[ComparedPair]) -> Iterator[Chunk[Rows]]:
    for pair in pairs:
        original, other = pair.original, pair.other
        if isinstance(other, QuantizedEntry):
            row = original.row_bytes
            for first, last in plan_ranges(other.plan, row):
                parts = entry_parts(b.coded, other, first, last)
                own = ByteRange(a.source, original.name, first * row, last * row)
                yield Chunk((pair, first, last), (own, *parts))
            continue
        sizes = _itemsize(original), _itemsize(other)
        for span in byte_ranges(original if sizes[0] >= sizes[1] else other):
            yield Chunk(
                (pair, 0, 0),
                tuple(
                    ByteRange(side.source, tensor.name, *(at * size // max(sizes) for at in span))
                    for side, tensor, size in zip((a, b), (original, other), sizes, strict=True)
                ),
            )


#: A pair, and the first and last row of a chunk of it if it is quantized.
Rows = tuple[ComparedPair, int, int]


def _itemsize(tensor: SourceTensor) -> int:
    """Bytes per element; 1 for elements smaller than that, which are only tested for equality."""
    elements = prod(tensor.spec.shape)
    return max(tensor.spec.nbytes // elements, 1) if elements else 1


def _measure(backend: DeviceBackend | None, rows: Rows, parts: list[Bytes]) -> None:
    pair, first, last = rows
    other, dtype = pair.other, pair.original.dtype
    if not len(parts[0]):
        return
    if pair.same_type:
        # As raw items: NaN equals itself, and -0.0 is not 0.0.
        kind = f"V{_itemsize(pair.original)}"
        pair.differing += int(np.count_nonzero(parts[0].view(kind) != parts[1].view(kind)))
    if not pair.measured:
        return
    assert backend is not None
    if isinstance(other, QuantizedEntry):
        plan, (x, packed, scale) = chunk_plan(other.plan.decoding, last - first), parts
        second = other.second_of(first)
        pair.sums += backend.quantized_sums(plan, x, dtype, packed, scale, second)
    else:
        pair.sums += backend.sums(parts[0], dtype, parts[1], other.dtype)


def measure(
    a: Side, b: Side, pairs: Sequence[ComparedPair], *, device: str, progress: Progress | None
) -> None:
    """Reads every pair, and fills in its error sums and how many elements differ.

    Args:
        a: where the originals are read.
        b: where what became of them is.
        pairs: what to measure.
        device: `cpu` or a CUDA device.
        progress: called with (bytes done, bytes in all) of `a`.
    """
    measured = [pair for pair in pairs if pair.measured]
    backend = None
    if measured:
        plans = [p.other.plan.decoding for p in measured if isinstance(p.other, QuantizedEntry)]
        dtypes = {pair.original.dtype for pair in measured}
        backend = DeviceBackend(device, dtypes, "error_stats", plans)
    tally = Tally(progress, sum(pair.original.spec.nbytes for pair in pairs))
    for rows, staged in read_ahead(_chunks(a, b, pairs)):
        _measure(backend, rows, staged.parts)
        tally.add(len(staged.parts[0]))


@by_ieee
def compare_sides(
    a: Side, b: Side, *, device: str = "cpu", progress: Progress | None = None
) -> FileReport:
    """Measures how far the tensors of one side are from those of another.

    Args:
        a: the original; nothing of it is quantized.
        b: a quantized or dequantized version of it, with the same tensor names.
        device: `cpu` or `cuda`.
        progress: called with (bytes done, bytes in all) of `a`.

    Returns:
        One entry per tensor: statistics for floats; for others the `reason` says whether all
        elements are equal.

    Raises:
        FileFormatError: if tensors are missing in either, or of kinds that cannot be compared.
        ShapeError: if the shapes of a tensor differ.
    """
    started = time.perf_counter()
    pairs = _pairs(a, b)
    measure(a, b, pairs, device=device, progress=progress)
    tensors = [pair.report() for pair in pairs]
    return FileReport(
        source=str(a.path),
        target=None,
        tensors=tensors,
        options={"other": str(b.path), "device": device},
        seconds=time.perf_counter() - started,
        warnings=difference_warnings(tensors),
    )


def compare_files(
    a: Path, b: Path, *, device: str = "cpu", progress: Progress | None = None
) -> FileReport:
    """Measures how far the tensors of one file are from those of another.

    float64 of `a` counts as the float32 that `--cast` makes of it, unless `b` has float64 too.

    Args:
        a: the original: .safetensors, .npy or .npz.
        b: a quantized or dequantized version of it, with the same tensor names.
        device: `cpu` or `cuda`.
        progress: called with (bytes done, bytes in all) of `a`.

    Returns:
        As :func:`compare_sides`.

    Raises:
        FileFormatError: if a file is malformed, or tensors are missing in either.
        ShapeError: if the shapes of a tensor differ.
    """
    with open_source(b) as second:
        other = file_side(second)
        with with_cast(open_source(a), cast_like(other.tensors.values())) as first:
            return compare_sides(file_side(first), other, device=device, progress=progress)


def cast_like(tensors: Iterable[Logical]) -> str | None:
    """What float64 of an original is compared as, given what became of it."""
    wide = any(isinstance(tensor, SourceTensor) and tensor.dtype == "float64" for tensor in tensors)
    return None if wide else "float32"
