# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Looking for faults: what `fp4kit verify` calls."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from fp4kit.checkpoint.read.components import is_pipeline
from fp4kit.checkpoint.read.directory import Checkpoint
from fp4kit.checkpoint.verify.paths import compared_paths, path_faults, reader_notes
from fp4kit.checkpoint.verify.values import ComparedTensor, compared_share
from fp4kit.errors import OptionError
from fp4kit.fleet.executors import Course
from fp4kit.fleet.mirror import opened
from fp4kit.fleet.shares import ShareWork, check_hash, hash_of, interleaved
from fp4kit.fleet.workers import Workers, check_workers, run
from fp4kit.float_mode import by_ieee
from fp4kit.io.report import TensorReport
from fp4kit.io.stream.chunks import Progress

from .choices import ExpertsLayout, StrPath, check_arguments, checked
from .devices import resolve_device
from .shared import absolute


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
    workers: Workers = None,
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
        workers: who shares the comparison of two model directories, as for
            :func:`quantize_checkpoint`; no part.
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
    used = device if workers is not None or against is None else resolve_device(device)
    if check_workers(workers) is not None:
        raise OptionError(f"workers={workers!r}: verify has no parts; give a scheduler")
    if workers is not None and against is None:
        raise OptionError("workers compare values; say against what (--against)")
    with ExitStack() as stack:
        source = checked(stack.enter_context(opened(os.fspath(path))))
        original = None
        if against is not None:
            original = checked(stack.enter_context(opened(os.fspath(against))))
        faults = path_faults(source)
        tensors: list[TensorReport] = []
        if original is not None and not faults and workers is not None:
            places = absolute(path), absolute(against or "")
            faults, tensors = _shared(
                (source, original), (*places, experts_layout, used), workers, progress
            )
        elif original is not None and not faults:
            faults, tensors = compared_paths(
                source, original, experts_layout=experts_layout, device=used, progress=progress
            )
        notes = reader_notes(source)
    where = os.fspath(path)
    return VerifyReport(
        where, [fault.replace(str(source), where) for fault in faults], notes, tensors
    )


def _shared(
    folders: tuple[Path, Path],
    arguments: tuple[str, str, str | None, str],
    workers: Workers,
    progress: Progress | None,
) -> tuple[list[str], list[TensorReport]]:
    """What workers found: faults, and the tensors that they compared.

    Raises:
        OptionError: if either is no model directory.
        OutputError: if some were not compared.
    """
    for folder in folders:
        if not folder.is_dir() or is_pipeline(folder):
            raise OptionError(f"{folder}: is no model directory; workers compare two of those")
    with Checkpoint(folders[1]) as checkpoint:
        nbytes = sum(tensor.spec.nbytes for tensor in checkpoint.tensors.values())
    asked = (*arguments, hash_of(*folders))
    work = ShareWork("verify", arguments[3], arguments[0], _compare, asked, nbytes)
    run(Course(work, range(work.count), progress), workers)
    shares = work.in_order()
    found: list[ComparedTensor] = interleaved([tensors for _, tensors in shares])
    faults = [*shares[0][0], *(fault for each in found for fault in each.faults)]
    return faults, [each.tensor for each in found]


@by_ieee
def _compare(
    path: str,
    against: str,
    experts_layout: str | None,
    device: str,
    wanted: str,
    number: int,
    count: int,
) -> tuple[list[str], list[ComparedTensor]]:
    """A share of the comparison; `wanted` is the hash that both must have."""
    with opened(path) as source, opened(against) as original:
        check_hash(wanted, source, original)
        return compared_share(
            source,
            original,
            (number, count),
            experts_layout=experts_layout,
            device=resolve_device(device),
        )
