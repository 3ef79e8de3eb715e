# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""`fp4kit.survey`: what each format would do to a model, and which to choose within a budget."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import replace as with_changes
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fp4kit import __version__
from fp4kit.checkpoint.layouts import get_layout
from fp4kit.checkpoint.plan.moments import open_moments
from fp4kit.checkpoint.read.components import is_pipeline
from fp4kit.checkpoint.survey import Surveyed
from fp4kit.errors import OptionError
from fp4kit.fleet.executors import Course
from fp4kit.fleet.mirror import opened
from fp4kit.fleet.shares import ShareWork, hash_of
from fp4kit.fleet.workers import Workers, check_workers, run
from fp4kit.float_mode import by_ieee
from fp4kit.io.candidates import DEFAULT_CANDIDATES, KEPT, candidates
from fp4kit.io.stream.chunks import Progress, Tally
from fp4kit.io.survey_tensors import SurveyWork, survey_tensors

from .budget import Allocation, Budget, Pin, allocate, format_of, pinned
from .choices import Layout, StrPath, SurveyChoices, check_arguments, checked, known
from .devices import resolve_device
from .moments import sensitivities, take_moments
from .recommend import recommendation
from .shared import absolute
from .survey_report import (
    CandidateError,
    ChoiceGroup,
    KeptTensor,
    SurveyedTensor,
    SurveyReport,
)
from .survey_source import SurveyAsked, open_surveyed, survey_share

if TYPE_CHECKING:
    from typing_extensions import Unpack


@by_ieee
def survey(
    path: StrPath,
    formats: Sequence[str] = DEFAULT_CANDIDATES,
    *,
    budget: float | str | None = None,
    pins: Sequence[str] = (),
    moments: StrPath | None = None,
    layout: Layout = "compressed-tensors",
    device: str = "auto",
    workers: Workers = None,
    progress: Progress | None = None,
    **choices: Unpack[SurveyChoices],
) -> SurveyReport:
    """Measures what each format would do to every tensor of a model: `fp4kit survey`.

    The data is read once, and nothing is written.

    Args:
        path: a model directory, its URL, or a .safetensors, .npy or .npz file.
        formats: candidates: names of formats, `nvfp4+sweep` for one with a scale search, and
            `bf16` for leaving a tensor as it is stored.
        budget: choose a candidate for each group of tensors so that all take at most so many bits
            a weight (`4.8`), or the whole result so many bytes (`"20GB"`).
        pins: `PATTERN=FORMAT`: what some tensors get whatever the budget.
        moments: file of the second moments of the layers' inputs (:mod:`fp4kit.io.moments`), or
            llama.cpp's `imatrix.gguf`: errors are then those of the layers' outputs.
        layout: which layout sizes are those of; a budget chooses among the formats that it holds.
        device: as for :func:`quantize_file`; `cpu` with moments.
        workers: who shares the reading of a model directory, as for :func:`quantize_checkpoint`;
            no part.
        progress: called with (bytes done, bytes in all) of the source.
        **choices: `include`, `exclude`, `cast`, `unscaled_fp8`, `experts_layout`, `follow_links`:
            as for :func:`quantize_checkpoint`.

    Returns:
        Every candidate's error for every tensor, and what the budget chose.

    Raises:
        OptionError: for unknown options, an impossible budget, pins that overlap, or moments of
            another model.
        FileFormatError: if the source is malformed or quantized already.
        NonFiniteError: if a tensor holds NaN or infinity.

    Examples:
        >>> import tempfile, numpy as np, fp4kit
        >>> folder = tempfile.mkdtemp()
        >>> w = np.random.default_rng(0).standard_normal((64, 64), np.float32)
        >>> model = {"model.layers.0.mlp.down_proj.weight": w}
        >>> _ = fp4kit.save(f"{folder}/model", model, config={"model_type": "llama"})
        >>> report = fp4kit.survey(f"{folder}/model", ["nvfp4", "fp8"], budget=8.6)
        >>> report.plan
        {'model.layers.0.mlp.down_proj': 'fp8'}
    """
    check_arguments(locals())
    started = time.perf_counter()
    given = known(choices, SurveyChoices)
    wanted = None if budget is None else Budget.of(budget)
    fixed = [Pin.of(text) for text in pins]
    names = list(dict.fromkeys([*formats, *(pin.candidate for pin in fixed)]))
    compared = candidates([*formats, *names[len(list(formats)) :]])
    read = None if moments is None else open_moments(Path(moments))
    used = "cpu" if device == "auto" and read is not None else device
    # Workers see what they have.
    used = resolve_device(used) if workers is None else used
    if read is not None and used != "cpu":
        raise OptionError(f"device={device!r}: moments are for the CPU; leave --device out")
    if check_workers(workers) is not None:
        raise OptionError(f"workers={workers!r}: a survey has no parts; give a scheduler")
    with (
        opened(os.fspath(path)) as source,
        open_surveyed(checked(source), layout, compared, given) as found,
    ):
        if workers is not None and (not source.is_dir() or is_pipeline(source)):
            raise OptionError(f"{source}: is no model directory, which workers are for")
        asked = SurveyAsked(
            absolute(path),
            tuple(each.name for each in compared),
            layout,
            None if moments is None else str(Path(moments).absolute()),
            used,
            given,
            "" if workers is None else hash_of(source),
        )
        if not found.works:
            raise OptionError(f"{source}: no tensor can be quantized to {', '.join(formats)}")
        groups = _groups(found, pinned(found.groups, fixed))
        warnings = [] if read is None else take_moments(found, read)
        kept = [_kept(work) for work in found.kept]
        # Sizes are known from the headers, and so is whether a budget is impossible.
        _choose(_tensors(found, names), groups, kept, list(formats), layout, wanted)
        _measure(found, asked, workers, progress)
        tensors = _tensors(found, names)
    chosen = _choose(tensors, groups, kept, list(formats), layout, wanted)
    report = SurveyReport(
        source=os.fspath(path),
        candidates=names,
        tensors=tensors,
        kept=kept,
        moments=read is not None,
        options={
            "formats": list(formats),
            "budget": None if wanted is None else wanted.text,
            "pins": list(pins),
            "moments": None if moments is None else str(moments),
            "layout": layout,
            "device": used,
            **{name: list(v) if isinstance(v, tuple) else v for name, v in given.items()},
        },
        versions={
            "fp4kit": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
        },
        warnings=warnings,
        **chosen,
    )
    report = with_changes(report, recommendation=recommendation(report))
    return with_changes(report, seconds=time.perf_counter() - started)


def _measure(
    found: Surveyed, asked: SurveyAsked, workers: Workers, progress: Progress | None
) -> None:
    """Reads every tensor, here or by workers, and fills in what was measured."""
    nbytes = sum(work.tensor.spec.nbytes for work in found.works)
    if workers is None:
        tally = Tally(progress, nbytes)
        survey_tensors(found.source, found.works, resolve_device(asked.device), tally)
        found.source.check_unchanged()
        return
    work = ShareWork("survey", asked.device, asked.source, survey_share, (asked,), nbytes)
    run(Course(work, range(work.count), progress), workers)
    by_name = {each.name: each for share in work.in_order() for each in share}
    for each in found.works:
        by_name[each.tensor.name].give_to(each)


def _tensors(found: Surveyed, names: Sequence[str]) -> list[SurveyedTensor]:
    groups = {name: key for key, members in found.groups.items() for name in members}
    weights = sensitivities(found.works)
    return [
        SurveyedTensor(
            name=work.tensor.name,
            shape=work.tensor.spec.shape,
            dtype=work.tensor.dtype,
            nbytes=work.tensor.spec.nbytes,
            group=groups[work.tensor.name],
            errors={name: error for name in names if (error := _error(work, name)) is not None},
            sensitivity=weights[work.tensor.name],
        )
        for work in found.works
    ]


def _error(work: SurveyWork, name: str) -> CandidateError | None:
    """What a candidate does to a tensor, None if it cannot hold it."""
    if name == KEPT:
        return CandidateError(work.tensor.spec.nbytes, 0.0, None if work.moments is None else 0.0)
    made = work.tries.get(name)
    if made is None or made.entry is None:
        return None
    sums = made.sums
    noise = sums.sum_d2 / sums.sum_x2 if sums.sum_x2 else 0.0
    return CandidateError(
        made.entry.stored,
        noise if math.isfinite(noise) else math.inf,
        work.output_noise(name),
    )


def _kept(work: Any) -> KeptTensor:
    spec = work.tensor.spec
    return KeptTensor(work.tensor.name, spec.shape, work.tensor.dtype, spec.nbytes, work.reason)


def _groups(found: Surveyed, pins: dict[str, Pin]) -> list[ChoiceGroup]:
    """What shares a choice, with those that pins make."""
    groups = []
    for key, members in found.groups.items():
        pin = pins.get(key)
        choice, pattern = (None, None) if pin is None else (pin.candidate, pin.pattern)
        groups.append(ChoiceGroup(key, tuple(members), choice, pattern))
    return groups


def _choose(
    tensors: list[SurveyedTensor],
    groups: list[ChoiceGroup],
    kept: list[KeptTensor],
    formats: list[str],
    layout: str,
    budget: Budget | None,
) -> dict[str, Any]:
    """The points of a report, and what a budget chooses: fields of it by name."""
    nbytes = sum(tensor.nbytes for tensor in kept)
    allocation = Allocation(tensors, groups, nbytes)
    uniform = [point for name in formats if (point := allocation.uniform(name)) is not None]
    if budget is None:
        return {"groups": groups, "uniform": uniform}
    held = get_layout(layout).formats
    names = [name for name in formats if name == KEPT or format_of(name) in held]
    if not any(name != KEPT for name in names):
        raise OptionError(
            f"layout {layout} holds none of {', '.join(formats)}; it holds {' and '.join(held)}"
        )
    choices, frontier = allocate(allocation, names, budget, nbytes)
    return {
        "groups": [
            with_changes(group, choice=choice)
            for group, choice in zip(groups, choices, strict=True)
        ],
        "uniform": uniform,
        "frontier": frontier,
        "chosen": allocation.point(choices),
    }
