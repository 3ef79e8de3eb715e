# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint is made of, whatever it is stored as: the first step of every operation."""

from __future__ import annotations

from dataclasses import dataclass

from fp4kit.errors import FileFormatError
from fp4kit.io.description import QuantizedEntry
from fp4kit.io.source import Source

from .codes import Codes, EntryCodes, Mxfp4Codes
from .config_facts import QuantFacts
from .directory import Checkpoint, listed
from .expert_layout import Excluded, nothing
from .logical import LogicalSource
from .mxfp4_views import Mxfp4View
from .options import CheckpointOptions
from .reading import Quantized, find_quantized_weights, read_facts
from .view_search import search

#: Quantizations of other tools that are decoded on the way: what they are called, and why.
DECODED_METHODS = ("fp8", "mxfp4")


@dataclass(frozen=True)
class Opened:
    """A checkpoint as logical tensors.

    Attributes:
        source: float tensors; weights in FP8 or MXFP4 and fused experts are views of it.
        quantized: its weights in a layout of ours, which are no tensors of `source`; None without.
        dropped: stored tensors that have no use once the weights are decoded, and why.
    """

    source: LogicalSource
    quantized: Quantized | None
    dropped: dict[str, str]

    @property
    def entries(self) -> dict[str, QuantizedEntry]:
        """The quantized weights by name."""
        return {} if self.quantized is None else self.quantized.entries


class Remaining(Source):
    """The stored tensors that are no part of a quantized weight."""

    def __init__(self, checkpoint: Checkpoint, parts: set[str]) -> None:
        self.path = checkpoint.path
        self.metadata = checkpoint.metadata
        self.tensors = {
            name: tensor for name, tensor in checkpoint.tensors.items() if name not in parts
        }
        self._checkpoint = checkpoint

    def read(self, name: str, offset: int, out: memoryview) -> None:  # noqa: D102
        self._checkpoint.read(name, offset, out)

    def close(self) -> None:
        """Nothing to do: the files belong to the checkpoint."""


def _check_method(checkpoint: Checkpoint, facts: QuantFacts | None) -> None:
    """Refuses a quantization that no view decodes."""
    if facts is not None and facts.method not in (
        *DECODED_METHODS,
        "compressed-tensors",
        "modelopt",
        "comfy",
    ):
        raise FileFormatError(
            f"{checkpoint.path}: is quantized already by {facts.method}, which is not read here; "
            "give the original checkpoint"
        )


def open_quantized(checkpoint: Checkpoint) -> Opened:
    """A checkpoint that is quantized in any known way.

    Raises:
        FileFormatError: if nothing is quantized, or in a way that is not known.
    """
    _check_method(checkpoint, read_facts(checkpoint))
    quantized = find_quantized_weights(checkpoint)
    parts = quantized.parts() if quantized is not None else set()
    found = search(Remaining(checkpoint, parts), checkpoint.config, fused=False)
    if not found.views and not (quantized is not None and quantized.entries):
        raise FileFormatError(f"{checkpoint.path}: holds no quantized weight")
    dropped = dict(found.dropped)
    if quantized is not None:
        owned = {spec.name for entry in quantized.entries.values() for spec in entry.parts}
        dropped |= {
            name: f"belongs to layout {quantized.layout.name}"
            for name in parts
            if name not in owned
        }
    source = LogicalSource(checkpoint, found.views, dropped.keys() | parts)
    return Opened(source, quantized, dropped)


def _refuse_quantized(checkpoint: Checkpoint, format: str) -> None:
    """Refuses weights that are quantized to what is wanted, or in a way that loses more."""
    quantized = find_quantized_weights(checkpoint)
    if quantized is None or not quantized.entries:
        return
    names = list(quantized.entries)
    formats = {entry.plan.format.name for entry in quantized.entries.values()}
    if formats == {"mxfp4"} and quantized.layout.storage.packed_suffix == "_packed":
        return  # decoded, or taken over, by views
    raise FileFormatError(
        f"{checkpoint.path}: is quantized already ({len(names)} weights as "
        f"{' and '.join(sorted(formats))} in layout {quantized.layout.name}: {listed(names)}); "
        "nothing is quantized twice. Use `fp4kit convert` for another layout, or `fp4kit "
        "dequantize` first"
    )


def open_logical(
    checkpoint: Checkpoint, options: CheckpointOptions, excluded: Excluded = nothing
) -> tuple[LogicalSource, dict[str, Codes], dict[str, str]]:
    """A checkpoint that is to be quantized.

    Args:
        checkpoint: the stored tensors.
        options: how it is to be quantized.
        excluded: whether a tensor is left alone; fused experts that are stay fused.

    Returns:
        Its logical float tensors; the codes of those that are stored as MXFP4; and the stored
        tensors that have no use any more, with the reason.

    Raises:
        FileFormatError: if it is quantized already in a way that is not a source.
        OptionError: if it cannot be told how experts are fused.
    """
    _check_method(checkpoint, read_facts(checkpoint))
    _refuse_quantized(checkpoint, options.format)
    found = search(checkpoint, checkpoint.config, options.experts_layout, excluded=excluded)
    codes: dict[str, Codes] = {
        view.tensor.name: Mxfp4Codes(view) for view in found.views if isinstance(view, Mxfp4View)
    }
    source = LogicalSource(checkpoint, found.views, set(found.dropped))
    leftover = [
        name
        for name, tensor in source.tensors.items()
        if tensor.spec.dtype == "U8" and f"{name.removesuffix('_packed')}_scale" in source.tensors
    ]
    if leftover:
        raise FileFormatError(
            f"{checkpoint.path}: {len(leftover)} tensors look quantized but not in a way that is "
            f"known here: {listed(leftover)}"
        )
    return source, codes, found.dropped


def entry_codes(opened: Opened) -> dict[str, Codes]:
    """The codes of every weight in a layout, by name."""
    if opened.quantized is None:
        return {}
    checkpoint = opened.source.checkpoint
    return {name: EntryCodes(checkpoint, entry) for name, entry in opened.quantized.entries.items()}
