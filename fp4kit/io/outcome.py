# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What a plan or its result means to the user: nothing to do, options that help, overflow."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from fp4kit.errors import OptionError

from .naming import grouped
from .report import TensorReport
from .work import TensorPlan

#: Tensors that a message names.
NAMED = 5


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


def refuse_nothing(
    path: object, works: Iterable[TensorPlan], idle: Sequence[str], *, padding: bool
) -> None:
    """Refuses a plan that quantizes nothing: an output that looks quantized must be so.

    Args:
        path: the source.
        works: what would happen to each tensor.
        idle: lines about patterns that do nothing.
        padding: as for :func:`advice`.

    Raises:
        OptionError: with the reasons, and how many tensors have each.
    """
    planned = list(works)
    if any(work.entry is not None for work in planned):
        return
    reasons = [work.reason for work in planned]
    why = grouped(reasons) or "it holds no tensor"
    help = "".join(f"; {part}" for part in (*idle, advice(reasons, padding=padding)) if part)
    raise OptionError(
        f"{path}: no tensor is quantized, so that nothing is written: {why}"
        f"{help}; --allow-nothing writes the output all the same"
    )


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
