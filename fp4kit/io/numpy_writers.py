# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Writing .npy and .npz atomically; see :mod:`fp4kit.io.numpy_files` for how types are recorded."""

from __future__ import annotations

import contextlib
import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from fp4kit.errors import FileFormatError, OptionError, brief

from .archives import name_fault
from .files import AtomicFile, Output, as_output
from .numpy_files import (
    MAX_DIMENSIONS,
    RECORD_MEMBER,
    RECORD_VERSION,
    STORABLE,
    parse_record,
    sidecar,
    sidecar_text,
)
from .safetensors import DTYPES, TensorSpec

_NUMPY = {code: text for text, code in STORABLE.items()}


def build_record(tensors: Sequence[TensorSpec]) -> str:
    """The record of those tensors whose element type NumPy's files cannot name, or ""."""
    entries = {
        spec.name: {"dtype": DTYPES[spec.dtype].name, "shape": list(spec.shape)}
        for spec in tensors
        if spec.dtype not in _NUMPY
    }
    return json.dumps({"version": RECORD_VERSION, "tensors": entries}) if entries else ""


def array_header_bytes(spec: TensorSpec) -> bytes:
    """The .npy header for a tensor; types NumPy cannot name are stored as unsigned integers."""
    text, shape = _NUMPY.get(spec.dtype), spec.shape
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


def _check_storable(spec: TensorSpec, target: Output | Path) -> None:
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


class NpyWriter:
    """Writes one tensor as .npy, atomically, with a record next to it if it needs one."""

    def __init__(self, output: Output | Path, tensors: Sequence[TensorSpec]) -> None:
        self._output = as_output(output)
        target = self._output.path
        if len(tensors) != 1:
            raise OptionError(
                f"{target}: .npy holds one array, but there are {len(tensors)} tensors; write "
                ".npz or .safetensors"
            )
        _check_storable(tensors[0], target)
        self._record = build_record([tensors[0]])
        self._header = array_header_bytes(tensors[0])
        side = sidecar(target)
        if self._record and side.exists() and not _is_record(side):
            raise OptionError(
                f"{target}: its element type would be recorded in {side}, which holds something "
                "else; choose another name, or .npz"
            )
        self._file = AtomicFile(output)

    def write(self, name: str, offset: int, data: Any) -> None:
        """Writes bytes of the tensor, beginning `offset` bytes into it."""
        self._file.write_at(len(self._header) + offset, data)

    def finish(self, metadata: Mapping[str, str] | None = None) -> None:
        """Gives the file its name; NumPy's files have no place for metadata."""
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

    def __enter__(self) -> NpyWriter:
        self._file.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.__exit__(kind, error, trace)


class NpzWriter:
    """Writes tensors as an uncompressed .npz, atomically, one after the other."""

    def __init__(self, output: Output | Path, tensors: Sequence[TensorSpec]) -> None:
        self._specs = {spec.name: spec for spec in tensors}
        for spec in tensors:
            _check_storable(spec, output)
            fault = name_fault(spec.name)
            if fault:
                raise FileFormatError(
                    f"{output}: the tensor name {brief(spec.name)} {fault}; write .safetensors"
                )
        if RECORD_MEMBER in self._specs:
            raise FileFormatError(f"{output}: a tensor cannot be named {RECORD_MEMBER}")
        self._record = build_record(tensors)
        self._file = AtomicFile(output)
        self._stream = open(self._file.fd, "w+b", closefd=False)  # noqa: SIM115
        self._archive = zipfile.ZipFile(self._stream, "w")
        self._member: IO[bytes] | None = None
        self._name = ""

    def _open(self, name: str) -> IO[bytes]:
        self._close_member()
        # A fixed date: the same tensors give the same bytes.
        info = zipfile.ZipInfo(name + ".npy", (1980, 1, 1, 0, 0, 0))
        return self._archive.open(info, "w", force_zip64=True)

    def _close_member(self) -> None:
        if self._member is not None:
            self._member.close()
            self._member = None

    def write(self, name: str, offset: int, data: Any) -> None:
        """Writes the next bytes of a tensor; each tensor in one go, from offset 0 on."""
        if offset == 0:
            self._member = self._open(name)
            self._member.write(array_header_bytes(self._specs[name]))
            self._name = name
        assert self._member is not None
        assert self._name == name, "an .npz is written one tensor after the other"
        self._member.write(data)

    def finish(self, metadata: Mapping[str, str] | None = None) -> None:
        """Completes the archive and gives it its name; .npz has no place for metadata."""
        self._close_member()
        if self._record:
            text = np.array(self._record)
            self._member = self._open(RECORD_MEMBER)
            np.lib.format.write_array(self._member, text, allow_pickle=False)
            self._close_member()
        self._archive.close()
        self._stream.flush()
        self._file.commit()

    def __enter__(self) -> NpzWriter:
        self._file.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            # An archive that is given up is not completed: the file is about to be removed, and a
            # full disk must not raise a second time.
            with contextlib.suppress(OSError):
                self._close_member()
            self._archive.fp = None
        with contextlib.suppress(OSError):
            self._stream.close()
        self._file.__exit__(kind, error, trace)
