# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What lies around a model's weights: files to copy, and forms of the same weights, which are not.

What is not understood is copied. Left out is only what would carry the model along a second time:
other forms of its weights in the same directory, their indexes and settings, and adapters (which
readers would look for a model of theirs by).
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from fp4kit.errors import FileFormatError, OptionError
from fp4kit.io.read.ranges import size_of

from .json_files import check_regular, file_type
from .weight_files import (
    ADAPTER_CONFIG,
    ADAPTERS,
    INDEX_NAME,
    NATIVE,
    PARAMS,
    WEIGHTS,
    WeightFiles,
    list_folder,
)

HF_QUANT_CONFIG = "hf_quant_config.json"
#: Where an unfinished conversion keeps its notes; a directory that holds it is not complete.
STATE_DIR = ".fp4kit-incomplete"
#: Where a result is written that takes the place of another one once it is whole.
REPLACEMENT = ".fp4kit-replacement"
#: Directories that belong to a tool and not to the model.
TOOL_FOLDERS = frozenset((".git", ".cache", "__pycache__", STATE_DIR, REPLACEMENT))
#: Names under which libraries keep the weights of a whole model in other containers.
OTHER_FORM = re.compile(
    r"(pytorch_model|model|tf_model|flax_model|rust_model|diffusion_pytorch_model|"
    r"diffusion_flax_model|consolidated|adapter_model|adapter|pytorch_lora_weights)"
    r"([.-][^/]*)?\.(bin|pt|pth|ckpt|h5|msgpack|onnx|onnx_data|ot|tflite|pkl)(\.index\.json)?"
)
#: Exports of the whole model for other programs, in whatever directory.
EXPORT = re.compile(r"([^/]*/)*([^/]*\.gguf|([^/]*_)?model[^/]*\.(onnx|onnx_data|tflite))")
#: Part of the path of a snapshot in the cache of the Hugging Face hub, and where its links lead.
SNAPSHOTS, BLOBS = "snapshots", "blobs"


@dataclass(frozen=True)
class OtherFiles:
    """The files of a model directory that are no weights of it.

    Attributes:
        copied: names relative to the directory, of the files to copy.
        left_out: those of files that are not copied: weights in another form, and what belongs to
            them.
        nbytes: bytes of the files to copy.
    """

    copied: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    nbytes: int = 0


class Links:
    """Where the links of a model directory may lead."""

    def __init__(self, folder: Path, *, follow: bool) -> None:
        """Takes the directory and whether links out of it are followed."""
        self._follow = follow
        real = Path(os.path.realpath(folder))
        caches = [parent.parent / BLOBS for parent in real.parents if parent.name == SNAPSHOTS]
        self._inside = (real, *caches)

    def check(self, path: Path) -> None:
        """Refuses a link that leads out of the directory, unless they are to be followed."""
        if self._follow:
            return
        target = Path(os.path.realpath(path))
        if not any(target.is_relative_to(folder) for folder in self._inside):
            raise OptionError(
                f"{path}: is a link out of the model directory, to {target}; pass follow_links "
                "(--follow-links) if what it points to belongs to the model"
            )


def _walk(folder: Path, links: Links, passed_over: Collection[str] = ()) -> Iterator[Path]:
    """Every file below a directory but those in folders right in it that are passed over.

    Links are followed, as the cache of the Hugging Face hub consists of them; a directory that is
    reached a second time, as by a link to one above, is passed over.
    """
    seen: set[str] = set()
    waiting = [folder]
    while waiting:
        place = waiting.pop()
        real = os.path.realpath(place)
        if real in seen:
            continue
        seen.add(real)
        folders = []
        for entry in list_folder(place):
            if file_type(place / entry.name) != stat.S_IFDIR:
                yield place / entry.name
            elif place == folder and entry.name in passed_over:
                continue
            elif entry.name not in TOOL_FOLDERS:
                if entry.is_symlink():
                    links.check(place / entry.name)
                folders.append(place / entry.name)
        waiting += reversed(folders)


def _is_left_out(name: str, weights: WeightFiles) -> bool:
    """Whether a file beside the weights is another form of them, or belongs to one."""
    if "/" not in name:
        if name.endswith(WEIGHTS) or INDEX_NAME.fullmatch(name) or OTHER_FORM.fullmatch(name):
            return True
        if name == ADAPTER_CONFIG and weights.form.stem not in ADAPTERS:
            return True
    return EXPORT.fullmatch(name) is not None


def _check_readable(path: Path) -> int:
    """Bytes of a file that is to be copied."""
    check_regular(path)
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be read: {error.strerror}") from None
    return size_of(path)


def _sort(
    walk: Iterator[Path], folder: Path, links: Links, is_left: Callable[[str], bool | None]
) -> OtherFiles:
    """Sorts files into those to copy, each opened once, and those left out.

    Args:
        walk: the files.
        folder: what their names are relative to.
        links: where links may lead.
        is_left: whether a file is left out, by its name; None for neither.
    """
    copied: dict[str, int] = {}
    left: list[str] = []
    for path in walk:
        name = path.relative_to(folder).as_posix()
        verdict = is_left(name)
        if verdict:
            left.append(name)
            continue
        if verdict is not None:
            copied[name] = _check_readable(path)
        if path.is_symlink():
            links.check(path)
    if PARAMS in copied and any(name.startswith(NATIVE) for name in left):
        # Readers would look for the weights that it belongs to.
        del copied[PARAMS]
        left.append(PARAMS)
    return OtherFiles(tuple(copied), tuple(left), sum(copied.values()))


def find_around(folder: Path, components: Collection[str], links: Links) -> OtherFiles:
    """Everything in a pipeline but some of its folders.

    What the pipeline itself holds as one file beside its folders is another form of it.
    """

    def is_left(name: str) -> bool:
        return "/" not in name and (name.endswith(WEIGHTS) or bool(OTHER_FORM.fullmatch(name)))

    return _sort(_walk(folder, links, components), folder, links, is_left)


def find_others(
    folder: Path, weights: WeightFiles, generated: Collection[str], links: Links
) -> OtherFiles:
    """Everything around the weights; `generated` are files that are written anew."""
    taken = {*weights.names, *generated}
    if weights.form.indexed:
        taken.add(weights.form.name)

    def is_left(name: str) -> bool | None:
        return None if name in taken else _is_left_out(name, weights)

    return _sort(_walk(folder, links), folder, links, is_left)
