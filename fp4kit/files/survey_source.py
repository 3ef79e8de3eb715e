# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What a survey measures, opened from wherever it lies; and shares of it, for workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp4kit.backend.interface import ErrorSums
from fp4kit.checkpoint.options import CheckpointOptions
from fp4kit.checkpoint.plan.moments import open_moments
from fp4kit.checkpoint.survey import Surveyed, open_survey
from fp4kit.errors import OptionError
from fp4kit.fleet.mirror import opened
from fp4kit.fleet.shares import check_hash
from fp4kit.float_mode import by_ieee
from fp4kit.io.candidates import Candidate, candidates
from fp4kit.io.quantize import open_file_survey
from fp4kit.io.quantize_plan import units
from fp4kit.io.report import QuantizeOptions
from fp4kit.io.stream.chunks import Tally
from fp4kit.io.survey_tensors import SurveyWork, survey_tensors

from .devices import resolve_device
from .moments import take_moments


@contextmanager
def open_surveyed(
    source: Path, layout: str, compared: Sequence[Candidate], given: dict[str, Any]
) -> Iterator[Surveyed]:
    """What there is to survey."""
    given = dict(given)
    if source.is_dir():
        options = CheckpointOptions(layout=layout, **given)
        with open_survey(source, options, compared) as found:
            yield found
        return
    for name in ("experts_layout", "follow_links", "unscaled_fp8"):
        if given.pop(name, None):
            raise OptionError(f"{source}: is a file; {name} is for model directories")
    with open_file_survey(source, QuantizeOptions(**given), compared) as (read, works, kept):
        yield Surveyed(read, works, kept, {work.tensor.name: [work.tensor.name] for work in works})


@dataclass(frozen=True)
class SurveyAsked:
    """What a survey is asked for, as it goes to workers.

    Attributes:
        source: path or URL of the model directory.
        candidates: names of what is compared.
        layout: which layout sizes are those of.
        moments: path of the second moments, None without any.
        device: where to compute, as `--device` says it.
        given: the other options.
        hash: of the source.
    """

    source: str
    candidates: tuple[str, ...]
    layout: str
    moments: str | None
    device: str
    given: dict[str, Any]
    hash: str


@dataclass(frozen=True)
class Measured:
    """What was measured of a tensor; fields as in :class:`SurveyWork`."""

    name: str
    sums: dict[str, ErrorSums]
    signal: float
    noise: dict[str, float]

    @classmethod
    def of(cls, work: SurveyWork) -> Measured:
        """What a work holds once it is done."""
        sums = {name: each.sums for name, each in work.tries.items()}
        return cls(work.tensor.name, sums, work.signal, work.noise)

    def give_to(self, work: SurveyWork) -> None:
        """Makes a work one that is done."""
        for name, sums in self.sums.items():
            work.tries[name].sums = sums
        work.signal, work.noise = self.signal, self.noise


@by_ieee
def survey_share(asked: SurveyAsked, number: int, count: int) -> list[Measured]:
    """Measures every `count`-th group of tensors that share a second level.

    Raises:
        OptionError: if this process sees another source.
        NonFiniteError: if a tensor holds NaN or infinity.
    """
    with opened(asked.source) as folder:
        check_hash(asked.hash, folder)
        compared = candidates(list(asked.candidates))
        with open_surveyed(folder, asked.layout, compared, asked.given) as found:
            if asked.moments is not None:
                take_moments(found, open_moments(Path(asked.moments)))
            groups = list(units(found.works))[number::count]
            works = [work for group in groups for work in group if isinstance(work, SurveyWork)]
            survey_tensors(found.source, works, resolve_device(asked.device), Tally(None, 1))
            found.source.check_unchanged()
            return [Measured.of(work) for work in works]
