# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Planning how given tensors become a checkpoint in the layout of an engine, codes verbatim."""

from __future__ import annotations

from math import inf

from fp4kit.checkpoint.layouts import ALL_LAYOUTS, Layout, Summary, get_layout, module_of
from fp4kit.checkpoint.models.fusion import groups
from fp4kit.checkpoint.plan.checkpoint_plan import (
    CheckpointPlan,
    WorkUnit,
    check_source,
    pack,
)
from fp4kit.checkpoint.plan.ignored import ignored_modules, unknown_type_warnings
from fp4kit.checkpoint.plan.model_dtype import state_decoded_dtype
from fp4kit.checkpoint.plan.quantize import embedding_modules
from fp4kit.checkpoint.verify.structure import scale_faults
from fp4kit.checkpoint.views.codes import EntryCodes
from fp4kit.checkpoint.views.logical import LogicalSource
from fp4kit.errors import FileFormatError, OptionError, brief
from fp4kit.io.containers import DTYPE_CODES, TensorSpec
from fp4kit.io.metadata import shared_plan
from fp4kit.io.quantize_plan import TensorPlan, refuse_collisions
from fp4kit.io.read.source import SourceTensor
from fp4kit.io.storage import WEIGHT, QuantizedEntry
from fp4kit.io.tensor_names import unknown_beside

from .given import GivenTensors, SaveOptions


def _entry(layout: Layout, held: QuantizedEntry) -> QuantizedEntry:
    """A quantized tensor as a layout stores it.

    Raises:
        OptionError: with the reason why it cannot.
    """
    spec, shape = held.plan.format, held.shape
    why = ""
    if spec.name not in layout.formats:
        why = f"it holds {' or '.join(layout.formats)}, this is {spec.name}"
    elif len(shape) != 2:
        why = f"engines have quantized layers of 2-D weights, this has shape {list(shape)}"
    elif shape[-1] % spec.block_size:
        why = f"engines read no padded rows, {shape[-1]} is no multiple of {spec.block_size}"
    elif spec.has_second_level and (held.second is None) != (layout.storage.second_suffix is None):
        kept, has = ("a", "none") if held.second is None else ("no", "one")
        why = f"it keeps {kept} second-level scale, and this has {has}"
    elif layout.reason_to_keep(held.name):
        why = f"it is {layout.reason_to_keep(held.name)}"
    elif not held.name.endswith(WEIGHT):
        why = f"engines look for names that end in {WEIGHT}"
    if why:
        raise OptionError(
            f"layout {layout.name} cannot hold tensor {brief(held.name)}: {why}; save it "
            "dequantized, or in a .safetensors file of fp4kit's own (layout=None)"
        )
    plan = shared_plan(shape, layout.laid_out(held.plan.scheme))
    return QuantizedEntry(
        held.name, shape, held.dtype, plan, held.second, layout.storage, layout.markers(held.name)
    )


def _check_groups(given: GivenTensors, fused: dict[str, list[str]]) -> None:
    """Refuses weights that engines fuse and that have different second-level scales."""
    for names in fused.values():
        seconds = {name: given.entries[name].stored_second() for name in names}
        if len({value.tobytes() for value in seconds.values()}) > 1:
            listed = ", ".join(f"{name} {float(value[0])!r}" for name, value in seconds.items())
            raise OptionError(
                f"{given.path}: engines fuse these weights and use one second-level scale for "
                f"them, but they have different ones: {listed}; quantize them with the largest "
                "amax of all (fp4kit.quantize(x, amax=...))"
            )


def _check_scales(given: GivenTensors) -> None:
    """Refuses scales that no engine can use, before anything is written."""
    for entry in given.entries.values():
        faults = list(scale_faults(given, entry))
        if entry.second is not None:
            value = float(entry.stored_second()[0])
            if not 0 < value < inf:
                faults.append(f"{entry.names.second}: is {value}, which is not finite and above 0")
        if faults:
            raise OptionError(f"{given.path}: {faults[0]}; engines cannot decode that")


def _activations(given: GivenTensors, layout: Layout) -> str | None:
    """Whether activation scales are among the tensors, as the layout names them."""
    modules = [module_of(name) for name in given.entries]
    known = [each for each in ALL_LAYOUTS.values() if each.activation_suffix is not None]
    for other in known:
        for module in modules if other.activation_suffix != layout.activation_suffix else ():
            name = f"{module}{other.activation_suffix}"
            if name in given.tensors:
                raise OptionError(
                    f"{given.path}: {name!r} is an activation scale of layout {other.name}, which "
                    f"layout {layout.name} keeps in another direction; leave it out, or save in "
                    "that layout and use fp4kit.convert_checkpoint"
                )
    found = [f"{module}{layout.activation_suffix}" in given.tensors for module in modules]
    return "calibrated" if any(found) else None


def plan_layout(given: GivenTensors, options: SaveOptions) -> CheckpointPlan:
    """Decides about every given tensor.

    Raises:
        OptionError: if the layout cannot hold one, or a directory lacks what its readers need.
        FileFormatError: for names that clash, or that are not understood beside a quantized weight.
    """
    layout, entries = get_layout(options.layout), given.entries
    if entries:
        check_source(given, layout)
    if entries and given.is_directory and not layout.single_file and not given.documents:
        raise OptionError(
            f"{given.path}: readers of layout {layout.name} need a config.json; give config=, its "
            "content or path ({} to go without)"
        )
    layout.check_names(entries, given.config)
    if layout.stacks(entries, given.config):
        raise OptionError(
            f"{given.path}: readers of layout {layout.name} want the experts stacked; save plain "
            f"weights, then use quantize_checkpoint(layout={layout.name!r})"
        )
    activations = _activations(given, layout)
    formats = sorted({entry.plan.format.name for entry in entries.values()})
    granularities = {entry.plan.scheme.granularity for entry in entries.values()}
    works: dict[str, TensorPlan] = {}
    units = []
    for name in given.names:
        held = entries.get(name)
        if held is None:
            works[name] = TensorPlan(given.tensors[name], "keep", "not quantized")
            units.append(WorkUnit([works[name]]))
            continue
        entry = _entry(layout, held)
        spec = TensorSpec(name, DTYPE_CODES[held.dtype], held.shape)
        logical = SourceTensor(spec, held.dtype, held.stored)
        works[name] = TensorPlan(logical, "transfer", "codes and scales taken over", entry=entry)
        units.append(WorkUnit([works[name]], codes=[EntryCodes(given, held)]))
    if len(formats) > 1 or len(granularities) > 1:
        kinds = formats if len(formats) > 1 else sorted(map(str, granularities))
        raise OptionError(
            f"{given.path}: holds {' and '.join(kinds)}, and layout {layout.name} names one format "
            "(and granularity) for all; save them to two directories"
        )
    for entry in entries.values():
        layout.check(entry.plan.scheme, activations)
    refuse_collisions(given.path, works.values())
    parts = {part.name for entry in entries.values() for part in entry.parts}
    plain = [name for name in given.names if name not in entries]
    for name, owner in unknown_beside(plain, entries, ()).items():
        raise FileFormatError(
            f"{given.path}: {name!r} stands beside the quantized {owner!r} and may change what it "
            "means to a reader; rename or leave out one of them"
        )
    members = groups(entries)
    fused = {key: names for key, names in members.items() if len(names) > 1}
    if formats == ["nvfp4"] and layout.storage.second_suffix is not None:
        _check_groups(given, fused)
    _check_scales(given)
    plan = CheckpointPlan(
        source=LogicalSource(given, [], parts),
        options=options,
        layout=layout if entries else None,
        shards=pack(units, given, options.max_shard_size),
        summary=Summary(
            formats[0] if formats else "",
            ignored_modules(works, given, layout) if entries else (),
            activations,
            embedding_modules(works),
            granularity=next(iter(granularities), None),
        ),
        dropped={},
        groups=fused,
    )
    if entries:
        plan.warnings += state_decoded_dtype(plan)
        plan.warnings += unknown_type_warnings(given, layout)
    return plan
