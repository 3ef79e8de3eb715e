# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Types of what functions on files are asked for, and the checks that they share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from fp4kit.checkpoint.options import DEFAULT_SHARD_SIZE, parse_size
from fp4kit.errors import OptionError
from fp4kit.io.read.open import check_source

StrPath = str | os.PathLike[str]
Format = Literal["nvfp4", "mxfp4", "mxfp8", "mxfp8_e5m2"]
FloatType = Literal["float32", "float16", "bfloat16"]
Layout = Literal["compressed-tensors", "modelopt", "comfy"]
ExpertsLayout = Literal["out_in", "in_out", "interleaved"]


class Choices(TypedDict, total=False):
    """What decides the bytes, and which tensors are quantized; see :func:`quantize_file`."""

    recipe: str
    scale_rule: str | None
    scale_search: str | None
    error: str | None
    e4m3_max: int
    include: Sequence[str]
    exclude: Sequence[str]
    cast: Literal["float32"] | None
    unscaled_fp8: bool
    allow_nothing: bool


class FileChoices(Choices, total=False):
    """The choices of :func:`quantize_file`."""

    scale_layout: str
    nibble_order: str
    pad: bool
    void_dtype: Literal["bfloat16"] | None


class CheckpointChoices(Choices, total=False):
    """The choices of :func:`quantize_checkpoint`."""

    activations: str | os.PathLike[str] | None
    experts_layout: ExpertsLayout | None
    max_shard_size: str | None
    follow_links: bool


class RestoreChoices(TypedDict, total=False):
    """The choices of :func:`dequantize_checkpoint`."""

    experts_layout: ExpertsLayout | Literal["single"] | None
    unscaled_fp8: bool
    max_shard_size: str | None
    follow_links: bool


def checked(path: StrPath) -> Path:
    """A source, refused if it cannot be one at all."""
    source = Path(path)
    check_source(source)
    return source


def known(choices: Any, kind: Any) -> dict[str, Any]:
    """Choices by name, lists as tuples.

    Raises:
        OptionError: for a name that is none of them.
    """
    names: set[str] = set(kind.__optional_keys__)
    for name in choices:
        if name not in names:
            raise OptionError(f"{name!r} is no option of this; choose {', '.join(sorted(names))}")
    return {
        name: tuple(value) if name in ("include", "exclude") else value
        for name, value in choices.items()
    }


def shard_size(text: str | None) -> int:
    """Bytes that a weight file takes at most."""
    return parse_size(text or DEFAULT_SHARD_SIZE)
