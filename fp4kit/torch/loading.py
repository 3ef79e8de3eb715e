# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Puts a quantized checkpoint into a model without decoding it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import fp4kit
from fp4kit.errors import DtypeError, OptionError, brief
from fp4kit.formats import DTYPES

from .assignment import Assignment, assign
from .names import kept_in_float32
from .placing import Change, apply
from .report import LoadReport, sizes_of
from .slots import Slot, Slots, slots_of
from .stored import Stored, StoredTensor

if TYPE_CHECKING:
    from fp4kit.api.options import Backend

Progress = Callable[[int, int], Any]


def load(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    *,
    device: Any = None,
    dtype: torch.dtype | None = None,
    prepare: bool = False,
    backend: Backend | None = None,
    strict: bool = True,
    progress: Progress | None = None,
) -> LoadReport:
    """Fills a model from a quantized checkpoint; quantized weights stay as they are stored.

    A `torch.nn.Linear` whose weight is quantized is replaced by a :class:`Linear` that multiplies
    with the stored codes. All else is loaded in plain numbers: parameters of other modules that are
    stored as codes (embeddings, the experts of transformers 5) are decoded, and the report says
    which. Names are those of the checkpoint; for models of transformers its own rules say what they
    are in the model. Activations are not quantized, even if the checkpoint asks for it (the report
    says so). Tensors go from the file to their place one at a time: a model on the meta device is
    never held in plain numbers. If anything fails, the model stays what it was.

    Args:
        model: a model, usually on the meta device (`with torch.device("meta")`). Of others, all
            numbers are replaced.
        checkpoint: directory or file in any layout that :func:`fp4kit.open` reads.
        device: where all of the model goes; None for where its tensors are, and for those on the
            meta device torch's default device.
        dtype: element type of all plain numbers, but of those that the model has of another type
            than most; None for the one that each is stored in, and for decoded ones that of most
            stored numbers. What a model of transformers keeps in float32 stays that.
        prepare: repack FP4 weights for the products of a GPU (:func:`fp4kit.prepare`).
        backend: of the products: `reference`, `cpu`, `cuda`, or None for the default of the device.
        strict: refuse tensors of the model that are not stored, and stored ones that the model has
            no place for; else both are left alone.
        progress: called with (bytes done, bytes in all).

    Returns:
        What was replaced and decoded, and the bytes that the model holds.

    Raises:
        FileFormatError: if the checkpoint is malformed, not quantized, or does not fit the model.
        ShapeError: for a tensor of another shape.
        OptionError: for a model that cannot be filled.
        DtypeError: for an element type that is none of fp4kit's.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(f"model={brief(model)} is no torch.nn.Module")
    if dtype is not None and str(dtype).removeprefix("torch.") not in DTYPES:
        raise DtypeError(f"dtype={dtype} is none of {', '.join(DTYPES)}")
    slots = slots_of(model)
    with Stored(Path(checkpoint), dtype) as stored:
        found = assign(model, slots, stored, strict)
        loader = _Loader(model, slots, stored, found, device, dtype)
        loader.progress = progress
        changes = loader.changes(backend, prepare)
        notes = tuple(stored.notes)
    apply(model, changes, slots, None if device is None else torch.device(device))
    linear = {slot.name: slot.path for slot in slots.stored.values() if slot.takes_codes}
    return LoadReport(
        replaced=tuple(linear[name] for name in found.quantized),
        decoded=loader.decoded,
        kept=tuple(path for name, path in linear.items() if name not in found.quantized),
        missing=tuple(found.missing),
        left=tuple(found.left),
        notes=notes,
        **sizes_of(model),
    )


def _usual_dtype(slots: Slots) -> torch.dtype | None:
    """The element type of most numbers of a model."""
    counts: Counter[torch.dtype] = Counter()
    for slot in slots.stored.values():
        if slot.tensor is not None:
            counts[slot.tensor.dtype] += slot.tensor.numel()
    return max(counts, key=counts.__getitem__, default=None)


class _Loader:
    """Reads what a model gets, one tensor at a time.

    Attributes:
        decoded: names of what was stored as codes and is in plain numbers, to its bytes.
        progress: what is called with bytes done and bytes in all, or None.
    """

    progress: Progress | None = None

    def __init__(
        self,
        model: nn.Module,
        slots: Slots,
        stored: Stored,
        found: Assignment,
        device: Any,
        dtype: torch.dtype | None,
    ) -> None:
        self._slots, self._stored, self._found = slots, stored, found
        self._device = None if device is None else torch.device(device)
        self._dtype = dtype
        self._is_wide = kept_in_float32(model, dtype or stored.dtype)
        self._usual = _usual_dtype(slots)
        self.decoded: dict[str, int] = {}
        one_of = [*found.quantized.values(), *found.plain.values()]
        one_of += [stored.tensors[name] for merged in found.merged for name, _ in merged.parts]
        self._all = sum(one.nbytes for one in one_of)
        self._done = 0

    def changes(self, backend: Any, prepare: bool) -> list[Change]:
        """Everything that is to be put into the model."""
        changes = []
        for name, one in self._found.quantized.items():
            slot = self._slots.stored[name]
            weight = self._stored.quantized(one.name).to(self._place(slot))
            if prepare and weight.scheme.spec.packs_nibbles:
                weight = fp4kit.prepare(weight)
            changes.append(Change(slot, weight, backend))
            self._count(one)
        for name, one in self._found.plain.items():
            slot = self._slots.stored[name]
            value = self._fitted(slot, self._stored.values(one.name))
            if one.coded:
                self.decoded[name] = value.nbytes
            changes.append(Change(slot, value))
            self._count(one)
        for merged in self._found.merged:
            coded = any(self._stored.tensors[name].coded for name, _ in merged.parts)
            first = self._slots.stored[merged.first]
            made = merged.convert(partial(self._part, first))
            for name, value in made.items():
                if name in self._slots.stored:
                    slot = self._slots.stored[name]
                    changes.append(Change(slot, self._fitted(slot, value)))
                    if coded:
                        self.decoded[name] = changes[-1].value.nbytes
        return self._tied(changes)

    def _part(self, slot: Slot, name: str) -> torch.Tensor:
        """A part of what is merged, of the type and at the place of the whole."""
        value = self._fitted(slot, self._stored.values(name))
        self._count(self._stored.tensors[name])
        return value

    def _tied(self, changes: list[Change]) -> list[Change]:
        """Has slots that are one tensor get the same one, where their numbers do not differ."""
        by_name = {change.slot.name: change for change in changes}
        for group in self._slots.groups().values():
            given = [by_name[slot.name] for slot in group if slot.name in by_name]
            if not given:
                continue
            for change in given[1:]:
                if change.equals(given[0]):
                    change.value = given[0].value
            for slot in group:
                if slot.name not in by_name:
                    changes.append(Change(slot, given[0].value, given[0].backend))
        return changes

    def _place(self, slot: Slot) -> torch.device:
        return slot.device() if self._device is None else self._device

    def _fitted(self, slot: Slot, value: torch.Tensor) -> torch.Tensor:
        """A value where it belongs, of the element type that it should have."""
        dtype = value.dtype
        if value.is_floating_point():
            own = None if slot.tensor is None else slot.tensor.dtype
            if self._is_wide(slot.name):
                dtype = torch.float32
            elif self._dtype is not None:
                # What differs from the rest of a model is so on purpose.
                special = own is not None and own.is_floating_point and own != self._usual
                dtype = own if special else self._dtype
        return value.to(self._place(slot), dtype)

    def _count(self, one: StoredTensor) -> None:
        self._done += one.nbytes
        if self.progress is not None:
            self.progress(self._done, self._all)
