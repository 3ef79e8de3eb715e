# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Writing .safetensors: an atomic streaming writer.

A file is an 8-byte little-endian header length, a JSON header, and the tensors' bytes with neither
holes nor overlaps; see :mod:`fp4kit.io.read.safetensors` for how one is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fp4kit.errors import DtypeError, FileFormatError, brief
from fp4kit.io.containers import (
    DTYPES,
    MAX_HEADER_BYTES,
    MAX_TENSORS,
    METADATA,
    TensorSpec,
)
from fp4kit.io.write.files import Output, Writer


def build_header(
    tensors: Sequence[TensorSpec], metadata: Mapping[str, str], name: str
) -> tuple[bytes, dict[str, int]]:
    """The first bytes of a file (length and header), and the position of each tensor.

    Tensors with wider elements come first, so that every one is aligned for its element type; the
    header is padded with spaces to a multiple of 8.

    Raises:
        FileFormatError: for the reserved name, a name used twice, or a header above the limit.
        DtypeError: for an element type the format does not have.
    """
    offsets: dict[str, int] = {}
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    end = 0
    if len(tensors) > MAX_TENSORS:
        raise FileFormatError(
            f"{name}: {len(tensors)} tensors are too many for one file, which holds {MAX_TENSORS}: "
            "split them over several files (shards)"
        )
    for spec in tensors:
        if spec.dtype not in DTYPES:
            raise DtypeError(f"{name}: tensor {brief(spec.name)}: safetensors has no {spec.dtype}")
    for spec in sorted(tensors, key=lambda spec: -DTYPES[spec.dtype].bits):
        if spec.name == METADATA:
            raise FileFormatError(f"{name}: a tensor cannot be named {METADATA}")
        if spec.name in offsets:
            raise FileFormatError(f"{name}: two tensors are named {brief(spec.name)}")
        offsets[spec.name] = end
        header[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [end, end + spec.nbytes],
        }
        end += spec.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise FileFormatError(
            f"{name}: the header of {len(tensors)} tensors would take {len(text)} bytes; readers "
            f"refuse more than {MAX_HEADER_BYTES}: split the tensors over several files (shards)"
        )
    base = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {key: base + at for key, at in offsets.items()}


class SafetensorsWriter(Writer):
    """Writes a safetensors file piece by piece, atomically.

    Space for the header is reserved first and the header is written last: an unfinished file
    begins with zeros, which no reader accepts.
    """

    def __init__(
        self, target: Output | Path, tensors: Sequence[TensorSpec], metadata: Mapping[str, str]
    ) -> None:
        self._target = target
        self._tensors = list(tensors)
        self._metadata = dict(metadata)
        self._header, self._offsets = build_header(tensors, metadata, str(target))
        self._left = {spec.name: spec.nbytes for spec in tensors}
        super().__init__(target)

    def write(self, name: str, offset: int, data: Any) -> None:
        self._left[name] -= len(data)
        self._file.write_at(self._offsets[name] + offset, data)

    def finish(self, metadata: Mapping[str, str] | None = None) -> None:
        missing = {name: count for name, count in self._left.items() if count}
        assert not missing, f"bytes not written: {missing}"
        header = self._header
        if metadata is not None:
            header, _ = build_header(self._tensors, metadata, str(self._target))
            assert len(header) == len(self._header), "the header's length changed"
        self._file.write_at(0, header)
        self._file.commit()
