# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What moments say of the tensors of a survey."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fp4kit.checkpoint.layouts import module_of
from fp4kit.checkpoint.plan.moments import GivenMoments, moments_of
from fp4kit.checkpoint.survey import Surveyed
from fp4kit.io.moments import PRIOR_ROWS
from fp4kit.io.survey_tensors import SurveyWork


def take_moments(found: Surveyed, given: GivenMoments) -> list[str]:
    """Gives each tensor its moments; says which have none.

    Raises:
        OptionError: for moments of another model.
    """
    known = {work.tensor.name for work in (*found.works, *found.kept)}
    moments, warnings = moments_of(given, known, [work.tensor for work in found.works])
    for work in found.works:
        module = module_of(work.tensor.name)
        work.moments, work.effects = moments.columns(module), moments.effects(module)
        work.rows = moments.rows.get(module, 0.0)
        for each in work.tries.values():
            each.weigh(work.moments)
    return warnings


def sensitivities(works: Sequence[SurveyWork]) -> dict[str, float]:
    """What the output's error of each tensor counts, once all are measured.

    With effects it is the share of the model's output that hangs on the tensor, 1 on average, and
    few rows are shrunk towards 1, as moments are. With moments alone nothing is known of the way
    from the layer's output to the model's, and outputs that a few large channels make look more
    exact than they are: then the geometric mean of the output's error and the weight's counts.
    """
    known = [work.signal for work in works if work.effects is not None]
    mean = sum(known) / len(known) if known else 0.0
    found = {}
    for work in works:
        if work.effects is not None and mean > 0:
            seen = work.signal / mean
            found[work.tensor.name] = (work.rows * seen + PRIOR_ROWS) / (work.rows + PRIOR_ROWS)
        else:
            found[work.tensor.name] = _hedge(work)
    return found


def _hedge(work: SurveyWork) -> float:
    """What makes the output's error of the first candidate its geometric mean with the weight's."""
    name = next(iter(work.tries))
    sums, output = work.tries[name].sums, work.output_noise(name)
    if output is None or not output or not sums.sum_d2 or not math.isfinite(sums.sum_d2 * output):
        return 1.0
    return math.sqrt(sums.sum_d2 / sums.sum_x2 / output)
