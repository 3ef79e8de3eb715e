# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""`--html FILE`: checked before work like `--report`, drawn and written after it."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from dataclasses import replace as with_changes
from pathlib import Path
from typing import Any

import click

from fp4kit.errors import OptionError
from fp4kit.report.before import read_before
from fp4kit.report.model import Run, page_data
from fp4kit.report.page import Library, load_library, page

from .given import Given
from .main import ARGUMENTS
from .report_file import ReportFile, check_side_file


@dataclass(frozen=True)
class HtmlReport:
    """Where a page goes, and what it takes to draw it.

    Attributes:
        file: where it goes.
        library: what draws it.
        before: an earlier run to compare with.
        survey: the survey that chose the formats, as JSON.
    """

    file: ReportFile
    library: Library
    before: dict[str, Any] | None
    survey: dict[str, Any] | None = None

    def with_survey(self, survey: dict[str, Any]) -> HtmlReport:
        """One that also shows what a budget chose from, by the JSON of the survey."""
        return with_changes(self, survey=survey)

    def write(self, report: dict[str, Any], coded: Path | None) -> None:
        """Writes the page.

        Args:
            report: what the command gives as JSON.
            coded: what holds the codes that were measured; None if nothing does.

        Raises:
            OutputError: if it cannot be written.
        """
        context = click.get_current_context()
        run = Run(
            kind=str(context.info_name),
            command=shlex.join(["fp4kit", *context.meta[ARGUMENTS]]),
            coded=coded,
            before=self.before,
            survey=self.survey,
            versions=self.library.versions,
        )
        self.file.write_text(page(page_data(report, run), self.library))


def check_html(given: Given, inputs: list[Path]) -> HtmlReport | None:
    """Refuses a page that cannot be drawn, or would destroy something, before any work.

    Args:
        given: options of the command, its output filled in if it has one.
        inputs: files and directories that are read.

    Returns:
        Where the page goes; None without `--html`.

    Raises:
        OptionError: as :func:`check_side_file`, if the library is missing, or if another file of
            the command goes there.
        FileFormatError: if the report of an earlier run is none.
        OutputError: if it cannot be written.
    """
    path, before = given.html, given.before
    if path is None:
        if before is not None:
            raise click.UsageError("--before is shown in the page of --html; name one")
        return None
    for flag, other in (("--report", given.report_file), ("--save-plan", given.plan_file)):
        if other is not None and os.path.realpath(other) == os.path.realpath(path):
            raise OptionError(f"{path}: {flag} and --html name the same file; choose another")
    held = [*inputs, *([] if before is None else [before])]
    file = check_side_file(given, path, held, "html")
    assert file is not None
    return HtmlReport(file, load_library(), None if before is None else read_before(before))
