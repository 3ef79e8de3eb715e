# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The places of a model that a checkpoint fills."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from fp4kit.errors import OptionError

from .linear import Linear
from .names import tied_names

WEIGHT = "weight"


@dataclass(frozen=True)
class Slot:
    """A parameter, a buffer, or the quantized weight of a :class:`Linear`.

    Attributes:
        name: its name in the model.
        module: what it belongs to.
        key: its name there.
        shape: its shape.
        tensor: what it holds now; None for a quantized weight.
    """

    name: str
    module: nn.Module
    key: str
    shape: tuple[int, ...]
    tensor: torch.Tensor | None

    @property
    def path(self) -> str:
        """Name of the module."""
        return self.name.rpartition(".")[0]

    @property
    def takes_codes(self) -> bool:
        """Whether a quantized weight can stand here as it is."""
        # A class of its own may look at its weight, as torch's attention does.
        plain = type(self.module) is nn.Linear or isinstance(self.module, Linear)
        return plain and self.key == WEIGHT

    @property
    def is_empty(self) -> bool:
        """Whether it is on the meta device, without any numbers."""
        return self.tensor is not None and self.tensor.device.type == "meta"

    def device(self) -> torch.device:
        """Where what it gets belongs: where it is, or torch's default device."""
        now = self.tensor
        if now is None:
            now = next(iter(self.module.buffers()))
        if now.device.type != "meta":
            return now.device
        usual = torch.get_default_device()
        return torch.device("cpu") if usual.type == "meta" else usual


@dataclass(frozen=True)
class Slots:
    """All of a model.

    Attributes:
        stored: what a checkpoint holds, by name; a module with several names has several.
        computed: buffers that are not stored.
        tied: name to the name of all that are the same tensor.
    """

    stored: dict[str, Slot]
    computed: dict[str, Slot]
    tied: dict[str, str]

    def groups(self) -> dict[str, list[Slot]]:
        """Slots that are one tensor."""
        found: dict[str, list[Slot]] = {}
        for name, slot in self.stored.items():
            found.setdefault(self.tied[name], []).append(slot)
        return found


def slots_of(model: nn.Module) -> Slots:
    """The slots of a model.

    Raises:
        OptionError: if the model itself is a linear layer: it cannot be replaced.
    """
    if isinstance(model, (nn.Linear, Linear)):
        raise OptionError(
            "model is a single linear layer, which cannot be replaced from inside; use "
            "fp4kit.torch.Linear(fp4kit.open(checkpoint)[name])"
        )
    stored: dict[str, Slot] = {}
    computed: dict[str, Slot] = {}
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        before = f"{path}." if path else ""
        held: dict[str, torch.Tensor | None] = dict(module._parameters)
        if isinstance(module, Linear):
            name = f"{before}{WEIGHT}"
            stored[name] = Slot(name, module, WEIGHT, module.shape, None)
            tied[name] = first.setdefault(id(module), name)
        else:
            held |= module._buffers
        for key, tensor in held.items():
            if tensor is None:
                continue
            name = f"{before}{key}"
            slot = Slot(name, module, key, tuple(tensor.shape), tensor)
            if key in module._non_persistent_buffers_set:
                computed[name] = slot
                continue
            stored[name] = slot
            tied[name] = first.setdefault(id(tensor), name)
    for name, other in tied_names(model).items():
        if name in stored and other in stored:
            old, new = tied[name], tied[other]
            tied = {each: new if group == old else group for each, group in tied.items()}
    return Slots(stored, computed, tied)
