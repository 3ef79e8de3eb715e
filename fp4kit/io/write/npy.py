# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Writing .npy atomically; see :mod:`fp4kit.io.read.npy` for how element types are recorded."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fp4kit.errors import FileFormatError, OptionError, brief
from fp4kit.io.containers import DTYPES, TensorSpec
from fp4kit.io.read.npy import (
    MAX_DIMENSIONS,
    RECORD_VERSION,
    STORABLE,
    parse_record,
    sidecar,
    sidecar_text,
)
from fp4kit.io.write.files import AtomicFile, Output, Writer, as_output

NUMPY_TYPES = {code: text for text, code in STORABLE.items()}


def build_record(tensors: Sequence[TensorSpec]) -> str:
    """The record of those tensors whose element type NumPy's files cannot name, or ""."""
    entries = {
        spec.name: {"dtype": DTYPES[spec.dtype].name, "shape": list(spec.shape)}
        for spec in tensors
        if spec.dtype not in NUMPY_TYPES
    }
    return json.dumps({"version": RECORD_VERSION, "tensors": entries}) if entries else ""


def array_header_bytes(spec: TensorSpec) -> bytes:
    """The .npy header for a tensor; types NumPy cannot name are stored as unsigned integers."""
    text, shape = NUMPY_TYPES.get(spec.dtype), spec.shape
    if text is None:
        bits = DTYPES[spec.dtype].bits
        text = f"u{max(bits, 8) // 8}"
        if bits < 8:
            shape = (spec.nbytes,)
    stream = io.BytesIO()
    descr = ("|" if text[1] == "1" else "<") + text
    np.lib.format.write_array_header_1_0(
        stream, {"descr": descr, "fortran_order": False, "shape": shape}
    )
    return stream.getvalue()


def _is_record(path: Path) -> bool:
    """Whether a file is a record of ours: its name might belong to someone else's file."""
    try:
        parse_record(sidecar_text(path), str(path))
    except FileFormatError:
        return False
    return True


def check_storable(spec: TensorSpec, target: Output | Path) -> None:
    """Refuses a tensor that NumPy could not load again from its file.

    Raises:
        FileFormatError: with the reason and what to do.
    """
    dims = len(spec.shape)
    if dims > MAX_DIMENSIONS:
        raise FileFormatError(
            f"{target}: tensor {brief(spec.name)} has {dims} dimensions, NumPy's files hold at "
            f"most {MAX_DIMENSIONS}; write .safetensors"
        )


class NpyWriter(Writer):
    """Writes one tensor as .npy, atomically, with a record next to it if it needs one."""

    def __init__(self, output: Output | Path, tensors: Sequence[TensorSpec]) -> None:
        self._output = as_output(output)
        target = self._output.path
        if len(tensors) != 1:
            raise OptionError(
                f"{target}: .npy holds one array, but there are {len(tensors)} tensors; write "
                ".npz or .safetensors"
            )
        check_storable(tensors[0], target)
        self._record = build_record([tensors[0]])
        self._header = array_header_bytes(tensors[0])
        side = sidecar(target)
        if self._record and side.exists() and not _is_record(side):
            raise OptionError(
                f"{target}: its element type would be recorded in {side}, which holds something "
                "else; choose another name, or .npz"
            )
        super().__init__(output)

    def write(self, name: str, offset: int, data: Any) -> None:
        self._file.write_at(len(self._header) + offset, data)

    def finish(self, metadata: Mapping[str, str] | None = None) -> None:
        self._file.write_at(0, self._header)
        side = sidecar(self._output.path)
        if self._record:
            # First, as an array without its record would be read as plain integers.
            with AtomicFile(Output(side, self._output.permissions, replace=True)) as record:
                record.write_at(0, self._record.encode())
                record.commit()
        self._file.commit()
        if not self._record and _is_record(side):
            side.unlink()
