# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Opening an input: what is none, with what to do instead, and the reader for its suffix."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from fp4kit.errors import FileFormatError, OptionError
from fp4kit.io.containers import INPUT_SUFFIXES
from fp4kit.io.read.files import InputFile
from fp4kit.io.read.gguf import open_gguf
from fp4kit.io.read.kinds import check_content, sniff
from fp4kit.io.read.npy import (
    NpySource,
)
from fp4kit.io.read.npz import NpzSource
from fp4kit.io.read.safetensors import SafetensorsSource
from fp4kit.io.read.source import Source

#: A repository on the Hugging Face hub, `owner/name`.
HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_PICKLE = (
    "a PyTorch file, which is pickled: that can run code when it is loaded and is never read; load "
    "it with torch (weights_only=True) and save its tensors with safetensors"
)
_ARCHIVE = "an archive; unpack it first"
#: Suffixes of other tools' files: what they are, and what to do.
FOREIGN = {
    ".bin": _PICKLE,
    ".ckpt": _PICKLE,
    ".pt": _PICKLE,
    ".pth": _PICKLE,
    ".pkl": "pickled data, which can run code when it is loaded and is never read; save it again "
    "with safetensors or numpy.savez",
    ".onnx": "an ONNX graph; give the weights that it was exported from in safetensors",
    ".h5": "an HDF5 file; save its tensors with safetensors first",
    ".keras": "a Keras archive; save its tensors with safetensors first",
    ".msgpack": "a Flax file; save its tensors with safetensors first",
    ".tflite": "a TensorFlow Lite model; give its weights in safetensors",
    ".pb": "a TensorFlow graph; give its weights in safetensors",
    ".engine": "a TensorRT engine; give the model that it was built from",
    ".json": "a JSON file; give the directory that it lies in, or a file of tensors",
    ".gz": _ARCHIVE,
    ".tar": _ARCHIVE,
    ".zip": _ARCHIVE,
}


#: What a file of a suffix must hold.
CONTENT = {".safetensors": "safetensors", ".npy": "npy", ".npz": "zip", ".gguf": "GGUF"}


def check_source(path: Path) -> None:
    """Refuses what cannot be an input at all, before anything else is tried.

    Args:
        path: a file or model directory, as the user gave it.

    Raises:
        FileFormatError: if there is nothing of that name.
        OptionError: if it is a file of another kind.
    """
    if path.is_dir():
        return
    if not path.exists():
        raise FileFormatError(f"{path}: {_absence(path)}")
    suffix = path.suffix.lower()
    if suffix in INPUT_SUFFIXES:
        return
    known = f"inputs end in {', '.join(INPUT_SUFFIXES)}, or are model directories"
    if suffix in FOREIGN:
        raise OptionError(f"{path}: is {FOREIGN[suffix]}; {known}")
    held = None
    if path.is_file():
        with InputFile(path) as file:
            held = sniff(file.read(0, 64))
    what = f"holds {held} data" if held else "is of an unknown kind"
    renamed = {"safetensors": ".safetensors", "GGUF": ".gguf"}.get(held or "")
    advice = f"; rename it to {renamed}" if renamed else ""
    raise OptionError(f"{path}: {what}{advice}; {known}")


def _absence(path: Path) -> str:
    """Why there is nothing, as far as that can be guessed."""
    if path.is_symlink():
        return "is a link to nothing; download what it should lead to"
    folder = path.parent
    if HUB_ID.fullmatch(str(path)) and not folder.exists():
        return (
            "no such file or directory. If it is the name of a model on the Hugging Face hub, "
            f"download it first: `hf download {path} --local-dir {path.name}`, and give that "
            "directory"
        )
    if not folder.is_dir():
        return f"no such file or directory (there is no directory {folder})"
    near = difflib.get_close_matches(path.name, [found.name for found in folder.iterdir()], 1)
    meant = f"; did you mean {str(path.with_name(near[0]))!r}?" if near else ""
    return f"no such file or directory{meant}"


def open_source(path: Path, void_dtype: str | None = None) -> Source:
    """Opens an input file by its suffix, after checking that its content is no other kind.

    Args:
        path: a .safetensors, .npy, .npz or .gguf file; of a model in several .gguf, the first.
        void_dtype: what 2-byte void data of NumPy's files is (`bfloat16`), None to refuse it.

    Raises:
        OptionError: for another suffix or an unknown `void_dtype`.
        FileFormatError: if the file is malformed, before any tensor is read.
        DtypeError: if an .npy holds something that is no tensor.
    """
    if void_dtype not in (None, "bfloat16"):
        raise OptionError(f"void_dtype={void_dtype!r} is not known; choose bfloat16")
    if path.is_dir():
        raise OptionError(
            f"{path}: is a directory; give one of its files (quantize, dequantize, convert, verify "
            "and inspect take whole model directories)"
        )
    suffix = path.suffix.lower()
    if suffix not in INPUT_SUFFIXES:
        raise OptionError(
            f"{path}: unknown kind of file; inputs end in {', '.join(INPUT_SUFFIXES)}"
        )
    file = InputFile(path)
    try:
        check_content(file, CONTENT[suffix])
        if suffix == ".safetensors":
            return SafetensorsSource(file)
        if suffix == ".gguf":
            return open_gguf(file)
        return NpySource(file, void_dtype) if suffix == ".npy" else NpzSource(file, void_dtype)
    except BaseException:
        file.close()
        raise
