# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Second levels in NumPy: a few numbers, which every host backend makes alike."""

from __future__ import annotations

from fp4kit.backend.interface import Backend, Plan, RawArray

from . import scaling


class HostSecondLevels(Backend):
    """The part of a host backend that makes and converts second-level scales."""

    def second_level(self, amax: RawArray, plan: Plan, dtype: str) -> RawArray:
        assert plan.recipe is not None
        with scaling.quiet():
            return scaling.second_level_from_amax(amax, plan.recipe, dtype)

    def convert_second_level(self, value: RawArray, source: str, target: str) -> RawArray:
        with scaling.quiet():
            return scaling.convert_second_level(value, source, target)
