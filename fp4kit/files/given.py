# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Tensors that a caller gives, as the checkpoint that they are to become a file of."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from dataclasses import replace as with_changes
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4kit import arrays
from fp4kit.api.tensor import QuantizedTensor
from fp4kit.arrays.frameworks import open_raw
from fp4kit.checkpoint.options import CommonOptions
from fp4kit.checkpoint.read.directory import Checkpoint
from fp4kit.checkpoint.read.weight_files import CONFIG, INDEX_SUFFIX, WEIGHTS
from fp4kit.checkpoint.write.output import new_config
from fp4kit.errors import DtypeError, FileFormatError, OptionError, brief
from fp4kit.io.containers import DTYPE_CODES, DTYPES, TensorSpec
from fp4kit.io.metadata import shared_plan
from fp4kit.io.read.source import SourceTensor
from fp4kit.io.storage import PLAIN, QuantizedEntry
from fp4kit.scheme import Scheme

from .open import TensorFile

Bytes = NDArray[np.uint8]
#: NVFP4 without its second level, which only layouts that keep none can hold.
ONE_LEVEL = with_changes(PLAIN, second_suffix=None)


@dataclass(frozen=True)
class SaveOptions(CommonOptions):
    """How given tensors become a checkpoint.

    Attributes:
        layout: how quantized tensors are stored.
        max_shard_size: bytes of a shard at most; a larger tensor is alone in one.
    """

    layout: str
    max_shard_size: int


def _accept(name: str, dtype: str, itemsize: int) -> None:
    code = DTYPE_CODES.get(dtype)
    if code is None or DTYPES[code].bits != 8 * itemsize:
        raise DtypeError(
            f"tensor {brief(name)} is {dtype}, which safetensors files do not hold; cast it first, "
            "for example to float32"
        )


def _opened(name: str, value: Any) -> tuple[Any, str, Any]:
    return open_raw(value, f"tensor {brief(name)}", lambda *facts: _accept(name, *facts))


def _host_bytes(name: str, value: Any) -> Bytes:
    """The bytes of an array on any device: C order, little-endian."""
    data, _, origin = _opened(name, value)
    if origin.device_kind != "cpu":
        with arrays.device_scope(origin):
            data = arrays.array_module(origin).asnumpy(data)
    if data.dtype.byteorder == ">":
        data = data.astype(data.dtype.newbyteorder("<"))
    flat: Bytes = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    return flat


def held_entry(name: str, tensor: QuantizedTensor, *, exact: bool) -> QuantizedEntry:
    """A quantized tensor as an entry of a file, in its own order of scales and nibbles.

    Args:
        name: its name.
        tensor: the tensor.
        exact: everything about it must be recorded, also what decoding does not need.

    Raises:
        OptionError: if no file holds one of its kind.
    """
    recorded = _recorded(tensor.scheme)
    why = _unstorable(tensor)
    single = tensor.scheme.spec.has_second_level and tensor.second_level is None
    if not why and exact and single:
        why = "it has no second-level scale, which files of nvfp4 hold"
    if not why and exact and tensor.scheme != recorded:
        why = f"fp4kit's own files do not record all of {tensor.scheme.describe()}"
    if why:
        raise OptionError(
            f"tensor {brief(name)} cannot be saved: {why}; quantize it plainly (rowwise, one "
            "second-level scale), or save fp4kit.dequantize of it"
        )
    plan = shared_plan(tensor.shape, recorded, pad=True)
    second = None
    if tensor.second_level is not None:
        second = _host_bytes(name, tensor.second_level[1]).view(np.float32).reshape(1)
    storage = ONE_LEVEL if single else PLAIN
    return QuantizedEntry(name, tensor.shape, tensor.source_dtype, plan, second, storage)


def _recorded(scheme: Scheme) -> Scheme:
    """What of a scheme files record: plain rows, and how their scales were searched."""
    return scheme.replace(
        direction="rowwise",
        block_shape="1d",
        second_level="none" if scheme.second_level == "none" else "tensor",
        rounding="nearest",
        rht=None,
        rht_rounding=None,
    ).parts[0]


def _unstorable(tensor: QuantizedTensor) -> str:
    """Why no file holds a tensor, "" if some do."""
    plan = tensor.plan()
    if tensor.direction == "columnwise":
        return "its blocks run along the columns, and files hold blocks along the last axis"
    if tensor.scheme.rht is not None:
        return "it is rotated (rht), which no reader of files undoes"
    if tensor.second_level is not None and plan.rows_per_scale != max(plan.rows, 1):
        return "it has several second-level scales, and files hold one per tensor"
    if 0 in tensor.shape:
        return "it is empty"
    return ""


class GivenTensors(Checkpoint):
    """Arrays and quantized tensors in memory, in the place of a checkpoint that was read.

    Only what describes them is kept: a value is fetched again from the caller's mapping when its
    bytes are written.

    Attributes:
        path: what is written; messages begin with it.
        names: logical names in the caller's order.
        entries: the quantized ones by name, their parts named as in fp4kit's own files.
    """

    concurrent = False
    in_memory = True

    def __init__(
        self, path: Path, values: Mapping[str, Any], *, is_directory: bool, exact: bool
    ) -> None:
        """Looks at every value.

        Args:
            path: what is written.
            values: names to arrays and quantized tensors.
            is_directory: it is a model directory, else a file.
            exact: everything about quantized tensors must be recorded.

        Raises:
            DtypeError: for what is no array, or of a type that files do not hold.
            OptionError: for a quantized tensor of a kind that files do not hold.
            FileFormatError: for names that clash.
        """
        if not isinstance(values, Mapping):
            raise DtypeError(
                f"{path}: tensors is a {type(values).__name__}; give a dict of names to arrays"
            )
        self.path = path
        self.is_directory = is_directory
        self.base = "model" if is_directory else path.name[: -len(WEIGHTS)]
        self.metadata = {}
        self.headers = []
        self.tensors = {}
        self.config = {}
        self.documents = {}
        self.hf_quant_config = None
        self.stale = {}
        self.native = False
        self.entries: dict[str, QuantizedEntry] = {}
        self.names = list(values)
        self._weights = None
        self._sources = {}
        self._values = values
        self._exact = exact
        self._owner_of: dict[str, str] = {}
        self._lock = threading.Lock()
        #: Bytes of the parts of the tensor that was read last.
        self._parts: tuple[str, dict[str, Bytes]] = ("", {})
        for name in self.names:
            self._add(name, values[name])

    def _add(self, name: str, value: Any) -> None:
        if not isinstance(name, str):
            raise OptionError(f"{self.path}: {name!r} is no name of a tensor; names are strings")
        if isinstance(value, QuantizedTensor):
            entry = held_entry(name, value, exact=self._exact)
            self.entries[name] = entry
            specs = entry.parts
        else:
            data, dtype, _ = _opened(name, value)
            specs = [TensorSpec(name, DTYPE_CODES[dtype], tuple(data.shape))]
        for spec in specs:
            other = self._owner_of.setdefault(spec.name, name)
            if other != name:
                raise FileFormatError(
                    f"{self.path}: tensors {other!r} and {name!r} would both be written as "
                    f"{spec.name!r}; rename one of them"
                )
            found = SourceTensor(spec, DTYPES[spec.dtype].name, spec.nbytes)
            self.tensors[spec.name] = found

    def weight_files(self) -> Iterator[Path]:
        """The files that they are read from: the result is no more readable than these."""
        if isinstance(self._values, TensorFile):
            yield from self._values.weight_files()

    def settings(self, config: dict[str, Any] | None) -> None:
        """Takes the content of config.json, without the quantization that it may describe."""
        if config is not None:
            self.config = new_config(config, None)
            self.documents = {CONFIG: self.config}

    @property
    def stored_at(self) -> Path | None:
        """Where they are read from, if it is an open file: that is never written over."""
        return self._values.path if isinstance(self._values, TensorFile) else None

    @property
    def file(self) -> Path | None:
        """The file that they are read from, None for memory and directories."""
        place = self.stored_at
        return place if place is not None and place.is_file() else None

    @property
    def index(self) -> Path:
        """The index that shards are given."""
        return self.path / f"{self.base}{INDEX_SUFFIX}"

    def data(self, name: str) -> Bytes:
        """All bytes of a stored tensor."""
        with self._lock:
            owner = self._owner_of[name]
            if self._parts[0] != owner:
                self._parts = (owner, self._fetch(owner))
            return self._parts[1][name]

    def _fetch(self, owner: str) -> dict[str, Bytes]:
        value = self._values[owner]
        entry = self.entries.get(owner)
        if entry is None:
            return {owner: _host_bytes(owner, value)}
        names = entry.names
        parts = {
            names.packed: _host_bytes(owner, value.packed),
            names.scale: _host_bytes(owner, value.block_scale),
        }
        if names.second is not None:
            parts[names.second] = entry.stored_second().astype("<f4").view(np.uint8)
        return parts

    def read(self, name: str, offset: int, out: memoryview) -> None:  # noqa: D102
        out[:] = self.data(name)[offset : offset + len(out)].data
