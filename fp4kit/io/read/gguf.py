# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Reading .gguf: plain tensors as they are, Q8_0 as float32, FP4 blocks as codes and scales.

A model may be cut into shards, `model-00001-of-00003.gguf` and so on; together they are one source.
Blocks of other types are opaque: a tensor of such is rows of bytes, and is only copied.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fp4kit.cpu.ggml_blocks import (
    amaxes_of_q8_0,
    codes_of_blocks,
    decode_q8_0,
    scales_of_blocks,
)
from fp4kit.errors import FileFormatError, OptionError, brief
from fp4kit.io.containers import TensorSpec
from fp4kit.io.ggml import (
    ARRAY,
    LAYOUTS_BY_TYPE,
    Q8_0,
    SHARD_NAME,
    SPLIT_COUNT,
    SPLIT_NUMBER,
    SPLIT_TENSORS,
    BlockLayout,
)

from .files import InputFile
from .gguf_header import GgufHeader, GgufTensor, parse_header
from .source import Coded, OpaqueTensor, Source, SourceTensor, plain_tensor

#: Blocks that are taken apart at a time.
_PIECE_BYTES = 4 << 20
#: Suffixes under which the parts of a quantized tensor are read.
PACKED, SCALE = "_packed", "_scale"
#: Of what the largest magnitude of a tensor in Q8_0 is found in.
AMAX = "_amax"
WEIGHT = ".weight"
#: Fills a buffer with bytes from an offset on.
Read = Callable[[int, memoryview], None]


@dataclass(frozen=True)
class Shard:
    """One file of a model.

    Attributes:
        file: the open file.
        header: what it holds.
    """

    file: InputFile
    header: GgufHeader


def scale_names(name: str) -> tuple[str, str]:
    """The names that the second level of a weight may have: llama.cpp's, and one seen elsewhere."""
    return f"{name.removesuffix(WEIGHT)}.scale", f"{name}.scale"


class GgufSource(Source):
    """A GGUF file, or all shards of one.

    Attributes:
        shards: its files.
        stored: every tensor as the header has it, and the shard that it lies in, by name.
    """

    concurrent = True

    def __init__(self, shards: list[Shard]) -> None:
        self.shards = shards
        self.path = shards[0].file.path
        self.metadata = {
            entry.key: str(entry.value)
            for entry in shards[0].header.entries.values()
            if entry.kind != ARRAY
        }
        self.stored: dict[str, tuple[Shard, GgufTensor]] = {}
        self.tensors = {}
        self.coded: dict[str, Coded] = {}
        self.amaxes: dict[str, SourceTensor] = {}
        self._reads: dict[str, Read] = {}
        for shard in shards:
            for tensor in shard.header.tensors:
                if tensor.name in self.stored:
                    raise FileFormatError(
                        f"{shard.file.path}: tensor {brief(tensor.name)} is in another shard too"
                    )
                self.stored[tensor.name] = shard, tensor
        for name, (shard, tensor) in self.stored.items():
            self._add(name, shard.file, tensor)

    def _add(self, name: str, file: InputFile, tensor: GgufTensor) -> None:
        kind = tensor.type
        raw = partial(_read_raw, file, tensor)
        if kind.number in LAYOUTS_BY_TYPE:
            self._add_blocks(name, file, tensor, LAYOUTS_BY_TYPE[kind.number])
        elif kind == Q8_0:
            spec = TensorSpec(name, "F32", tensor.shape)
            note = "Q8_0, read as float32"
            read = partial(_read_q8_0, raw, decode_q8_0, Q8_0.elements)
            self._put(SourceTensor(spec, "float32", tensor.nbytes, note), read)
            self._add_amaxes(name, tensor, raw)
        elif kind.dtype:
            self._put(plain_tensor(TensorSpec(name, kind.dtype, tensor.shape)), raw)
        else:
            self._put(bytes_of(tensor), raw)

    def _add_amaxes(self, name: str, tensor: GgufTensor, raw: Read) -> None:
        if name + AMAX not in self.stored and tensor.shape:
            *lead, cols = tensor.shape
            spec = TensorSpec(name + AMAX, "F32", (*lead, cols // Q8_0.elements))
            self.amaxes[name] = plain_tensor(spec)
            self._reads[spec.name] = partial(_read_q8_0, raw, amaxes_of_q8_0, 1)

    def _add_blocks(
        self, name: str, file: InputFile, tensor: GgufTensor, layout: BlockLayout
    ) -> None:
        *lead, cols = tensor.shape or (1,)
        spec, raw = layout.format, partial(_read_raw, file, tensor)
        codes = TensorSpec(name + PACKED, "U8", (*lead, cols // spec.codes_per_byte))
        dtype = "F8_E4M3" if spec.scale_type == "e4m3" else "U8"
        scales = TensorSpec(name + SCALE, dtype, (*lead, cols // spec.block_size))
        self._put(plain_tensor(codes), partial(_read_codes, raw, layout))
        self._put(plain_tensor(scales), partial(_read_scales, raw, layout))
        second = None
        if spec.has_second_level:
            second = next((one for one in scale_names(name) if one in self.stored), None)
        self.coded[name] = Coded(spec.name, tensor.shape, codes.name, scales.name, second)

    def _put(self, tensor: SourceTensor, read: Read) -> None:
        if tensor.name in self.tensors or (
            tensor.name not in self.stored and tensor.name in self.coded
        ):
            raise FileFormatError(
                f"{self.path}: two tensors would be read under the name {brief(tensor.name)}"
            )
        self.tensors[tensor.name] = tensor
        self._reads[tensor.name] = read

    def read(self, name: str, offset: int, out: memoryview) -> None:
        self._reads[name](offset, out)

    def read_stored(self, name: str, offset: int, out: memoryview) -> None:
        """Fills `out` with the bytes of a tensor as the file has them."""
        shard, tensor = self.stored[name]
        _read_raw(shard.file, tensor, offset, out)

    def check_unchanged(self) -> None:
        for shard in self.shards:
            shard.file.check_unchanged()

    def close(self) -> None:
        for shard in self.shards:
            shard.file.close()


class VerbatimSource(Source):
    """A GGUF source of which some tensors are read as the bytes that the file has."""

    concurrent = True

    def __init__(self, source: GgufSource, names: Collection[str]) -> None:
        self._source = source
        self._names = frozenset(names)
        self.path, self.metadata = source.path, source.metadata
        self.tensors, self.amaxes = dict(source.tensors), source.amaxes
        for name in names:
            _, tensor = source.stored[name]
            self.tensors[name] = bytes_of(tensor)

    def read(self, name: str, offset: int, out: memoryview) -> None:
        if name in self._names:
            self._source.read_stored(name, offset, out)
        else:
            self._source.read(name, offset, out)

    def check_unchanged(self) -> None:
        self._source.check_unchanged()

    def close(self) -> None:
        """Nothing: the source below is another's."""


def bytes_of(tensor: GgufTensor) -> OpaqueTensor:
    """A tensor as rows of bytes."""
    *lead, cols = tensor.shape or (1,)
    row = cols // tensor.type.elements * tensor.type.nbytes
    return OpaqueTensor(
        TensorSpec(tensor.name, "U8", (*lead, row)),
        tensor.type.name.lower(),
        tensor.nbytes,
        f"{tensor.type.name} is not decoded here: taken as its bytes",
        tensor.shape,
    )


def _read_raw(file: InputFile, tensor: GgufTensor, offset: int, out: memoryview) -> None:
    file.read_into(tensor.start + offset, out)


def _pieces(
    raw: Read, nbytes: int, made: int, offset: int, out: memoryview
) -> Iterator[tuple[np.ndarray, slice, memoryview]]:
    """The blocks that a range of what is made of them needs, a piece at a time.

    Args:
        raw: reads blocks.
        nbytes: bytes of a block.
        made: bytes that are made of a block.
        offset: beginning of the range.
        out: its bytes.

    Yields:
        Blocks, the part of what is made of them that is wanted, and where it goes. They are valid
        until the next step.
    """
    at, step = offset, _PIECE_BYTES // nbytes * made
    buffer = np.empty(min(_PIECE_BYTES, (len(out) // made + 2) * nbytes), np.uint8)
    while at < offset + len(out):
        first = at // made
        end = min(offset + len(out), first * made + step)
        blocks = buffer[: (-(-end // made) - first) * nbytes]
        raw(first * nbytes, blocks.data)
        wanted = slice(at - first * made, end - first * made)
        yield blocks, wanted, out[at - offset : end - offset]
        at = end


def _make(blocks: np.ndarray, count: int, made: Callable[[np.ndarray], Any], **where: Any) -> None:
    """Has bytes made of blocks, at their place if all of them are wanted."""
    wanted, out = where["wanted"], np.frombuffer(where["out"], np.uint8)
    whole = out if len(out) == count else np.empty(count, np.uint8)
    made(whole)
    if whole is not out:
        out[:] = whole[wanted]


def _read_codes(raw: Read, layout: BlockLayout, offset: int, out: memoryview) -> None:
    nbytes, made = layout.type.nbytes, layout.code_bytes
    for blocks, wanted, place in _pieces(raw, nbytes, made, offset, out):
        take = partial(codes_of_blocks, blocks, layout.scales, layout.half)
        _make(blocks, len(blocks) // nbytes * made, take, wanted=wanted, out=place)


def _read_scales(raw: Read, layout: BlockLayout, offset: int, out: memoryview) -> None:
    nbytes, made = layout.type.nbytes, layout.scales
    for blocks, wanted, place in _pieces(raw, nbytes, made, offset, out):
        take = partial(scales_of_blocks, blocks, layout.scales, layout.half, layout.scale_bytes)
        _make(blocks, len(blocks) // nbytes * made, take, wanted=wanted, out=place)


def _read_q8_0(
    raw: Read,
    take: Callable[[np.ndarray, np.ndarray], None],
    elements: int,
    offset: int,
    out: memoryview,
) -> None:
    """What is made of blocks of Q8_0: some float32 of each."""
    nbytes, made = Q8_0.nbytes, elements * 4
    for blocks, wanted, place in _pieces(raw, nbytes, made, offset, out):

        def taken(whole: np.ndarray, blocks: np.ndarray = blocks) -> None:
            take(blocks, whole.view(np.float32))

        _make(blocks, len(blocks) // nbytes * made, taken, wanted=wanted, out=place)


def shard_paths(path: Path, count: int) -> list[Path]:
    """The files that a model of some shards lies in, given the first.

    Raises:
        OptionError: if it is not the first, or has no name of a shard.
    """
    match = SHARD_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise OptionError(
            f"{path}: is one of {count} shards of a model, but its name does not end in "
            f"-00001-of-{count:05d}.gguf; give it the name that it was split under"
        )
    if int(match["number"]) != 1:
        first = path.with_name(f"{match['stem']}-00001-of-{match['count']}.gguf")
        raise OptionError(f"{path}: is a shard of a model; give the first, {first.name}")
    return [
        path.with_name(f"{match['stem']}-{number:05d}-of-{count:05d}.gguf")
        for number in range(1, count + 1)
    ]


def _number(header: GgufHeader, key: str, default: int) -> int:
    entry = header.entries.get(key)
    return entry.value if entry is not None and type(entry.value) is int else default


def open_gguf(file: InputFile) -> GgufSource:
    """A GGUF file, with its other shards if it is the first of several.

    Raises:
        FileFormatError: if one of them is missing or malformed.
        OptionError: if it is another shard than the first.
    """
    with ExitStack() as stack:
        shards = [Shard(file, parse_header(file))]
        count = _number(shards[0].header, SPLIT_COUNT, 1)
        paths = shard_paths(file.path, count) if count > 1 else [file.path]
        for number, path in enumerate(paths[1:], 1):
            other = InputFile(path)
            stack.callback(other.close)
            shard = Shard(other, parse_header(other))
            said = tuple(_number(shard.header, key, -1) for key in (SPLIT_NUMBER, SPLIT_COUNT))
            if said != (number, count):
                raise FileFormatError(
                    f"{path}: says that it is shard {said[0] + 1} of {said[1]}, not "
                    f"{number + 1} of {count}"
                )
            shards.append(shard)
        total = sum(len(shard.header.tensors) for shard in shards)
        expected = _number(shards[0].header, SPLIT_TENSORS, total)
        if total != expected:
            raise FileFormatError(
                f"{file.path}: {expected} tensors are said to be in its shards, there are {total}"
            )
        source = GgufSource(shards)
        stack.pop_all()
    return source
