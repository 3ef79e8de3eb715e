# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""A GGUF model that is written from another: its shards, its metadata, what each tensor becomes.

All metadata is carried over as its bytes, except for the few entries that say what the file holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fp4kit.errors import OptionError
from fp4kit.io.containers import GGUF
from fp4kit.io.ggml import (
    ARCHITECTURE_KEY,
    BLOCK_LAYOUTS,
    FILE_TYPE_KEY,
    QUANTIZATION_VERSION,
    QUANTIZATION_VERSION_KEY,
    SHARD_NAME,
    SPLIT_TENSORS,
    TYPES_BY_DTYPE,
    TYPES_BY_NAME,
    UINT32,
)
from fp4kit.io.read.gguf import PACKED, SCALE, GgufSource, scale_names
from fp4kit.io.read.gguf_header import GgufHeader, GgufTensor
from fp4kit.io.read.source import Coded
from fp4kit.io.write.files import check_output, output_suffix
from fp4kit.io.write.gguf import GgufFile, GgufOutput, entry_bytes


def architecture_of(source: GgufSource) -> str:
    """What the file says of the model's architecture, "" if nothing."""
    return source.metadata.get(ARCHITECTURE_KEY, "")


def verbatim(tensor: GgufTensor) -> list[GgufOutput]:
    """A tensor that stays as it is."""
    return [GgufOutput(tensor.name, tensor.type, tensor.shape)]


def decoded(tensor: GgufTensor, dtype: str) -> list[GgufOutput]:
    """A tensor that becomes plain numbers.

    Args:
        tensor: of the source.
        dtype: safetensors' name of its new element type.
    """
    return [GgufOutput(tensor.name, TYPES_BY_DTYPE[dtype], tensor.shape)]


def coded_as(name: str, shape: tuple[int, ...], format: str, *, second: bool) -> Coded:
    """What the parts of a weight that is quantized are called until they are written.

    Args:
        name: the weight.
        shape: its shape.
        format: its block format.
        second: whether its second level stands beside it.
    """
    scale = scale_names(name)[0] if second else None
    return Coded(format, shape, name + PACKED, name + SCALE, scale)


def in_blocks(name: str, coded: Coded, scales: int) -> list[GgufOutput]:
    """A tensor that becomes blocks, and its second level.

    Args:
        name: its name.
        coded: what its parts are called.
        scales: second levels: one, or one for each index of the first axis.
    """
    kind = BLOCK_LAYOUTS[coded.format].type
    outputs = [GgufOutput(name, kind, coded.shape, coded.packed, coded.scale)]
    if coded.second is not None:
        outputs.append(GgufOutput(coded.second, TYPES_BY_NAME["F32"], (scales,)))
    return outputs


def check_target(source: GgufSource, target: Path) -> list[Path]:
    """The files that a result has: as many as the source.

    Raises:
        OptionError: if the name of the target does not fit.
    """
    output_suffix(target, (GGUF,))
    count = len(source.shards)
    match = SHARD_NAME.fullmatch(target.name)
    if count == 1:
        return [target]
    if match is None or (int(match["number"]), int(match["count"])) != (1, count):
        raise OptionError(
            f"{target}: {source.path} comes in {count} shards, and so does the result: give its "
            f"first one a name that ends in -00001-of-{count:05d}.gguf"
        )
    return [
        target.with_name(f"{match['stem']}-{number:05d}-of-{count:05d}.gguf")
        for number in range(1, count + 1)
    ]


def default_target(source: Path, format: str) -> Path:
    """The source's name with the format added, before the number of a shard."""
    match = SHARD_NAME.fullmatch(source.name)
    if match is None:
        return source.with_name(f"{source.stem}-{format}{GGUF}")
    stem, number, count = match.group("stem", "number", "count")
    return source.with_name(f"{stem}-{format}-{number}-of-{count}{GGUF}")


def output_files(
    source: GgufSource,
    target: Path,
    becomes: Mapping[str, Sequence[GgufOutput]],
    file_type: int,
    *,
    force: bool,
) -> list[GgufFile]:
    """The files of a result, checked before any work.

    Args:
        source: what it is made from.
        target: its first file.
        becomes: what is written for each stored tensor of the source; none if it is left out.
        file_type: what `general.file_type` says.
        force: existing files may be replaced.

    Raises:
        OptionError: if a file exists, or is one of the source.
        OutputError: if it cannot be written.
    """
    total = sum(len(outputs) for outputs in becomes.values())
    files = []
    space = sum(output.nbytes for outputs in becomes.values() for output in outputs)
    for number, path in enumerate(check_target(source, target)):
        shard = source.shards[number]
        output = check_output(shard.file.path, path, force=force, nbytes=0 if number else space)
        for other in source.shards:
            if path.exists() and path.samefile(other.file.path):
                raise OptionError(f"{path}: is a shard of the input; choose another name")
        tensors = [output for one in shard.header.tensors for output in becomes[one.name]]
        entries = _entries(shard.header, file_type if number == 0 else None, total)
        files.append(GgufFile(output, entries, shard.header.alignment, tensors))
    return files


def _entries(header: GgufHeader, file_type: int | None, tensors: int) -> list[bytes]:
    """The metadata of a shard; only the first says what the model is."""
    entries = header.entries
    raws = {key: entry.raw for key, entry in entries.items()}
    if SPLIT_TENSORS in entries:
        raws[SPLIT_TENSORS] = entry_bytes(SPLIT_TENSORS, entries[SPLIT_TENSORS].kind, tensors)
    if file_type is not None:
        raws[FILE_TYPE_KEY] = entry_bytes(FILE_TYPE_KEY, UINT32, file_type)
        version = entry_bytes(QUANTIZATION_VERSION_KEY, UINT32, QUANTIZATION_VERSION)
        raws.setdefault(QUANTIZATION_VERSION_KEY, version)
    return list(raws.values())


def second_levels(shape: tuple[int, ...], name: str) -> int:
    """Second levels of a weight: one for each expert of a stack, else one."""
    return shape[0] if len(shape) == 3 and "_exps" in name and shape[0] else 1
