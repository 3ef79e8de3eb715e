# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The folders of a diffusers pipeline, each of which is a model of its own."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fp4kit.errors import FileFormatError

from .directory import Checkpoint
from .json_files import listed, read_json
from .quantized import find_quantized_weights
from .weight_files import PIPELINE, folders_with_weights

#: Components that take away noise, by the names of their folders; they hold most of the weights.
DENOISER = re.compile(r"(transformer|unet|dit)(_\d+)?")
#: The same by the names of their classes.
DENOISER_CLASS = re.compile(r"Transformer|UNet|DiT")
#: Library of such classes: text encoders are transformers, too.
LIBRARY = "diffusers"


def is_pipeline(path: Path) -> bool:
    """Whether a path is a pipeline and not one of its components."""
    if not path.is_dir() or not os.path.lexists(path / PIPELINE):
        return False
    return bool(folders_with_weights(path))


def denoisers(path: Path) -> list[str]:
    """The folders of a pipeline that are quantized."""
    index = read_json(path / PIPELINE)
    folders = folders_with_weights(path)
    found = [name for name in folders if DENOISER.fullmatch(name) or _denoises(index.get(name))]
    if not found:
        raise FileFormatError(
            f"{path}: is a diffusers pipeline, but none of its folders {listed(folders)} is known "
            "to hold a transformer or a U-Net; give the folder that is to be quantized"
        )
    return found


def _denoises(entry: Any) -> bool:
    """Whether model_index.json's [library, class] of a component is that of a denoiser."""
    if not isinstance(entry, list) or len(entry) != 2 or entry[0] != LIBRARY:
        return False
    return isinstance(entry[1], str) and DENOISER_CLASS.search(entry[1]) is not None


def quantized_components(path: Path) -> list[str]:
    """The folders of a pipeline whose weights are quantized in a known layout."""
    found = []
    for name in folders_with_weights(path):
        with Checkpoint(path / name) as checkpoint:
            quantized = find_quantized_weights(checkpoint)
            if quantized is not None and quantized.entries:
                found.append(name)
    if not found:
        raise FileFormatError(
            f"{path}: is a diffusers pipeline, and no folder of it holds a quantized weight"
        )
    return found


def component_faults(path: Path, check: Callable[[str], list[str]]) -> list[str]:
    """The faults of every quantized component."""
    return [f"{name}: {fault}" for name in quantized_components(path) for fault in check(name)]
