# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Comparing a quantized checkpoint with the one that it was made from, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace as with_changes
from math import prod
from pathlib import Path
from typing import NamedTuple

from fp4kit.api.metrics import ErrorStats
from fp4kit.checkpoint.compare import rejoin_like
from fp4kit.checkpoint.options import CheckpointOptions
from fp4kit.checkpoint.read.components import is_pipeline, quantized_components
from fp4kit.checkpoint.read.directory import Checkpoint, listed
from fp4kit.checkpoint.views.logical import LogicalSource
from fp4kit.checkpoint.views.opened import Opened, open_logical, open_quantized
from fp4kit.errors import Fp4kitError
from fp4kit.formats import DTYPES
from fp4kit.io.compare import ComparedPair, Side, cast_like, measure
from fp4kit.io.report import TensorReport
from fp4kit.io.stream.chunks import Progress

#: Signal to noise ratio in dB that 4-bit weights reach by far unless something is wrong with
#: them: a wrong second level, a wrong order of nibbles or scales.
MIN_SQNR = 8.0


def far(name: str, stats: ErrorStats) -> Iterator[str]:
    """The fault of a quantized tensor whose values are not those of the source."""
    if not stats.sqnr >= MIN_SQNR:
        yield (
            f"{name}: its values are far from the source: SQNR {stats.sqnr:.2f} dB, largest error "
            f"{stats.max_abs_error:.3g}"
        )


def _pairs(source: LogicalSource, opened: Opened) -> tuple[list[ComparedPair], list[str]]:
    """Tensors of both, and the faults seen on the way."""
    result, entries = opened.source, opened.entries
    faults = []
    names = set(result.tensors) | set(entries)
    lost = [name for name in source.tensors if name not in names]
    if lost:
        faults.append(f"{len(lost)} tensors of the source are missing: {listed(lost)}")
    extra = [name for name in (*result.tensors, *entries) if name not in source.tensors]
    if extra:
        faults.append(f"{len(extra)} tensors are not in the source: {listed(extra)}")
    pairs = []
    for name, original in list(source.tensors.items()):
        entry, kept = entries.get(name), result.tensors.get(name)
        if entry is not None:
            shape = entry.shape
        elif kept is not None:
            shape = kept.spec.shape
        else:
            continue
        if shape != original.spec.shape:
            faults.append(
                f"{name}: has shape {list(shape)}, in the source {list(original.spec.shape)}"
            )
        elif entry is not None:
            pairs.append(ComparedPair(original, entry, measured=True))
        elif kept is None:
            continue
        elif result.is_decoded(name):
            pairs.append(ComparedPair(original, kept, measured=True))
        elif source.is_decoded(name):
            if kept.dtype in DTYPES:
                cast = source.cast(name, kept.dtype)
                pairs.append(ComparedPair(cast, kept, measured=False))
        elif kept.dtype != original.dtype:
            faults.append(f"{name}: is {kept.dtype}, in the source {original.dtype}")
        else:
            pairs.append(ComparedPair(original, kept, measured=False))
    return pairs, faults


def _pair_faults(pair: ComparedPair) -> Iterator[str]:
    name = pair.original.name
    if pair.measured:
        yield from far(name, ErrorStats.from_sums(pair.sums, None))
    elif pair.differing:
        elements = prod(pair.original.spec.shape)
        yield (
            f"{name}: is not quantized, but {pair.differing} of {elements} elements differ from "
            "the source"
        )


class Compared(NamedTuple):
    """What a comparison with the source found.

    Attributes:
        faults: one line each; empty if there is none.
        tensors: every tensor of both, with error statistics; empty if it came to no comparison.
    """

    faults: list[str]
    tensors: list[TensorReport]


def compared_values(
    path: Path,
    against: Path,
    *,
    experts_layout: str | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Compared:
    """Every tensor of a quantized checkpoint, and which are not what its source makes them.

    Kept tensors must be equal bit for bit; the values of quantized ones must be near.

    Args:
        path: the quantized checkpoint.
        against: what it was made from.
        experts_layout: how fused experts of the source are stored, None to decide by model type
            and sizes.
        device: `cpu` or a CUDA device.
        progress: called with (bytes done, bytes in all) of the source.
    """

    def component(name: str) -> Compared:
        found = compared_values(
            path / name,
            against / name,
            experts_layout=experts_layout,
            device=device,
            progress=progress,
        )
        return Compared(
            [f"{name}: {fault}" for fault in found.faults],
            [with_changes(each, name=f"{name}/{each.name}") for each in found.tensors],
        )

    try:
        if is_pipeline(path):
            parts = [component(name) for name in quantized_components(path)]
            return Compared(
                [fault for part in parts for fault in part.faults],
                [tensor for part in parts for tensor in part.tensors],
            )
        faults, found = compared_share(
            path, against, experts_layout=experts_layout, device=device, progress=progress
        )
        faults += [fault for each in found for fault in each.faults]
        return Compared(faults, [each.tensor for each in found])
    except Fp4kitError as error:
        return Compared([str(error)], [])


class ComparedTensor(NamedTuple):
    """What a comparison found of one tensor.

    Attributes:
        tensor: its report.
        faults: one line each.
    """

    tensor: TensorReport
    faults: list[str]


def compared_share(
    path: Path,
    against: Path,
    share: tuple[int, int] = (0, 1),
    *,
    experts_layout: str | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> tuple[list[str], list[ComparedTensor]]:
    """As :func:`compared_values` of a model directory, for every n-th tensor.

    Args:
        path: the quantized checkpoint.
        against: what it was made from.
        share: number of the first tensor, and n.
        experts_layout: as there.
        device: as there.
        progress: as there.

    Returns:
        Faults that are seen without values, and what was found of each tensor.

    Raises:
        Fp4kitError: if either cannot be read.
    """
    with ExitStack() as stack:
        opened = open_quantized(stack.enter_context(Checkpoint(path)))
        result = opened.source
        # What the result has fused stays fused: how it lies need not be known.
        stacked = {name for name, each in result.tensors.items() if len(each.spec.shape) == 3}
        # A cast to FP8 is taken as one: values that were lost show in the comparison.
        options = CheckpointOptions(experts_layout=experts_layout, unscaled_fp8=True)
        cast = cast_like(result.tensors.values())
        original = stack.enter_context(Checkpoint(against, cast=cast))
        source = open_logical(original, options, stacked.__contains__).source
        rejoin_like(source, result.tensors.keys() | opened.entries.keys())
        pairs, faults = _pairs(source, opened)
        pairs = pairs[share[0] :: share[1]]
        sides = Side(against, {}, source, original), Side(path, {}, result, result.checkpoint)
        measure(*sides, pairs, device=device, progress=progress)
        return faults, [ComparedTensor(pair.report(), list(_pair_faults(pair))) for pair in pairs]


def value_faults(
    path: Path, against: Path, *, experts_layout: str | None = None, device: str = "cpu"
) -> list[str]:
    """The faults of :func:`compared_values`."""
    return compared_values(path, against, experts_layout=experts_layout, device=device).faults
