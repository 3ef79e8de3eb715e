# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What is no input: paths that do not exist, and files of other tools, with what to do instead."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from fp4kit.errors import FileFormatError, OptionError

from .files import SUFFIXES, InputFile, sniff

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
    ".gguf": "a GGUF file of llama.cpp, whose weights are mostly quantized already; give the "
    "original model in safetensors",
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
    if suffix in SUFFIXES:
        return
    known = f"inputs end in {', '.join(SUFFIXES)}, or are model directories"
    if suffix in FOREIGN:
        raise OptionError(f"{path}: is {FOREIGN[suffix]}; {known}")
    held = None
    if path.is_file():
        with InputFile(path) as file:
            held = sniff(file.read(0, 64))
    what = f"holds {held} data" if held else "is of an unknown kind"
    advice = "; rename it to .safetensors" if held == "safetensors" else ""
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
