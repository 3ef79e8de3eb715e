# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What a file operation is asked for, and what it says it did: plain data, shared with the CLI."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as with_changes
from pathlib import Path
from typing import Any

from fp4kit.api.metrics import ErrorStats
from fp4kit.backend.interface import ErrorSums
from fp4kit.scheme import Scheme

from .storage import FILE_FIELDS, Logical

#: Reasons, and tensors, that a message names.
SHOWN_REASONS, NAMED = 8, 5


@dataclass(frozen=True)
class QuantizeOptions:
    """How the tensors of a file are quantized.

    Attributes:
        scheme: what is wanted of each tensor, as far as files store it.
        device: `cpu` or `cuda` (already resolved from `auto`).
        include: name patterns (globs, or `re:` regular expressions); empty means all.
        exclude: name patterns carried through unchanged.
        void_dtype: what 2-byte void data in .npy/.npz files is (`bfloat16`), None to refuse it.
        cast: `float32` to take float64 tensors as if they were stored as that, None to keep them.
        allow_nothing: go on although no tensor is quantized.
        force: overwrite an existing output.
        choices: name of a tensor to that of its candidate (:mod:`fp4kit.io.candidates`), which
            takes the place of `scheme`; None for one scheme.
    """

    scheme: Scheme = field(default_factory=Scheme)
    device: str = "cpu"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    void_dtype: str | None = None
    cast: str | None = None
    allow_nothing: bool = True
    force: bool = False
    choices: Mapping[str, str] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The options as plain data."""
        scheme = {name: getattr(self.scheme, name) for name in FILE_FIELDS}
        rest = {name: getattr(self, name) for name in self.__dataclass_fields__}
        if self.choices is None:
            del rest["choices"]
        return {**scheme, **{name: value for name, value in rest.items() if name != "scheme"}}


@dataclass(frozen=True, slots=True)
class TensorReport:
    """One tensor of a file: what was (or would be) done with it.

    Attributes:
        name: name in the source file.
        shape: logical shape.
        dtype: source element type, for example `bfloat16`.
        action: `quantize`, `dequantize`, `compare`, in a listing `quantized`, or else `keep`.
        reason: why a tensor is kept, or dropped with `bytes_after` 0; empty otherwise.
        format: format written or read, None for kept tensors.
        bytes_before: bytes of the tensor in the source.
        bytes_after: bytes of all tensors it becomes in the output.
        stats: error statistics, None for kept tensors and dry runs.
        sums: the sums behind `stats`, for totals.
        facts: how a quantized tensor is encoded, as in the file's metadata; empty otherwise.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    action: str
    reason: str
    format: str | None
    bytes_before: int
    bytes_after: int
    stats: ErrorStats | None = None
    sums: ErrorSums | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, tensor: Logical, action: str, reason: str = "", after: int | None = None, **more: Any
    ) -> TensorReport:
        """The report of a tensor.

        Args:
            tensor: of the source.
            action: what is done with it.
            reason: why it is kept.
            after: bytes that it takes in the output, None for as many as in the source.
            **more: statistics, and what is not as the tensor says.
        """
        after = tensor.stored if after is None else after
        facts = {"format": tensor.format, "bytes_before": tensor.stored, "bytes_after": after}
        said = {"shape": tensor.shape, "dtype": tensor.dtype, **facts, **more}
        return cls(name=tensor.name, action=action, reason=reason, **said)

    @property
    def differs(self) -> bool:
        """Whether its values were measured and are not exactly those of the original."""
        return self.sums is not None and self.sums.sum_d2 != 0


@dataclass(frozen=True)
class FileReport:
    """All tensors of a file operation.

    Attributes:
        source: path read.
        target: path written, None for dry runs and comparisons.
        tensors: one entry per source tensor, in file order.
        options: the options that were in force, as plain data.
        seconds: wall time.
        warnings: what the user should know.
    """

    source: str
    target: str | None
    tensors: list[TensorReport]
    options: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    warnings: list[str] = field(default_factory=list)

    @property
    def counted(self) -> list[TensorReport]:
        """What the total covers: tensors that are (or were) quantized, or whose values differ.

        A plain tensor that is equal in both files does not count, so that `quantize` and `compare`
        say the same of one pair of files.
        """
        return [
            tensor
            for tensor in self.tensors
            if tensor.action != "keep" and (tensor.format is not None or tensor.differs)
        ]

    @property
    def total_sums(self) -> ErrorSums:
        """Sums over all tensors whose values changed; over all measured ones if none did.

        Those that came out exact are left out: of a dequantized file nobody can tell whether they
        were quantized at all.
        """
        total = ErrorSums()
        for tensor in self._totalled():
            assert tensor.sums is not None
            total += tensor.sums
        return total

    @property
    def total_stats(self) -> ErrorStats | None:
        """Statistics of :attr:`total_sums`, None if nothing was measured."""
        measured = self._totalled()
        if not measured:
            return None
        coded = all(tensor.stats and tensor.stats.saturated is not None for tensor in measured)
        nbytes = sum(tensor.bytes_after for tensor in measured) if coded else None
        return ErrorStats.from_sums(self.total_sums, nbytes)

    def _totalled(self) -> list[TensorReport]:
        measured = [tensor for tensor in self.tensors if tensor.sums is not None]
        return [tensor for tensor in measured if tensor.differs] or measured


def joined(path: Path, reports: Mapping[str, FileReport]) -> FileReport:
    """The report of several parts of one thing; their names stand before those of tensors.

    Args:
        path: what holds the parts.
        reports: the report of each by its name.
    """
    return FileReport(
        source=str(path),
        target=None,
        tensors=[
            with_changes(tensor, name=f"{part}/{tensor.name}")
            for part, report in reports.items()
            for tensor in report.tensors
        ],
        options={"components": {part: report.options for part, report in reports.items()}},
        seconds=sum(report.seconds for report in reports.values()),
        warnings=[
            f"{part}: {warning}" for part, report in reports.items() for warning in report.warnings
        ],
    )


def kind_of(reason: str) -> str:
    """A reason without the numbers that differ from tensor to tensor."""
    return re.sub(r"^last axis \d+", "last axis", reason)


def grouped(reasons: Iterable[str]) -> str:
    """Reasons with the number of tensors that have each, the most frequent first."""
    counts: dict[str, int] = {}
    for reason in reasons:
        counts[kind_of(reason)] = counts.get(kind_of(reason), 0) + 1
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    shown = [
        f"{reason} ({count} tensor{'' if count == 1 else 's'})"
        for reason, count in ordered[:SHOWN_REASONS]
    ]
    if len(ordered) > SHOWN_REASONS:
        shown.append(f"{sum(count for _, count in ordered[SHOWN_REASONS:])} for other reasons")
    return ", ".join(shown)


def advice(reasons: Iterable[str], *, padding: bool) -> str:
    """Options by which kept tensors would be quantized, "" without any.

    Args:
        reasons: why tensors are kept.
        padding: whether rows may be padded; engines cannot read that.
    """
    found = set(reasons)
    flags = []
    if "float64 is not quantized" in found:
        flags.append("--cast float32 takes float64 as well")
    if padding and any(reason.startswith("last axis ") for reason in found):
        flags.append("--pad fills rows up to whole blocks")
    return ", ".join(flags)


def named(names: Sequence[str]) -> str:
    """The first few of a list of names, and how many more there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def overflow_warnings(tensors: Iterable[TensorReport]) -> list[str]:
    """A line about tensors whose error is not a finite number.

    NaN and infinity are refused before quantizing, so that these are finite values which their
    codes and scales decode to something that is not.
    """
    found = [
        tensor
        for tensor in tensors
        if tensor.action == "quantize"
        and tensor.stats is not None
        and not math.isfinite(tensor.stats.max_abs_error)
    ]
    if not found:
        return []
    recipes = {str(tensor.facts.get("recipe")) for tensor in found} - {"None"}
    under = f" under recipe {' and '.join(sorted(recipes))}" if recipes else ""
    return [
        f"finite values of {len(found)} tensor{'' if len(found) == 1 else 's'} decode to infinity "
        f"or NaN{under}: {named([tensor.name for tensor in found])}; their magnitudes (about 1e37 "
        "and more) are beyond what the second-level scale can express: exclude them, or scale them "
        "down first"
    ]


def difference_warnings(tensors: Sequence[TensorReport]) -> list[str]:
    """Lines about a comparison's tensors that no number says enough of."""
    said = []
    unequal = [tensor.name for tensor in tensors if tensor.reason not in ("", "equal")]
    if unequal:
        said.append(f"not measured, but different: {named(unequal)}")
    lost = [
        tensor.name
        for tensor in tensors
        if tensor.stats is not None and not math.isfinite(tensor.stats.mse)
    ]
    if lost:
        said.append(f"NaN or infinity in one of the two, so that no SQNR exists: {named(lost)}")
    return said
