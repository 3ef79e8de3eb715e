# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What makes a quantized file describe itself: the `fp4kit` entry of its header metadata.

The entry is JSON: `{"version": 1, "tensors": {name: {...}}}`, one object per quantized tensor with
its format, recipe or scale rule, logical shape, source element type, scale layout and nibble
order, and its second-level scale in the direction the recipe keeps, bit by bit. Tensors whose
scales were searched say how, and make it version 2: readers that would not know it must not
decode them. Files without the entry but with compressed-tensors' names are understood as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace as with_changes
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4kit.errors import FileFormatError, OptionError, ShapeError, brief, shortened
from fp4kit.formats import BLOCK_FORMATS, DTYPES, SCALE_LAYOUTS, FormatSpec, one_of
from fp4kit.io.coded import coded_entries
from fp4kit.io.read.json_text import strict_json
from fp4kit.io.read.source import Source
from fp4kit.io.storage import (
    PLAIN,
    Logical,
    QuantizedEntry,
    Storage,
    stored_direction,
)
from fp4kit.options import SEARCH_ERRORS
from fp4kit.plan import plan_of
from fp4kit.scheme import as_scheme

METADATA_KEY = "fp4kit"
#: The second one has tensors with a `scale_search`; it is written only where there are some.
VERSION, SEARCH_VERSION = 1, 2
#: Values and keys of an entry, without the sizes of its shape.
_MAX_VALUES = 64
#: Thousands of experts have the same shape, and then the same plan.
shared_plan = lru_cache(4096)(plan_of)


def describe(entries: Iterable[QuantizedEntry]) -> str:
    """The value of the `fp4kit` metadata entry."""
    tensors = {entry.name: entry.facts() for entry in entries}
    searched = any("scale_search" in facts for facts in tensors.values())
    content = {"version": SEARCH_VERSION if searched else VERSION, "tensors": tensors}
    return json.dumps(content, separators=(",", ":"))


def _parse_search(facts: dict[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`search_facts`, as fields of a scheme."""
    if "scale_search" not in facts:
        return {}
    # What files called `error` before Schemes.
    error = facts["error"] if "error" in facts else facts["search_error"]
    found = {name: facts[name] for name in ("scale_search", "e4m3_max")}
    return {**found, "search_error": one_of("search_error", error, SEARCH_ERRORS)}


def _parse_entry(name: str, facts: dict[str, Any]) -> QuantizedEntry:
    """One entry of the metadata; errors are those of the functions that it calls."""
    shape = tuple(facts["shape"])
    if not all(type(size) is int and 0 < size < 2**63 for size in shape):
        raise ShapeError(f"shape {brief(shape)} is not one of a quantized tensor")
    fields = {
        "recipe": facts.get("recipe"),
        "scale_rule": facts.get("scale_rule"),
        "granularity": facts.get("granularity"),
        "scale_layout": one_of("scale_layout", facts["scale_layout"], SCALE_LAYOUTS),
        "nibble_order": facts["nibble_order"],
        **_parse_search(facts),
    }
    # Codes and scales tell by their shapes whether rows were padded.
    plan = plan_of(shape, as_scheme(facts["format"], fields).parts[0], pad=True)
    second = None
    if plan.recipe is not None:
        level = facts["second_level"]
        direction, bits = level["direction"], level["bits"]
        if (
            direction != stored_direction(plan.recipe)
            or not isinstance(bits, str)
            or len(bits) != 8
        ):
            raise OptionError(
                f"second level {brief(level)} does not belong to recipe {plan.recipe.name}"
            )
        if re.fullmatch("[0-9a-f]{8}", bits) is None:
            raise OptionError(f"second level {brief(level)} is no 32-bit pattern")
        second = np.array([int(bits, 16)], np.uint32).view(np.float32)
    return QuantizedEntry(name, shape, one_of("dtype", facts["dtype"], DTYPES), plan, second)


def _reason(error: Exception) -> str:
    """What was wrong with an entry, in few words."""
    text = f"{brief(error.args[0])} is missing" if isinstance(error, KeyError) else str(error)
    return shortened(text, 300)


def _from_metadata(source: Source, text: str) -> list[QuantizedEntry]:
    where = f"{source.path}: metadata {METADATA_KEY!r}"
    # Entries' arrays stand in the file: that bounds how much there is to say of them.
    values = sum(_MAX_VALUES + len(tensor.spec.shape) for tensor in source.tensors.values())
    try:
        content = strict_json(text, max_values=_MAX_VALUES + values)
        version, tensors = content["version"], content["tensors"].items()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileFormatError(f"{where}: damaged: {_reason(error)}") from None
    if type(version) is not int or version not in (VERSION, SEARCH_VERSION):
        raise FileFormatError(
            f"{where}: version {brief(version)} is not known, this fp4kit reads {VERSION} and "
            f"{SEARCH_VERSION}; update fp4kit"
        )
    entries = []
    for name, facts in tensors:
        try:
            entries.append(_parse_entry(name, facts))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise FileFormatError(
                f"{where}: tensor {brief(name)}: damaged: {_reason(error)}"
            ) from None
    return entries


def entries_by_names(
    source: Source,
    storage: Storage = PLAIN,
    recipe: str = "compressed-tensors",
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> list[QuantizedEntry]:
    """Quantized tensors recognized by names, element types and shapes; no data is read.

    Args:
        source: file or checkpoint.
        storage: how their parts are named and laid out.
        recipe: order of operations by which NVFP4 is decoded.
        shapes: logical shapes of tensors whose rows are padded in the file.
    """
    entries = []
    for scale in source.tensors.values():
        name = storage.scaled_name(scale.name)
        if name is None:
            continue
        for spec in BLOCK_FORMATS.values():
            entry = _by_names(source, storage, name, spec, recipe, (shapes or {}).get(name))
            if entry is not None and scale.spec == entry.parts[1]:
                entries.append(entry)
                break
    return entries


def _by_names(
    source: Source,
    storage: Storage,
    name: str,
    spec: FormatSpec,
    recipe: str,
    shape: tuple[int, ...] | None,
) -> QuantizedEntry | None:
    """What tensor `name` would be in a format, if its codes are there and fit."""
    packed = source.tensors.get(storage.part_names(name, spec).packed)
    if packed is None or packed.spec.dtype != storage.code_spec("", (0,), spec).dtype:
        return None
    if not packed.spec.shape or 0 in packed.spec.shape:
        return None
    *lead, width = packed.spec.shape
    stored = (*lead, width * storage.word_bytes * spec.codes_per_byte)
    shape = shape or stored
    if shape[-1] % spec.block_size:
        return None
    scheme = as_scheme(
        spec.name,
        {
            "recipe": recipe if spec.has_second_level else None,
            "second_level": None if storage.second_suffix else "none",
            "scale_layout": storage.scale_layout or "linear",
            "nibble_order": storage.nibble_order or "low_first",
        },
    )
    plan = shared_plan(shape, scheme.parts[0])
    entry = QuantizedEntry(name, shape, "bfloat16", plan, storage=storage)
    return entry if packed.spec == entry.parts[0] else None


def _check_parts(source: Source, entry: QuantizedEntry) -> None:
    """Refuses an entry whose parts are missing or of another type or shape."""
    where = f"{source.path}: tensor {brief(entry.name)}"
    for part in entry.parts:
        found = source.tensors.get(part.name)
        if found is None:
            lost = "; without it every value is off by a factor" if part.dtype == "F32" else ""
            raise FileFormatError(f"{where}: its part {brief(part.name)} is missing{lost}")
        spec = found.spec
        if part.name == entry.names.second and spec.dtype == part.dtype and spec.nbytes == 4:
            continue  # tools disagree on [] and [1]
        if spec != part:
            raise FileFormatError(
                f"{where}: {brief(part.name)} is {spec.dtype} {brief(list(spec.shape))}, expected "
                f"{part.dtype} {brief(list(part.shape))}"
            )


def _stored_second(source: Source, entry: QuantizedEntry) -> NDArray[np.float32] | None:
    """The second level that stands in the file, None for formats without one."""
    if entry.names.second is None:
        return None
    stored = np.empty(1, np.float32)
    source.read(entry.names.second, 0, stored.view(np.uint8).data)
    return stored


def _check_second(source: Source, entry: QuantizedEntry) -> None:
    """Refuses a file whose second level is not what its description says."""
    stored = _stored_second(source, entry)
    if stored is None:
        return
    if stored.view(np.uint32)[0] != entry.stored_second().view(np.uint32)[0]:
        raise FileFormatError(
            f"{source.path}: tensor {brief(entry.name)}: {brief(entry.names.second)} and the "
            f"metadata {METADATA_KEY!r} disagree: one of them was changed after quantizing"
        )


def complete(source: Source, entry: QuantizedEntry) -> QuantizedEntry:
    """An entry recognized by names, with its parts checked and its second level read.

    Raises:
        FileFormatError: if a part is missing or does not fit.
    """
    _check_parts(source, entry)
    return with_changes(entry, second=_stored_second(source, entry))


def find_quantized(source: Source) -> list[QuantizedEntry]:
    """Every quantized tensor of a file, checked against the tensors it is stored as.

    Raises:
        FileFormatError: if the description is damaged, or a part is missing or does not fit.
    """
    if source.coded:
        return coded_entries(source)
    text = source.metadata.get(METADATA_KEY)
    if text is None:
        return [complete(source, entry) for entry in entries_by_names(source)]
    entries = _from_metadata(source, text)
    for entry in entries:
        _check_parts(source, entry)
        _check_second(source, entry)
    return entries


def orphan_codes(source: Source, entries: Iterable[QuantizedEntry]) -> list[str]:
    """Names that look like codes of a quantized tensor but belong to none of `entries`."""
    known = {entry.names.packed for entry in entries}
    return [
        name
        for name, tensor in source.tensors.items()
        if name not in known
        and tensor.spec.dtype in ("U8", "F8_E4M3", "F8_E5M2")
        and f"{name.removesuffix('_packed')}_scale" in source.tensors
    ]


def logical_tensors(source: Source, entries: Iterable[QuantizedEntry]) -> dict[str, Logical]:
    """Logical tensors by name, in file order: a :class:`QuantizedEntry` or a source tensor."""
    owner = {part.name: entry for entry in entries for part in entry.parts}
    logical: dict[str, Logical] = {}
    for name, tensor in source.tensors.items():
        entry = owner.get(name)
        key, value = (entry.name, entry) if entry is not None else (name, tensor)
        if logical.setdefault(key, value) is not value:
            name = brief(key)
            raise FileFormatError(f"{source.path}: both {name} and a quantized {name} exist")
    return logical
