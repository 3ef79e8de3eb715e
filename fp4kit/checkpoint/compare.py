# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Comparing files and checkpoints with each other, in any pairing."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fp4kit.io.compare import Side, cast_like, compare_sides, file_side
from fp4kit.io.metadata import METADATA_KEY, find_quantized
from fp4kit.io.read.cast import with_cast
from fp4kit.io.read.open import open_source
from fp4kit.io.report import FileReport, joined
from fp4kit.io.storage import Logical, QuantizedEntry
from fp4kit.io.stream.chunks import Progress

from .options import CheckpointOptions
from .read.components import is_pipeline
from .read.directory import Checkpoint
from .read.quantized import file_layout, find_quantized_weights
from .read.weight_files import folders_with_weights
from .views.logical import LogicalSource
from .views.opened import open_logical, open_quantized


def is_checkpoint(path: Path) -> bool:
    """Whether something is stored as engines have it: a directory, or a file in a layout.

    Raises:
        FileFormatError: if it is a malformed file.
    """
    if path.is_dir():
        return True
    if path.suffix.lower() != ".safetensors" or not path.is_file():
        return False
    return file_layout(path) is not None


def compare_paths(
    a: Path,
    b: Path,
    *,
    experts_layout: str | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> FileReport:
    """Measures how far the tensors of one file or checkpoint are from those of another.

    Tensors are the logical ones of both: weights in FP8 or MXFP4 are decoded, and experts that are
    fused in one of the two only are taken one by one.

    Args:
        a: the original: a model directory, a .safetensors, .npy or .npz file, or a diffusers
            pipeline, all folders of which are compared with those of another.
        b: a quantized or dequantized version of it, of either kind.
        experts_layout: how fused experts are stored, None to decide by model type and sizes.
        device: `cpu` or `cuda`.
        progress: called with (bytes done, bytes in all) of `a`.

    Returns:
        As :func:`fp4kit.io.compare.compare_sides`.

    Raises:
        FileFormatError: if something is malformed or missing, or `a` is quantized.
        ShapeError: if the shapes of a tensor differ.
        OptionError: if it cannot be told how experts are fused.
    """
    if is_pipeline(a) and is_pipeline(b):
        parts = {
            name: compare_paths(
                a / name, b / name, experts_layout=experts_layout, device=device, progress=progress
            )
            for name in folders_with_weights(b)
        }
        return joined(b, parts)
    with ExitStack() as stack:
        other = stack.enter_context(opened_side(b, experts_layout, None, {}))
        config = other.source.checkpoint.config if isinstance(other.source, LogicalSource) else {}
        one = stack.enter_context(
            opened_side(a, experts_layout, cast_like(other.tensors.values()), config)
        )
        one, other = _same_experts(one, other), _same_experts(other, one)
        return compare_sides(one, other, device=device, progress=progress)


@contextmanager
def opened_side(
    path: Path,
    experts_layout: str | None = None,
    cast: str | None = None,
    config: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[Side]:
    """The logical tensors of a file or checkpoint, quantized or not, while it is open.

    Args:
        path: file or model directory, no diffusers pipeline.
        experts_layout: how fused experts are stored, None to decide by model type and sizes.
        cast: what float64 is taken as.
        config: that of a model whose file it may be.
    """
    if not is_checkpoint(path) and not _is_plain_model(path):
        with with_cast(open_source(path), cast) as source:
            yield file_side(source)
        return
    with Checkpoint(path, cast=cast) as checkpoint:
        if not checkpoint.is_directory:
            checkpoint.config = dict(config)
        yield _checkpoint_side(checkpoint, experts_layout)


def _is_plain_model(path: Path) -> bool:
    """Whether a file may be that of a model, with experts that are fused."""
    if path.suffix.lower() != ".safetensors":
        return False
    with open_source(path) as source:
        return METADATA_KEY not in source.metadata and not find_quantized(source)


def _checkpoint_side(checkpoint: Checkpoint, experts_layout: str | None) -> Side:
    """The logical tensors of a checkpoint, quantized or not."""
    found = find_quantized_weights(checkpoint)
    if found is not None and found.entries:
        opened = open_quantized(checkpoint)
        tensors: dict[str, Logical] = {**opened.source.tensors, **opened.entries}
        return Side(checkpoint.path, tensors, opened.source, checkpoint)
    source = open_logical(checkpoint, CheckpointOptions(experts_layout=experts_layout)).source
    return Side(checkpoint.path, dict(source.tensors), source, checkpoint)


def _same_experts(side: Side, other: Side) -> Side:
    """A side with its experts left fused where the other has them fused."""
    source = side.source
    if not isinstance(source, LogicalSource):
        return side
    rejoin_like(source, other.tensors)
    coded = {
        name: tensor for name, tensor in side.tensors.items() if isinstance(tensor, QuantizedEntry)
    }
    return Side(side.path, {**source.tensors, **coded}, source, side.coded)


def rejoin_like(source: LogicalSource, names: Collection[str]) -> None:
    """Leaves experts fused where `names` has the stored tensor, and not the single ones."""
    fused: dict[str, list[str]] = {}
    for name, view in source.views.items():
        stored = view.consumed[0]
        if stored in names and name not in names:
            fused.setdefault(stored, []).append(name)
    for members in fused.values():
        source.rejoin(members)
