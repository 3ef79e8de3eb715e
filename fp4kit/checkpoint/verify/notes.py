# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What a user of a checkpoint should know that is no fault of it."""

from __future__ import annotations

from pathlib import Path

from fp4kit.checkpoint.layouts import module_of
from fp4kit.checkpoint.models import architectures
from fp4kit.checkpoint.models.reader_faults import reader_faults
from fp4kit.checkpoint.read.components import component_faults, is_pipeline
from fp4kit.checkpoint.read.directory import Checkpoint
from fp4kit.checkpoint.read.quantized import find_quantized_weights
from fp4kit.errors import Fp4kitError


def reader_notes(path: Path) -> list[str]:
    """Readers that are known to fail on a checkpoint, and what could not be checked.

    Args:
        path: model directory or .safetensors file, from any tool.

    Returns:
        One line per note; empty if there is none, or if the checkpoint has faults that keep it from
        being read (:func:`.structure.structure_faults` tells them).
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
    if checkpoint.native or checkpoint.is_diffusion:
        return notes
    unknown = architectures.unknown_types(config, architectures.models(config, ()))
    notes += [
        f"model type {name!r} is not one of transformers {architectures.version()}: the ignore "
        "list was checked by the stored names only"
        for name in unknown
    ]
    return notes
