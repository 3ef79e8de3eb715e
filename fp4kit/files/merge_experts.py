# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Experts that are stored one by one, put together in a file of their own.

transformers has the weights of all experts of a layer in one parameter. Where the checkpoint has
them one by one it would put those of all layers together in memory. From a file that holds them as
the model does they are mapped, like all other weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fp4kit.checkpoint.models import architectures
from fp4kit.checkpoint.read.directory import Checkpoint
from fp4kit.io.containers import TensorSpec
from fp4kit.io.stream.chunks import byte_ranges
from fp4kit.io.write.files import check_output
from fp4kit.io.write.safetensors import SafetensorsWriter

#: The number of an expert, and what its weight is called.
_SINGLE = re.compile(r"\.experts\.(\d+)\.(\w+)\.weight$")
#: The order in which the weights of an expert stand above each other: gate, then up.
_GATES = ("gate_proj", "w1", "linear")
#: Parameters by name, mapped from files.
State = dict[str, Any]


def merged_of(checkpoint: Checkpoint) -> dict[str, list[list[str]]]:
    """Parameters of all experts of a layer to the stored weights of each expert, in order."""
    found: dict[str, dict[int, list[str]]] = {}
    models = architectures.models(checkpoint.config, list(checkpoint.tensors))[:1]
    for name in checkpoint.tensors:
        match = _SINGLE.search(name)
        if match is None:
            continue
        for model in models:
            built = model.built(name)
            if len(built) == 1 and _SINGLE.search(built[0]) is None:
                found.setdefault(built[0], {}).setdefault(int(match[1]), []).append(name)
    return {
        built: [sorted(experts[number], key=_is_second) for number in sorted(experts)]
        for built, experts in found.items()
        if sorted(experts) == list(range(len(experts)))
    }


def _is_second(name: str) -> bool:
    match = _SINGLE.search(name)
    return match is None or match[2] not in _GATES


def merged_specs(
    checkpoint: Checkpoint, merged: Mapping[str, Sequence[Sequence[str]]]
) -> list[TensorSpec] | None:
    """Their shapes, None if the weights of some do not fit together."""
    specs = []
    for built, experts in merged.items():
        shapes = {
            tuple(checkpoint.tensors[name].spec.shape for name in members) for members in experts
        }
        dtypes = {checkpoint.tensors[name].spec.dtype for members in experts for name in members}
        (first, *others) = shapes
        if others or len(dtypes) > 1 or len({shape[1:] for shape in first}) > 1:
            return None
        rows = sum(shape[0] for shape in first)
        specs.append(TensorSpec(built, dtypes.pop(), (len(experts), rows, *first[0][1:])))
    return specs


def merged_state(source: Path, folder: Path) -> State | None:
    """All parameters of a checkpoint whose experts are stored one by one.

    Args:
        source: model directory.
        folder: where the experts are written; the file must stay as long as the result is used.

    Returns:
        What transformers takes as a state, None if nothing needs to be put together.

    Raises:
        OutputError: if the disk has too little space.
    """
    with Checkpoint(source) as checkpoint:
        merged = merged_of(checkpoint)
        specs = merged_specs(checkpoint, merged)
        if not specs:
            return None
        target = folder / "experts.safetensors"
        output = check_output(None, target, force=False, nbytes=sum(spec.nbytes for spec in specs))
        with SafetensorsWriter(output, specs, {"format": "pt"}) as file:
            for built, experts in merged.items():
                _copy(checkpoint, [n for members in experts for n in members], built, file.write)
            file.finish()
        single = {name for experts in merged.values() for members in experts for name in members}
        state = _mapped(target, list(merged))
        for path in checkpoint.weight_files():
            names = checkpoint.shards[path.name]
            state |= _mapped(path, [name for name in names if name not in single])
    return state


def _copy(
    checkpoint: Checkpoint,
    names: Sequence[str],
    built: str,
    write: Callable[[str, int, Any], None],
) -> None:
    """Writes stored weights one behind another."""
    at = 0
    for name in names:
        tensor = checkpoint.tensors[name]
        for first, last in byte_ranges(tensor):
            piece = np.empty(last - first, np.uint8)
            checkpoint.read(name, first, piece.data)
            write(built, at + first, piece)
        at += tensor.spec.nbytes


def _mapped(path: Path, names: Sequence[str]) -> State:
    """Some tensors of a file, mapped."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in names}
