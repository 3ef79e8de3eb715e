# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Writing .npz atomically; see :mod:`fp4kit.io.read.npy` for how element types are recorded."""

from __future__ import annotations

import contextlib
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from fp4kit.errors import FileFormatError, brief
from fp4kit.io.containers import TensorSpec
from fp4kit.io.read.npy import RECORD_MEMBER
from fp4kit.io.write.files import Output, Writer
from fp4kit.io.write.npy import array_header_bytes, build_record, check_storable

#: Bytes of a member's name, `.npy` included, in a zip archive.
MAX_NAME = 65_535


def name_fault(name: str) -> str:
    """Why an archive cannot hold a tensor of that name so that it is found again, or ""."""
    parts = re.split(r"[/\\\\]", name)
    if "\0" in name:
        return "holds a NUL, where zip archives end a name"
    if len(name.encode()) + len(".npy") > MAX_NAME:
        return f"is longer than {MAX_NAME} bytes"
    if ".." in parts or (not parts[0] and len(parts) > 1) or re.match(r"[A-Za-z]:[/\\]", name):
        return "would leave the folder that the archive is unpacked in"
    return ""


class NpzWriter(Writer):
    """Writes tensors as an uncompressed .npz, whose members are streams."""

    ordered = True

    def __init__(self, output: Output | Path, tensors: Sequence[TensorSpec]) -> None:
        self._specs = {spec.name: spec for spec in tensors}
        for spec in tensors:
            check_storable(spec, output)
            fault = name_fault(spec.name)
            if fault:
                raise FileFormatError(
                    f"{output}: the tensor name {brief(spec.name)} {fault}; write .safetensors"
                )
        if RECORD_MEMBER in self._specs:
            raise FileFormatError(f"{output}: a tensor cannot be named {RECORD_MEMBER}")
        self._record = build_record(tensors)
        super().__init__(output)
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

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if kind is not None:
            # An archive that is given up is not completed: the file is about to be removed, and a
            # full disk must not raise a second time.
            with contextlib.suppress(OSError):
                self._close_member()
            self._archive.fp = None
        with contextlib.suppress(OSError):
            self._stream.close()
        super().__exit__(kind, error, trace)
