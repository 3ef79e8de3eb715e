# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""`fp4kit survey`."""

from __future__ import annotations

from typing import Any

import click

from fp4kit.files.choices import SurveyChoices
from fp4kit.files.survey import survey
from fp4kit.files.survey_plan import plan_content
from fp4kit.files.survey_report import SurveyReport
from fp4kit.io.read.open import check_source

from .choice_options import BUDGET, FORMATS, MOMENTS, PINS, SAVE_PLAN
from .given import Given
from .html_report import check_html
from .options import layout, refuse, source, takes
from .output import print_json, say
from .progress import progress_bar
from .report_file import check_report, check_side_file
from .survey_tables import print_survey
from .text import example

PLAN_FILE = "save-plan"


@click.command(
    epilog=example(
        "fp4kit survey Llama-3-8B",
        "fp4kit survey Llama-3-8B --budget 4.8 --save-plan plan.json",
        "fp4kit quantize Llama-3-8B -o out --plan plan.json",
        "fp4kit survey Llama-3-8B --budget 6GB --pin '*down_proj=fp8' --formats nvfp4,fp8",
    )
)
@takes(
    source(),
    *(FORMATS, BUDGET, PINS, MOMENTS),
    layout(
        "Which layout sizes are those of; --budget chooses among the formats that it holds.  "
        "[default: compressed-tensors]"
    ),
    SAVE_PLAN,
    *("scheduler", "device", "threads", "include", "exclude", "experts_layout", "unscaled_fp8"),
    *("follow_links", "cast", "all", "report", "html", "force", "json"),
)
def command(given: Given) -> None:
    """Compare formats on a model, and choose within a budget.

    IN is a model directory, or a .safetensors, .npy or .npz file. It is read once, and nothing is
    written but the reports and the plan.
    """
    if not given.source_url:
        check_source(given.source)
    inputs = [given.source, *([] if given.moments is None else [given.moments])]
    report_file, html = check_report(given, inputs), check_html(given, inputs)
    plan_file = check_side_file(given, given.plan_file, inputs, PLAN_FILE)
    if given.budget is None:
        refuse(("plan_file",), "for what --budget chooses; give one")
    report = run_survey(given)
    content = report.to_json()
    if report_file is not None:
        report_file.write(content)
    if html is not None:
        html.write(content, None)
    if plan_file is not None:
        plan_file.write(plan_content(report.plan))
    if given.as_json:
        print_json(content)
    else:
        print_survey(report, every=given.every)
    for warning in report.warnings:
        say(f"Warning: {warning}")
    if plan_file is not None:
        weighed = "" if given.moments is None else f" --moments {given.moments}"
        say(
            f"Wrote {plan_file.path}; fp4kit quantize {given.where} --plan {plan_file.path}"
            f"{weighed}"
        )


def run_survey(given: Given) -> SurveyReport:
    """The survey that options ask for."""
    names = SurveyChoices.__optional_keys__
    options: dict[str, Any] = given.pick(*names, "budget", "pins", "moments", "device")
    formats = [name.strip() for name in given.formats.split(",") if name.strip()]
    with progress_bar(f"Surveying {given.source.name}") as progress:
        return survey(
            given.where,
            formats,
            layout=given.layout or "compressed-tensors",
            workers=given.scheduler,
            progress=progress,
            **options,
        )
