# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Plans: which format each group of tensors gets, as a small JSON file that a person can edit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp4kit.checkpoint.options import CheckpointOptions
from fp4kit.checkpoint.read.directory import listed
from fp4kit.checkpoint.read.json_files import read_settings
from fp4kit.checkpoint.survey import Surveyed, resolve
from fp4kit.errors import FileFormatError, OptionError
from fp4kit.io.candidates import KEPT, candidate
from fp4kit.io.quantize import open_file_survey
from fp4kit.io.report import QuantizeOptions

#: The key that says what the file is, and the version of its form.
KEY, VERSION = "fp4kit_plan", 1
GROUPS = "groups"
#: Group to candidate, or the path of a file that holds it.
Plan = Mapping[str, str] | str | os.PathLike[str]


def plan_content(groups: Mapping[str, str]) -> dict[str, Any]:
    """A plan as the JSON of its file."""
    return {KEY: VERSION, GROUPS: dict(groups)}


def read_plan(plan: Plan) -> tuple[str, dict[str, str]]:
    """What messages call a plan, and group to candidate.

    Raises:
        FileFormatError: if a file is no plan.
        OptionError: if there is none, or for an unknown candidate.
    """
    if isinstance(plan, Mapping):
        where, groups = "plan", dict(plan)
    else:
        path = Path(plan)
        where, groups = str(path), _groups(path)
    for key, name in groups.items():
        candidate(name, f"{where}: {key}: ")
    return where, groups


def _groups(path: Path) -> dict[str, str]:
    content = read_settings(path)
    if content is None:
        raise OptionError(f"{path}: no such file; give a plan that `fp4kit survey` wrote")
    if content.get(KEY) != VERSION or not isinstance(content.get(GROUPS), dict):
        raise FileFormatError(
            f"{path}: is no plan: it needs {KEY!r}: {VERSION} and {GROUPS!r}, an object of groups "
            "of tensors and their formats"
        )
    groups: dict[str, Any] = content[GROUPS]
    bad = next((key for key, name in groups.items() if not isinstance(name, str)), None)
    if bad is not None:
        raise FileFormatError(f"{path}: the format of {bad!r} is no string")
    return groups


def choices_of(path: Path, options: CheckpointOptions, plan: Plan) -> dict[str, str]:
    """The candidate of every weight of a checkpoint under a plan.

    Args:
        path: model directory.
        options: which tensors.
        plan: what each group gets.

    Raises:
        OptionError: for groups that the checkpoint does not have, or that the plan lacks.
    """
    where, groups = read_plan(plan)
    return resolve(path, options, lambda found: _fitted(where, groups, found))


def file_choices_of(path: Path, options: QuantizeOptions, plan: Plan) -> dict[str, str]:
    """The candidate of every tensor of a file under a plan.

    Args:
        path: .safetensors, .npy or .npz file.
        options: which tensors.
        plan: what each tensor gets.

    Raises:
        OptionError: for tensors that the file does not have, or that the plan lacks, and for a
            format that a tensor's rows cannot have.
    """
    where, groups = read_plan(plan)
    with open_file_survey(path, options, [candidate("fp8")]) as (source, works, kept):
        names = [work.tensor.name for work in works]
        chosen = _fitted(where, groups, Surveyed(source, works, kept, {n: [n] for n in names}))
        for work in works:
            scheme, rows = _scheme(chosen[work.tensor.name]), work.tensor.spec.shape[-1]
            if scheme is not None and rows % scheme.spec.block_size:
                raise OptionError(
                    f"{where}: {work.tensor.name} cannot be {scheme.format}: its rows of {rows} "
                    f"are no multiple of {scheme.spec.block_size}; choose fp8 or {KEPT}"
                )
    return chosen


def _fitted(where: str, groups: dict[str, str], found: Surveyed) -> dict[str, str]:
    """A plan for just the groups that there are."""
    unknown = [key for key in groups if key not in found.groups]
    if unknown:
        reasons = {work.tensor.name: work.reason for work in found.kept}
        why = reasons.get(unknown[0]) or reasons.get(f"{unknown[0]}.weight")
        said = f" ({why})" if why else ""
        raise OptionError(
            f"{where}: {len(unknown)} of its groups can not be quantized here or do not exist: "
            f"{listed(unknown)}{said}; remove them, or make the plan anew with `fp4kit survey`"
        )
    specs = [scheme.spec for scheme in map(_scheme, groups.values()) if scheme is not None]
    block = min((spec.block_size for spec in specs), default=1)
    rows = {work.tensor.name: work.tensor.spec.shape[-1] for work in found.works}
    missing = [key for key in found.groups if key not in groups]
    wanted = [key for key in missing if all(rows[n] % block == 0 for n in found.groups[key])]
    if wanted:
        raise OptionError(
            f"{where}: says nothing of {len(wanted)} groups: {listed(wanted)}; name a format for "
            f"each, or {KEPT}"
        )
    return groups | dict.fromkeys(missing, KEPT)


def _scheme(name: str) -> Any:
    return candidate(name).scheme
