# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What fused experts were before they were separated: a note in the header of every file.

Single experts do not say that the model's own form is one tensor of all of them, nor how it lies.
So the header of each shard lists the fused tensors, whichever shards their parts are in: any one
of the files that is left tells it. Tensors of the same shape share an entry.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from fp4kit.checkpoint.models.experts import (
    ExpertsLayout,
    expert_name,
    fused_bias,
    fused_weight,
    projections,
)
from fp4kit.errors import FileFormatError
from fp4kit.io.read.json_text import strict_json
from fp4kit.io.read.source import Source

#: Header metadata: the fused tensors that single experts were made from.
EXPERTS_KEY = "fp4kit_experts"
VERSION = 1


@dataclass(frozen=True)
class Part:
    """One projection of one expert, as a part of a fused tensor.

    Attributes:
        name: of the tensor of its own.
        expert: number of the expert.
        rows: size along the fused axis.
        start: first index along the fused axis.
        step: distance between indices.
    """

    name: str
    expert: int
    rows: int
    start: int
    step: int


@dataclass(frozen=True)
class FusedTensor:
    """A tensor that holds a projection of all experts of a layer, or gate and up of all.

    Attributes:
        name: as the model stores it.
        shape: [E, out, in], transposed [E, in, out], or [E, out] of a bias.
        layout: how it lies.
    """

    name: str
    shape: tuple[int, ...]
    layout: ExpertsLayout

    @property
    def is_bias(self) -> bool:
        """Whether it holds biases."""
        return len(self.shape) == 2

    @property
    def outputs(self) -> int:
        """Size of the fused axis."""
        return self.shape[2] if self.layout.transposed and not self.is_bias else self.shape[1]

    @property
    def inputs(self) -> int:
        """Size of the axis that every expert's weight has whole, 1 for a bias."""
        if self.is_bias:
            return 1
        return self.shape[1] if self.layout.transposed else self.shape[2]

    @property
    def prefix(self) -> str:
        """Name of the module of all experts."""
        return self._found[0]

    @property
    def role(self) -> str:
        """`gate_up_proj` or `down_proj`."""
        return self._found[1]

    @property
    def _found(self) -> tuple[str, str]:
        found = fused_bias(self.name) if self.is_bias else fused_weight(self.name)
        assert found is not None
        return found

    def part_shape(self, part: Part) -> tuple[int, ...]:
        """Shape of a part as a tensor of its own."""
        return (part.rows,) if self.is_bias else (part.rows, self.inputs)

    def parts(self) -> Iterator[Part]:
        """Every part, expert by expert."""
        prefix, kind = self.prefix, "bias" if self.is_bias else "weight"
        members = projections(self.role, self.outputs, self.layout)
        for expert in range(self.shape[0]):
            for projection, rows, start, step in members:
                name = expert_name(prefix, expert, projection, kind)
                yield Part(name, expert, rows, start, step)


def describe(fused: Iterable[FusedTensor]) -> str:
    """The value of the header metadata."""
    groups: dict[tuple[tuple[int, ...], ExpertsLayout], list[str]] = {}
    for tensor in fused:
        groups.setdefault((tensor.shape, tensor.layout), []).append(tensor.name)
    tensors = [
        {
            "shape": list(shape),
            "transposed": layout.transposed,
            "interleaved": layout.interleaved,
            "names": names,
        }
        for (shape, layout), names in groups.items()
    ]
    return json.dumps({"version": VERSION, "tensors": tensors}, separators=(",", ":"))


def _parse_group(group: dict[str, Any]) -> Iterator[FusedTensor]:
    """The tensors of one entry.

    Raises:
        ValueError: if it is none; KeyError and TypeError too.
    """
    shape = tuple(group["shape"])
    if len(shape) not in (2, 3) or not all(type(size) is int and size > 0 for size in shape):
        raise ValueError(f"shape {shape} is not one of fused experts")
    layout = ExpertsLayout(group["transposed"], group["interleaved"])
    if not all(type(value) is bool for value in (layout.transposed, layout.interleaved)):
        raise ValueError("transposed and interleaved are true or false")
    for name in group["names"]:
        tensor = FusedTensor(str(name), shape, layout)
        found = fused_bias(str(name)) if tensor.is_bias else fused_weight(str(name))
        if found is None:
            raise ValueError(f"{name!r} is no name of fused experts")
        if found[1] == "gate_up_proj" and tensor.outputs % 2:
            raise ValueError(f"{name!r} of shape {list(shape)} is no gate and up")
        yield tensor


def recorded(source: Source) -> list[FusedTensor]:
    """The fused tensors that the header of a checkpoint notes.

    Raises:
        FileFormatError: if the note is damaged, or of a later version.
    """
    text = source.metadata.get(EXPERTS_KEY)
    if text is None:
        return []
    where = f"{source.path}: metadata {EXPERTS_KEY!r}"
    try:
        content = strict_json(text)
        version = content["version"]
        tensors = [
            tensor
            for group in (content["tensors"] if version == VERSION else ())
            for tensor in _parse_group(group)
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileFormatError(f"{where}: damaged: {error!s}") from None
    if version != VERSION:
        raise FileFormatError(
            f"{where}: version {version!r} is not known, this fp4kit reads {VERSION}; update fp4kit"
        )
    names = {tensor.name for tensor in tensors}
    if len(names) < len(tensors):
        raise FileFormatError(f"{where}: damaged: names a tensor twice")
    return tensors
