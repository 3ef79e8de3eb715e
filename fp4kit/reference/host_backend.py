# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What host backends have in common: whose arrays they take, and second levels in NumPy."""

from __future__ import annotations

from fp4kit.backend.interface import Backend, Plan, RawArray, Request

from . import scaling


class HostBackend(Backend):
    """A backend for arrays of the host."""

    def refusal(self, request: Request) -> str | None:
        if request.device_kind != "cpu":
            return (
                f"works on host arrays, not on {request.device}; copy the array to the host first "
                "or leave backend=None"
            )
        return None

    def second_level(self, amax: RawArray, plan: Plan, dtype: str) -> RawArray:
        assert plan.recipe is not None
        with scaling.quiet():
            return scaling.second_level_from_amax(amax, plan.recipe, dtype)

    def convert_second_level(self, value: RawArray, source: str, target: str) -> RawArray:
        with scaling.quiet():
            return scaling.convert_second_level(value, source, target)
