# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Looking at a quantized checkpoint as an engine would: structure, scales, and the JSON files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fp4kit.checkpoint.layouts import module_of
from fp4kit.checkpoint.layouts.comfy import recorded_layers
from fp4kit.checkpoint.layouts.compressed_tensors import METHOD
from fp4kit.checkpoint.layouts.deepseek import DeepSeek
from fp4kit.checkpoint.layouts.ignore_list import EXPRESSION, LINEAR, IgnoreList, check_ignore
from fp4kit.checkpoint.models import architectures
from fp4kit.checkpoint.models.experts import Excluded, nothing
from fp4kit.checkpoint.models.fusion import groups
from fp4kit.checkpoint.models.mistral import built_name
from fp4kit.checkpoint.plan.ignored import Unquantized
from fp4kit.checkpoint.read.components import component_faults, is_pipeline
from fp4kit.checkpoint.read.config_facts import FP8, QuantFacts
from fp4kit.checkpoint.read.directory import CONFIG, HF_QUANT_CONFIG, PARAMS, Checkpoint, read_json
from fp4kit.checkpoint.read.quantized import (
    Quantized,
    find_quantized_weights,
    is_usable,
    scale_bits,
)
from fp4kit.checkpoint.views.entries import read_factors
from fp4kit.checkpoint.views.fp8 import Fp8View
from fp4kit.checkpoint.views.opened import coded_weights, find_others, unknowns
from fp4kit.checkpoint.views.search import FoundViews
from fp4kit.errors import Fp4kitError
from fp4kit.io.read.source import Source
from fp4kit.io.storage import SCALE_DTYPES, QuantizedEntry

#: Bytes of scales looked at together.
CHUNK = 16 << 20


def structure_faults(
    path: Path, *, unfinished: bool = False, plain: bool = False, excluded: Excluded = nothing
) -> list[str]:
    """Every fault of a checkpoint that can be seen without its source.

    Args:
        path: model directory or .safetensors file, from any tool.
        unfinished: look also at a directory whose conversion has not said that it is done.
        plain: it may hold no quantized weight.
        excluded: whether a tensor was left alone, understood or not.

    Returns:
        One line per fault; empty if there is none.
    """
    try:
        if is_pipeline(path):
            return component_faults(path, lambda name: structure_faults(path / name))
        with Checkpoint(path, unfinished=unfinished) as checkpoint:
            quantized = find_quantized_weights(checkpoint)
            found = None
            if quantized is not None:
                found = find_others(checkpoint, quantized, excluded=excluded)
            others = [] if found is None else coded_weights(checkpoint, found)
            if quantized is None or found is None or not (quantized.entries or others):
                unquantized = f"{path}: holds no quantized weight of a known layout"
                return list(_index_faults(checkpoint)) if plain else [unquantized]
            unread = list(unknowns(checkpoint, quantized, found, excluded))
            unread += _byte_faults(found)
            return unread + list(_faults(checkpoint, quantized, others))
    except Fp4kitError as error:
        return [str(error)]


def _faults(checkpoint: Checkpoint, quantized: Quantized, others: list[str]) -> Iterator[str]:
    """Faults; `others` are weights that are quantized in another way than the layout's."""
    yield from _index_faults(checkpoint)
    yield from _header_faults(checkpoint, quantized, others)
    yield from _config_faults(checkpoint, quantized, others)
    for entry in quantized.entries.values():
        yield from second_faults(entry)
        yield from scale_faults(checkpoint, entry)
    yield from _group_faults(quantized)
    yield from _activation_faults(quantized)
    yield from _pre_scale_faults(checkpoint, quantized)


def _index_faults(checkpoint: Checkpoint) -> Iterator[str]:
    """The index names every tensor (checked on opening); what it says about sizes must hold."""
    if not checkpoint.indexed:
        return
    for name, shard in checkpoint.stale.items():
        yield (
            f"{name}: {shard} holds a copy, but {checkpoint.index.name} names another shard; "
            "engines that load whole files may take either"
        )
    index = checkpoint.index
    metadata = read_json(index).get("metadata")
    if not isinstance(metadata, dict) or "total_size" not in metadata:
        yield f"{index.name}: has no metadata.total_size"
        return
    total = sum(tensor.spec.nbytes for tensor in checkpoint.tensors.values())
    if metadata["total_size"] != total:
        yield (
            f"{index.name}: total_size is {metadata['total_size']}, the tensors take {total} bytes"
        )


def _header_faults(
    checkpoint: Checkpoint, quantized: Quantized, others: list[str]
) -> Iterator[str]:
    if quantized.layout.single_file:
        recorded = set(recorded_layers(checkpoint.headers, checkpoint.path))
        modules = {module_of(name) for name in (*quantized.entries, *others)}
        for module in sorted(modules - recorded):
            yield f"{module}: is quantized, but the header metadata does not say so"
        for module in sorted(recorded - modules):
            yield f"{module}: the header metadata calls it quantized, its weight is not"


def _config_faults(
    checkpoint: Checkpoint, quantized: Quantized, others: list[str]
) -> Iterator[str]:
    facts, layout = quantized.facts, quantized.layout
    where = PARAMS if checkpoint.native else CONFIG
    if layout.single_file:
        return
    if facts is None:
        yield f"{where}: has no quantization_config; engines would load codes as weights"
        return
    for fault in facts.faults:
        yield f"{where}: {fault}"
    if layout.in_hf_quant_config and checkpoint.hf_quant_config is None:
        yield f"{HF_QUANT_CONFIG}: is missing"
    for name, entry in quantized.entries.items():
        if facts.formats and entry.plan.format.name not in facts.formats:
            yield (
                f"{name}: is stored as {entry.plan.format.name}, the config says "
                f"{' and '.join(sorted(facts.formats))}"
            )
    for name in () if facts.fp8 else others:
        dtype = checkpoint.tensors[name].dtype if name in checkpoint.tensors else "quantized"
        yield f"{name}: is {dtype}, the config says {' and '.join(sorted(facts.formats))} only"
    yield from _target_faults(checkpoint, quantized, others)
    yield from _layer_faults(facts, {module_of(name) for name in (*quantized.entries, *others)})
    parts = quantized.parts() | set(others)
    shapes = {n: t.spec.shape for n, t in checkpoint.tensors.items() if n not in parts}
    left = Unquantized(shapes, (*quantized.entries, *others), checkpoint.config)
    modules = [module_of(name) for name in (*quantized.entries, *others)]
    kept = list(dict.fromkeys([*left.stored, *left.built]))
    if checkpoint.native:  # whose readers look for no other names
        modules, kept = ([built_name(name) for name in names] for names in (modules, left.stored))
    if not facts.ignore and layout.name == DeepSeek.name:
        return  # DeepSeek's own list nothing: readers know their models
    for fault in check_ignore(modules, kept, facts.ignore, layout.name):
        yield f"{where}: {fault}"


def _target_faults(
    checkpoint: Checkpoint, quantized: Quantized, others: list[str]
) -> Iterator[str]:
    """Where groups of the config name modules: one that fits a module has its format."""
    targets = {} if quantized.facts is None else quantized.facts.targets
    if not targets:
        return
    stored = {name: entry.plan.format.name for name, entry in quantized.entries.items()}
    stored |= dict.fromkeys(others, FP8)
    patterns = {
        text: IgnoreList([text], METHOD)
        for text in targets
        if text.startswith(EXPRESSION) or text == LINEAR
    }
    models = architectures.models(checkpoint.config, list(stored))
    for name, format in stored.items():
        built = (module_of(text) for model in models for text in model.built(name))
        names = dict.fromkeys([module_of(name), *built])
        said = {one for text in names for one in targets.get(text, ())}
        for text, listed in patterns.items():
            said |= targets[text] if any(map(listed.matches, names)) else frozenset()
        if format not in said:
            what = f"says {' or '.join(sorted(said))}" if said else "has no group for it"
            yield f"{module_of(name)}: is stored as {format}, the config {what}"


def _layer_faults(facts: QuantFacts, modules: set[str]) -> Iterator[str]:
    """Where the config says of every module how it is quantized."""
    for module in sorted(modules - facts.layers.keys()) if facts.layers else ():
        yield f"{module}: is quantized, but quantized_layers does not name it"
    for module in sorted(facts.layers.keys() - modules):
        yield f"{module}: quantized_layers calls it {facts.layers[module]}, its weight is not there"


def _byte_faults(found: FoundViews) -> Iterator[str]:
    """Scales of FP8 weights that are no scales."""
    for view in found.views:
        if isinstance(view, Fp8View):
            try:
                view.check()
            except Fp4kitError as error:
                yield str(error)


def _pre_scale_faults(checkpoint: Checkpoint, quantized: Quantized) -> Iterator[str]:
    """What inputs are multiplied by: readers apply it only where they are told to."""
    facts = quantized.facts
    unsaid = facts is not None and not quantized.layout.single_file and not facts.pre_scaled
    for tensor in quantized.pre_scales.values():
        if unsaid:
            yield f"{tensor.name}: is there, but the config's quant_algo has readers ignore it"
        factors = read_factors(checkpoint, tensor)
        if not (factors > 0).all():
            yield f"{tensor.name}: holds a scale that is not above 0"


def second_faults(entry: QuantizedEntry) -> Iterator[str]:
    """A second-level scale that no decoder can use."""
    if entry.second is None:
        return
    if not is_usable(entry.second):
        value = float(entry.second[0])
        yield f"{entry.names.second}: is {value}; a second-level scale is finite and above 0"


def scale_faults(source: Source, entry: QuantizedEntry) -> Iterator[str]:
    """Scales that are NaN, infinite or negative, as an engine would read them."""
    name = entry.names.scale
    size = source.tensors[name].spec.nbytes
    width = entry.plan.format.scales.bytes
    nans = negative = 0
    dtype = SCALE_DTYPES[entry.plan.format.scale_type]
    for start in range(0, size, CHUNK):
        data = np.empty(min(CHUNK, size - start), np.uint8)
        source.read(name, start, data.data)
        if dtype == "F32":
            values = data.view("<f4")
            nans += int(np.count_nonzero(~np.isfinite(values)))
            negative += int(np.count_nonzero(values < 0))
        elif dtype == "F8_E4M3":
            nans += int(np.count_nonzero((data & 0x7F) == 0x7F))
            negative += int(np.count_nonzero((data > 0x80) & (data < 0xFF)))
        else:
            nans += int(np.count_nonzero(data == 0xFF))
    if nans:
        yield f"{name}: {nans} of {size // width} block scales are NaN"
    if negative:
        yield f"{name}: {negative} of {size // width} block scales are negative"


def _unequal(what: str, scales: Mapping[str, NDArray[np.float32]]) -> Iterator[str]:
    """Scales of weights or modules that engines fuse: they use one for all."""
    if len({scale_bits(value) for value in scales.values()}) > 1:
        values = ", ".join(f"{name} {float(value[0])!r}" for name, value in sorted(scales.items()))
        yield f"fused {what}: {values}"


def _group_faults(quantized: Quantized) -> Iterator[str]:
    for members in groups(quantized.entries).values():
        seconds = {name: quantized.entries[name].second for name in members}
        present = {name: value for name, value in seconds.items() if value is not None}
        yield from _unequal("weights have different second-level scales", present)


def _activation_faults(quantized: Quantized) -> Iterator[str]:
    facts = quantized.facts
    for module, value in quantized.activations.items():
        if not is_usable(value):
            yield (
                f"{module}{quantized.layout.activation_suffix}: is {float(value[0])}; an "
                "activation scale is finite and above 0"
            )
    for members in groups(f"{module}.weight" for module in quantized.activations).values():
        modules = map(module_of, members)
        scales = {module: quantized.activations[module] for module in modules}
        yield from _unequal("modules have different activation scales", scales)
    if facts is None or not facts.activations or quantized.layout.single_file:
        return
    for name, entry in quantized.entries.items():
        if entry.plan.has_second_level and module_of(name) not in quantized.activations:
            yield (
                f"{module_of(name)}{quantized.layout.activation_suffix}: is missing; the config "
                "says that activations are quantized"
            )
