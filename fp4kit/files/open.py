# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""`fp4kit.open`: a file or checkpoint as a mapping of names to arrays and quantized tensors."""

from __future__ import annotations

import difflib
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fp4kit.api.quantize import dequantize
from fp4kit.api.tensor import QuantizedTensor
from fp4kit.arrays.dtypes import dtype_name
from fp4kit.checkpoint.layouts.comfy import is_marker
from fp4kit.checkpoint.models.experts import nothing
from fp4kit.checkpoint.read.code_names import ELEMENTS, FOREIGN, scale_names
from fp4kit.checkpoint.read.code_names import is_marker as is_fp8_marker
from fp4kit.checkpoint.read.components import is_pipeline
from fp4kit.checkpoint.read.directory import Checkpoint
from fp4kit.checkpoint.read.quantized import read_facts
from fp4kit.checkpoint.read.weight_files import folders_with_weights
from fp4kit.checkpoint.views.fp8 import Fp8View
from fp4kit.checkpoint.views.mxfp4 import Mxfp4TransposedView, Mxfp4View
from fp4kit.checkpoint.views.opened import Opened, open_quantized
from fp4kit.errors import DtypeError, FileFormatError, Fp4kitError
from fp4kit.io.dequantize import open_quantized as open_own
from fp4kit.io.metadata import METADATA_KEY, find_quantized, logical_tensors
from fp4kit.io.read.open import check_source, open_source
from fp4kit.io.read.source import Source, SourceTensor

from .choices import GGUF_LAYOUT, StrPath, check_arguments
from .items import Item, TensorInfo

#: What :attr:`TensorFile.layout` says of fp4kit's own files.
OWN_LAYOUT = "fp4kit"
#: MXFP4 of other tools.
MXFP4_VIEWS = (Mxfp4View, Mxfp4TransposedView)
#: FP8 in every bias.
FP8 = (*ELEMENTS, *FOREIGN)


class TensorNameError(Fp4kitError, KeyError):
    """A file holds no tensor of that name; the message says which it may have meant."""


class TensorFile(Mapping[str, Any]):
    """The tensors of a file or checkpoint: names to arrays and :class:`QuantizedTensor`.

    Headers are read when it is opened; the data of a tensor when it is indexed, one tensor at a
    time, and nothing of it is kept. Indexing twice reads twice. :func:`fp4kit.open` makes one.

    Attributes:
        path: what was opened.
        layout: how its weights are quantized: `fp4kit` (its own files), `compressed-tensors`,
            `modelopt`, `comfy`, `mlx`, `gguf`, `fp8` or `mxfp4`; several are joined by "+". None
            without any.
        metadata: the header metadata of the file (of a checkpoint: of its first shard; of a GGUF
            model its single values, as text).
        config: content of a checkpoint's config.json; empty without one.
    """

    def __init__(self, path: Path, *, decode: str | None, raw: bool) -> None:
        self.path = path
        self.layout: str | None = None
        self.metadata: dict[str, str] = {}
        self.config: dict[str, Any] = {}
        self._decode = decode
        self._raw = raw
        self._items: dict[str, Item] = {}
        self._unreadable: dict[str, str] = {}
        self._sources: list[Source] = []
        with ExitStack() as stack:
            self._open(path, stack)
            self._close = weakref.finalize(self, stack.pop_all().close)

    def _open(self, path: Path, stack: ExitStack) -> None:
        """Finds every tensor, from headers alone."""
        if is_pipeline(path):
            layouts: dict[str | None, None] = {}
            for folder in folders_with_weights(path):
                opened = self._open_checkpoint(path / folder, stack, f"{folder}/")
                layouts[opened] = None
            self.layout = "+".join(name for name in layouts if name) or None
            self.config = {}
        elif path.is_dir() or (path.suffix.lower() == ".safetensors" and not _is_own(path)):
            self.layout = self._open_checkpoint(path, stack, "")
        else:
            self._open_file(path, stack)

    def _open_file(self, path: Path, stack: ExitStack) -> None:
        """A file of NumPy's, one of fp4kit's own, or a GGUF model."""
        source = stack.enter_context(open_source(path))
        self._sources.append(source)
        self.metadata = source.metadata
        entries = [] if self._raw else find_quantized(source)
        if entries:
            self.layout = GGUF_LAYOUT if source.coded else OWN_LAYOUT
            entries = open_own(source)
        for name, tensor in logical_tensors(source, entries).items():
            if isinstance(tensor, SourceTensor) and not tensor.readable:
                self._unreadable[name] = f"{tensor.dtype}: {tensor.note}"
            else:
                self._items[name] = Item(source, tensor)

    def _open_checkpoint(self, path: Path, stack: ExitStack, prefix: str) -> str | None:
        """A model directory or a file of another tool; returns its layout."""
        checkpoint = stack.enter_context(Checkpoint(path))
        self._sources.append(checkpoint)
        self.metadata = {**checkpoint.metadata, **self.metadata}
        self.config = checkpoint.config
        if self._raw:
            for name, tensor in checkpoint.tensors.items():
                self._items[prefix + name] = Item(checkpoint, tensor)
            return None
        opened = open_quantized(checkpoint, plain=True, excluded=_only_cast(checkpoint))
        for name, item in _checkpoint_items(checkpoint, opened, self._decode).items():
            self._items[prefix + name] = item
        return _layout_of(checkpoint, opened)

    def __getitem__(self, name: str) -> Any:
        item = self._item(name)
        value = item.read()
        for source in self._sources:
            source.check_unchanged()
        if self._decode is None:
            return value
        return dequantize(value, self._decode) if isinstance(value, QuantizedTensor) else value

    def _item(self, name: str) -> Item:
        if not self._close.alive:
            raise FileFormatError(f"{self.path}: is closed; index it inside of `with fp4kit.open`")
        item = self._items.get(name)
        if name in self._unreadable:
            raise DtypeError(f"{self.path}: tensor {name!r}: {self._unreadable[name]}")
        if item is None:
            near = difflib.get_close_matches(str(name), self._items, 1)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            raise TensorNameError(f"{self.path}: has no tensor {name!r}{meant}")
        return item

    def weight_files(self) -> Iterator[Path]:
        """The .safetensors files that hold tensors."""
        for source in self._sources:
            if isinstance(source, Checkpoint):
                yield from source.weight_files()
            elif source.path.suffix.lower() == ".safetensors":
                yield source.path

    def info(self, name: str) -> TensorInfo:
        """What the header says of a tensor; nothing is read."""
        return self._item(name).info(name)

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    # Comparing contents, as mappings do, would read both files.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        state = "" if self._close.alive else ", closed"
        layout = f", layout={self.layout!r}" if self.layout else ""
        return f"<fp4kit.TensorFile {str(self.path)!r}: {len(self)} tensors{layout}{state}>"

    def close(self) -> None:
        """Closes the file; its names stay, its tensors cannot be read any more."""
        self._close()

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_own(path: Path) -> bool:
    """Whether a file describes itself as those of fp4kit do."""
    with open_source(path) as source:
        return METADATA_KEY in source.metadata


def _only_cast(checkpoint: Checkpoint) -> Callable[[str], bool]:
    """Whether a tensor is FP8 that means what it says: nothing of the checkpoint has a scale."""
    tensors = checkpoint.tensors
    bytes_ = {name for name, tensor in tensors.items() if tensor.spec.dtype in FP8}
    scaled = any(scale in tensors for name in bytes_ for scale in scale_names(name))
    if scaled or read_facts(checkpoint) is not None:
        return nothing
    return bytes_.__contains__


def _checkpoint_items(
    checkpoint: Checkpoint, opened: Opened, decode: str | None
) -> dict[str, Item]:
    """The logical tensors of a checkpoint, in the order in which they are stored."""
    source, found, first = opened.source, {}, {}
    for name, tensor in list(source.tensors.items()):
        view = source.views.get(name)
        blocks = view.stored if isinstance(view, Mxfp4TransposedView) else view
        if isinstance(blocks, Mxfp4View) or (
            isinstance(blocks, Fp8View) and blocks.scheme is not None
        ):
            found[name] = Item(checkpoint, blocks)
        elif decode is not None and source.is_decoded(name):
            found[name] = Item(source, source.cast(name, decode))
        else:
            found[name] = Item(source, tensor)
        first[name] = source.stored_names(name)[0]
    for name, entry in opened.entries.items():
        found[name], first[name] = Item(checkpoint, entry), entry.names.packed
    for name in opened.dropped:
        tensor = checkpoint.tensors[name]
        if not is_marker(tensor) and not is_fp8_marker(name):
            found[name], first[name] = Item(checkpoint, tensor), name
    place = {name: number for number, name in enumerate(checkpoint.tensors)}
    return {name: found[name] for name in sorted(found, key=lambda name: place[first[name]])}


def _layout_of(checkpoint: Checkpoint, opened: Opened) -> str | None:
    """How the weights of a checkpoint are quantized."""
    if opened.quantized is not None and opened.quantized.entries:
        return opened.quantized.layout.name
    coded = [name for name in opened.source.views if opened.source.is_decoded(name)]
    if not coded:
        return None
    facts = read_facts(checkpoint)
    if facts is not None:
        return facts.method
    views = (opened.source.views[name] for name in coded)
    kinds = {"mxfp4" if isinstance(view, MXFP4_VIEWS) else "fp8" for view in views}
    return "+".join(sorted(kinds))


def open(path: StrPath, *, decode: Any = None, raw: bool = False) -> TensorFile:
    """Opens a file or checkpoint of tensors as a mapping; nothing but headers is read.

    Everything that the command line reads can be opened: .npy, .npz, .safetensors and .gguf files,
    model directories with any number of shards, diffusers pipelines (whose names begin with the
    folder, `transformer/`), and whatever is quantized in a known way. A weight that is stored as
    codes and scales is one tensor under its logical name: a :class:`fp4kit.QuantizedTensor` with
    the stored bytes where one can hold them (NVFP4, MXFP4 and MXFP8 of any layout; FP8 with float
    scales per tensor, channel or 128x128 block, which become float32; gpt-oss's blocks, as they lie
    in the file), else a float32 array (FP8 with other scales, INT8; weights that AWQ smoothed,
    multiplied by the scales of their inputs). FP8 without a scale anywhere was only cast, and stays
    FP8. All other tensors are NumPy arrays under their stored names, bfloat16 and FP8 with the
    types of ml_dtypes; elements of less than a byte come as their bytes. The one array of an .npy
    has the name of the file.

    Args:
        path: file or directory.
        decode: element type to decode quantized weights to, `float32`, `float16` or `bfloat16`, by
            name or as a dtype of any framework; None to leave them quantized. Other tensors
            keep their type.
        raw: take every stored tensor as it is: codes and scales apart, nothing understood.

    Returns:
        A read-only mapping and context manager, see :class:`TensorFile`.

    Raises:
        FileFormatError: if there is no such file, it is malformed, or quantized in a way that is
            not known (`raw=True` opens it then).
        OptionError: if it is a file of another kind.
        DtypeError: if an .npy holds something that is no tensor.

    Examples:
        >>> import tempfile, numpy as np, fp4kit
        >>> path = tempfile.mkdtemp() + "/small.safetensors"
        >>> w = np.random.default_rng(0).standard_normal((4, 32), np.float32)
        >>> _ = fp4kit.save(path, {"w": fp4kit.quantize(w), "bias": np.zeros(4, np.float32)})
        >>> with fp4kit.open(path) as tensors:
        ...     print(list(tensors), tensors.layout)
        ...     print(tensors["bias"])
        ...     print(fp4kit.dequantize(tensors["w"]).shape)
        ['w', 'bias'] fp4kit
        [0. 0. 0. 0.]
        (4, 32)
    """
    check_arguments({"path": path, "raw": raw})
    if decode is not None:
        decode = dtype_name(decode, "decode")
    where = Path(path)
    check_source(where)
    return TensorFile(where, decode=decode, raw=raw)
