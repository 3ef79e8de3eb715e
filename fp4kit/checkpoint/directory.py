# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""A model directory as one source: every shard's tensors, the JSON files, and what else is there.

Everything is checked before any data is read: the index against the shards both ways, names that
would leave the directory, and tensors that stand in two shards.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from fp4kit.errors import FileFormatError, OptionError
from fp4kit.io.files import InputFile, check_content
from fp4kit.io.json_text import strict_json
from fp4kit.io.source import SafetensorsSource, Source

CONFIG = "config.json"
HF_QUANT_CONFIG = "hf_quant_config.json"
INDEX_SUFFIX = ".safetensors.index.json"
#: Where an unfinished conversion keeps its notes; a directory that holds it is not complete.
STATE_DIR = ".fp4kit-incomplete"
#: Weights in other containers; copying them would carry the model along unquantized.
OTHER_WEIGHTS = frozenset(
    (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".tflite", ".pkl")
)
#: Directories that belong to a tool and not to the model.
TOOL_FOLDERS = frozenset((".git", ".cache", "__pycache__", STATE_DIR))
#: A file that is one of several by its name.
SHARD_NAME = re.compile(r"(.+)-\d+-of-0*(\d+)\.safetensors")
SHOWN = 3


def listed(names: list[str]) -> str:
    """The first few of many names, for a message."""
    text = ", ".join(repr(name) for name in names[:SHOWN])
    return text if len(names) <= SHOWN else f"{text} and {len(names) - SHOWN} more"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        FileFormatError: if it cannot be read or is something else.
    """
    try:
        value = strict_json(path.read_text("utf-8"))
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise FileFormatError(f"{path}: damaged JSON: {error}") from None
    if not isinstance(value, dict):
        raise FileFormatError(f"{path}: holds no JSON object")
    return value


def _contained(name: str, index: Path) -> str:
    """A shard's file name from an index, if it stays inside the directory."""
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name:
        raise FileFormatError(f"{index}: names the file {name!r}, which leaves the directory")
    return name


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name to shard file name."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FileFormatError(f"{index}: has no weight_map")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str):
            raise FileFormatError(f"{index}: weight_map of {tensor!r} is no file name")
        _contained(shard, index)
    return weight_map


def _shard_files(folder: Path, base: str | None = None) -> list[str]:
    """Files that are one of several by their names, perhaps only those of some base name."""
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        match = SHARD_NAME.fullmatch(path.name)
        if match and int(match.group(2)) > 1 and base in (None, match.group(1)):
            found.append(path.name)
    return found


def _find_shards(folder: Path) -> tuple[str, list[str], dict[str, str] | None, Path]:
    """(base name, shard file names in order, weight map or None, index file)."""
    indexes = sorted(folder.glob(f"*{INDEX_SUFFIX}"))
    if len(indexes) > 1:
        found = listed([path.name for path in indexes])
        raise FileFormatError(f"{folder}: has {len(indexes)} indexes ({found}); keep one")
    if indexes:
        weight_map = _weight_map(indexes[0])
        names = sorted(set(weight_map.values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise FileFormatError(
                f"{folder}: {len(missing)} of {len(names)} shards that {indexes[0].name} names are "
                f"missing: {listed(missing)}; download them again"
            )
        base = indexes[0].name.removesuffix(INDEX_SUFFIX)
        stray = [name for name in _shard_files(folder, base) if name not in names]
        if stray:
            raise FileFormatError(
                f"{folder}: {len(stray)} shards are not in {indexes[0].name}: {listed(stray)}; an "
                "engine would not load them. Remove them, or restore the index"
            )
        return base, names, weight_map, indexes[0]
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    if not files:
        raise FileFormatError(
            f"{folder}: holds no .safetensors file; give a model directory, or save the model with "
            "safetensors first"
        )
    shards = _shard_files(folder)
    if shards:
        raise FileFormatError(
            f"{folder}: holds shards ({listed(shards)}) but no *{INDEX_SUFFIX}; restore the index, "
            "and what shards it names"
        )
    if len(files) > 1 and "model.safetensors" in files:
        # What transformers loads where several forms of a model lie side by side.
        files = ["model.safetensors"]
    if len(files) > 1:
        raise FileFormatError(
            f"{folder}: holds {len(files)} .safetensors files ({listed(files)}) but no "
            f"*{INDEX_SUFFIX} that says how they belong together; give one of the files, or "
            "restore the index"
        )
    return files[0].removesuffix(".safetensors"), files, None, folder / files[0]


class Checkpoint(Source):
    """A model directory, or a single safetensors file.

    Attributes:
        path: the directory or file.
        base: first part of the names of the weight files, for example `model`.
        config: content of config.json, empty without one.
        hf_quant_config: content of hf_quant_config.json, None without one.
        metadata: header metadata of all shards together, the first one's values where they differ.
        headers: header metadata of each shard.
        tensors: every stored tensor, shard after shard.
        shards: shard file name to its names of tensors.
        indexed: whether there is an index.
    """

    concurrent = True

    def __init__(self, path: Path, *, unfinished: bool = False) -> None:
        """Opens and checks it.

        Args:
            path: directory or file.
            unfinished: open also a directory whose conversion has not said that it is done.

        Raises:
            FileFormatError: if anything is missing, malformed or contradictory.
        """
        self.path = path
        self.metadata = {}
        self.headers: list[dict[str, str]] = []
        self.tensors = {}
        self.shards: dict[str, list[str]] = {}
        self.config: dict[str, Any] = {}
        self.hf_quant_config: dict[str, Any] | None = None
        self._sources: dict[str, SafetensorsSource] = {}
        self._owner: dict[str, SafetensorsSource] = {}
        self.is_directory = path.is_dir()
        weight_map: dict[str, str] | None = None
        index = path
        if self.is_directory:
            if (path / STATE_DIR).exists() and not unfinished:
                raise FileFormatError(
                    f"{path}: is the unfinished output of a conversion; finish it with --resume"
                )
            self.base, names, weight_map, index = _find_shards(path)
            if (path / CONFIG).is_file():
                self.config = read_json(path / CONFIG)
            if (path / HF_QUANT_CONFIG).is_file():
                self.hf_quant_config = read_json(path / HF_QUANT_CONFIG)
        else:
            if path.suffix.lower() != ".safetensors":
                raise OptionError(
                    f"{path}: give a model directory or a .safetensors file for a checkpoint layout"
                )
            self.base, names = path.name[: -len(".safetensors")], [path.name]
        self.indexed = weight_map is not None
        try:
            for name in names:
                self._open(name, path / name if self.is_directory else path)
            if weight_map is not None:
                self._check_index(index, weight_map)
        except BaseException:
            self.close()
            raise

    def _open(self, name: str, path: Path) -> None:
        file = InputFile(path)
        try:
            check_content(file, "safetensors")
            source = SafetensorsSource(file)
        except BaseException:
            file.close()
            raise
        self._sources[name] = source
        self.shards[name] = list(source.tensors)
        twice = [tensor for tensor in source.tensors if tensor in self.tensors]
        if twice:
            raise FileFormatError(
                f"{path}: holds {len(twice)} tensors that another shard holds too: {listed(twice)}"
            )
        self.tensors.update(source.tensors)
        self._owner.update(dict.fromkeys(source.tensors, source))
        self.metadata = {**source.metadata, **self.metadata}
        self.headers.append(source.metadata)

    def _check_index(self, index: Path, weight_map: dict[str, str]) -> None:
        lost = [
            name for name, shard in weight_map.items() if name not in self._sources[shard].tensors
        ]
        if lost:
            raise FileFormatError(
                f"{index}: {len(lost)} tensors are not in the shard that it names: {listed(lost)}"
            )
        stray = [name for name in self.tensors if name not in weight_map]
        if stray:
            raise FileFormatError(
                f"{index}: {len(stray)} tensors of the shards are not in it: {listed(stray)}; an "
                "engine would not load them. Restore the index"
            )

    def __enter__(self) -> Checkpoint:
        return self

    def read(self, name: str, offset: int, out: memoryview) -> None:  # noqa: D102
        self._owner[name].read(name, offset, out)

    def shard_of(self, name: str) -> str:
        """File name of the shard that a tensor stands in."""
        return self._owner[name].path.name

    def close(self) -> None:  # noqa: D102
        for source in self._sources.values():
            source.close()

    def weight_files(self) -> Iterator[Path]:
        """Every file that holds tensors of the model."""
        for source in self._sources.values():
            yield source.path

    def other_files(self) -> tuple[list[str], list[str]]:
        """Relative names of the files to copy, and of weights in another form, which are not.

        Links are followed, as the cache of the Hugging Face hub consists of them.

        Raises:
            FileFormatError: for something to copy that is no file, or a link to nothing.
        """
        if not self.is_directory:
            return [], []
        copied: list[str] = []
        left: list[str] = []
        seen: set[str] = set()
        for root, folders, files in os.walk(self.path, followlinks=True):
            if os.path.realpath(root) in seen:  # a link to a directory above
                folders.clear()
                continue
            seen.add(os.path.realpath(root))
            folders[:] = sorted(name for name in folders if name not in TOOL_FOLDERS)
            for name in sorted(files):
                relative = (Path(root) / name).relative_to(self.path).as_posix()
                if relative in self.shards or relative == HF_QUANT_CONFIG:
                    continue
                if relative == CONFIG or relative.endswith(INDEX_SUFFIX):
                    continue
                suffix = Path(name).suffix.lower()
                other = suffix == ".safetensors" or suffix in OTHER_WEIGHTS
                if not other and not (Path(root) / name).is_file():
                    raise FileFormatError(
                        f"{self.path / relative}: is no regular file, or a link to nothing; remove "
                        "it, or download what is missing"
                    )
                (left if other else copied).append(relative)
        return copied, left
