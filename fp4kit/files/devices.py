# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What `device="auto"` means for work on files."""

from __future__ import annotations

import re

from fp4kit.api.backends import backend_status, get_backend
from fp4kit.errors import BackendUnavailableError, OptionError


def check_device(device: str) -> None:
    """Refuses what is no device; whether it can be used is another question.

    Raises:
        OptionError: for another word.
    """
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", device):
        raise OptionError(f"device={device!r} is not known; choose auto, cpu, cuda, or cuda:N")


def resolve_device(device: str) -> str:
    """`cpu`, `cuda` or `cuda:N` for what was asked for; `auto` is cuda where that can run.

    Raises:
        OptionError: for another word.
        BackendUnavailableError: if cuda was asked for by name and cannot run here.
    """
    check_device(device)
    if device == "cpu":
        return device
    cuda = next(status for status in backend_status() if status.name == "cuda")
    if cuda.available:
        return "cuda" if device == "auto" else device
    if device == "auto":
        return "cpu"
    raise BackendUnavailableError(f"serve --device {device}", {"cuda": cuda.reason or "no reason"})


def resolve_devices(device: str) -> tuple[str, ...]:
    """The devices that share the shards of a checkpoint: for `cuda` every GPU.

    Raises:
        OptionError: as :func:`resolve_device`.
        BackendUnavailableError: as :func:`resolve_device`.
    """
    resolved = resolve_device(device)
    return tuple(get_backend("cuda").devices()) if resolved == "cuda" else (resolved,)
