# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Planning how a checkpoint is quantized: every tensor is decided from headers and JSON alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fp4kit.checkpoint.layouts import Layout, Summary, module_of
from fp4kit.checkpoint.models import mistral as mistral_native
from fp4kit.checkpoint.models.fusion import fusion_group, groups, settle
from fp4kit.checkpoint.options import DYNAMIC, UNCALIBRATED, CheckpointOptions
from fp4kit.checkpoint.read.activations import read_amaxes
from fp4kit.checkpoint.read.directory import Checkpoint, listed
from fp4kit.checkpoint.views.codes import Codes
from fp4kit.checkpoint.views.logical import LogicalSource
from fp4kit.checkpoint.views.opened import open_logical
from fp4kit.checkpoint.views.stacked import stack
from fp4kit.errors import FileFormatError, OptionError
from fp4kit.formats import DTYPES, SECOND_LEVEL_RANGE, get_format
from fp4kit.io.quantize_plan import SecondLevel, TensorPlan, refuse_collisions, refuse_nothing
from fp4kit.io.read.source import SourceTensor
from fp4kit.io.tensor_names import unknown_beside

from .checkpoint_plan import CheckpointPlan, WorkUnit, check_source, pack
from .expert_restore import note
from .ignored import ignored_modules, unknown_type_warnings
from .model_dtype import model_dtype, state_decoded_dtype
from .moments import moments_of, open_moments
from .rules import Rules, is_embedding, setting
from .schemes import Schemes, check_layout, format_groups

#: Element type of a kept weight whose stored form (FP8, MXFP4) no engine reads beside the new one.
DECODED_DTYPE = "bfloat16"


def uncalibrated_amax(format: str) -> float:
    """The activation amax whose scale is 1.0 in both directions."""
    spec = get_format(format)
    return spec.element.max if spec.has_scale_grid else float(SECOND_LEVEL_RANGE)


def _reasons(
    source: LogicalSource, layout: Layout, schemes: Schemes, rules: Rules, config: dict[str, Any]
) -> dict[str, str]:
    """Why each tensor is kept; "" for those that are quantized, fusion groups settled."""
    tied = bool(setting(config, "tie_word_embeddings"))
    reasons = {}
    for name, tensor in source.tensors.items():
        shape = tensor.spec.shape
        reason = rules.reason_to_keep(name, shape, tensor.dtype)
        fused = source.fused_of(name)
        if not reason and fused is not None and rules.excludes(fused.name):
            reason = f"excluded with {fused.name}"
        if not reason and tied and name.rpartition("lm_head")[1]:
            reason = "tied to the embedding"
        if not reason and source.checkpoint.native:
            reason = mistral_native.reason_to_keep(name)
        if not reason:
            reason = layout.reason_to_keep(name)
        if not reason and 0 in shape:
            reason = "empty"
        if not reason and shape[-1] % schemes.block:
            reason = f"last axis {shape[-1]} is not a multiple of {schemes.block}"
        reasons[name] = reason
    # An engine's quantized layer has no place for what it may have to compute with.
    chosen = [name for name, reason in reasons.items() if not reason]
    specs = [scheme.spec for scheme in schemes.distinct]
    taken = {
        part
        for name in chosen
        for spec in specs
        for part in layout.storage.part_names(name, spec).all()
    }
    for other, module in unknown_beside(source.tensors, chosen, taken).items():
        reasons[f"{module}.weight"] = f"{other} beside it is not understood"
    settled = settle(reasons, groups(reasons))
    for name, reason in settled.items():
        settled[name] = reason or schemes.reason_to_keep(name, source.tensors[name].spec.shape)
    return settle(settled, groups(settled))


def _units(
    source: LogicalSource,
    codes: dict[str, Codes],
    works: dict[str, TensorPlan],
    fused: dict[str, list[str]],
) -> list[WorkUnit]:
    """Works in output order; the members of a group stand where the first of them does."""
    group_of = {name: key for key, names in fused.items() for name in names}
    units: list[WorkUnit] = []
    done: set[str] = set()
    for name in source.tensors:
        key = group_of.get(name, "")
        if works[name].entry is None or not key:
            units.append(WorkUnit([works[name]], codes=_codes(codes, [works[name]])))
        elif key not in done:
            done.add(key)
            members = [works[member] for member in fused[key]]
            shared = SecondLevel()
            for member in members:
                member.second = shared
            units.append(WorkUnit(members, key, _codes(codes, members)))
    return units


def _codes(codes: dict[str, Codes], works: list[TensorPlan]) -> list[Codes]:
    """The codes of every work, if all are quantized and have some."""
    if any(work.entry is None or work.tensor.name not in codes for work in works):
        return []
    return [codes[work.tensor.name] for work in works]


def _rejoin(source: LogicalSource, reasons: dict[str, str]) -> None:
    """Leaves fused experts fused where none of them is quantized, nor decoded one by one."""
    folders: dict[str, list[str]] = {}
    for name, view in source.views.items():
        folders.setdefault(view.consumed[0].rpartition(".")[0], []).append(name)
    for names in folders.values():
        if all(reasons[name] and not source.is_decoded(name) for name in names):
            first = reasons[names[0]]
            for stored in source.rejoin(names):
                reasons[stored] = first
            for name in names:
                del reasons[name]


def _kept(source: LogicalSource, tensor: SourceTensor, reason: str, dtype: str) -> TensorPlan:
    """A tensor that is carried through; one that a view decodes gets the model's element type."""
    if source.is_decoded(tensor.name) and tensor.dtype != dtype:
        tensor = source.cast(tensor.name, dtype)
    return TensorPlan(tensor, "keep", reason)


def embedding_modules(works: dict[str, TensorPlan]) -> tuple[str, ...]:
    """Modules of embeddings, which are never quantized."""
    return tuple(
        module_of(name) for name, work in works.items() if work.entry is None and is_embedding(name)
    )


def _amax(module: str, value: object, path: object) -> float:
    number = value.get("input_amax") if isinstance(value, dict) else value
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise FileFormatError(f"{path}: activation amax of {module!r} is no number")
    if not math.isfinite(number) or number < 0:
        raise FileFormatError(
            f"{path}: activation amax of {module!r} is {number}; it must be finite and not negative"
        )
    return float(number)


def activation_amaxes(
    options: CheckpointOptions, schemes: Schemes, modules: Iterable[str]
) -> dict[str, float]:
    """The activation amax of each module, modules that an engine fuses sharing the largest.

    Args:
        schemes: what each weight gets.
        options: weights only, `uncalibrated`, or a JSON file `{module: amax}` (or
            `{module: {"input_amax": amax}}`), or moments that `calibrate` wrote.
        modules: the modules whose weights are quantized.

    Returns:
        Module to amax; empty for weights only.
    """
    wanted = list(modules)
    if options.activations in (None, DYNAMIC):
        return {}
    if options.activations == UNCALIBRATED:
        chosen = {module: schemes.of(f"{module}.weight") for module in wanted}
        return {
            module: uncalibrated_amax(scheme.format)
            for module, scheme in chosen.items()
            if scheme is not None
        }
    (path,) = options.files
    given = {name: _amax(name, value, path) for name, value in read_amaxes(path).items()}
    missing = [module for module in wanted if module not in given]
    if missing:
        raise OptionError(
            f"{path}: has no activation amax for {len(missing)} of {len(wanted)} modules: "
            f"{listed(missing)}; add them, or exclude these modules"
        )
    shared: dict[str, float] = {}
    for module in wanted:
        key = fusion_group(f"{module}.weight") or module
        shared[key] = max(shared.get(key, 0.0), given[module])
    return {module: shared[fusion_group(f"{module}.weight") or module] for module in wanted}


def _weigh(works: Mapping[str, TensorPlan], options: CheckpointOptions) -> list[str]:
    """Gives weights that are quantized the moments of their inputs; says which have none.

    Raises:
        OptionError: for moments of another model, or where nothing is searched.
    """
    if options.moments is None:
        return []
    chosen = [work for work in works.values() if work.entry is not None]
    moments, warnings = moments_of(
        open_moments(Path(options.moments)), works, [work.tensor for work in chosen]
    )
    for work in chosen:
        work.weigh(moments.columns(module_of(work.tensor.name)))
    if options.choices is None and all(work.weights is None for work in chosen):
        raise OptionError(
            f"moments: {options.moments}: weigh the errors that a sweep of scales compares, and "
            "there is none; choose scale_search='sweep', or a plan"
        )
    return warnings


def _warnings(plan: CheckpointPlan) -> list[str]:
    """What a user should hear before trusting the result."""
    said = []
    if plan.summary.activations == UNCALIBRATED:
        said.append(
            "activation scales are uncalibrated: all are 1.0, which fixes every activation amax at "
            f"{uncalibrated_amax(plan.summary.format):.0f}"
        )
    stacked = [
        work
        for work in plan.works
        if work.entry is None and work.tensor.dtype in DTYPES and len(work.tensor.spec.shape) > 2
    ]
    if stacked:
        said.append(
            f"{sum(work.tensor.spec.nbytes for work in stacked)} bytes of {len(stacked)} tensors "
            "with three or more dimensions are left unquantized: "
            f"{listed([work.tensor.name for work in stacked])}"
        )
    if not any(work.entry is not None for work in plan.works):
        said.append("no tensor is quantized; all are kept")
    said += _reader_warnings(plan)
    said += unknown_type_warnings(plan.source.checkpoint, plan.layout)
    return said


def _reader_warnings(plan: CheckpointPlan) -> list[str]:
    """What a reader makes of the layout that a user may not expect."""
    checkpoint, layout = plan.source.checkpoint, plan.layout
    if layout is not None and not layout.diffusion and checkpoint.is_diffusion:
        return [
            f"this is a component of a diffusion model, and no reader of such models knows layout "
            f"{layout.name}: diffusers will not load it. ComfyUI reads --layout comfy"
        ]
    return state_decoded_dtype(plan)


def plan_quantize(checkpoint: Checkpoint, options: CheckpointOptions) -> CheckpointPlan:
    """Decides about every tensor of a checkpoint; no data is read.

    Args:
        checkpoint: what to convert.
        options: how.

    Raises:
        OptionError: for unknown or contradictory options, a pattern that matches nothing, or fused
            experts whose orientation is not clear.
        FileFormatError: if the checkpoint is quantized already in a way that is not a source, or
            names would collide.
    """
    schemes = Schemes(options)
    layout = check_layout(options, schemes)
    checkpoint.refuse_adapter()
    check_source(checkpoint, layout)
    config = checkpoint.config
    rules = Rules(options.include, options.exclude, config, checkpoint.tensors)
    opened = open_logical(checkpoint, options, rules.excludes)
    source, codes = opened.source, opened.codes
    reasons = _reasons(source, layout, schemes, rules, config)
    rules.check_used(source.tensors)
    _rejoin(source, reasons)
    dtype = model_dtype(config) or DECODED_DTYPE
    weights = [name for name, reason in reasons.items() if not reason]
    layout.check_names(weights, config)
    stacks = layout.stacks(weights, config)
    if stacks:
        source, codes = stack(source, codes, stacks)
        singles = {member for members in stacks.values() for member in members}
        reasons = {name: why for name, why in reasons.items() if name not in singles}
        reasons |= dict.fromkeys(stacks, "")
        weights = [name for name in weights if name not in singles] + list(stacks)
    amaxes = activation_amaxes(options, schemes, [module_of(name) for name in weights])
    works: dict[str, TensorPlan] = {}
    for name, tensor in list(source.tensors.items()):
        if reasons[name]:
            works[name] = _kept(source, tensor, reasons[name], dtype)
            continue
        scheme = schemes.of(name)
        assert scheme is not None
        shape, amax = tensor.spec.shape, amaxes.get(module_of(name))
        entry = layout.entry(name, shape, tensor.dtype, scheme, amax)
        works[name] = TensorPlan(tensor, "quantize", tensor.note, entry=entry)
    unmoved = _weigh(works, options)
    refuse_collisions(checkpoint.path, works.values())
    fused = {
        key: [name for name in names if works[name].entry is not None]
        for key, names in groups(works).items()
    }
    fused = {key: names for key, names in fused.items() if len(names) > 1}
    calibration = options.activations
    if options.files:
        calibration = "calibrated"
    units = _units(source, codes, works, fused)
    first = layout.laid_out(schemes.distinct[0])
    plan = CheckpointPlan(
        source=source,
        options=options,
        layout=layout,
        shards=pack(units, checkpoint, options.max_shard_size),
        summary=Summary(
            first.format,
            ignored_modules(works, checkpoint, layout),
            calibration,
            embedding_modules(works),
            granularity=first.granularity,
            mixed=format_groups(works, checkpoint, layout),
        ),
        dropped=opened.dropped,
        groups=fused,
        header=note(source),
    )
    idle = rules.idle(reasons)
    if not options.allow_nothing:
        refuse_nothing(checkpoint.path, plan.works, idle, padding=False)
    plan.warnings = idle + unmoved + _warnings(plan)
    if options.cast is not None:
        # It would have the result loaded as what it no longer is.
        stale = [key for key in ("dtype", "torch_dtype") if config.get(key) == "float64"]
        plan.config |= dict.fromkeys(stale, options.cast)
    return plan
