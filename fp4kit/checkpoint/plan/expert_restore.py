# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Which single experts are put together again once they are plain numbers.

Single experts do not say that the model's own form is one tensor of all of them, nor how it lies.
So what fp4kit separated is noted in the header of every shard, whichever shards the parts are in.
Files of other tools hold no such note: there the model type tells, as a reader that knows fused
experts only would leave them random, without an error. A part that is missing or does not fit is an
error for the same reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fp4kit.checkpoint.models.expert_types import (
    EXPERT_KEYS,
    EXPERTS_LAYOUTS,
    FUSED_NAMES,
    OPTION,
    RESTORED_LAYOUTS,
    SINGLE,
    config_sizes,
    option_layout,
    read_layout,
    reading,
)
from fp4kit.checkpoint.models.experts import (
    PROJECTIONS,
    ExpertsLayout,
    FusedTensor,
    expert_name,
    fused_bias,
    fused_weight,
)
from fp4kit.checkpoint.read.directory import Checkpoint, listed
from fp4kit.checkpoint.views.logical import LogicalSource
from fp4kit.errors import FileFormatError
from fp4kit.formats import one_of
from fp4kit.io.read.json_text import parse_metadata
from fp4kit.io.read.source import Source

#: Header metadata: the fused tensors that single experts were made from.
EXPERTS_KEY = "fp4kit_experts"
VERSION = 1
WAY_OUT = f"pass {OPTION} {SINGLE} to leave them single"
_EXPERT = re.compile(
    r"(?P<prefix>.+)\.(?P<expert>\d{1,6})\."
    r"(?P<projection>gate_proj|up_proj|down_proj)\.(?P<kind>weight|bias)"
)
Shapes = Mapping[str, tuple[int, ...]]
#: Expert to projection to shape.
Experts = dict[int, dict[str, tuple[int, ...]]]
#: `weight` and `bias` to the experts that have one.
Kinds = dict[str, Experts]


def note(source: LogicalSource) -> dict[str, str]:
    """Header metadata of a checkpoint whose experts are single from now on.

    Returns:
        The note under its key: an empty one where experts were single already and the model type
        does not say so. Nothing for other models.
    """
    checkpoint = source.checkpoint
    fused = [view.fused for view in source.views.values() if view.fused is not None]
    # Of a quantized checkpoint that is quantized further.
    fused += [old for old in recorded(checkpoint) if next(old.parts()).name in source.tensors]
    if fused or EXPERTS_KEY in checkpoint.metadata:
        return {EXPERTS_KEY: describe(dict.fromkeys(fused))}
    kind = checkpoint.config.get("model_type")
    if not isinstance(kind, str) or reading(checkpoint.config) == "single":
        return {}
    plain = {
        name: tensor.spec.shape
        for name, tensor in source.tensors.items()
        if name not in source.views
    }
    return {EXPERTS_KEY: describe([])} if _experts(plain) else {}


def describe(fused: Iterable[FusedTensor]) -> str:
    """The value of the header metadata."""
    groups: dict[tuple[tuple[int, ...], ExpertsLayout], list[str]] = {}
    for tensor in fused:
        groups.setdefault((tensor.shape, tensor.layout), []).append(tensor.name)
    tensors = [
        {
            "shape": list(shape),
            "transposed": layout.transposed,
            "interleaved": layout.interleaved,
            "names": names,
        }
        for (shape, layout), names in groups.items()
    ]
    return json.dumps({"version": VERSION, "tensors": tensors}, separators=(",", ":"))


def _parse_group(group: dict[str, Any]) -> Iterator[FusedTensor]:
    """The tensors of one entry."""
    shape = tuple(group["shape"])
    if len(shape) not in (2, 3) or not all(type(size) is int and size > 0 for size in shape):
        raise ValueError(f"shape {shape} is not one of fused experts")
    layout = ExpertsLayout(group["transposed"], group["interleaved"])
    if not all(type(value) is bool for value in (layout.transposed, layout.interleaved)):
        raise ValueError("transposed and interleaved are true or false")
    for name in group["names"]:
        tensor = FusedTensor(str(name), shape, layout)
        found = fused_bias(str(name)) if tensor.is_bias else fused_weight(str(name))
        if found is None:
            raise ValueError(f"{name!r} is no name of fused experts")
        if found[1] == "gate_up_proj" and tensor.outputs % 2:
            raise ValueError(f"{name!r} of shape {list(shape)} is no gate and up")
        yield tensor


def recorded(source: Source) -> list[FusedTensor]:
    """The fused tensors that the header of a checkpoint notes."""

    def read(content: Any) -> tuple[object, list[FusedTensor]]:
        version = content["version"]
        groups = content["tensors"] if version == VERSION else ()
        return version, [tensor for group in groups for tensor in _parse_group(group)]

    where = f"{source.path}: metadata {EXPERTS_KEY!r}"
    found = parse_metadata(source.metadata, EXPERTS_KEY, source.path, read)
    version, tensors = found or (VERSION, [])
    if version != VERSION:
        raise FileFormatError(
            f"{where}: version {version!r} is not known, this fp4kit reads {VERSION}; update fp4kit"
        )
    names = {tensor.name for tensor in tensors}
    if len(names) < len(tensors):
        raise FileFormatError(f"{where}: damaged: names a tensor twice")
    return tensors


def find_fused(
    checkpoint: Checkpoint, tensors: Shapes, experts_layout: str | None
) -> tuple[list[FusedTensor], list[str]]:
    """Decides which experts of a quantized checkpoint are put together, and how.

    Args:
        checkpoint: where headers and config.json are.
        tensors: name and logical shape of everything that it holds in plain numbers or decoded.
        experts_layout: the user's word, one of RESTORED_LAYOUTS, or None. It decides where no
            header does; `single` always does.

    Returns:
        The tensors that they are put together to, and what the user should know.
    """
    if experts_layout is not None:
        one_of("experts_layout", experts_layout, RESTORED_LAYOUTS)
    if experts_layout == SINGLE:
        return [], []
    modules = _experts(tensors)
    fused = [
        tensor for tensor in recorded(checkpoint) if _is_there(checkpoint, tensors, modules, tensor)
    ]
    joined = {tensor.prefix for tensor in fused}
    left = {
        prefix: kinds
        for prefix, kinds in modules.items()
        if prefix not in joined and "weight" in kinds and prefix.rpartition(".")[2] == "experts"
    }
    if not left or (EXPERTS_KEY in checkpoint.metadata and experts_layout is None):
        return fused, []
    known = reading(checkpoint.config)
    if experts_layout is None and known != "fused":
        return fused, [] if known else _unknown(checkpoint, list(left))
    layout = option_layout(experts_layout) if experts_layout else read_layout(checkpoint.config)
    for prefix, kinds in left.items():
        for kind, experts in kinds.items():
            fused += _fuse(checkpoint, prefix, kind, experts, layout)
    return fused, []


def _is_there(
    checkpoint: Checkpoint, tensors: Shapes, modules: dict[str, Kinds], fused: FusedTensor
) -> bool:
    """Whether single experts of a noted tensor are there."""
    kinds = modules.get(fused.prefix, {})
    experts = kinds.get("bias" if fused.is_bias else "weight", {})
    if not any(found.keys() & set(PROJECTIONS[fused.role]) for found in experts.values()):
        return False
    where = f"{checkpoint.path}: {fused.name!r} was separated into experts"
    if len(experts) != fused.shape[0]:
        raise FileFormatError(
            f"{where}: the header says {fused.shape[0]}, {len(experts)} are there; complete the "
            f"checkpoint, or {WAY_OUT}"
        )
    for part in fused.parts():
        shape = tensors.get(part.name)
        if shape != fused.part_shape(part):
            raise FileFormatError(
                f"{where}: {part.name!r} {'is missing' if shape is None else f'is {list(shape)}'}, "
                f"the header says {list(fused.part_shape(part))}; complete the checkpoint, or "
                f"{WAY_OUT}"
            )
    if fused.name in tensors:
        raise FileFormatError(f"{where}, and is stored as well; remove one of the two forms")
    return True


def _experts(tensors: Shapes) -> dict[str, Kinds]:
    """Single experts by the name of the module of all."""
    found: dict[str, Kinds] = {}
    for name, shape in tensors.items():
        match = _EXPERT.fullmatch(name)
        # `experts.03` would get another name back.
        if match is not None and str(int(match["expert"])) == match["expert"]:
            experts = found.setdefault(match["prefix"], {}).setdefault(match["kind"], {})
            experts.setdefault(int(match["expert"]), {})[match["projection"]] = shape
    return found


def _unknown(checkpoint: Checkpoint, prefixes: list[str]) -> list[str]:
    """What to say about experts of a model type that is not known."""
    kind = checkpoint.config.get("model_type")
    if not isinstance(kind, str) or "auto_map" in checkpoint.config:
        return []  # no reader of transformers' own
    return [
        f"experts stay single in {len(prefixes)} modules ({listed(prefixes)}): model type {kind} "
        f"is not known to this version. If its reader has them fused, pass {OPTION} "
        f"{'|'.join(EXPERTS_LAYOUTS)}, or they will be random; {OPTION} {SINGLE} says that it has "
        "not"
    ]


def _fuse(
    checkpoint: Checkpoint, prefix: str, kind: str, experts: Experts, layout: ExpertsLayout
) -> list[FusedTensor]:
    """The fused tensors of one module."""
    count = len(experts)
    where = f"{checkpoint.path}: {prefix}"
    wanted = config_sizes(checkpoint.config, EXPERT_KEYS)
    if set(experts) != set(range(count)) or (wanted and count not in wanted):
        said = f", config.json says {sorted(wanted)}" if wanted else ""
        raise FileFormatError(
            f"{where}: holds {count} experts, the last is {max(experts)}{said}; its reader "
            f"has them fused and needs all. Complete the checkpoint, or {WAY_OUT}"
        )
    roles = {
        role: members
        for role, members in PROJECTIONS.items()
        if kind == "weight" or any(name in found for found in experts.values() for name in members)
    }
    fused = []
    sizes = {}
    for role, members in roles.items():
        shapes = {
            expert_name(prefix, expert, name, kind): experts[expert].get(name)
            for expert in range(count)
            for name in members
        }
        shape = next(iter(shapes.values()))
        odd = next((name for name, found in shapes.items() if found != shape or not found), None)
        if odd is not None or shape is None or len(shape) != (2 if kind == "weight" else 1):
            raise FileFormatError(
                f"{where}: {odd!r} is missing, or has another shape than the other experts; its "
                f"reader has them fused. Complete the checkpoint, or {WAY_OUT}"
            )
        sizes[role] = shape
        out = shape[0] * len(members)
        axes = (out,) if kind == "bias" else (out, shape[1])
        if layout.transposed:
            axes = axes[::-1]
        fused.append(
            FusedTensor(_fused_name(checkpoint, prefix, role, kind), (count, *axes), layout)
        )
    if kind == "weight" and sizes["gate_up_proj"] != sizes["down_proj"][::-1]:
        raise FileFormatError(
            f"{where}: gate_proj {list(sizes['gate_up_proj'])} and down_proj "
            f"{list(sizes['down_proj'])} are no experts; {WAY_OUT}"
        )
    return fused


def _fused_name(checkpoint: Checkpoint, prefix: str, role: str, kind: str) -> str:
    """Name of a fused tensor as the model type's files have it."""
    if kind == "bias":
        return f"{prefix}.{role}_bias"
    names = FUSED_NAMES.get(str(checkpoint.config.get("model_type")), {})
    return f"{prefix}.{names.get(role, role)}"
