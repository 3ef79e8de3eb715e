# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What a file holds, by its first bytes."""

from __future__ import annotations

from fp4kit.errors import FileFormatError
from fp4kit.io.read.files import InputFile


def sniff(head: bytes) -> str | None:
    """What the first bytes of a file say it is, in words, or None if they say nothing.

    Args:
        head: the first 16 bytes or more.
    """
    length = int.from_bytes(head[:8], "little")
    # First, as a header length can look like any other magic number.
    if len(head) > 8 and head[8:9] == b"{" and 2 <= length <= 100_000_000:
        return "safetensors"
    magics = (
        (b"\x93NUMPY", "npy"),
        (b"PK\x03\x04", "zip"),
        (b"PK\x05\x06", "zip"),
        (b"GGUF", "GGUF"),
        (b"\x89HDF\r\n\x1a\n", "HDF5"),
        (b"\x1f\x8b", "gzip"),
        (b"version https://git-lfs", "Git LFS pointer"),
        (b"<!DOCTYPE", "HTML"),
        (b"<html", "HTML"),
    )
    for magic, kind in magics:
        if head.startswith(magic):
            return kind
    if len(head) > 2 and head[0] == 0x80 and 2 <= head[1] <= 5:
        return "pickle"
    return None


#: What to do about content under the wrong suffix.
ADVICE = {
    "safetensors": "rename it to .safetensors",
    "npy": "rename it to .npy",
    "zip": "rename it to .npz if numpy.savez wrote it; a torch .pt file must be saved again with "
    "safetensors",
    "pickle": "pickled data can run code when loaded and is never read; save it again with "
    "safetensors",
    "GGUF": "rename it to .gguf",
    "HDF5": "convert it to safetensors first",
    "gzip": "decompress it first",
    "Git LFS pointer": "fetch the real file with git lfs pull",
    "HTML": "this is a web page; download the file itself",
}


def check_content(file: InputFile, expected: str) -> None:
    """Refuses a file whose first bytes are plainly something other than its suffix says.

    Args:
        file: the file.
        expected: what :func:`sniff` should say: `safetensors`, `npy`, `zip` or `GGUF`.

    Raises:
        FileFormatError: naming what it holds and what to do.
    """
    kind = sniff(file.read(0, 64))
    if kind is not None and kind != expected:
        raise FileFormatError(
            f"{file.path}: holds {kind} data under the suffix {file.path.suffix}; {ADVICE[kind]}"
        )
