# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Puts what was read into a model: all of it, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fp4kit.errors import OptionError

from .linear import Linear
from .names import is_of_transformers
from .slots import Slot, Slots

#: What an integer buffer holds until it is computed.
UNSET = -1


@dataclass
class Change:
    """What a slot gets.

    Attributes:
        slot: the slot.
        value: a tensor in plain numbers, or a quantized weight.
        backend: of the products with that weight.
    """

    slot: Slot
    value: Any
    backend: Any = None

    def equals(self, other: Change) -> bool:
        """Whether both are the same numbers in the same form."""
        mine, theirs = self.value, other.value
        if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
            return mine.dtype == theirs.dtype and bool(torch.equal(mine, theirs))
        return type(mine) is type(theirs) and bool(mine == theirs)


class _Undo:
    """Changes of dictionaries of modules, which can be taken back."""

    def __init__(self) -> None:
        self._steps: list[tuple[dict[str, Any], str, Any]] = []

    def put(self, holder: dict[str, Any], key: str, value: Any) -> None:
        """Replaces an entry."""
        self._steps.append((holder, key, holder[key]))
        holder[key] = value

    def back(self) -> None:
        """Takes everything back, the last change first."""
        for holder, key, value in reversed(self._steps):
            holder[key] = value


@contextmanager
def _all_or_nothing() -> Iterator[_Undo]:
    undo = _Undo()
    try:
        yield undo
    except BaseException:
        undo.back()
        raise


def apply(
    model: nn.Module, changes: list[Change], slots: Slots, device: torch.device | None
) -> None:
    """Puts values into a model and computes the buffers that are not stored.

    Raises:
        OptionError: for buffers that nobody knows how to compute.
    """
    with _all_or_nothing() as undo:
        _place(undo, model, changes)
        given = {change.slot.name for change in changes}
        rest = [slot for name, slot in slots.stored.items() if name not in given]
        empty = []
        moved: dict[int, torch.Tensor] = {}
        made: dict[int, nn.Parameter] = {}
        for slot in [*rest, *slots.computed.values()]:
            if slot.is_empty and slot.name in slots.computed:
                empty.append(slot)
            elif device is not None and slot.tensor is not None and not slot.is_empty:
                one = id(slot.tensor)
                moved[one] = moved.get(one, slot.tensor.detach().to(device))
                _put(undo, slot, moved[one], made)
        _compute(undo, model, empty, device)


def _place(undo: _Undo, model: nn.Module, changes: list[Change]) -> None:
    """Plain numbers first: new layers take their biases from the old ones."""
    made: dict[int, nn.Parameter] = {}
    layers: dict[int, Linear] = {}
    for change in changes:
        if isinstance(change.value, torch.Tensor):
            _put(undo, change.slot, change.value, made)
    for change in changes:
        if isinstance(change.value, torch.Tensor):
            continue
        old = change.slot.module
        if id(old) not in layers:
            layer = Linear(change.value, old.bias, backend=change.backend)
            layers[id(old)] = layer.train(old.training)
        above, _, key = change.slot.path.rpartition(".")
        undo.put(model.get_submodule(above)._modules, key, layers[id(old)])


def _put(undo: _Undo, slot: Slot, value: torch.Tensor, made: dict[int, nn.Parameter]) -> None:
    """Gives a slot a tensor; of one tensor all slots get one parameter."""
    module = slot.module
    if slot.key not in module._parameters:
        undo.put(module._buffers, slot.key, value)
        value._is_hf_initialized = True
        return
    if id(value) not in made:
        learns = slot.tensor is not None and slot.tensor.requires_grad
        parameter = nn.Parameter(value, requires_grad=learns and value.is_floating_point())
        # transformers looks for it before it gives a parameter random numbers.
        parameter._is_hf_initialized = True
        made[id(value)] = parameter
    undo.put(module._parameters, slot.key, made[id(value)])


def _compute(undo: _Undo, model: nn.Module, empty: list[Slot], device: torch.device | None) -> None:
    """Fills buffers that are not stored, by the means of transformers.

    Raises:
        OptionError: naming those that stay without numbers.
    """
    for slot in empty:
        assert slot.tensor is not None
        fill = float("nan") if slot.tensor.is_floating_point() else UNSET
        place = slot.device() if device is None else device
        value = torch.full(slot.shape, fill, dtype=slot.tensor.dtype, device=place)
        undo.put(slot.module._buffers, slot.key, value)
    if empty and is_of_transformers(model):
        _initialize(model, empty)
    left = [slot.name for slot in empty if _is_unset(_buffer(slot))]
    if left:
        raise OptionError(
            f"{len(left)} buffers are not stored, and nothing says how to compute them: "
            f"{', '.join(left[:3])}. Build the model on a device that holds numbers instead of the "
            "meta device, or these buffers"
        )


def _initialize(model: nn.Module, empty: list[Slot]) -> None:
    """Has transformers compute buffers, by the code that gives new models their numbers.

    It is asked for the module of a buffer, then for those around it, until all are there.
    """
    from transformers.initialization import guard_torch_init_functions

    own = dict(_initializers("", model, None))
    computed = {slot.name: slot for slot in empty}
    asked = {name: slot.path for name, slot in computed.items()}
    with torch.no_grad(), guard_torch_init_functions():
        while asked:
            for path in sorted(set(asked.values())):
                module, initialize = own[path]
                for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
                    if tensor is not None and f"{path}.{key}".lstrip(".") not in asked:
                        # It holds the right numbers already.
                        tensor._is_hf_initialized = True
                if initialize is not None:
                    initialize(module)
            asked = {
                name: path.rpartition(".")[0]
                for name, path in asked.items()
                if path and _is_unset(_buffer(computed[name]))
            }


def _buffer(slot: Slot) -> torch.Tensor | None:
    held: torch.Tensor | None = slot.module._buffers[slot.key]
    return held


def _initializers(
    path: str, module: nn.Module, outer: Callable[[nn.Module], None] | None
) -> Iterator[tuple[str, tuple[nn.Module, Callable[[nn.Module], None] | None]]]:
    """Every module with the function of the innermost model around it that initializes modules."""
    own = module._init_weights if is_of_transformers(module) else outer
    yield path, (module, own)
    for name, child in module.named_children():
        yield from _initializers(f"{path}.{name}" if path else name, child, own)


def _is_unset(value: torch.Tensor | None) -> bool:
    if value is None or not value.numel():
        return False
    if value.is_floating_point():
        return bool(value.isnan().all())
    return bool((value == UNSET).all())
