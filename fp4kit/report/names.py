# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What names say about tensors: the layer, and the type of the module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Place(NamedTuple):
    """Where a tensor stands in its model.

    Attributes:
        layer: number of its layer, None if its name has none.
        type: what its like is called in every layer; the name itself without a layer.
    """

    layer: int | None
    type: str


def _is_number(part: str) -> bool:
    # Of a longer number nobody would say that it counts layers.
    return part.isascii() and part.isdigit() and len(part) < 7


def _parts(name: str) -> tuple[str, int | None, str]:
    """Stack, layer and type: of `model.layers.3.mlp.experts.7.up` it is `mlp.experts.*.up`."""
    parts = name.removesuffix(".weight").split(".")
    at = next((index for index, part in enumerate(parts) if _is_number(part)), None)
    if at is None:
        return "", None, ".".join(parts)
    rest = ["*" if _is_number(part) else part for part in parts[at + 1 :]]
    return ".".join(parts[:at]), int(parts[at]), ".".join(rest)


def places(names: Sequence[str]) -> list[Place]:
    """The place of every tensor of a model.

    A type is told by what follows the number of the layer, unless the model has several stacks of
    layers: then what precedes it is part of the type.

    Examples:
        >>> places(["model.layers.2.self_attn.q_proj.weight", "lm_head.weight"])
        [Place(layer=2, type='self_attn.q_proj'), Place(layer=None, type='lm_head')]
    """
    found = [_parts(name) for name in names]
    stacks = {stack for stack, layer, _ in found if layer is not None}
    return [
        Place(layer, _type(stack, rest, several=len(stacks) > 1) or name)
        for name, (stack, layer, rest) in zip(names, found, strict=True)
    ]


def _type(stack: str, rest: str, *, several: bool) -> str:
    return ": ".join(part for part in (stack if several else "", rest) if part)
