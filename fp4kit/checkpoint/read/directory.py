# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""A model directory as one source: every shard's tensors, the JSON files, and what else is there.

Everything is checked before any data is read: the index against the shards both ways, names that
would leave the directory, and what cannot be read. Of a tensor that stands in two shards, the one
that the index names counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace as with_changes
from functools import cached_property
from pathlib import Path
from typing import Any

from fp4kit.checkpoint.layouts import comfy
from fp4kit.checkpoint.models import mistral as mistral_native
from fp4kit.errors import FileFormatError, OptionError
from fp4kit.io.read.cast import with_cast
from fp4kit.io.read.files import FilePool
from fp4kit.io.read.kinds import check_content
from fp4kit.io.read.safetensors import SafetensorsSource
from fp4kit.io.read.source import Source
from fp4kit.io.tensor_names import refuse_adapter

from .json_files import listed, read_json, read_settings
from .other_files import HF_QUANT_CONFIG, STATE_DIR, Links, OtherFiles, find_others
from .weight_files import CONFIG, INDEX_SUFFIX, PARAMS, WEIGHTS, WeightFiles, find_weights

__all__ = (
    "CONFIG",
    "HF_QUANT_CONFIG",
    "INDEX_SUFFIX",
    "PARAMS",
    "STATE_DIR",
    "Checkpoint",
    "listed",
    "read_json",
)
#: Tensors of a checkpoint: planning takes some 2 KB each, and no model has a third of them.
MAX_TENSORS = 1_000_000


class Checkpoint(Source):
    """A model directory, or a single safetensors file.

    Attributes:
        path: the directory or file.
        base: first part of the names of the weight files, for example `model`.
        config: settings of the model, as config.json names them; empty without any.
        documents: content of the files of settings (config.json, params.json) by name.
        hf_quant_config: content of hf_quant_config.json, None without one.
        metadata: header metadata of all shards together, the first one's values where they differ.
        headers: header metadata of each shard.
        tensors: every stored tensor, shard after shard.
        shards: shard file name to its names of tensors.
        indexed: whether there is an index.
        native: whether it is in Mistral's own format, whose settings are in params.json.
        stale: tensors that the index maps elsewhere, to the shard that holds such a copy.
        warnings: what the user should know about what was read.
    """

    concurrent = True
    #: Whether a caller gave the tensors, so that a conversion of them cannot be resumed.
    in_memory = False

    def __init__(
        self,
        path: Path,
        *,
        unfinished: bool = False,
        follow_links: bool = True,
        cast: str | None = None,
    ) -> None:
        """Opens and checks it.

        Args:
            path: directory or file.
            unfinished: open also a directory whose conversion has not said that it is done.
            follow_links: copy also what links out of the directory point to.
            cast: `float32` to take float64 tensors as that, None to leave them alone.
        """
        self.path = path
        self.metadata = {}
        self.headers: list[dict[str, str]] = []
        self.tensors = {}
        self.shards: dict[str, list[str]] = {}
        self.config: dict[str, Any] = {}
        self.documents: dict[str, dict[str, Any]] = {}
        self.hf_quant_config: dict[str, Any] | None = None
        self.stale: dict[str, str] = {}
        self._pool = FilePool()
        self._sources: dict[str, Source] = {}
        self._owner: dict[str, Source] = {}
        self._follow_links = follow_links
        self._weights: WeightFiles | None = None
        self.is_directory = path.is_dir()
        self._cast = cast
        weight_map: dict[str, str] | None = None
        if self.is_directory:
            if (path / STATE_DIR).exists() and not unfinished:
                raise FileFormatError(
                    f"{path}: is the unfinished output of a conversion; finish it with --resume"
                )
            found = find_weights(path)
            weight_map = found.weight_map
            self._weights = with_changes(found, weight_map=None)  # as large as all names
            self.base, names = self._weights.form.base, self._weights.names
            self._read_settings(path)
        else:
            if path.suffix.lower() != WEIGHTS:
                raise OptionError(
                    f"{path}: give a model directory or a .safetensors file for a checkpoint layout"
                )
            self.base, names = path.name[: -len(WEIGHTS)], [path.name]
        self.indexed = weight_map is not None
        self.native = self._weights is not None and self._weights.native
        try:
            for name in names:
                self._open(name, path / name if self.is_directory else path, weight_map)
            if weight_map is not None:
                self._check_index(weight_map)
        except BaseException:
            self.close()
            raise

    def _read_settings(self, folder: Path) -> None:
        """The JSON files that say what the model is, and how it is quantized."""
        assert self._weights is not None
        names = (CONFIG, PARAMS) if self._weights.native else (CONFIG,)
        for name in names:
            content = read_settings(folder / name)
            if content is not None:
                self.documents[name] = content
        self.config = self.documents.get(CONFIG, {})
        if self._weights.native:
            self.config = mistral_native.as_config(self.documents[PARAMS], self.config)
        self.hf_quant_config = read_settings(folder / HF_QUANT_CONFIG)

    def _open(self, name: str, path: Path, weight_map: dict[str, str] | None) -> None:
        file = self._pool.open(path)
        try:
            check_content(file, "safetensors")
            source = with_cast(SafetensorsSource(file), self._cast)
        except BaseException:
            file.close()
            raise
        self._sources[name] = source
        found, source.tensors = source.tensors, {}  # held once, for all shards
        self.metadata = {**source.metadata, **self.metadata}
        self.headers.append(source.metadata)
        if weight_map is not None:
            elsewhere = [tensor for tensor in found if weight_map.get(tensor, name) != name]
            self.stale.update(dict.fromkeys(elsewhere, name))
            for tensor in elsewhere:
                del found[tensor]
        if len(self.tensors) + len(found) > MAX_TENSORS:
            raise FileFormatError(
                f"{self.path}: holds more than {MAX_TENSORS} tensors, which are not read together"
            )
        self.shards[name] = list(found)
        self.tensors.update(found)
        self._owner.update(dict.fromkeys(found, source))

    def _check_index(self, weight_map: dict[str, str]) -> None:
        lost = [name for name in weight_map if name not in self.tensors]
        if lost:
            raise FileFormatError(
                f"{self.index}: {len(lost)} tensors are not in the shard that it names: "
                f"{listed(lost)}"
            )
        stray = [name for name in self.tensors if name not in weight_map]
        if stray:
            raise FileFormatError(
                f"{self.index}: {len(stray)} tensors of the shards are not in it: {listed(stray)}; "
                "an engine would not load them. Restore the index"
            )

    def __enter__(self) -> Checkpoint:
        return self

    def read(self, name: str, offset: int, out: memoryview) -> None:  # noqa: D102
        self._owner[name].read(name, offset, out)

    def check_unchanged(self) -> None:  # noqa: D102
        for source in self._sources.values():
            source.check_unchanged()

    def close(self) -> None:  # noqa: D102
        for source in self._sources.values():
            source.close()

    def weight_files(self) -> Iterator[Path]:
        """Every file that holds tensors of the model."""
        for source in self._sources.values():
            yield source.path

    @property
    def stored_at(self) -> Path | None:
        """The directory or file that it is read from, None if there is none."""
        return self.path

    @cached_property
    def layer_records(self) -> dict[str, dict[str, Any]]:
        """What ComfyUI's headers and markers say about each module."""
        return comfy.layer_records(self, self.headers, self.path)

    @property
    def layer_formats(self) -> dict[str, str]:
        """Module to the format that ComfyUI's headers and markers say."""
        return comfy.layer_formats(self.layer_records)

    @property
    def index(self) -> Path:
        """The index, or where it would be."""
        if self._weights is None:
            return self.path
        return self.path / self._weights.form.index_name

    @property
    def is_diffusion(self) -> bool:
        """Whether it is a component of a diffusers pipeline, by its settings or its files."""
        return "_class_name" in self.config or self.base.startswith("diffusion_pytorch_model")

    def refuse_adapter(self) -> None:
        """Refuses an adapter: it is no model."""
        said = self._weights is not None and self._weights.adapter
        refuse_adapter(self.path, self.tensors, said=said)

    @cached_property
    def others(self) -> OtherFiles:
        """The files around the weights."""
        if self._weights is None:
            return OtherFiles()
        generated = {CONFIG, HF_QUANT_CONFIG, *self.documents}
        links = Links(self.path, follow=self._follow_links)
        return find_others(self.path, self._weights, generated, links)

    @property
    def warnings(self) -> list[str]:
        """What the user should know about what was read."""
        if not self.stale:
            return []
        copies = [f"{name} ({shard})" for name, shard in self.stale.items()]
        return [
            f"{len(copies)} tensors stand in a second shard as well; {self.index.name} decides, "
            f"and these copies are left out: {listed(copies)}"
        ]
