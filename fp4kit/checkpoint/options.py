# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint operation is asked for: plain data, shared with the CLI."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from fp4kit.errors import OptionError
from fp4kit.scheme import Scheme, as_scheme

#: Shards of this size suit the hub and every engine.
DEFAULT_SHARD_SIZE = "5GB"
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
UNCALIBRATED = "uncalibrated"
#: FP8: engines scale the inputs of each module as they come.
DYNAMIC = "dynamic"


@dataclass(frozen=True)
class CommonOptions:
    """What all operations are asked for.

    Attributes:
        follow_links: copy also what links out of a model directory point to.
        lossless: refuse to change the value of a weight that is written quantized.
    """

    follow_links: bool = field(default=False, kw_only=True)
    lossless: bool = field(default=False, kw_only=True)

    @property
    def files(self) -> tuple[Path, ...]:
        """Files of JSON or amaxes whose content decides bytes as well."""
        return ()

    @property
    def binary_files(self) -> tuple[Path, ...]:
        """Others that do."""
        return ()

    @property
    def cast(self) -> str | None:
        """What float64 tensors are taken as, None to leave them alone."""
        return None


@dataclass(frozen=True)
class CheckpointOptions(CommonOptions):
    """How a checkpoint is quantized.

    Attributes:
        format: one that the layout holds.
        layout: one of :data:`fp4kit.checkpoint.layouts.ALL_LAYOUTS`.
        recipe: NVFP4 recipe, None for te.
        scale_rule: MX scale rule, None for the format's default.
        granularity: what shares a scale of fp8, None for the layout's default.
        scale_search: `four_over_six` or `sweep`, None for the recipe's own scales.
        search_error: what a search compares, None for the mean squared error.
        e4m3_max: largest block scale of a search, 448 or 256.
        include: name patterns quantized although a default rule leaves them alone.
        exclude: name patterns left alone; wins over `include`.
        choices: name of a weight to that of its candidate (:mod:`fp4kit.io.candidates`), which
            takes the place of `format` and what belongs to it; None for one format.
        activations: None for weights only (W4A16), `uncalibrated`, or the path of a JSON file with
            the activation amax of each module (W4A4); for fp8 also `dynamic`.
        moments: path of a file of moments, which weigh the errors that a sweep of scales compares;
            None for errors that count alike.
        experts_layout: how fused 3-D experts are stored, None to decide by model type and sizes.
        max_shard_size: bytes of a shard at most; a larger tensor is alone in one.
        unscaled_fp8: FP8 tensors without a scale were only cast: take their values as they are.
        cast: `float32` to take float64 tensors as if they were stored as that, None to keep them.
        allow_nothing: go on although no tensor is quantized.
    """

    format: str = "nvfp4"
    layout: str = "compressed-tensors"
    recipe: str | None = None
    scale_rule: str | None = None
    granularity: str | None = None
    scale_search: str | None = None
    search_error: str | None = None
    e4m3_max: int = 448
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    choices: dict[str, str] | None = None
    activations: str | None = None
    moments: str | None = None
    experts_layout: str | None = None
    max_shard_size: int = 5 * 10**9
    unscaled_fp8: bool = False
    cast: str | None = None
    allow_nothing: bool = True

    @property
    def scheme(self) -> Scheme:
        """What is wanted of each tensor.

        Raises:
            OptionError: for unknown or contradictory fields.
        """
        fields = {
            "recipe": self.recipe,
            "scale_rule": self.scale_rule,
            "granularity": self.granularity,
            "scale_search": self.scale_search,
            "search_error": self.search_error,
            "e4m3_max": self.e4m3_max,
        }
        return as_scheme(self.format, fields)

    @property
    def files(self) -> tuple[Path, ...]:
        """Files whose content decides bytes as well: that of activation amaxes."""
        given = self.activations not in (None, UNCALIBRATED, DYNAMIC)
        return (Path(str(self.activations)),) if given else ()

    @property
    def binary_files(self) -> tuple[Path, ...]:
        """That of moments."""
        return () if self.moments is None else (Path(self.moments),)


@dataclass(frozen=True)
class DequantizeOptions(CommonOptions):
    """How a checkpoint is dequantized.

    Attributes:
        dtype: element type of the weights that were quantized.
        max_shard_size: bytes of a shard at most; a larger tensor is alone in one.
        experts_layout: how single experts are put together (`out_in`, `in_out`, `interleaved`, or
            `single` for not at all), None to decide by the headers and the model type.
        unscaled_fp8: FP8 tensors without a scale were only cast: take their values as they are.
    """

    dtype: str = "bfloat16"
    max_shard_size: int = 5 * 10**9
    experts_layout: str | None = None
    unscaled_fp8: bool = False


@dataclass(frozen=True)
class ConvertOptions(CommonOptions):
    """How a quantized checkpoint changes its layout.

    Attributes:
        layout: the new one.
        max_shard_size: bytes of a shard at most; a larger tensor is alone in one.
    """

    layout: str
    max_shard_size: int = 5 * 10**9


def size_of(text: str) -> int | None:
    """Bytes of a size such as `5GB` or `512MiB`, None if it is none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = _UNITS.get(match.group(2).upper()) if match else None
    return None if match is None or unit is None else int(float(match.group(1)) * unit)


def parse_size(text: str) -> int:
    """Bytes of a size of files.

    Raises:
        OptionError: if it is none, or less than 1 MB.
    """
    nbytes = size_of(text)
    if nbytes is None:
        raise OptionError(f"max_shard_size={text!r} is no size; give one like 5GB or 512MiB")
    if nbytes < 10**6:
        raise OptionError(f"max_shard_size={text!r} is too small; give at least 1MB")
    return nbytes
