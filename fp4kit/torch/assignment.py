# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Which stored tensor goes where in a model, decided from headers alone."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from fp4kit.checkpoint.read.json_files import listed
from fp4kit.errors import FileFormatError, OptionError, ShapeError

from .names import Merged, may_be_left, may_be_missing, names_of
from .slots import Slot, Slots
from .stored import Stored, StoredTensor


@dataclass
class Assignment:
    """What a model gets.

    Attributes:
        quantized: slot to the stored weight that it gets as it is.
        plain: slot to the stored tensor that it gets in plain numbers.
        merged: what becomes slots together.
        missing: slots that nothing is stored for.
        left: stored names that have no slot.
        untied: slots that are tied, but have numbers of their own in the checkpoint: they stay
            tied if these are equal.
    """

    quantized: dict[str, StoredTensor] = field(default_factory=dict)
    plain: dict[str, StoredTensor] = field(default_factory=dict)
    merged: list[Merged] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    untied: set[str] = field(default_factory=set)


def assign(model: nn.Module, slots: Slots, stored: Stored, strict: bool) -> Assignment:
    """Decides about every stored tensor and every slot.

    Raises:
        FileFormatError: for names that fit nothing, if `strict`.
        ShapeError: for tensors of another shape than their slot.
        OptionError: for a layer that cannot be replaced.
    """
    names = names_of(model, stored.tensors, slots.stored)
    found = Assignment()
    filled: dict[str, StoredTensor | None] = {}
    ignorable = may_be_left(model)
    for name, target in names.single.items():
        if target in slots.stored and target not in filled:
            filled[target] = stored.tensors[name]
            _check_shape(stored, slots.stored[target], stored.tensors[name].shape, name)
        elif not ignorable(target) and not ignorable(name):
            found.left.append(name)
    for merged in names.merged:
        made = merged.convert(lambda name: _on_meta(stored.tensors[name]))
        parts = [name for name, _ in merged.parts]
        found.merged.append(merged)
        for target, value in made.items():
            if target in slots.stored and target not in filled:
                filled[target] = None
                _check_shape(stored, slots.stored[target], tuple(value.shape), listed(parts))
            else:
                found.left += parts
    need_not = may_be_missing(model)
    for group in slots.groups().values():
        given = [slot for slot in group if slot.name in filled]
        if not given:
            found.missing += [slot.name for slot in group[:1] if not need_not(slot.name)]
        if len(given) > 1:
            found.untied.update(slot.name for slot in given)
        for slot in given:
            one = filled[slot.name]
            if one is None:
                continue
            others = [slot] if len(given) > 1 else group
            alone = all(other.takes_codes for other in others)
            if one.quantized and slot.takes_codes and alone:
                _check_replaceable(slot)
                found.quantized[slot.name] = one
            elif slot.tensor is None:
                raise OptionError(
                    f"{slot.path!r} is a fp4kit.torch.Linear, and {stored.path} stores plain "
                    "numbers for it, or ties it to another module; build the model anew"
                )
            else:
                found.plain[slot.name] = one
    if strict and (found.left or found.missing):
        raise FileFormatError(_misfits(stored, found))
    return found


def _on_meta(one: StoredTensor) -> torch.Tensor:
    return torch.empty(one.shape, dtype=one.dtype, device="meta")


def _check_shape(stored: Stored, slot: Slot, shape: tuple[int, ...], what: str) -> None:
    if slot.shape != shape:
        raise ShapeError(
            f"{stored.path}: {what} has shape {list(shape)}, {slot.name!r} of the model "
            f"{list(slot.shape)}; build the model with the checkpoint's own configuration"
        )


def _check_replaceable(slot: Slot) -> None:
    """Refuses to lose what somebody attached to a layer."""
    module = slot.module
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(module, name) for name in hooks) or "forward" in vars(module):
        raise OptionError(
            f"{slot.path!r} has hooks, or a forward of its own, which would be lost with the "
            "module that is replaced; load first, then add them"
        )


def _misfits(stored: Stored, found: Assignment) -> str:
    """What fits nothing, on both sides."""
    sides = []
    if found.left:
        sides.append(f"{len(found.left)} stored tensors are not in the model: {listed(found.left)}")
    if found.missing:
        names = listed(found.missing)
        sides.append(f"{len(found.missing)} tensors of the model are not stored: {names}")
    return (
        f"{stored.path}: {'; '.join(sides)}. Build the model of this checkpoint, or pass "
        "strict=False to leave them as they are"
    )
