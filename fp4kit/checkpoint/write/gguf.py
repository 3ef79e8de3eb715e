# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Codes of a checkpoint into a GGUF model: `fp4kit convert --layout gguf --template`.

The template is the same model in GGUF: it has the names, the metadata and everything that is not
quantized. What the checkpoint holds in FP4 replaces its tensors, codes and block scales verbatim.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import partial
from math import lcm, prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fp4kit.checkpoint.plan.gguf import Moved, check_sample, plan_gguf
from fp4kit.checkpoint.read.directory import Checkpoint
from fp4kit.checkpoint.views.codes import Codes
from fp4kit.io.ggml import BLOCK_LAYOUTS
from fp4kit.io.gguf_model import (
    check_target,
    output_files,
    verbatim,
)
from fp4kit.io.quantize_plan import TensorPlan
from fp4kit.io.quantize_tensors import quantize_tensors
from fp4kit.io.read.gguf import GgufSource, VerbatimSource, bytes_of
from fp4kit.io.read.open import open_source
from fp4kit.io.read.source import Coded
from fp4kit.io.report import FileReport, TensorReport
from fp4kit.io.stream.chunks import Progress, Tally, Write, row_ranges
from fp4kit.io.stream.pipeline import Pipeline
from fp4kit.io.write.gguf import GgufWriter

#: Bytes of codes that are handled together.
CHUNK_BYTES = 16 << 20


def _chunks(moved: Moved) -> Iterator[tuple[int, Codes, int, int]]:
    """Each weight in ranges of rows, with the row of the stack that it begins at."""
    for number, codes in enumerate(moved.codes):
        step = lcm(codes.step, moved.head)
        row = codes.plan.packed_shape[1]
        for first, last in row_ranges(codes.plan.rows, row, step, CHUNK_BYTES):
            yield number * codes.plan.rows, codes, first, last


def _write_rows(
    write: Write, coded: Coded, row: int, packed: NDArray[np.uint8], scales: NDArray[np.uint8]
) -> None:
    for name, part in ((coded.packed, packed), (coded.scale, scales)):
        data = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
        write(name, row * part.shape[1], data)


def _transfer(moved: Moved, write: Write, tally: Tally) -> None:
    with Pipeline() as pipeline:
        for start, codes, first, last in _chunks(moved):
            packed, scales = moved.parts(first, last, codes)
            rows = partial(_write_rows, write, moved.coded, start + first, packed, scales)
            pipeline.submit(rows)
            tally.add((last - first) * codes.plan.cols)
        pipeline.finish()
    if moved.coded.second is not None and moved.seconds is not None:
        write(moved.coded.second, 0, moved.seconds.astype("<f4").view(np.uint8))


def convert_to_gguf(
    source: Path,
    target: Path,
    template: Path,
    *,
    follow_links: bool = False,
    force: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> FileReport:
    """Puts the FP4 weights of a checkpoint into a GGUF model, codes and block scales verbatim.

    Args:
        source: quantized checkpoint in a known layout.
        target: .gguf file to write, atomically; of a template in shards, the first of as many.
        template: the same model in GGUF, not in FP4.
        follow_links: read also what links out of the source point to.
        force: replace an existing output.
        dry_run: plan from the headers alone; nothing is written.
        progress: called with (elements done, elements in all).

    Raises:
        OptionError: if the two do not belong together, or GGUF cannot hold what there is.
        FileFormatError: if something is quantized that has no place in the template.
        ShapeError: if shapes differ.
        OutputError: if the target cannot be written.
    """
    started = time.perf_counter()
    with (
        Checkpoint(source, follow_links=follow_links) as checkpoint,
        open_source(template) as model,
    ):
        assert isinstance(model, GgufSource)
        check_target(model, target)
        moved, notes = plan_gguf(model, checkpoint)
        for one in moved.values():
            check_sample(model, one)
        if not dry_run:
            _write(checkpoint, model, target, moved, force=force, progress=progress)
        reports = [_report(model, name, moved.get(name)) for name in model.stored]
    return FileReport(
        source=str(source),
        target=None if dry_run else str(target),
        tensors=reports,
        options={"layout": "gguf", "template": str(template), "force": force},
        seconds=time.perf_counter() - started,
        warnings=[*checkpoint.warnings, *notes],
    )


def _report(model: GgufSource, name: str, moved: Moved | None) -> TensorReport:
    tensor = model.tensors[name]
    if moved is None:
        return TensorReport.of(tensor, "keep", "as the template has it")
    after = sum(output.nbytes for output in moved.outputs)
    return TensorReport.of(tensor, "transfer", "", after, format=moved.coded.format)


def _write(
    checkpoint: Checkpoint,
    model: GgufSource,
    target: Path,
    moved: Mapping[str, Moved],
    *,
    force: bool,
    progress: Progress | None,
) -> None:
    becomes = {
        name: moved[name].outputs if name in moved else verbatim(tensor)
        for name, (_, tensor) in model.stored.items()
    }
    forms = [one.coded.format for one in moved.values()]
    file_type = BLOCK_LAYOUTS[max(forms, key=forms.count)].file_type
    files = output_files(model, target, becomes, file_type, force=force)
    kept = [name for name in model.stored if name not in moved]
    plans = [TensorPlan(bytes_of(model.stored[name][1]), "keep") for name in kept]
    elements = sum(prod(one.tensor.shape) for one in moved.values())
    tally = Tally(progress, elements + sum(plan.tensor.spec.nbytes for plan in plans))
    with GgufWriter(files) as writer:
        quantize_tensors(VerbatimSource(model, kept), plans, None, writer.write, tally)
        for one in moved.values():
            _transfer(one, writer.write, tally)
        model.check_unchanged()
        checkpoint.check_unchanged()
        writer.finish()
