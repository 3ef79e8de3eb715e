# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The layout of comfy-kitchen: read by ComfyUI, mostly as single files."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from fp4kit.errors import FileFormatError
from fp4kit.io.containers import TensorSpec
from fp4kit.io.read.json_text import parse_metadata, strict_json
from fp4kit.io.read.source import Source, SourceTensor
from fp4kit.io.storage import Constant, QuantizedEntry, Storage

from .base import Layout, Summary, module_of

METHOD = "comfy"
MARKER = ".comfy_quant"
#: Header metadata: which layers are quantized, and how. ComfyUI needs it or the markers.
LAYERS_KEY = "_quantization_metadata"
#: Header metadata of ours: logical shapes of weights whose rows are padded in the file.
SHAPES_KEY = "fp4kit_shapes"
FORMAT = {"format": "nvfp4"}
FORMATS = ("nvfp4",)
#: AWQ: what inputs are multiplied by, so that the weight is W / s.
PRE_SCALE = ".pre_quant_scale"
MAX_MARKER_BYTES = 1 << 16
#: Keys of a marker that say nothing about values.
HARMLESS_KEYS = ("full_precision_matrix_mult", "orig_dtype")
GROUP_SIZES = {"nvfp4": 16}


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _recorded(
    headers: Iterable[Mapping[str, str]],
    where: object,
    key: str,
    read: Callable[[Any], dict[str, Any]],
) -> dict[str, Any]:
    """What the headers of the shards say under a key; each speaks of its own weights."""
    found: dict[str, Any] = {}
    for text in dict.fromkeys(header[key] for header in headers if key in header):
        found |= parse_metadata({key: text}, key, where, read) or {}
    return found


def recorded_layers(headers: Iterable[Mapping[str, str]], where: object) -> dict[str, str]:
    """Modules that the headers of a checkpoint's files call quantized, with their formats."""

    def read(record: Any) -> dict[str, str]:
        return {name: str(facts["format"]) for name, facts in record["layers"].items()}

    return _recorded(headers, where, LAYERS_KEY, read)


def is_marker(tensor: SourceTensor) -> bool:
    """Whether a tensor says how a layer is quantized."""
    return tensor.name.endswith(MARKER) and tensor.spec.dtype == "U8"


def layer_records(
    source: Source, headers: Iterable[Mapping[str, str]], where: object
) -> dict[str, dict[str, Any]]:
    """What headers and marker tensors say about each quantized module; a marker counts more."""

    def read(record: Any) -> dict[str, dict[str, Any]]:
        return {name: dict(facts) for name, facts in record["layers"].items()}

    records = _recorded(headers, where, LAYERS_KEY, read)
    for name, tensor in source.tensors.items():
        if is_marker(tensor):
            size = tensor.spec.nbytes
            data = bytearray(min(size, MAX_MARKER_BYTES))
            source.read(name, 0, memoryview(data))
            try:
                if size > MAX_MARKER_BYTES:
                    raise ValueError(f"{size} bytes, at most {MAX_MARKER_BYTES} are read")
                facts = dict(strict_json(data.decode()))
            except (ValueError, TypeError) as error:
                raise FileFormatError(
                    f"{where}: tensor {name!r}: damaged: {str(error)[:80]}"
                ) from None
            said = records.setdefault(name.removesuffix(MARKER), facts)
            if said.get("format") != facts.get("format"):
                raise FileFormatError(
                    f"{where}: tensor {name!r} calls the layer {str(facts.get('format'))[:40]!r}, "
                    f"the header metadata {str(said.get('format'))[:40]!r}; remove the wrong one"
                )
            records[name.removesuffix(MARKER)] = facts
    return records


def layer_formats(records: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Module to the format that it is said to have."""
    return {name: str(facts.get("format"))[:80] for name, facts in records.items()}


def record_faults(
    records: Mapping[str, Mapping[str, Any]], tensors: Collection[str]
) -> Iterator[str]:
    """What is said about modules and not understood, so that it may change their values.

    `full_precision_matrix_mult` only says how to multiply, and `group_size` what the format has
    anyway; AWQ's scales must be there if they are announced.
    """
    for module, facts in records.items():
        inner = facts.get("params")
        known = dict(inner) | dict(facts) if isinstance(inner, dict) else dict(facts)
        for key, value in known.items():
            if value in (None, False, {}, []) or key in ("format", "params", *HARMLESS_KEYS):
                continue
            if key == "group_size" and value == GROUP_SIZES.get(str(facts.get("format"))):
                continue
            if key == PRE_SCALE.removeprefix(".") and value is True:
                if f"{module}{PRE_SCALE}" not in tensors:
                    yield f"{module}: its marker announces {key}, which is not there"
                continue
            yield f"{module}: its marker has {key!r}: {str(value)[:40]}, which is not understood"


def padded_shapes(
    headers: Iterable[Mapping[str, str]], where: object
) -> dict[str, tuple[int, ...]]:
    """Logical shapes that the headers of a checkpoint's files record."""

    def read(record: Any) -> dict[str, tuple[int, ...]]:
        if not all(type(size) is int and size > 0 for shape in record.values() for size in shape):
            raise ValueError("a size is no positive integer")
        return {name: tuple(shape) for name, shape in record.items()}

    return _recorded(headers, where, SHAPES_KEY, read)


class Comfy(Layout):
    """`X.weight` U8, high nibble first, swizzled `X.weight_scale`, `X.weight_scale_2` (decode)."""

    name = METHOD
    formats = FORMATS
    storage = Storage(
        METHOD,
        packed_suffix="",
        second_suffix="_scale_2",
        second_shape=(),
        keeps="decode_scale",
        scale_layout="swizzled_128x4",
        nibble_order="high_first",
        row_multiple=16,
    )
    recipe = METHOD
    activation_suffix = ".input_scale"
    activation_shape = ()
    pre_scale_suffix = PRE_SCALE
    single_file = True

    def quantization_config(self, summary: Summary) -> dict[str, Any] | None:
        """None: ComfyUI reads no config.json."""
        return None

    def header(self, entries: Sequence[QuantizedEntry]) -> dict[str, str]:
        """The header metadata that ComfyUI looks for, and shapes that padding hides."""
        layers = {module_of(entry.name): FORMAT for entry in entries}
        metadata = {LAYERS_KEY: _compact({"format_version": "1.0", "layers": layers})}
        shapes = {
            entry.name: list(entry.shape)
            for entry in entries
            if self.storage.code_rows(entry.plan.rows) != entry.plan.rows
        }
        return metadata | ({SHAPES_KEY: _compact(shapes)} if shapes else {})

    def markers(self, name: str) -> tuple[Constant, ...]:
        """The tensor of JSON bytes beside each weight."""
        data = json.dumps(FORMAT).encode()
        return (Constant(TensorSpec(f"{module_of(name)}{MARKER}", "U8", (len(data),)), data),)
