# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What of a checkpoint can be quantized, and what must be chosen together."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import replace as with_changes
from pathlib import Path

from fp4kit.errors import OptionError
from fp4kit.io.candidates import Candidate, candidate
from fp4kit.io.quantize_plan import TensorPlan
from fp4kit.io.read.cast import check_cast
from fp4kit.io.read.source import Source
from fp4kit.io.survey_tensors import SurveyWork, survey_work

from .layouts import get_layout, module_of
from .models.fusion import fusion_group
from .options import CheckpointOptions
from .plan.quantize import plan_quantize
from .read.components import denoisers, is_pipeline
from .read.directory import Checkpoint, listed

#: What an engine builds as one layer of experts: it has one format.
_EXPERTS = re.compile(r"^(.*?\.(?:local_)?experts)\.\d+\.")
#: The format that takes rows of any length: whether a tensor is asked about does not depend on it.
_ANY_ROWS = "fp8"
#: A layout that holds nearly every format.
_USUAL = "compressed-tensors"


@dataclass(frozen=True)
class Surveyed:
    """What there is to survey in a source.

    Attributes:
        source: where tensors are read.
        works: the tensors that some candidate quantizes; those that share a second level stand
            next to each other.
        kept: every other tensor, with the reason.
        groups: tensors that must have one candidate, by a name for all of them.
    """

    source: Source
    works: list[SurveyWork]
    kept: list[TensorPlan]
    groups: dict[str, list[str]]


@contextmanager
def open_survey(
    path: Path, options: CheckpointOptions, candidates: Sequence[Candidate]
) -> Iterator[Surveyed]:
    """What a survey of a checkpoint has to measure; no data is read.

    Args:
        path: model directory; of a diffusers pipeline, its transformer or U-Net is surveyed.
        options: which tensors, and the layout that sizes are those of.
        candidates: what is compared.

    Raises:
        OptionError: for a diffusers pipeline of several models to quantize, or patterns that match
            nothing.
        FileFormatError: if the checkpoint is malformed or quantized already.
    """
    if is_pipeline(path):
        names = denoisers(path)
        if len(names) > 1:
            raise OptionError(
                f"{path}: is a diffusers pipeline with {len(names)} models to quantize, "
                f"{listed(names)}; a survey is of one: give its folder"
            )
        path = path / names[0]
    check_cast(options.cast)
    asked = with_changes(
        options,
        format=_ANY_ROWS,
        layout=_USUAL,
        choices=None,
        activations=None,
        moments=None,
        granularity=None,
        allow_nothing=True,
    )
    with Checkpoint(path, follow_links=options.follow_links, cast=options.cast) as checkpoint:
        plan = plan_quantize(checkpoint, asked)
        # What the layout does not hold is measured all the same.
        layout, usual = get_layout(options.layout), get_layout(_USUAL)
        works: list[SurveyWork] = []
        kept: list[TensorPlan] = []
        for work in plan.works:
            if work.entry is None:
                kept.append(work)
                continue
            tensor, shape = work.tensor, work.tensor.spec.shape
            schemes = {
                each.name: each.scheme
                for each in candidates
                if each.scheme is not None and shape[-1] % each.scheme.spec.block_size == 0
            }
            if not schemes:
                reason = f"last axis {shape[-1]} is a multiple of no candidate's block"
                kept.append(TensorPlan(tensor, "keep", reason))
                continue
            entries = {
                name: (layout if scheme.format in layout.formats else usual).entry(
                    tensor.name, shape, tensor.dtype, scheme
                )
                for name, scheme in schemes.items()
            }
            made = survey_work(tensor, entries)
            made.second = work.second
            works.append(made)
        yield Surveyed(plan.source, works, kept, choice_groups([w.tensor.name for w in works]))


def choice_groups(names: Sequence[str]) -> dict[str, list[str]]:
    """Weights that must have one format, by a name that a plan gives them.

    Engines fuse them into one matrix (q, k and v), or build one layer of all experts.
    """
    found: dict[str, list[str]] = {}
    for name in names:
        experts = _EXPERTS.match(name)
        key = experts[1] if experts else fusion_group(name) or module_of(name)
        found.setdefault(key, []).append(name)
    return {_shown(key, members): members for key, members in found.items()}


def _shown(key: str, members: Sequence[str]) -> str:
    """The name of a group: of fused weights only those that are there."""
    if "{" not in key:
        return key
    parent, _, listed = key.removesuffix("}").partition("{")
    present = {module_of(name).removeprefix(parent) for name in members}
    last = [each for each in listed.split(",") if each in present]
    return f"{parent}{last[0]}" if len(last) == 1 else f"{parent}{{{','.join(last)}}}"


def resolve(
    path: Path, options: CheckpointOptions, plan: Callable[[Surveyed], dict[str, str]]
) -> dict[str, str]:
    """The candidate of every weight of a checkpoint; no data is read.

    Args:
        path: model directory.
        options: which tensors.
        plan: gives each choice group's candidate.

    Returns:
        Weight to candidate, as `options.choices` has it.
    """
    with open_survey(path, options, [candidate(_ANY_ROWS)]) as surveyed:
        chosen = plan(surveyed)
        return {name: chosen[key] for key, names in surveyed.groups.items() for name in names}
