# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What becomes of a checkpoint: units of tensors, packed into the files of the output."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from dataclasses import replace as with_changes
from math import prod
from typing import Any

from fp4kit.checkpoint.layouts import Layout, Summary, module_of
from fp4kit.checkpoint.layouts.comfy import LAYERS_KEY, SHAPES_KEY
from fp4kit.checkpoint.models.mistral import ignore_list
from fp4kit.checkpoint.options import CommonOptions
from fp4kit.checkpoint.plan.expert_restore import EXPERTS_KEY
from fp4kit.checkpoint.read.directory import Checkpoint
from fp4kit.checkpoint.views.codes import Codes
from fp4kit.checkpoint.views.logical import LogicalSource
from fp4kit.errors import FileFormatError, OptionError
from fp4kit.io.containers import TensorSpec
from fp4kit.io.metadata import METADATA_KEY
from fp4kit.io.quantize_plan import TensorPlan
from fp4kit.io.storage import search_facts

#: Header metadata of files whose block scales were searched: how. Decoding does not need it.
SEARCH_KEY = "fp4kit_scale_search"
#: Header metadata of every weight file of fp4kit's: `--force` replaces only these.
WRITTEN_KEY = "fp4kit_checkpoint"
#: Header metadata that described an older quantization.
OLD_METADATA = (
    LAYERS_KEY,
    METADATA_KEY,
    SHAPES_KEY,
    SEARCH_KEY,
    EXPERTS_KEY,
    "fp4kit_second_level",
)
#: Bytes of a header of a shard, estimated by the names and this many for the rest of an entry.
HEADER_BYTES, ENTRY_BYTES = 10 << 20, 100
#: Tensors of a file that has no shards; readers refuse longer headers.
FILE_TENSORS = 150_000


@dataclass(eq=False, slots=True)
class WorkUnit:
    """Tensors that are converted together, because an engine fuses them: one shared scale.

    Attributes:
        works: what happens to each.
        key: name of the fusion group, "" for a tensor alone.
        codes: the codes that each has in the source, empty if one has none.
    """

    works: list[TensorPlan]
    key: str = ""
    codes: list[Codes] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes in the output."""
        return sum(spec.nbytes for work in self.works for spec in work.outputs)


@dataclass(eq=False)
class Shard:
    """One file of the output."""

    name: str
    units: list[WorkUnit]

    @property
    def works(self) -> list[TensorPlan]:
        """Every tensor of it."""
        return [work for unit in self.units for work in unit.works]

    @property
    def specs(self) -> list[TensorSpec]:
        """Every tensor that is written to it."""
        return [spec for work in self.works for spec in work.outputs]


@dataclass(eq=False)
class CheckpointPlan:
    """Everything that a conversion will do.

    Attributes:
        source: the logical tensors.
        options: what was asked for, a dataclass.
        layout: how quantized weights are stored, None if the result holds none.
        shards: the files of the output.
        summary: what the JSON files will say.
        dropped: stored tensors that appear nowhere, and why.
        groups: fusion group to its members.
        header: header metadata of every file beside the source's.
        config: values that config.json gets.
        warnings: what the user should know.
    """

    source: LogicalSource
    options: CommonOptions
    layout: Layout | None
    shards: list[Shard]
    summary: Summary
    dropped: dict[str, str]
    groups: dict[str, list[str]] = field(default_factory=dict)
    header: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Readers of Mistral's own format build modules under other names than it stores."""
        if self.source.checkpoint.native and self.layout is not None:
            quantized = [
                module_of(work.tensor.name) for work in self.works if work.entry is not None
            ]
            ignore = ignore_list(self.summary.ignore, quantized)
            self.summary = with_changes(self.summary, ignore=ignore)

    @property
    def works(self) -> list[TensorPlan]:
        """Every tensor, in output order."""
        return [work for shard in self.shards for work in shard.works]

    @property
    def plain(self) -> bool:
        """Whether nothing of the result is quantized; readers are told of no quantization then."""
        return all(work.entry is None for work in self.works)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the output."""
        return sum(spec.nbytes for work in self.works for spec in work.outputs)

    @property
    def weight_map(self) -> dict[str, str]:
        """Tensor name to file, as in an index."""
        return {spec.name: shard.name for shard in self.shards for spec in shard.specs}

    @property
    def parameters(self) -> int:
        """Logical elements of all float tensors."""
        return sum(prod(work.tensor.spec.shape) for work in self.works)

    def metadata(self, shard: Shard) -> dict[str, str]:
        """Header metadata of a file: the source's, `format` (readers insist on it), ours."""
        kept = {
            key: value for key, value in self.source.metadata.items() if key not in OLD_METADATA
        }
        entries = [work.entry for work in shard.works if work.entry is not None]
        own = {} if self.layout is None else self.layout.header(entries)
        searches = [search_facts(entry.plan.scheme) for entry in entries]
        searched = next((facts for facts in searches if facts), None)
        if searched is not None:
            own = {**own, SEARCH_KEY: json.dumps(searched, separators=(",", ":"))}
        return {"format": "pt", **kept, **self.header, **own, WRITTEN_KEY: "1"}


def check_source(checkpoint: Checkpoint, layout: Layout) -> None:
    """Refuses a source that a layout is not for."""
    if not checkpoint.is_directory and not layout.single_file:
        raise OptionError(
            f"{checkpoint.path}: layout {layout.name} needs a model directory with its config.json"
        )
    if checkpoint.native and not (layout.single_file or layout.in_params):
        raise OptionError(
            f"{checkpoint.path}: is in Mistral's own format, whose readers know no layout "
            f"{layout.name}; choose --layout compressed-tensors"
        )


def in_stored_order(source: LogicalSource, units: dict[str, WorkUnit]) -> list[WorkUnit]:
    """Units of single tensors, by logical name, as the checkpoint stores them."""
    owners: dict[str, list[str]] = {}
    for name, unit in units.items():
        view, origin = source.views.get(name), unit.works[0].origin
        stored = view.consumed[0] if view else origin.names.packed if origin else name
        owners.setdefault(stored, []).append(name)
    return [units[name] for stored in source.checkpoint.tensors for name in owners.get(stored, ())]


def shard_names(base: str, count: int) -> list[str]:
    """File names of a checkpoint of some shards."""
    if count == 1:
        return [f"{base}.safetensors"]
    return [f"{base}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def pack(units: Iterable[WorkUnit], checkpoint: Checkpoint, limit: int) -> list[Shard]:
    """Cuts units into files.

    Args:
        units: what is written, in order.
        checkpoint: what they come from; a single file becomes one.
        limit: bytes of a file at most; a larger unit is alone in one. Where there are very many
            tensors, files are smaller, so that neither their headers nor notes about them take
            much memory.
    """
    bins: list[list[WorkUnit]] = [[]]
    filled = header = count = 0
    for unit in units:
        specs = [spec for work in unit.works for spec in work.outputs]
        nbytes = sum(spec.nbytes for spec in specs)
        described = sum(len(spec.name) + ENTRY_BYTES for spec in specs)
        count += len(specs)
        full = filled + nbytes > limit or header + described > HEADER_BYTES
        if checkpoint.is_directory and bins[-1] and full:
            bins.append([])
            filled = header = 0
        bins[-1].append(unit)
        filled += nbytes
        header += described
    if not checkpoint.is_directory and count > FILE_TENSORS:
        raise FileFormatError(
            f"{checkpoint.path}: the result would be one file of {count} tensors; at most "
            f"{FILE_TENSORS} are written to one: give a model directory of several shards"
        )
    names = shard_names(checkpoint.base, len(bins))
    return [Shard(name, members) for name, members in zip(names, bins, strict=True)]
