# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""`fp4kit env`."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

import click

from fp4kit import __version__, backend_status

from .given import Given
from .options import takes
from .output import Column, print_json, print_table
from .text import UNKNOWN, example, one_line

#: Distribution names under which each package is known: CuPy's wheels carry the CUDA version.
PACKAGES = {
    "numpy": ["numpy"],
    "numba": ["numba"],
    "ml_dtypes": ["ml_dtypes"],
    "cupy": ["cupy-cuda13x", "cupy-cuda12x", "cupy"],
}


@click.command(
    epilog=example(
        "fp4kit env",
        "fp4kit env --json",
    )
)
@takes("json")
def command(given: Given) -> None:
    """Show versions, GPUs, and which backends can run here.

    Please put the output into bug reports.
    """
    facts = collect()
    if given.as_json:
        print_json(facts)
        return
    print_table(
        [Column("what", number=False), Column("version", number=False)],
        [
            *([name, version or "not installed"] for name, version in facts["versions"].items()),
            ["platform", facts["platform"]],
            ["cpus", str(facts["cpus"])],
        ],
    )
    click.echo()
    print_table(
        [
            Column("backend", number=False),
            Column("available", number=False),
            Column("details", number=False),
        ],
        [row for backend in facts["backends"] for row in backend_rows(backend)],
    )


def backend_rows(backend: dict[str, Any]) -> list[list[str]]:
    """A row for a backend, and one more for every further detail."""
    details = [backend["reason"]] if backend["reason"] else []
    details += [f"{key} {value}" for key, value in backend["details"].items()]
    first, *more = details or [UNKNOWN]
    available = "yes" if backend["available"] else "no"
    return [[backend["name"], available, first], *(["", "", detail] for detail in more)]


def collect() -> dict[str, Any]:
    """Everything `fp4kit env` knows, as plain data."""
    versions: dict[str, str | None] = {
        "fp4kit": __version__,
        "python": platform.python_version(),
    }
    versions |= {name: installed_version(names) for name, names in PACKAGES.items()}
    return {
        "versions": versions,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "backends": [
            {
                "name": status.name,
                "available": status.available,
                "reason": status.reason and one_line(status.reason),
                "details": status.details,
            }
            for status in backend_status()
        ],
    }


def installed_version(names: list[str]) -> str | None:
    """Version of the first of several distributions that is installed; imports nothing."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None
