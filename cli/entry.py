# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Entry point of the `fp4kit` script: small, so that a signal finds it ready early."""

from typing import NoReturn

from . import interrupts


def main() -> NoReturn:
    """Runs the `fp4kit` command."""
    interrupts.prepare()
    from .main import main as run

    run()
