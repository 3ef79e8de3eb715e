# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Reading a quantized checkpoint, whoever wrote it: its layout, weights and activation scales."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from dataclasses import replace as with_changes
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fp4kit.checkpoint.layouts import ALL_LAYOUTS, Layout, get_layout, module_of
from fp4kit.checkpoint.layouts.comfy import (
    MARKER,
    METHOD,
    padded_shapes,
)
from fp4kit.checkpoint.read.code_names import ELEMENTS, FLOATS, is_block_scale, scale_names
from fp4kit.errors import FileFormatError
from fp4kit.io.metadata import METADATA_KEY, complete, entries_by_names
from fp4kit.io.read.source import Source, SourceTensor
from fp4kit.io.storage import QuantizedEntry

from .code_names import unread_codes
from .config_facts import QuantFacts, comfy_facts, detect
from .directory import Checkpoint, listed


@dataclass(frozen=True)
class Quantized:
    """The quantized weights of a checkpoint.

    Attributes:
        layout: how they are stored.
        facts: what the JSON files say, None if there are none.
        entries: weights by logical name, in stored order.
        activations: module to the bits of its stored activation scale.
        markers: tensors that mark weights as quantized.
        pre_scales: module to the tensor that its inputs are multiplied by (AWQ), so that its
            effective weight is the stored one times it, column by column.
    """

    layout: Layout
    facts: QuantFacts | None
    entries: dict[str, QuantizedEntry]
    activations: dict[str, NDArray[np.float32]]
    markers: tuple[str, ...]
    pre_scales: dict[str, SourceTensor]

    def parts(self) -> set[str]:
        """Every stored tensor that belongs to a quantized weight."""
        names = {spec.name for entry in self.entries.values() for spec in entry.parts}
        names |= {tensor.name for tensor in self.pre_scales.values()}
        suffix = self.layout.activation_suffix
        return names | set(self.markers) | {f"{module}{suffix}" for module in self.activations}

    def without_pre_scales(self) -> Quantized:
        """The weights that mean what is stored."""
        kept = {
            name: entry
            for name, entry in self.entries.items()
            if module_of(name) not in self.pre_scales
        }
        return with_changes(self, entries=kept, pre_scales={})


def is_usable(scale: NDArray[np.float32]) -> bool:
    """Whether a decoder can use a second-level or activation scale."""
    return bool(np.isfinite(scale[0]) and scale[0] > 0)


def scale_bits(scale: NDArray[np.float32]) -> int:
    """The bits of a second-level or activation scale, to compare and to write down."""
    return int(scale.view(np.uint32)[0])


def read_facts(checkpoint: Checkpoint) -> QuantFacts | None:
    """What JSON files, headers and markers of a checkpoint say about its quantization, or None."""
    facts = detect(checkpoint.config, checkpoint.hf_quant_config, checkpoint.headers)
    if facts is not None and facts.method != METHOD:
        return facts
    layers = checkpoint.layer_formats
    return comfy_facts(layers) if layers else None


def quantizes_activations(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint says that the inputs of its layers are quantized as well."""
    facts = read_facts(checkpoint)
    if facts is not None and facts.activations:
        return True
    config = checkpoint.config.get("quantization_config")
    if not isinstance(config, dict):
        return False
    groups = config.get("config_groups")
    given = groups.values() if isinstance(groups, dict) else ()
    return bool(config.get("activation_scheme")) or any(
        isinstance(group, dict) and group.get("input_activations") for group in given
    )


def _by_names(checkpoint: Checkpoint) -> Layout | None:
    """The layout that the names of a file without any metadata belong to."""
    if any(name.endswith(MARKER) for name in checkpoint.tensors):
        return get_layout("comfy")
    found = [layout for layout in ALL_LAYOUTS.values() if layout.find(checkpoint)]
    if len(found) > 1:
        names = " and ".join(layout.name for layout in found)
        raise FileFormatError(
            f"{checkpoint.path}: its quantized weights fit the layouts {names}, and no metadata "
            "says which it is; restore config.json or the header metadata"
        )
    return found[0] if found else None


def _activations(
    source: Source, entries: Iterable[QuantizedEntry], layout: Layout
) -> dict[str, NDArray[np.float32]]:
    """Every activation scale that is stored as the layout has it."""
    if layout.activation_suffix is None:
        return {}
    modules = {module_of(entry.name) for entry in entries}
    found = {}
    for name, tensor in source.tensors.items():
        module = name.removesuffix(layout.activation_suffix)
        if module == name:
            continue
        if tensor.spec.dtype != "F32" or tensor.spec.nbytes != 4:
            if module not in modules:
                continue  # of FP8, which has other forms too
            raise FileFormatError(
                f"{source.path}: tensor {name!r}: an activation scale is one float32, this is "
                f"{tensor.spec.dtype} {list(tensor.spec.shape)}"
            )
        value = np.empty(1, np.float32)
        source.read(name, 0, value.view(np.uint8).data)
        found[module] = value
    return found


def _pre_scales(
    source: Source, entries: Iterable[QuantizedEntry], layout: Layout
) -> dict[str, SourceTensor]:
    """Every AWQ scale that the layout's readers apply."""
    found: dict[str, SourceTensor] = {}
    for entry in entries if layout.pre_scale_suffix else ():
        module = module_of(entry.name)
        tensor = source.tensors.get(f"{module}{layout.pre_scale_suffix}")
        if tensor is None:
            continue
        if tensor.spec.dtype not in FLOATS or prod(tensor.spec.shape) != entry.shape[-1]:
            raise FileFormatError(
                f"{source.path}: tensor {tensor.name!r}: the scale of the inputs has a float for "
                f"each of the {entry.shape[-1]} columns, this is {tensor.spec.dtype} "
                f"{list(tensor.spec.shape)}"
            )
        found[module] = tensor
    return found


def _orphans(source: Source, entries: Iterable[QuantizedEntry], layout: Layout) -> list[str]:
    """Codes and scales that belong to no weight that was understood; FP8 weights are views."""
    known = {spec.name for entry in entries for spec in entry.parts}
    rest = {name: tensor for name, tensor in source.tensors.items() if name not in known}
    bytes_ = {name: tensor for name, tensor in rest.items() if tensor.spec.dtype == "U8"}
    coded = set(unread_codes(bytes_, source.tensors))
    coded |= {name for name in bytes_ if name.endswith("_packed")}
    return [
        name
        for name, tensor in rest.items()
        if not name.endswith(MARKER)
        and (
            name in coded
            or (tensor.spec.dtype in ELEMENTS and is_block_scale(source, name))
            or _is_second(name, layout)
        )
    ]


def _is_second(name: str, layout: Layout) -> bool:
    """Whether a name is that of a second level, and of no activation scale."""
    suffix, activation = layout.storage.second_suffix, layout.activation_suffix
    if suffix is None or not name.endswith(suffix):
        return False
    return activation is None or not name.endswith(activation)


def _plain_advice(checkpoint: Checkpoint) -> str:
    """What to do with a file that is quantized, but in no engine's layout."""
    if checkpoint.is_directory:
        return (
            "holds a file that `fp4kit quantize FILE` wrote, in no engine's layout; give that file "
            "itself to dequantize, verify, inspect or compare"
        )
    return (
        "is quantized in the form of fp4kit's own files, which is no engine's layout. For a layout "
        "quantize its source with `fp4kit quantize SOURCE --layout ...`, or without that the "
        "output of `fp4kit dequantize`"
    )


def find_quantized_weights(checkpoint: Checkpoint) -> Quantized | None:
    """The quantized weights of a checkpoint, recognized but not looked into; None without any.

    Raises:
        FileFormatError: if it is quantized in a way that is not known, or parts are missing.
    """
    facts = read_facts(checkpoint)
    if METADATA_KEY in checkpoint.metadata:
        raise FileFormatError(f"{checkpoint.path}: {_plain_advice(checkpoint)}")
    if facts is not None and facts.layout not in ALL_LAYOUTS:
        return None
    layout = ALL_LAYOUTS[facts.layout] if facts is not None else _by_names(checkpoint)
    if layout is None:
        return None
    shapes = padded_shapes(checkpoint.headers, checkpoint.path)
    entries = layout.find(checkpoint, shapes)
    orphans = [] if layout.read_as_views else _orphans(checkpoint, entries, layout)
    if orphans:
        raise FileFormatError(
            f"{checkpoint.path}: {len(orphans)} tensors look quantized but do not fit layout "
            f"{layout.name}: {listed(orphans)}"
        )
    markers = tuple(name for name in checkpoint.tensors if name.endswith(MARKER))
    return Quantized(
        layout,
        facts,
        {entry.name: complete(checkpoint, entry) for entry in entries},
        _activations(checkpoint, entries, layout),
        markers,
        _pre_scales(checkpoint, entries, layout),
    )


def _holds_bytes(checkpoint: Checkpoint) -> bool:
    """Whether weights are FP8, or bytes with a scale, in no block format of fp4kit's own."""
    tensors = checkpoint.tensors
    return not entries_by_names(checkpoint) and any(
        (tensor.spec.dtype in ELEMENTS and not is_block_scale(checkpoint, name))
        or (tensor.spec.dtype == "I8" and any(scale in tensors for scale in scale_names(name)))
        for name, tensor in tensors.items()
    )


def file_layout(path: Path) -> Layout | None:
    """The layout of a single file that is not one of fp4kit's own, None for those and plain ones.

    Files of FP8 weights count as ComfyUI's, whose dialects they are.
    """
    with Checkpoint(path) as checkpoint:
        if METADATA_KEY in checkpoint.metadata:
            return None
        codes = [
            name
            for name, tensor in checkpoint.tensors.items()
            if tensor.spec.dtype == "U8" and f"{name}_scale_2" in checkpoint.tensors
        ]
        facts = read_facts(checkpoint)
        if not codes and facts is None:
            return get_layout(METHOD) if _holds_bytes(checkpoint) else None
        found = find_quantized_weights(checkpoint)
        return None if found is None else found.layout
