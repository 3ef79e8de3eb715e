# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Listing the logical tensors of a checkpoint and how they are stored."""

from __future__ import annotations

import time
from collections.abc import Collection
from math import prod
from pathlib import Path

from fp4kit.io.metadata import shared_plan
from fp4kit.io.report import FileReport, TensorReport, joined
from fp4kit.io.storage import WEIGHT, QuantizedEntry

from .layouts import module_of
from .read.code_names import is_block_scale, scale_names
from .read.components import is_pipeline
from .read.directory import Checkpoint
from .read.quantized import find_quantized_weights
from .read.weight_files import folders_with_weights
from .views.fp8 import DEFAULT_BLOCK, FORMATS, Fp8View, grid_of

#: The element type of a weight of bytes, where it is not recorded what it was quantized from.
CODES = "8-bit codes"


def _float8(checkpoint: Checkpoint, known: Collection[str]) -> dict[str, Fp8View]:
    """The parts of weights in FP8 with scales as fp4kit's own format has them.

    Others are listed as they are stored, also those that nothing reads.
    """
    found: dict[str, Fp8View] = {}
    for name, weight in checkpoint.tensors.items():
        if name in known or weight.spec.dtype not in FORMATS or is_block_scale(checkpoint, name):
            continue
        scales = [
            checkpoint.tensors[each] for each in scale_names(name) if each in checkpoint.tensors
        ]
        if len(weight.shape) < 2 or len(scales) != 1:
            continue
        grid = grid_of(weight.shape, scales[0].shape, False, DEFAULT_BLOCK)
        if grid is not None:
            view = Fp8View(checkpoint, weight, scales[0], grid)
            found |= {} if view.scheme is None else dict.fromkeys(view.consumed, view)
    return found


def inspect_checkpoint(path: Path) -> FileReport:
    """Lists every tensor of a checkpoint; the parts of a quantized weight are one entry.

    Args:
        path: model directory, diffusers pipeline, or file in a layout.

    Returns:
        As :func:`fp4kit.io.compare.inspect_file`; `options` holds the layout and the metadata.

    Raises:
        FileFormatError: if the checkpoint is malformed.
    """
    if is_pipeline(path):
        return joined(
            path, {name: inspect_checkpoint(path / name) for name in folders_with_weights(path)}
        )
    started = time.perf_counter()
    with Checkpoint(path) as checkpoint:
        quantized = find_quantized_weights(checkpoint)
        entries = {} if quantized is None else quantized.entries
        owners = {spec.name: entry for entry in entries.values() for spec in entry.parts}
        scales = {} if quantized is None else quantized.pre_scales
        owners |= {scale.name: entries[f"{module}{WEIGHT}"] for module, scale in scales.items()}
        float8 = _float8(checkpoint, owners)
        tensors: dict[str, TensorReport] = {}
        for name, tensor in checkpoint.tensors.items():
            entry, view = owners.get(name), float8.get(name)
            if view is not None:
                weight = view.tensor
                if weight.name not in tensors and view.scheme is not None:
                    plan = shared_plan(weight.shape, view.scheme)
                    tensors[weight.name] = TensorReport.of(
                        weight,
                        "quantized",
                        dtype=CODES,
                        format=plan.format.name,
                        facts=QuantizedEntry(weight.name, weight.shape, CODES, plan).facts(),
                    )
            elif entry is None:
                tensors[name] = TensorReport.of(tensor, "keep", tensor.note)
            elif entry.name not in tensors:
                packed = entry.plan.format.codes_per_byte == 2
                scale = scales.get(module_of(entry.name))
                nbytes = entry.stored + (0 if scale is None else scale.stored)
                # What its inputs are multiplied by is a part of what the weight means.
                facts = {} if scale is None else {"pre_quant_scale": scale.name}
                tensors[entry.name] = TensorReport.of(
                    entry,
                    "quantized",
                    # What it was quantized from is not recorded in these layouts.
                    dtype="4-bit codes" if packed else CODES,
                    bytes_before=nbytes,
                    after=nbytes,
                    facts=entry.facts() | facts,
                )
        return FileReport(
            source=str(path),
            target=None,
            tensors=list(tensors.values()),
            options={
                "metadata": checkpoint.metadata,
                "layout": None if quantized is None else quantized.layout.name,
                "parameters": sum(prod(tensor.shape) for tensor in tensors.values()),
            },
            seconds=time.perf_counter() - started,
        )
