# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""A quantized checkpoint as a model wants it: weights as they are stored, or decoded.

Names and shapes are those that `fp4kit dequantize` would write, which are those of the model's own
plain files: experts that are one tensor there are one here, however they are stored.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fp4kit
from fp4kit.checkpoint.options import DequantizeOptions
from fp4kit.checkpoint.plan.dequantize import plan_dequantize
from fp4kit.checkpoint.read.components import is_pipeline
from fp4kit.checkpoint.read.directory import Checkpoint
from fp4kit.checkpoint.read.quantized import quantizes_activations, read_facts
from fp4kit.checkpoint.views.entries import EntryView
from fp4kit.errors import FileFormatError, OptionError
from fp4kit.files.open import OWN_LAYOUT
from fp4kit.formats import DTYPES

from .arrays import as_tensor, of_torch

#: Element type of what is decoded where a checkpoint holds nothing in plain numbers.
USUAL = "bfloat16"
ACTIVATIONS = (
    "the checkpoint quantizes activations too: here weights alone are quantized, and products are "
    "those of the activations as they are"
)
KV_CACHE = "the checkpoint quantizes the KV cache: here it is not"


@dataclass(frozen=True)
class StoredTensor:
    """What is known of a tensor before it is read.

    Attributes:
        name: its name in the model's own plain files.
        shape: its shape there.
        dtype: element type of the values; of codes the one that they are decoded to.
        nbytes: bytes in the file.
        coded: whether it is stored as codes.
        quantized: whether it can be read as a quantized tensor of this shape.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    coded: bool
    quantized: bool


class Stored:
    """An open checkpoint.

    Attributes:
        path: directory or file.
        tensors: every tensor of the model, by name.
        dtype: element type of what is decoded.
        notes: what the checkpoint asks for and does not get here.
    """

    def __init__(self, path: Path, dtype: torch.dtype | None) -> None:
        """Opens a checkpoint; headers are read, and nothing else.

        Raises:
            FileFormatError: if it is malformed, not quantized, or in a way that is not known.
            OptionError: for a diffusers pipeline.
        """
        if is_pipeline(path):
            raise OptionError(
                f"{path}: is a pipeline of several models; give the folder of one, such as "
                f"{path / 'transformer'}"
            )
        self.path = path
        self.notes: list[str] = []
        with ExitStack() as stack:
            self._items = stack.enter_context(fp4kit.open(path))
            own = self._items.layout == OWN_LAYOUT
            self._checkpoint = None if own else stack.enter_context(Checkpoint(path))
            self.dtype = dtype or self._main_dtype()
            self._find()
            self._closing = stack.pop_all()

    def _main_dtype(self) -> torch.dtype:
        """The type of most numbers that are not quantized."""
        counts: Counter[str] = Counter()
        for name in self._items:
            info = self._items.info(name)
            if info.format is None and not info.note and info.dtype in DTYPES:
                counts[info.dtype] += prod(info.shape)
        found: torch.dtype = getattr(torch, max(counts, key=counts.__getitem__, default=USUAL))
        return found

    def _find(self) -> None:
        self._views: dict[str, EntryView] = {}
        if self._checkpoint is None:
            infos = [self._items.info(name) for name in self._items]
            if all(info.format is None for info in infos):
                raise FileFormatError(f"{self.path}: holds no quantized weight")
            self.tensors = {
                info.name: self._described(info.name, info.shape, info.dtype, info.nbytes, False)
                for info in infos
            }
            return
        name_of = str(self.dtype).removeprefix("torch.")
        plan = plan_dequantize(self._checkpoint, DequantizeOptions(dtype=name_of))
        self._source = plan.source
        self.notes += [*plan.warnings, *_ignored(self._checkpoint)]
        self.tensors = {}
        for work in plan.works:
            tensor = work.tensor
            if work.origin is not None:
                view = EntryView(self._checkpoint, work.origin, name_of)
                self._views[tensor.name] = view
            coded = work.action == "dequantize" or self._source.is_decoded(tensor.name)
            self.tensors[tensor.name] = self._described(
                tensor.name, tensor.shape, tensor.dtype, tensor.stored, coded
            )

    def _described(
        self, name: str, shape: tuple[int, ...], dtype: str, nbytes: int, coded: bool
    ) -> StoredTensor:
        info = self._items.info(name) if name in self._items else None
        quantized = info is not None and info.format is not None and info.shape == shape
        coded = coded or quantized
        kind = self.dtype if coded else getattr(torch, dtype, None)
        if kind is None:
            raise FileFormatError(f"{self.path}: tensor {name!r} is {dtype}, which torch has not")
        return StoredTensor(name, shape, kind, nbytes, coded, quantized)

    def quantized(self, name: str) -> Any:
        """A weight as it is stored, its arrays those of torch."""
        return of_torch(self._items[name])

    def values(self, name: str) -> torch.Tensor:
        """A tensor in plain numbers, of the type and shape that are described."""
        one = self.tensors[name]
        if self._checkpoint is None:
            value = self._items[name]
            return as_tensor(value.dequantize(self.dtype) if one.quantized else value)
        size = prod(one.shape) * one.dtype.itemsize
        if not size:
            return torch.empty(one.shape, dtype=one.dtype)
        data = np.empty(size, np.uint8)
        view = self._views.get(name)
        if view is not None:
            view.read(0, data.data)
        else:
            self._source.read(name, 0, data.data)
        self._checkpoint.check_unchanged()
        return torch.from_numpy(data).view(one.dtype).reshape(one.shape)

    def close(self) -> None:
        """Closes the files."""
        self._closing.close()

    def __enter__(self) -> Stored:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _ignored(checkpoint: Checkpoint) -> list[str]:
    """What a checkpoint asks for and does not get."""
    facts = read_facts(checkpoint)
    said = [ACTIVATIONS] if quantizes_activations(checkpoint) else []
    return [*said, KV_CACHE] if facts is not None and facts.kv_cache else said
