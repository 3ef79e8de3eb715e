# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Types of what functions on files are asked for, and the checks that they share."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, TypedDict

from fp4kit.checkpoint.options import DEFAULT_SHARD_SIZE, parse_size
from fp4kit.errors import OptionError, brief
from fp4kit.io.read.open import check_source
from fp4kit.options import (
    Granularity,
    NibbleOrder,
    RecipeName,
    ScaleLayout,
    ScaleRule,
    ScaleSearch,
    SearchError,
)
from fp4kit.scheme import Scheme, as_scheme

StrPath = str | os.PathLike[str]
Layout = Literal["compressed-tensors", "modelopt", "comfy", "deepseek", "mlx"]
#: What a checkpoint is converted into: a layout, or a model for llama.cpp.
ConvertedLayout = Layout | Literal["gguf"]
GGUF_LAYOUT = "gguf"
ExpertsLayout = Literal["out_in", "in_out", "interleaved"]


class Choices(TypedDict, total=False):
    """What decides the bytes, and which tensors are quantized; see :func:`quantize_file`."""

    recipe: RecipeName | None
    scale_rule: ScaleRule | None
    granularity: Granularity | None
    scale_search: ScaleSearch | None
    search_error: SearchError | None
    e4m3_max: Literal[448, 256]
    include: Sequence[str]
    exclude: Sequence[str]
    cast: Literal["float32"] | None
    unscaled_fp8: bool
    allow_nothing: bool


class FileChoices(Choices, total=False):
    """The choices of :func:`quantize_file`."""

    scale_layout: ScaleLayout
    nibble_order: NibbleOrder
    pad: bool
    void_dtype: Literal["bfloat16"] | None
    plan: Mapping[str, str] | str | os.PathLike[str] | None


class CheckpointChoices(Choices, total=False):
    """The choices of :func:`quantize_checkpoint`."""

    activations: str | os.PathLike[str] | None
    moments: str | os.PathLike[str] | None
    experts_layout: ExpertsLayout | None
    max_shard_size: str | None
    follow_links: bool
    lossless: bool
    plan: Mapping[str, str] | str | os.PathLike[str] | None


class SurveyChoices(TypedDict, total=False):
    """The choices of :func:`survey`."""

    include: Sequence[str]
    exclude: Sequence[str]
    cast: Literal["float32"] | None
    unscaled_fp8: bool
    experts_layout: ExpertsLayout | None
    follow_links: bool


class RestoreChoices(TypedDict, total=False):
    """The choices of :func:`dequantize_checkpoint`."""

    experts_layout: ExpertsLayout | Literal["single"] | None
    unscaled_fp8: bool
    max_shard_size: str | None
    follow_links: bool


class ConvertChoices(TypedDict, total=False):
    """The choices of :func:`convert_checkpoint`."""

    max_shard_size: str | None
    follow_links: bool
    lossless: bool


#: What the choices are for, in messages.
KINDS = {FileChoices: "files", CheckpointChoices: "checkpoints"}


def _is_path(value: object) -> bool:
    return isinstance(value, (str, os.PathLike))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_list_of_text(value: object) -> bool:
    return isinstance(value, (list, tuple, set, frozenset)) and all(map(_is_text, value))


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping)


#: What arguments may be, by their names: a test, and words for it.
_KINDS: tuple[tuple[str, Callable[[object], bool], str], ...] = (
    ("source target path against moments text template", _is_path, "a path"),
    ("force resume dry_run raw pad", _is_flag, "True or False"),
    ("unscaled_fp8 allow_nothing follow_links lossless", _is_flag, "True or False"),
    ("include exclude pins formats", _is_list_of_text, "a list of patterns"),
    ("metadata", _is_mapping, "a mapping of strings"),
    ("device", _is_text, "the name of a device"),
    ("experts_layout", _is_text, "the name of a layout of experts"),
    ("max_shard_size", _is_text, "a size like 5GB"),
    ("activations", _is_path, "the word uncalibrated or the path of a JSON file"),
    ("progress", callable, "a function of (bytes done, bytes in all)"),
)
_KIND_OF = {name: (test, words) for names, test, words in _KINDS for name in names.split()}
_MAY_BE_NONE = (
    *(
        "against",
        "template",
        "progress",
        "moments",
        "metadata",
        "max_shard_size",
        "activations",
        "experts_layout",
    ),
)


def check_arguments(given: Mapping[str, Any], optional: Sequence[str] = ()) -> None:
    """Refuses arguments that are of another kind than their names say; words are checked later.

    Args:
        given: the arguments of a function on files by name, `choices` among them.
        optional: further ones that may be None.

    Raises:
        OptionError: naming the argument, and what it may be.
    """
    for name, value in {**given, **given.get("choices", {})}.items():
        if name not in _KIND_OF or (value is None and name in (*_MAY_BE_NONE, *optional)):
            continue
        test, words = _KIND_OF[name]
        if not test(value):
            raise OptionError(f"{name}={brief(value)} is not {words}")


def checked(path: StrPath) -> Path:
    """A source, refused if it cannot be one at all."""
    source = Path(path)
    check_source(source)
    return source


def known(choices: Any, kind: Any) -> dict[str, Any]:
    """Choices by name, lists as tuples.

    Raises:
        OptionError: for a name that is none of those of a kind.
    """
    names: set[str] = set(kind.__optional_keys__)
    for name in choices:
        if name not in names:
            raise OptionError(f"{name!r} is no option of this; choose {', '.join(sorted(names))}")
    return {
        name: tuple(value) if name in ("include", "exclude") else value
        for name, value in choices.items()
    }


def known_with_scheme(choices: Any, kind: Any, scheme: Scheme | str) -> dict[str, Any]:
    """Choices by name, all fields of a scheme that belong to them included.

    Args:
        choices: what a caller passed as keywords, perhaps some of these fields.
        kind: the choices that there are.
        scheme: a scheme, or the name of a format.

    Raises:
        OptionError: as :func:`known`, and for a scheme that files do not take.
    """
    given, names = known(choices, kind), kind.__optional_keys__
    own = {name: given.pop(name) for name in Scheme.__dataclass_fields__ if name in given}
    wanted = as_scheme(scheme, own)
    for field in fields(wanted):
        value = getattr(wanted, field.name)
        if field.name in names or field.name == "format":
            given[field.name] = value
        elif value != field.default:
            raise OptionError(
                f"{field.name}={value!r} is not for whole {KINDS[kind]}; quantize the arrays with "
                "fp4kit.quantize and write them with fp4kit.save"
            )
    return given


def shard_size(text: str | None) -> int:
    """Bytes that a weight file takes at most."""
    return parse_size(text or DEFAULT_SHARD_SIZE)
