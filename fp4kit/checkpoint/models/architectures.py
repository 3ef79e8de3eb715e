# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What the modules of a model are called: a checkpoint's names are not always those of the model.

`architecture_table.json` beside this module was read from transformers by
`tests/architecture_facts.py`. It holds

- transformers: the version that was read;
- types: model type to [class that says most about it, base model, causal language model];
- classes: class to its row: `type`, the model type; `prefix`, what its base model is called in a
  model with a head; `children`, what stands first in names of its modules; `parts`, the models
  inside of it; `tied`, linear layers that share a weight with another module and so may not be
  stored ("*" for the number of a layer), each with the linear layer that it shares it with ("" if
  that is none). A part is [path, where its configuration stands ("" if it
  is that of the whole), class, model type, "any" if the configuration may be of any model type];
  the last two may be missing;
- renames: class or model type to its transforms, see :mod:`.renames`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .renames import Renames, Transform, transforms

TABLE = Path(__file__).with_name("architecture_table.json")
#: Transforms that every model type has.
LEGACY = "legacy"
#: Models in models; the deepest known is 4, a damaged configuration may say anything.
DEEPEST = 8
#: Places of the base model and the causal language model in a row of types.
BASE, CAUSAL = 1, 2

Config = dict[str, Any]


@functools.cache
def table() -> dict[str, Any]:
    """The content of the table."""
    content: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return content


def version() -> str:
    """The version of transformers that the table was read from."""
    return str(table()["transformers"])


@dataclass(frozen=True)
class Submodel:
    """A model, or a model inside of one.

    Attributes:
        path: where it is, "" for the whole.
        name: its class.
        type: its model type.
        config: its configuration, empty if config.json has none.
        foreign: the model type that its configuration says, if the table does not have it.
    """

    path: str
    name: str
    type: str
    config: Config
    foreign: str = ""

    @property
    def row(self) -> dict[str, Any]:
        """The row of its class."""
        row: dict[str, Any] = table()["classes"].get(self.name, {})
        return row


def _nested(config: Config, key: str) -> Config:
    """A configuration inside another, by attributes with dots between; empty without it."""
    found: Any = config
    for name in key.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


def _part(whole: Submodel, part: list[Any]) -> Submodel:
    """A part of a model, as its configuration has it."""
    path, key, name, *rest = part
    path = f"{whole.path}.{path}" if whole.path else path
    if key == "":
        return Submodel(path, name, whole.type, whole.config)
    config = {} if key is None else _nested(whole.config, key)
    usual = rest[0] if rest else ""
    given = config.get("model_type")
    types = table()["types"]
    if len(rest) < 2 or not isinstance(given, str) or given == usual:
        return Submodel(path, name, usual, config)
    if given not in types:
        return Submodel(path, name, usual, config, given)
    causal = usual in types and name == types[usual][CAUSAL] != types[usual][BASE]
    return Submodel(path, types[given][CAUSAL if causal else BASE], given, config)


def _submodels(model: Submodel) -> Iterator[Submodel]:
    """A model and the models inside of it, in the order of their modules."""
    yield model
    if model.path.count(".") < DEEPEST:
        for part in model.row.get("parts", ()):
            yield from _submodels(_part(model, part))


def _is_below(path: str, outer: Iterable[str]) -> bool:
    return any(not above or path.startswith(f"{above}.") for above in outer)


def _transforms(submodels: Iterable[Submodel], prefix: str) -> Iterator[Transform]:
    """Those of a model and its parts, each part once; transformers looks up the class first."""
    renames = table()["renames"]
    seen: dict[str, list[str]] = {}
    for model in submodels:
        if _is_below(model.path, seen.get(model.name, ())):
            continue
        key = model.name if model.name in renames else model.type
        if key not in renames or (key == model.type and _is_below(model.path, seen.get(key, ()))):
            continue
        scope = model.path.removeprefix(prefix).removeprefix(".") if model.path else None
        yield from transforms(renames[key], scope, prefix if scope is not None else "")
        for claimed in {model.name, key}:
            seen.setdefault(claimed, []).append(model.path)
    yield from transforms(renames[LEGACY])


class Model:
    """One class that a checkpoint can be loaded as."""

    def __init__(self, name: str, kind: str, config: Config, names: Iterable[str]) -> None:
        """Looks the class up."""
        row = table()["classes"][name]
        self._prefix = row.get("prefix", "")
        self._children = frozenset(row.get("children", ()))
        self._all = list(_submodels(Submodel("", name, kind, config)))
        self._renames = Renames(_transforms(self._all, self._prefix), names)
        base = next((model for model in self._all if model.path == self._prefix), None)
        self._inside = frozenset(base.row.get("children", ()) if base is not None else ())

    def built(self, name: str) -> list[str]:
        """What a stored tensor is called in the model; several names if it is cut."""
        return [self._placed(text) for text in self._renames.built(name)]

    def _placed(self, name: str) -> str:
        """A name with that of the base model before it, or without, as the class has it."""
        first, _, rest = name.partition(".")
        if first == self._prefix and rest:
            second = rest.partition(".")[0]
            # Some checkpoints hold the head under the name of the base model.
            return rest if second in self._children and second not in self._inside else name
        if self._prefix in self._children and first in self._inside - self._children:
            return f"{self._prefix}.{name}"
        return name

    @property
    def foreign(self) -> list[str]:
        """Model types of parts that the table does not have."""
        return [model.foreign for model in self._all if model.foreign]

    @property
    def tied(self) -> dict[str, str]:
        """Linear layers that share a weight, with a linear one of theirs; see the table."""
        found = {}
        for model in self._all:
            before = f"{model.path}." if model.path else ""
            for path, partner in model.row.get("tied", {}).items():
                found[f"{before}{path}"] = f"{before}{partner}" if partner else ""
        return found


def models(config: Config, names: Iterable[str]) -> list[Model]:
    """The classes of transformers that a checkpoint is loaded as.

    Returns:
        The class that config.json names (or the one that says most about its model type) first,
        then those that are made from it on request: the base model, and a causal language model.
        Empty if neither class nor model type is known.
    """
    classes, types = table()["classes"], table()["types"]
    given, kind = config.get("architectures"), config.get("model_type")
    row = types.get(kind, []) if isinstance(kind, str) else []
    named = given if isinstance(given, list) else []
    main = [name for name in named if isinstance(name, str) and name in classes][:1] or row[:1]
    found, listed = [], list(names)
    for name in dict.fromkeys([*main, *row]):
        if name in classes:
            own = row and name in (*main, *row[: BASE + 1])
            type_ = str(kind) if own else classes[name]["type"]
            found.append(Model(name, type_, config, listed))
    return found


def unknown_types(config: Config, found: list[Model]) -> list[str]:
    """Model types of a checkpoint that the table does not have.

    Returns:
        That of the whole, `none` without one, unless its class is known; and those of parts.
    """
    kind = config.get("model_type")
    unknown = [name for model in found for name in model.foreign]
    if isinstance(kind, str):
        unknown += [] if kind in table()["types"] else [kind]
    elif not found:
        unknown.append("none")
    return list(dict.fromkeys(unknown))


@functools.cache
def head_names() -> tuple[str, ...]:
    """Every name of a tied layer that stands outside of numbered layers, by the table."""
    rows = table()["classes"].values()
    found = {path for row in rows for path in row.get("tied", ())}
    return tuple(sorted(path for path in found if "*" not in path))
