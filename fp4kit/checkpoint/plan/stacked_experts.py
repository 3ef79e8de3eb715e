# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Modules of experts that stay stacked in one tensor: engines build layers of other names of them.

What is stored as one tensor of three axes (or as DBRX does, of two that hold all experts) is no
linear layer by itself. An engine builds one layer of experts for it, under the name of their
module, or linear layers where the experts are shared: all these names belong in an ignore list.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from fp4kit.checkpoint.layouts import module_of

#: Last parts of the names of stacked projections, whatever their module is called.
PROJECTIONS = frozenset(
    ("gate_up_proj", "gate_proj", "up_proj", "down_proj", "input_linear", "output_linear")
)
EXPERTS = "experts"
SHARED = ("shared_experts", "shared_expert", "share_expert")


def _modules(name: str, shape: tuple[int, ...]) -> Iterator[str]:
    """Names that engines may build for one tensor."""
    module = module_of(name)
    parts = module.split(".")
    parent = ".".join(parts[:-1])
    if EXPERTS in parts:
        at = parts.index(EXPERTS) + 1
        stacked = len(shape) == 3 or (len(shape) == 2 and module == name)
        if stacked and not "".join(parts[at : at + 1]).isdigit() and "bias" not in parts[-1]:
            yield ".".join(parts[:at])
    if len(shape) != 3 or not parent or parts[-1] not in PROJECTIONS:
        return
    yield module
    if parts[-2] in SHARED:
        yield parent
        yield f"{parent}.gate_up_proj"
    elif EXPERTS not in parts:
        yield f"{parent}.{EXPERTS}"


def stacked_modules(
    kept: Mapping[str, tuple[int, ...]], quantized: Collection[str]
) -> tuple[str, ...]:
    """What an ignore list has to name for stacked experts.

    Args:
        kept: weight to its shape, of all that are not quantized.
        quantized: weights that are: no name that holds one of them is given.
    """
    taken: set[str] = set()
    for name in quantized:
        parts = name.split(".")
        taken.update(".".join(parts[:count]) for count in range(1, len(parts)))
    found = dict.fromkeys(
        module for name, shape in kept.items() for module in _modules(name, shape)
    )
    return tuple(module for module in found if module not in taken)
