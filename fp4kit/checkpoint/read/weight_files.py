# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Which files of a directory are the model's weights, where several forms lie side by side.

A form is an index with the shards that it names, or a single file. Of several, the default variant
of the Hugging Face form is taken; others, which engines load on request only (`fp16`, Mistral's
`consolidated`), where they stand alone. What is ambiguous is refused: to load the wrong weights is
worse than not to load any.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from fp4kit.errors import FileFormatError

from .json_files import ENTRIES, file_type, listed, read_json

CONFIG = "config.json"
#: Settings of Mistral's own format.
PARAMS = "params.json"
#: What a diffusers pipeline says about its folders.
PIPELINE = "model_index.json"
WEIGHTS = ".safetensors"
INDEX_SUFFIX = f"{WEIGHTS}.index.json"
#: An index, wherever its writer put the variant: transformers, older and newer diffusers differ.
INDEX_NAME = re.compile(
    r"(?P<base>.+?)\.safetensors(?:\.(?P<inner>[^.]+))?\.index(?:\.(?P<outer>[^.]+))?\.json"
)
#: A file that is one of several by its name.
SHARD_NAME = re.compile(r"(.+)-\d+-of-0*(\d+)(?:\.([^.]+))?\.safetensors")
#: First part of the names under which Mistral publishes its own format.
NATIVE = "consolidated"
#: First parts of the names that libraries look for; what a dot adds to them is a variant.
STEMS = ("model", "diffusion_pytorch_model", NATIVE)
#: First parts of the names of adapters, which are no models.
ADAPTERS = ("adapter_model", "adapter", "pytorch_lora_weights")
ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class Form:
    """One form of the weights.

    Attributes:
        name: name of the index or of the single file.
        stem: first part of the names of its files, without the variant.
        variant: what is added to it, `fp16` for example; "" for the default.
        indexed: whether it is an index.
    """

    name: str
    stem: str
    variant: str
    indexed: bool

    @property
    def base(self) -> str:
        """First part of the names of its files."""
        return f"{self.stem}.{self.variant}" if self.variant else self.stem

    @property
    def index_name(self) -> str:
        """Name of its index, or that which it would have."""
        if self.indexed:
            return self.name
        if self.variant:
            return f"{self.stem}{WEIGHTS}.index.{self.variant}.json"
        return f"{self.base}{INDEX_SUFFIX}"


@dataclass(frozen=True)
class WeightFiles:
    """The weights of a model directory.

    Attributes:
        form: which form they are.
        names: files relative to the directory, in order.
        weight_map: tensor to file, None without an index.
        native: whether they are Mistral's own format, whose settings are in params.json.
        adapter: whether they are an adapter, for lack of anything else.
    """

    form: Form
    names: list[str]
    weight_map: dict[str, str] | None
    native: bool
    adapter: bool


def list_folder(folder: Path) -> list[os.DirEntry[str]]:
    """What lies in a directory, by name."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise FileFormatError(f"{folder}: cannot be read: {error.strerror}") from None


def _contained(name: str, index: Path) -> None:
    """Refuses a shard's file name that leaves the directory."""
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name:
        raise FileFormatError(f"{index}: names the file {name!r}, which leaves the directory")


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name to shard file name."""
    weight_map = read_json(index, ENTRIES, constants=False).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FileFormatError(f"{index}: has no weight_map")
    names: dict[str, str] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str):
            raise FileFormatError(f"{index}: weight_map of {tensor!r} is no file name")
        if shard not in names:
            _contained(shard, index)
        # One string for all tensors of a shard.
        weight_map[tensor] = names.setdefault(shard, shard)
    return weight_map


def _split(base: str) -> tuple[str, str]:
    """(stem, variant) of the first part of a file's name."""
    stem, _, variant = base.partition(".")
    return (stem, variant) if stem in STEMS else (base, "")


def _form_of(name: str) -> Form | None:
    """The form that an index or a single file is, None for other files and for shards."""
    index = INDEX_NAME.fullmatch(name)
    if index:
        stem, variant = _split(index["base"])
        return Form(name, stem, variant or index["inner"] or index["outer"] or "", True)
    if not name.endswith(WEIGHTS) or _shard_base(name) is not None:
        return None
    stem, variant = _split(name.removesuffix(WEIGHTS))
    return Form(name, stem, variant, False)


def _shard_base(name: str) -> str | None:
    """First part of the name of a file that is one of several, None for others."""
    match = SHARD_NAME.fullmatch(name)
    if match is None or int(match[2]) < 2:
        return None
    return f"{match[1]}.{match[3]}" if match[3] else match[1]


def _rank(form: Form, *, native: bool) -> tuple[int, bool, bool]:
    """What is taken first: the smallest."""
    if form.stem in ADAPTERS:
        order = 3
    elif form.stem not in STEMS and not form.indexed:
        order = 2
    else:
        order = int((form.stem == NATIVE) != native)
    return order, bool(form.variant), not form.indexed


def _choose(folder: Path, forms: list[Form], *, native: bool) -> Form:
    """The form that is the model."""
    ranks = [_rank(form, native=native) for form in forms]
    first = [form for form, rank in zip(forms, ranks, strict=True) if rank == min(ranks)]
    if len(first) == 1:
        return first[0]
    found = listed([form.name for form in first])
    if first[0].indexed:
        raise FileFormatError(f"{folder}: has {len(first)} indexes ({found}); keep one")
    if first[0].variant:
        raise FileFormatError(f"{folder}: holds {len(first)} variants ({found}); keep one")
    raise FileFormatError(
        f"{folder}: holds {len(first)} .safetensors files ({found}) but no *{INDEX_SUFFIX} that "
        "says how they belong together; give one of the files, or restore the index"
    )


def folders_with_weights(folder: Path) -> list[str]:
    """Names of the directories in a directory that hold safetensors files."""
    paths = [folder / entry.name for entry in list_folder(folder)]
    return [
        path.name
        for path in paths
        if file_type(path) == stat.S_IFDIR
        and any(_form_of(entry.name) for entry in list_folder(path))
    ]


def _refuse_empty(folder: Path) -> FileFormatError:
    """Why a directory without weights is none of a model, and which of its folders may be."""
    inner = folders_with_weights(folder)
    if inner:
        kind = "a diffusers pipeline" if (folder / PIPELINE).exists() else "no model directory"
        return FileFormatError(
            f"{folder}: is {kind}: it holds no .safetensors file, its folders {listed(inner)} do; "
            "give one of them"
        )
    return FileFormatError(
        f"{folder}: holds no .safetensors file; give a model directory, or save the model with "
        "safetensors first"
    )


def _named_by_index(
    folder: Path, form: Form, shards: list[str]
) -> tuple[list[str], dict[str, str]]:
    """(files, weight map) of an index, compared with what is there."""
    weight_map = _weight_map(folder / form.name)
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if file_type(folder / name) != stat.S_IFREG]
    if missing:
        raise FileFormatError(
            f"{folder}: {len(missing)} of {len(names)} shards that {form.name} names are "
            f"missing: {listed(missing)}; download them again"
        )
    named = set(names)
    stray = [name for name in shards if _shard_base(name) == form.base and name not in named]
    if stray:
        raise FileFormatError(
            f"{folder}: {len(stray)} shards are not in {form.name}: {listed(stray)}; an "
            "engine would not load them. Remove them, or restore the index"
        )
    return names, weight_map


def find_weights(folder: Path) -> WeightFiles:
    """The files that hold a model's weights."""
    names = [entry.name for entry in list_folder(folder)]
    settings = {name for name in (CONFIG, PARAMS) if name in names}
    forms = [form for form in map(_form_of, names) if form is not None]
    shards = [name for name in names if _shard_base(name) is not None]
    known = {form.base for form in forms if form.indexed}
    lonely = [name for name in shards if _shard_base(name) not in known]
    form = _choose(folder, forms, native=settings == {PARAMS}) if forms else None
    if form is None or not form.indexed:
        own = lonely
        if form is not None and form.stem in STEMS:
            own = [name for name in lonely if _shard_base(name) == form.base]
        if own:
            raise FileFormatError(
                f"{folder}: holds shards ({listed(own)}) but no *{INDEX_SUFFIX}; restore the "
                "index, and what shards it names"
            )
    if form is None:
        raise _refuse_empty(folder)
    native = form.stem == NATIVE and PARAMS in settings
    adapter = form.stem in ADAPTERS and ADAPTER_CONFIG in names
    files, weight_map = [form.name], None
    if form.indexed:
        files, weight_map = _named_by_index(folder, form, shards)
    return WeightFiles(form, files, weight_map, native, adapter)
