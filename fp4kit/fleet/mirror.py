# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""A model directory that lies elsewhere, as a local directory of stand-ins.

Plans, checks and conversions read it as they read any directory; what they read is fetched, and
nothing else (:mod:`fp4kit.io.read.ranges`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fp4kit.checkpoint.read.other_files import STATE_DIR
from fp4kit.checkpoint.read.weight_files import INDEX_NAME, WEIGHTS
from fp4kit.checkpoint.write.state import PLAN_FILE
from fp4kit.errors import FileFormatError, Fp4kitError, brief
from fp4kit.io.read.ranges import hold, release

from .patience import Patience
from .places import scratch
from .remote_files import CACHE_BYTES, RemoteFile, opened_reader
from .urls import READ_ONLY, check_url, file_system, is_url, protocol_of

#: What a model directory may hold, where a web server lists nothing; shards are in the index.
USUAL_FILES = (
    *("config.json", "params.json", "hf_quant_config.json", "generation_config.json"),
    *("model.safetensors", "model.safetensors.index.json"),
    *("consolidated.safetensors", "consolidated.safetensors.index.json"),
    *("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.safetensors.index.json"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json"),
    *("chat_template.jinja", "chat_template.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("preprocessor_config.json", "processor_config.json", "README.md", "LICENSE"),
)

#: Files of a model directory at most.
MOST_FILES = 100_000


@contextmanager
def opened(where: str, *, cache: int = CACHE_BYTES) -> Iterator[Path]:
    """A model directory that can be read, wherever it lies; a path is itself.

    Args:
        where: path or URL.
        cache: bytes of it that are kept on the disk at most.

    Raises:
        OptionError: for a URL that is not known, or holds a password.
        FileFormatError: if there is nothing, or it cannot be read.
    """
    if not is_url(where):
        yield Path(where)
        return
    url = check_url(where)
    fs = file_system(url)
    with scratch() as base, opened_reader(fs, base / "cache", cache) as reader:
        # Errors name the directory; its last part is what the user knows it by.
        folder = base / (url.rpartition("/")[2] or "model")
        folder.mkdir()
        try:
            with _renaming(str(folder), url):
                found = _listed(fs, url, reader.patience)
                heads: list[RemoteFile] = []
                for name, facts in found.items():
                    is_weights = name.endswith(WEIGHTS)
                    file = RemoteFile(reader, f"{url}/{name}", facts, has_head=is_weights)
                    heads += [file] if is_weights and "/" not in name else []
                    path = folder / name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.touch()
                    hold(path, file)
                for fetch in [reader.pool.submit(file.fetch_head) for file in heads]:
                    fetch.result()
                yield folder
        finally:
            release(folder)


@contextmanager
def _renaming(folder: str, url: str) -> Iterator[None]:
    """Has errors name what the user gave, and not where its stand-ins lie."""
    try:
        yield
    except Fp4kitError as error:
        text = str(error)
        if folder in text:
            error.args = (text.replace(folder, url), *error.args[1:])
        raise


def _listed(fs: Any, url: str, patience: Patience) -> dict[str, dict[str, Any]]:
    """Every file below a URL by its relative name, with what is known of it."""

    def failure(reason: str) -> FileFormatError:
        return FileFormatError(f"{url}: cannot be read: {reason}")

    if protocol_of(url) in READ_ONLY:
        found = _probed(fs, url, patience)
    else:
        root = fs._strip_protocol(url)
        entries = patience.with_retries(lambda: fs.find(root, detail=True), failure)
        found = {
            name.removeprefix(root).lstrip("/"): facts
            for name, facts in entries.items()
            if not name.endswith("/")
        }
    if not found:
        raise FileFormatError(f"{url}: there is nothing; give the URL of a model directory")
    if "" in found:
        raise FileFormatError(f"{url}: is a file; give the URL of a model directory")
    check_names(url, found)
    notes = [name for name in found if name.startswith(f"{STATE_DIR}/")]
    if f"{STATE_DIR}/{PLAN_FILE}" not in notes:  # a late worker left a receipt behind
        for name in notes:
            del found[name]
    return dict(sorted(found.items()))


def check_names(url: str, names: Collection[str]) -> None:
    """Refuses names that would leave the directory of stand-ins: anyone may have given them.

    Raises:
        FileFormatError: naming the first, or if there are too many.
    """
    if len(names) > MOST_FILES:
        raise FileFormatError(
            f"{url}: holds {len(names)} files, of which a model has at most {MOST_FILES}; give the "
            "URL of the model directory itself"
        )
    for name in names:
        parts = name.split("/")
        if not all(parts) or ".." in parts or "." in parts or "\0" in name or "\\" in name:
            raise FileFormatError(
                f"{url}: holds the file {brief(name)}, which leaves the directory"
            )


def _probed(fs: Any, url: str, patience: Patience) -> dict[str, dict[str, Any]]:
    """The files of a model on a web server: those that it links to, or that a model usually has."""

    def failure(reason: str) -> FileFormatError:
        return FileFormatError(f"{url}: cannot be read: {reason}")

    def facts_of(name: str) -> dict[str, Any] | None:
        try:
            facts: dict[str, Any] = fs.info(f"{url}/{name}")
        except FileNotFoundError:
            return None
        if facts.get("size") is None:
            raise FileFormatError(f"{url}/{name}: the server does not say how long it is")
        return facts

    def linked() -> list[str]:
        try:
            return [str(each["name"]) for each in fs.ls(f"{url}/", detail=True)]
        except FileNotFoundError:
            return []

    below = f"{url}/"
    links = [
        name.removeprefix(below)
        for name in patience.with_retries(linked, failure)
        if name.startswith(below) and not name.endswith("/")
    ]
    names = links or list(USUAL_FILES)
    found: dict[str, dict[str, Any]] = {}

    def add(wanted: list[str]) -> None:
        for name in wanted:
            facts = patience.with_retries(partial(facts_of, name), failure)
            if facts is not None:
                found[name] = facts

    add(names)
    for index in [name for name in found if INDEX_NAME.fullmatch(name)]:
        text = patience.with_retries(partial(fs.cat_file, f"{url}/{index}"), failure)
        add([name for name in _shards(text) if name not in found])
    return found


def _shards(index: bytes) -> list[str]:
    """The files that an index names, if it is one: what is wrong with it is said by its reader."""
    try:
        content = json.loads(index)
    except ValueError:
        return []
    named = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(named, dict):
        return []
    names = {name for name in named.values() if isinstance(name, str)}
    return sorted(name for name in names if ".." not in name and not name.startswith("/"))
