# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""A GGUF model in FP4 blocks back into plain numbers, in a GGUF file."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fp4kit.float_mode import by_ieee
from fp4kit.io.containers import DTYPE_CODES
from fp4kit.io.ggml import FLOAT_FILE_TYPES
from fp4kit.io.gguf_model import check_target, decoded, output_files, verbatim
from fp4kit.io.read.gguf import GgufSource, VerbatimSource, bytes_of
from fp4kit.io.report import FileReport, TensorReport
from fp4kit.io.storage import Logical, QuantizedEntry
from fp4kit.io.stream.chunks import Progress, Tally
from fp4kit.io.stream.device import DeviceBackend
from fp4kit.io.write.gguf import GgufOutput, GgufWriter

#: Decodes tensors, or copies them; see :func:`fp4kit.io.dequantize.dequantize_tensors`.
Decoder = Callable[..., None]


def _becomes(
    source: GgufSource, entries: Mapping[str, QuantizedEntry], dtype: str
) -> dict[str, list[GgufOutput]]:
    """What is written for every stored tensor."""
    seconds = {entry.names.second for entry in entries.values()}
    becomes: dict[str, list[GgufOutput]] = {}
    for name, (_, stored) in source.stored.items():
        if name in entries:
            becomes[name] = decoded(stored, DTYPE_CODES[dtype])
        else:
            becomes[name] = [] if name in seconds else verbatim(stored)
    return becomes


@by_ieee
def dequantize_gguf(
    source: GgufSource,
    target: Path,
    entries: Sequence[QuantizedEntry],
    dtype: str,
    decode: Decoder,
    *,
    device: str,
    force: bool,
    progress: Progress | None,
) -> FileReport:
    """Writes a GGUF model with its FP4 weights as plain numbers; all other tensors stay verbatim.

    Args:
        source: the open model.
        target: .gguf file to write, atomically; of a model in shards, the first of as many.
        entries: its weights in FP4.
        dtype: `float32`, `float16` or `bfloat16`.
        decode: what decodes and copies tensors.
        device: `cpu` or `cuda`.
        force: replace an existing output.
        progress: called with (bytes done, bytes in all) of the source.
    """
    started = time.perf_counter()
    check_target(source, target)
    weights = {entry.name: entry for entry in entries}
    becomes = _becomes(source, weights, dtype)
    file_type = FLOAT_FILE_TYPES[DTYPE_CODES[dtype]]
    files = output_files(source, target, becomes, file_type, force=force)
    kept = [name for name, outputs in becomes.items() if outputs and name not in weights]
    view = VerbatimSource(source, kept)
    tensors: list[Logical] = [
        weights[name] if name in weights else bytes_of(source.stored[name][1])
        for name, outputs in becomes.items()
        if outputs
    ]
    # Kept tensors are listed as what they are, though they are copied as bytes.
    listed = [weights.get(tensor.name) or source.tensors[tensor.name] for tensor in tensors]
    reports = [_report(tensor, becomes) for tensor in listed]
    plans = [entry.plan.decoding for entry in entries]
    backend = DeviceBackend(device, [dtype], "dequantize", plans)
    tally = Tally(progress, sum(report.bytes_before for report in reports))
    with GgufWriter(files) as writer:
        decode(backend, view, tensors, dtype, writer.write, tally)
        source.check_unchanged()
        writer.finish()
    return FileReport(
        source=str(source.path),
        target=str(target),
        tensors=reports,
        options={"dtype": dtype, "device": device, "force": force},
        seconds=time.perf_counter() - started,
    )


def _report(tensor: Logical, becomes: Mapping[str, Sequence[GgufOutput]]) -> TensorReport:
    after = sum(output.nbytes for output in becomes[tensor.name])
    if isinstance(tensor, QuantizedEntry):
        return TensorReport.of(tensor, "dequantize", "", after, facts=tensor.facts())
    return TensorReport.of(tensor, "keep", "not in FP4", after)
