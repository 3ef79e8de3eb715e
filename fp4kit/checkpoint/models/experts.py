# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Fused experts: their names, and how those of one layer lie in 3-D tensors.

`gate_up_proj` holds gate and up of every expert, `down_proj` the rest. Both may be stored as linear
layers are (`[E, 2I, H]` and `[E, H, I]`: out_in) or transposed (`[E, H, 2I]` and `[E, I, H]`:
in_out), and gate and up either one after the other or alternating (interleaved).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

#: What a fused tensor holds of every expert, in order.
PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
#: Whether a tensor is left alone, by name.
Excluded = Callable[[str], bool]

#: Names of fused weights; aria calls them fc1 and fc2.
_NAME = re.compile(
    r"(?P<prefix>.+)\.(?:(?P<gate_up>gate_up_proj(?:\.weight)?|(?<=experts\.)fc1\.weight)"
    r"|(?P<down>down_proj(?:\.weight)?|(?<=experts\.)fc2\.weight))"
)
_BIAS = re.compile(r"(?P<prefix>.+)\.(?P<role>gate_up_proj|down_proj)(?:_bias|\.bias)")


@dataclass(frozen=True)
class ExpertsLayout:
    """How fused experts lie in their tensors.

    Attributes:
        transposed: [E, in, out] instead of [E, out, in].
        interleaved: gate and up alternate (gate first) instead of following one another.
    """

    transposed: bool
    interleaved: bool

    @property
    def note(self) -> str:
        """In words."""
        order = "in x out, transposed" if self.transposed else "out x in"
        return f"{order}, gate and up alternating" if self.interleaved else order

    def part(self, half: int, intermediate: int) -> tuple[int, int]:
        """First index and step of gate (0) or up (1) along the fused axis of 2 x intermediate."""
        return (half, 2) if self.interleaved else (half * intermediate, 1)


def fused_weight(name: str) -> tuple[str, str] | None:
    """(prefix, `gate_up_proj` or `down_proj`) if that is what the name of a weight ends in."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return match["prefix"], "gate_up_proj" if match["gate_up"] else "down_proj"


def fused_bias(name: str) -> tuple[str, str] | None:
    """The same for a bias: `gate_up_proj_bias` or `gate_up_proj.bias`."""
    match = _BIAS.fullmatch(name)
    return None if match is None else (match["prefix"], match["role"])


def expert_name(prefix: str, expert: int, projection: str, kind: str = "weight") -> str:
    """Name of one expert's tensor as a module of its own: `...experts.3.gate_proj.weight`."""
    return f"{prefix}.{expert}.{projection}.{kind}"


def projections(role: str, out: int, layout: ExpertsLayout) -> list[tuple[str, int, int, int]]:
    """(projection, size, first index, step) along the output axis of a fused weight or bias."""
    names = PROJECTIONS[role]
    if len(names) == 1:
        return [(names[0], out, 0, 1)]
    half = out // 2
    return [(name, half, *layout.part(number, half)) for number, name in enumerate(names)]


def nothing(name: str) -> bool:
    """No tensor is excluded."""
    return False


def stay_fused(prefix: str, fused: Mapping[str, tuple[str, int]], excluded: Excluded) -> bool:
    """Whether a layer's fused experts are all excluded, so that nobody need know how they lie."""
    left = []
    for role, (name, experts) in fused.items():
        # All are asked about, so that a pattern for single experts counts as one that matches.
        parts = [
            excluded(expert_name(prefix, expert, projection))
            for expert in range(experts)
            for projection in PROJECTIONS[role]
        ]
        left.append(excluded(name) or all(parts))
    return all(left)


@dataclass(frozen=True)
class ExpertPart:
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

    def part_shape(self, part: ExpertPart) -> tuple[int, ...]:
        """Shape of a part as a tensor of its own."""
        return (part.rows,) if self.is_bias else (part.rows, self.inputs)

    def parts(self) -> Iterator[ExpertPart]:
        """Every part, expert by expert."""
        prefix, kind = self.prefix, "bias" if self.is_bias else "weight"
        members = projections(self.role, self.outputs, self.layout)
        for expert in range(self.shape[0]):
            for projection, rows, start, step in members:
                name = expert_name(prefix, expert, projection, kind)
                yield ExpertPart(name, expert, rows, start, step)
