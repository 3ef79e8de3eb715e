# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Looking for faults: what `fp4kit verify` calls."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass, field

from fp4kit.checkpoint.verify.paths import compared_paths, path_faults, reader_notes
from fp4kit.fleet.mirror import opened
from fp4kit.io.report import TensorReport
from fp4kit.io.stream.chunks import Progress

from .choices import ExpertsLayout, StrPath, check_arguments, checked
from .devices import resolve_device


@dataclass(frozen=True)
class VerifyReport:
    """What was found in a quantized file or checkpoint.

    Attributes:
        source: path that was looked at.
        faults: one line each; empty if there is none.
        notes: readers that are known to fail on it although it has no fault.
        tensors: those that were compared with `against`, with error statistics; empty without it,
            or if there were faults before.
    """

    source: str
    faults: list[str]
    notes: list[str]
    tensors: list[TensorReport] = field(default_factory=list, repr=False, compare=False)

    @property
    def ok(self) -> bool:
        """Whether there is no fault."""
        return not self.faults


def verify(
    path: StrPath,
    against: StrPath | None = None,
    *,
    experts_layout: ExpertsLayout | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> VerifyReport:
    """Looks for faults in a quantized checkpoint or file of any tool: `fp4kit verify`.

    Checks every tensor that an engine expects, element types and shapes, the ignore list,
    second-level scales that fused weights must share, NaN scales, index, sizes and metadata.

    Args:
        path: file or model directory, or the URL of one.
        against: what it was made from: also compare the values.
        experts_layout: how fused experts of `against` are stored, where that is not clear.
        device: where values are compared; as for :func:`quantize_file`.
        progress: called with (bytes done, bytes in all) while values are compared.

    Raises:
        FileFormatError: if there is nothing of that name.
        OptionError: if it is a file of another kind.
        BackendUnavailableError: if the device cannot be used.

    Examples:
        >>> import tempfile, numpy as np, fp4kit
        >>> file = tempfile.mkdtemp() + "/q.safetensors"
        >>> _ = fp4kit.save(file, {"w": fp4kit.quantize(np.eye(32, dtype=np.float32))})
        >>> fp4kit.verify(file).ok
        True
    """
    check_arguments(locals())
    used = "cpu" if against is None else resolve_device(device)
    with ExitStack() as stack:
        source = checked(stack.enter_context(opened(os.fspath(path))))
        original = None
        if against is not None:
            original = checked(stack.enter_context(opened(os.fspath(against))))
        faults = path_faults(source)
        tensors: list[TensorReport] = []
        if original is not None and not faults:
            faults, tensors = compared_paths(
                source, original, experts_layout=experts_layout, device=used, progress=progress
            )
        notes = reader_notes(source)
    where = os.fspath(path)
    return VerifyReport(
        where, [fault.replace(str(source), where) for fault in faults], notes, tensors
    )
