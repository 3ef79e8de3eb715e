# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Verifying whatever is quantized: checkpoints from any tool, and the files of fp4kit's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fp4kit.checkpoint.compare import compare_paths, is_checkpoint
from fp4kit.checkpoint.inspect import inspect_checkpoint
from fp4kit.checkpoint.layouts import module_of
from fp4kit.checkpoint.models import architectures
from fp4kit.checkpoint.models.reader_faults import reader_faults
from fp4kit.checkpoint.read.components import component_faults, is_pipeline
from fp4kit.checkpoint.read.directory import Checkpoint
from fp4kit.checkpoint.read.quantized import find_quantized_weights
from fp4kit.errors import Fp4kitError
from fp4kit.io.dequantize import open_quantized
from fp4kit.io.gguf_faults import model_faults
from fp4kit.io.inspect import inspect_file
from fp4kit.io.read.gguf import GgufSource
from fp4kit.io.read.open import open_source
from fp4kit.io.report import TensorReport
from fp4kit.io.stream.chunks import Progress

from .structure import scale_faults, second_faults, structure_faults
from .values import Compared, compared_values, far


def path_faults(path: Path) -> list[str]:
    """Every fault that can be seen without the source.

    Args:
        path: model directory or file, from any tool.

    Returns:
        One line per fault; empty if there is none.
    """
    try:
        if is_checkpoint(path):
            return structure_faults(path)
        with open_source(path) as source:
            entries = open_quantized(source)
            faults = [fault for entry in entries for fault in second_faults(entry)]
            if isinstance(source, GgufSource):
                faults += model_faults(source, entries)
            return faults + [fault for entry in entries for fault in scale_faults(source, entry)]
    except Fp4kitError as error:
        return [str(error)]


def compared_paths(
    path: Path,
    against: Path,
    *,
    experts_layout: str | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Compared:
    """As :func:`.values.compared_values`; either path is a file or a directory."""
    try:
        if is_checkpoint(path) and (against.is_dir() or not path.is_dir()):
            return compared_values(
                path, against, experts_layout=experts_layout, device=device, progress=progress
            )
        report = compare_paths(
            against, path, experts_layout=experts_layout, device=device, progress=progress
        )
    except Fp4kitError as error:
        return Compared([str(error)], [])
    faults = [fault for tensor in report.tensors for fault in _faults(tensor)]
    return Compared(faults, report.tensors)


def _faults(tensor: TensorReport) -> Iterator[str]:
    """What is wrong with a tensor that was compared with its source."""
    if tensor.format is not None:
        if tensor.stats is not None:
            yield from far(tensor.name, tensor.stats)
    elif tensor.differs:
        yield f"{tensor.name}: is not quantized, but its values differ from the source"
    elif tensor.reason not in ("", "equal"):
        yield f"{tensor.name}: is not quantized, but {tensor.reason} from the source"


def path_tensors(path: Path) -> list[TensorReport]:
    """The tensors of a file or checkpoint and how they are stored, by the headers.

    Args:
        path: model directory or file, from any tool.

    Returns:
        None of them if it has faults that keep it from being read (:func:`path_faults` tells them).
    """
    try:
        inspect = inspect_checkpoint if is_checkpoint(path) else inspect_file
        return inspect(path).tensors
    except Fp4kitError:
        return []


def reader_notes(path: Path) -> list[str]:
    """Readers that are known to fail on a checkpoint, and what could not be checked.

    Args:
        path: model directory or .safetensors file, from any tool.

    Returns:
        One line per note; empty if there is none, or if the checkpoint has faults that keep it from
        being read (:func:`path_faults` tells them).
    """
    try:
        if is_pipeline(path):
            return component_faults(path, lambda name: reader_notes(path / name))
        with Checkpoint(path) as checkpoint:
            return _notes(checkpoint)
    except Fp4kitError:
        return []


def _notes(checkpoint: Checkpoint) -> list[str]:
    quantized = find_quantized_weights(checkpoint)
    if quantized is None or not quantized.entries or quantized.layout.single_file:
        return []
    config, notes = checkpoint.config, []
    if quantized.layout.by_transformers:
        formats = {entry.plan.format.name for entry in quantized.entries.values()}
        notes = reader_faults(config, formats, [module_of(name) for name in quantized.entries])
    if checkpoint.native or checkpoint.is_diffusion or not quantized.layout.lists_ignored:
        return notes
    unknown = architectures.unknown_types(config, architectures.models(config, ()))
    notes += [
        f"model type {name!r} is not one of transformers {architectures.version()}: the ignore "
        "list was checked by the stored names only"
        for name in unknown
    ]
    return notes
