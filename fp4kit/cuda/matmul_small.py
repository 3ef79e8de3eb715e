# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Products of few rows by kernels of their own."""

from __future__ import annotations

from fp4kit.backend.matmul import MatmulJob


def launch(job: MatmulJob) -> bool:
    """Fills `job.out` if there is a kernel for it; False, and nothing is done, if not."""
    return False
