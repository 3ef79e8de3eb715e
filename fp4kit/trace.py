# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""`FP4KIT_TRACE=1`: a line on stderr for each call and each kernel, and why it was chosen."""

from __future__ import annotations

import os
import sys

#: Whether calls are traced; the variable is read once.
ENABLED = os.environ.get("FP4KIT_TRACE", "") not in ("", "0")


def say(subject: str, choice: str, reason: str) -> None:
    """Prints what was chosen for something, and why."""
    print(f"fp4kit: {subject}: {choice} ({reason})", file=sys.stderr)
