# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Dequantizing a file: everything that is needed stands in the file itself."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from fp4kit.errors import FileFormatError, OptionError, brief
from fp4kit.float_mode import by_ieee
from fp4kit.formats import DTYPES, one_of
from fp4kit.io.containers import DTYPE_CODES, GGUF, SUFFIXES, TensorSpec
from fp4kit.io.dequantize_gguf import dequantize_gguf
from fp4kit.io.metadata import METADATA_KEY, find_quantized, logical_tensors, orphan_codes
from fp4kit.io.read.gguf import GgufSource
from fp4kit.io.read.open import open_source
from fp4kit.io.read.source import OpaqueTensor, Source
from fp4kit.io.report import FileReport, TensorReport
from fp4kit.io.storage import Logical, QuantizedEntry
from fp4kit.io.stream.chunks import (
    ByteRange,
    Bytes,
    Chunk,
    Progress,
    Tally,
    Write,
    byte_ranges,
    chunk_plan,
    plan_ranges,
    scale_range,
)
from fp4kit.io.stream.device import DeviceBackend
from fp4kit.io.stream.gpu_pipeline import open_pipeline
from fp4kit.io.tensor_names import unknown_beside
from fp4kit.io.write.files import check_output, output_suffix
from fp4kit.io.write.open import open_writer

#: Rows of a quantized tensor (or bytes of another one) from a number to another.
Rows = tuple[Logical, int, int]


def open_quantized(source: Source) -> list[QuantizedEntry]:
    """The quantized tensors of a file that must have some.

    Raises:
        FileFormatError: if there are none, or some that cannot be understood.
    """
    entries = find_quantized(source)
    orphans = orphan_codes(source, entries)
    if orphans:
        raise FileFormatError(
            f"{source.path}: {len(orphans)} tensors look quantized but not in a way that is known "
            f"here, the first is {orphans[0]!r}"
        )
    if not entries:
        raise FileFormatError(
            f"{source.path}: holds no quantized tensor: neither {METADATA_KEY!r} metadata nor "
            "NAME_packed with NAME_scale"
        )
    if METADATA_KEY not in source.metadata:
        _refuse_neighbours(source, entries)
    return entries


def _refuse_neighbours(source: Source, entries: Sequence[QuantizedEntry]) -> None:
    """Refuses what another tool stores beside its weights and is not understood."""
    known = {part.name for entry in entries for part in entry.parts}
    unknown = unknown_beside(source.tensors, [entry.name for entry in entries], known)
    for name, owner in unknown.items():
        raise FileFormatError(
            f"{source.path}: {name}: is not understood, and stands beside the quantized {owner}: "
            "it may change what that weight means; give the original file"
        )


def _model(source: Source, target: Path) -> GgufSource:
    """A source that can become a GGUF file.

    Raises:
        OptionError: if it is none itself: nothing else says what llama.cpp must know of a model.
    """
    if not isinstance(source, GgufSource):
        raise OptionError(
            f"{target}: a .gguf file is made from another alone, and {source.path} is none; give "
            f"the output a name in {', '.join(SUFFIXES)}"
        )
    return source


def _refuse_opaque(source: Source, target: Path) -> None:
    """Refuses tensors that nothing but a GGUF file can hold."""
    for tensor in source.tensors.values():
        if isinstance(tensor, OpaqueTensor):
            raise FileFormatError(
                f"{source.path}: tensor {brief(tensor.name)}: {tensor.dtype} is not decoded here, "
                f"and {target} cannot hold it; write .gguf, where it stays as it is"
            )


def entry_parts(
    source: Source, entry: QuantizedEntry, first: int, last: int
) -> tuple[ByteRange, ByteRange]:
    """The bytes of codes and block scales of some rows."""
    plan, names = entry.plan, entry.names
    row = plan.packed_shape[1]
    return (
        ByteRange(source, names.packed, first * row, last * row),
        ByteRange(source, names.scale, *scale_range(plan, first, last)),
    )


def _chunks(
    source: Source, tensors: Sequence[Logical], itemsize: int, limit: int | None
) -> Iterator[Chunk[Rows]]:
    for tensor in tensors:
        if isinstance(tensor, QuantizedEntry):
            plan = tensor.plan
            for first, last in plan_ranges(plan, plan.cols * itemsize, limit):
                yield Chunk((tensor, first, last), entry_parts(source, tensor, first, last))
        else:
            for first, last in byte_ranges(tensor, limit):
                part = ByteRange(source, tensor.name, first, last)
                yield Chunk((tensor, first, last), (part,))


def _report(tensor: Logical, spec: TensorSpec) -> TensorReport:
    if isinstance(tensor, QuantizedEntry):
        return TensorReport.of(tensor, "dequantize", "", spec.nbytes, facts=tensor.facts())
    return TensorReport.of(tensor, "keep", "not quantized", spec.nbytes)


@by_ieee
def dequantize_file(
    source: Path,
    target: Path,
    dtype: str,
    *,
    device: str = "cpu",
    force: bool = False,
    progress: Progress | None = None,
) -> FileReport:
    """Turns a quantized file back into plain numbers.

    The work behind :func:`fp4kit.dequantize_file`, where options and errors are said. The result
    equals :func:`fp4kit.dequantize` of each tensor byte for byte; tensors that are not quantized
    are carried through unchanged, whatever `dtype` says.

    Args:
        source: .safetensors file of fp4kit's, or with compressed-tensors' names; or .gguf.
        target: file to write, atomically: .safetensors, .npz, or .npy for a single tensor; .gguf
            from a .gguf.
        dtype: `float32`, `float16` or `bfloat16`.
        device: `cpu` or `cuda`.
        force: replace an existing output.
        progress: called with (bytes done, bytes in all) of the source.
    """
    started = time.perf_counter()
    one_of("dtype", dtype, DTYPES)
    output_suffix(target, (*SUFFIXES, GGUF))
    with open_source(source) as opened:
        entries = open_quantized(opened)
        if target.suffix.lower() == GGUF:
            return dequantize_gguf(
                _model(opened, target), target, entries, dtype, dequantize_tensors,
                device=device, force=force, progress=progress,
            )  # fmt: skip
        _refuse_opaque(opened, target)
        tensors = list(logical_tensors(opened, entries).values())
        specs = [
            TensorSpec(tensor.name, DTYPE_CODES[dtype], tensor.shape)
            if isinstance(tensor, QuantizedEntry)
            else tensor.spec
            for tensor in tensors
        ]
        metadata = {key: value for key, value in opened.metadata.items() if key != METADATA_KEY}
        backend = DeviceBackend(
            device, [dtype], "dequantize", [entry.plan.decoding for entry in entries]
        )
        nbytes = sum(spec.nbytes for spec in specs)
        output = check_output(source, target, force=force, nbytes=nbytes)
        reports = [_report(tensor, spec) for tensor, spec in zip(tensors, specs, strict=True)]
        tally = Tally(progress, sum(report.bytes_before for report in reports))
        with open_writer(output, specs, metadata) as writer:
            write, ordered = writer.write, writer.ordered
            dequantize_tensors(backend, opened, tensors, dtype, write, tally, ordered=ordered)
            opened.check_unchanged()
            writer.finish()
        return FileReport(
            source=str(source),
            target=str(target),
            tensors=reports,
            options={"dtype": dtype, "device": device, "force": force},
            seconds=time.perf_counter() - started,
        )


def dequantize_tensors(
    backend: DeviceBackend,
    source: Source,
    tensors: Sequence[Logical],
    dtype: str,
    write: Write,
    tally: Tally,
    *,
    ordered: bool = False,
) -> None:
    """Decodes quantized tensors of a source, and copies the others.

    Args:
        backend: where to compute.
        source: what holds them.
        tensors: what to write, under their logical names.
        dtype: element type of what is decoded.
        write: writes bytes of an output tensor, from one thread at a time.
        tally: told about progress, in bytes of the source.
        ordered: writes must come in order.
    """
    itemsize = 4 if dtype == "float32" else 2
    with open_pipeline(backend, source, ordered=ordered) as pipeline:
        work = _chunks(source, tensors, itemsize, pipeline.chunk_bytes)
        for (tensor, first, last), staged in pipeline.staged(work):
            if not isinstance(tensor, QuantizedEntry):
                pipeline.store_host(staged, partial(write, tensor.name, first))
            else:
                chunk = pipeline.upload(staged)
                packed, scale = chunk.parts
                plan = chunk_plan(tensor.plan.decoding, last - first)
                counts = [plan.rows * plan.cols * itemsize]
                with pipeline.computing():
                    second = backend.put(tensor.second_of(first))
                    buffer, (out,) = pipeline.result(counts)
                    backend.dequantize(plan, packed, scale, second, out, dtype)
                    at = first * plan.cols * itemsize
                    pipeline.store(buffer, counts, partial(_write_one, write, tensor.name, at))
                pipeline.free(chunk)
            tally.add(staged.count)
        pipeline.finish()


def _write_one(write: Write, name: str, at: int, parts: list[Bytes]) -> None:
    write(name, at, parts[0])
