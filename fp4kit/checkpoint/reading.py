# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Reading a quantized checkpoint, whoever wrote it: its layout, weights and activation scales."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fp4kit.errors import FileFormatError
from fp4kit.io.description import METADATA_KEY, QuantizedEntry, complete
from fp4kit.io.source import Source

from .config_facts import QuantFacts
from .detect import detect
from .directory import Checkpoint, listed
from .layouts import ALL_LAYOUTS, Layout, get_layout
from .layouts.comfy import MARKER, padded_shapes


@dataclass(frozen=True)
class Quantized:
    """The quantized weights of a checkpoint.

    Attributes:
        layout: how they are stored.
        facts: what the JSON files say, None if there are none.
        entries: weights by logical name, in stored order.
        activations: module to the bits of its stored activation scale.
        markers: tensors that mark weights as quantized.
    """

    layout: Layout
    facts: QuantFacts | None
    entries: dict[str, QuantizedEntry]
    activations: dict[str, NDArray[np.float32]]
    markers: tuple[str, ...]

    def parts(self) -> set[str]:
        """Every stored tensor that belongs to a quantized weight."""
        names = {spec.name for entry in self.entries.values() for spec in entry.parts}
        suffix = self.layout.activation_suffix
        return names | set(self.markers) | {f"{module}{suffix}" for module in self.activations}


def read_facts(checkpoint: Checkpoint) -> QuantFacts | None:
    """What the JSON files and headers of a checkpoint say about its quantization, or None."""
    return detect(checkpoint.config, checkpoint.hf_quant_config, checkpoint.headers)


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


def _activations(source: Source, layout: Layout) -> dict[str, NDArray[np.float32]]:
    """Every activation scale that is stored."""
    found = {}
    for name, tensor in source.tensors.items():
        module = name.removesuffix(layout.activation_suffix)
        if module == name:
            continue
        if tensor.spec.dtype != "F32" or tensor.spec.nbytes != 4:
            raise FileFormatError(
                f"{source.path}: tensor {name!r}: an activation scale is one float32, this is "
                f"{tensor.spec.dtype} {list(tensor.spec.shape)}"
            )
        value = np.empty(1, np.float32)
        source.read(name, 0, value.view(np.uint8).data)
        found[module] = value
    return found


def _orphans(source: Source, entries: Iterable[QuantizedEntry], layout: Layout) -> list[str]:
    """Codes and scales that belong to no weight that was understood."""
    known = {spec.name for entry in entries for spec in entry.parts}
    return [
        name
        for name, tensor in source.tensors.items()
        if name not in known
        and (
            (tensor.spec.dtype in ("U8", "F8_E4M3", "F8_E5M2") and not name.endswith(MARKER))
            or (
                name.endswith(layout.storage.second_suffix)
                and not name.endswith(layout.activation_suffix)
            )
        )
    ]


def find_quantized_weights(checkpoint: Checkpoint) -> Quantized | None:
    """The quantized weights of a checkpoint, recognized but not looked into; None without any.

    Raises:
        FileFormatError: if it is quantized in a way that is not known, or parts are missing.
    """
    facts = read_facts(checkpoint)
    if METADATA_KEY in checkpoint.metadata:
        raise FileFormatError(
            f"{checkpoint.path}: is a single file that fp4kit wrote without a layout; give the "
            "file itself"
        )
    if facts is not None and facts.layout not in ALL_LAYOUTS:
        return None
    layout = ALL_LAYOUTS[facts.layout] if facts is not None else _by_names(checkpoint)
    if layout is None:
        return None
    shapes = padded_shapes(checkpoint.headers, checkpoint.path)
    entries = layout.find(checkpoint, shapes)
    orphans = _orphans(checkpoint, entries, layout)
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
        _activations(checkpoint, layout),
        markers,
    )


def file_layout(path: Path) -> Layout | None:
    """The layout of a single file that is not one of fp4kit's own, None for those and plain ones.

    Raises:
        FileFormatError: if the file is malformed.
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
            return None
        found = find_quantized_weights(checkpoint)
        return None if found is None else found.layout
