# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Planning how an FP8 checkpoint of any dialect changes its layout, codes staying verbatim.

Scales keep their values as float32. Where the result has a finer granularity than the source, the
one scale of a tensor stands for each of its rows or blocks.
"""

from __future__ import annotations

from dataclasses import replace as with_changes

import numpy as np

from fp4kit.checkpoint.layouts import Layout, Summary, module_of
from fp4kit.checkpoint.layouts.base import FP8_INPUT_SUFFIX, STATIC
from fp4kit.checkpoint.options import DYNAMIC, ConvertOptions
from fp4kit.checkpoint.read.directory import Checkpoint, listed
from fp4kit.checkpoint.read.quantized import is_usable
from fp4kit.checkpoint.views.codes import Fp8Codes
from fp4kit.checkpoint.views.opened import Opened
from fp4kit.errors import FileFormatError, OptionError
from fp4kit.formats import GRANULARITIES
from fp4kit.io.containers import TensorSpec
from fp4kit.io.quantize_plan import TensorPlan, refuse_collisions
from fp4kit.io.storage import Constant, QuantizedEntry
from fp4kit.scheme import Scheme, as_scheme

from .checkpoint_plan import CheckpointPlan, WorkUnit, check_source, in_stored_order, pack
from .ignored import ignored_modules
from .quantize import embedding_modules

#: Activation scales of a checkpoint, by module.
Inputs = dict[str, bytes]


def fp8_codes(opened: Opened) -> dict[str, Fp8Codes]:
    """The FP8 weights of a checkpoint whose scales are those of a granularity."""
    return {name: codes for name, codes in opened.codes.items() if isinstance(codes, Fp8Codes)}


def _scheme(checkpoint: Checkpoint, codes: dict[str, Fp8Codes], layout: Layout) -> Scheme:
    """The scheme that all weights fit."""
    formats = sorted({each.view.format for each in codes.values()})
    common = frozenset.intersection(*(each.view.granularities for each in codes.values()))
    # The coarsest is what the source has; all scales of a finer one would be the same.
    fitting = [name for name in GRANULARITIES if name in common and name in layout.granularities]
    if len(formats) > 1 or formats[0] not in layout.formats:
        raise OptionError(
            f"{checkpoint.path}: holds {' and '.join(formats)}; layout {layout.name} takes "
            f"{' or '.join(layout.formats)} only"
        )
    if not fitting:
        held = " or ".join(sorted(common)) or "of several kinds"
        raise OptionError(
            f"{checkpoint.path}: holds fp8 with granularity {held}; layout {layout.name} takes "
            f"{' or '.join(layout.granularities)} only"
        )
    return as_scheme(formats[0], {"granularity": fitting[0]})


def _stored_inputs(checkpoint: Checkpoint, codes: dict[str, Fp8Codes]) -> Inputs:
    """The activation scale of each module that has one."""
    found = {}
    for module in map(module_of, codes):
        tensor = checkpoint.tensors.get(f"{module}{FP8_INPUT_SUFFIX}")
        if tensor is None or tensor.spec.dtype != "F32" or tensor.spec.nbytes != 4:
            continue
        value = np.empty(1, np.float32)
        checkpoint.read(tensor.name, 0, value.view(np.uint8).data)
        if not is_usable(value):
            raise FileFormatError(
                f"{checkpoint.path}: tensor {tensor.name!r} is {float(value[0])}; an activation "
                "scale is finite and above 0: repair the checkpoint"
            )
        found[module] = value.astype("<f4").tobytes()
    return found


def _inputs(
    opened: Opened, codes: dict[str, Fp8Codes], scheme: Scheme, layout: Layout
) -> tuple[str | None, Inputs]:
    """How readers of the result take inputs, and the activation scales that they need."""
    checkpoint = opened.source.checkpoint
    facts = None if opened.quantized is None else opened.quantized.facts
    given = None if facts is None else facts.fp8_inputs
    stored = _stored_inputs(checkpoint, codes)
    missing = [f"{name}{FP8_INPUT_SUFFIX}" for name in map(module_of, codes) if name not in stored]
    if STATIC in layout.fp8_inputs and scheme.granularity != "block" and given == STATIC:
        if missing:
            raise FileFormatError(
                f"{checkpoint.path}: {len(missing)} of {len(codes)} activation scales are missing: "
                f"{listed(missing)}; the checkpoint is incomplete"
            )
        return STATIC, stored
    if layout.fp8_inputs == (STATIC,):
        raise OptionError(
            f"{checkpoint.path}: readers of fp8 in layout {layout.name} take a scale of each "
            "module's input, and the source has none; quantize the original checkpoint with "
            "--activations"
        )
    dynamic = given is not None and DYNAMIC in layout.fp8_inputs
    return DYNAMIC if dynamic else None, {}


def _check(checkpoint: Checkpoint, opened: Opened, layout: Layout) -> dict[str, Fp8Codes]:
    codes, source = fp8_codes(opened), opened.source
    others = [name for name in source.tensors if source.is_decoded(name) and name not in codes]
    if others:
        raise OptionError(
            f"{checkpoint.path}: holds weights that are no 2-D FP8 under scales of a tensor, of "
            f"rows or of blocks ({len(others)}: {listed(others)}); use `fp4kit dequantize`, then "
            "`fp4kit quantize`"
        )
    if opened.quantized is not None and opened.quantized.layout is layout:
        raise OptionError(f"{checkpoint.path}: is in layout {layout.name} already")
    check_source(checkpoint, layout)
    return codes


def plan_convert_fp8(
    checkpoint: Checkpoint, options: ConvertOptions, opened: Opened, layout: Layout
) -> CheckpointPlan:
    """Decides about every tensor of an FP8 checkpoint.

    Raises:
        OptionError: if the layout does not hold what the checkpoint does.
        FileFormatError: if activation scales are missing or no scales.
    """
    codes = _check(checkpoint, opened, layout)
    scheme = _scheme(checkpoint, codes, layout)
    kind, scales = _inputs(opened, codes, scheme, layout)
    units: dict[str, WorkUnit] = {}
    works: dict[str, TensorPlan] = {}
    for name, tensor in opened.source.tensors.items():
        if name not in codes:
            works[name] = TensorPlan(tensor, "keep", tensor.note or "not quantized")
            units[name] = WorkUnit([works[name]])
            continue
        entry = layout.entry(name, tensor.spec.shape, "bfloat16", scheme)
        works[name] = TensorPlan(tensor, "transfer", entry=_with_input(entry, scales, layout))
        units[name] = WorkUnit([works[name]], codes=[codes[name]])
    refuse_collisions(checkpoint.path, works.values())
    carried = {f"{module}{FP8_INPUT_SUFFIX}" for module in scales}
    return CheckpointPlan(
        source=opened.source,
        options=options,
        layout=layout,
        shards=pack(in_stored_order(opened.source, units), checkpoint, options.max_shard_size),
        summary=Summary(
            scheme.format,
            ignored_modules(works, checkpoint, layout),
            "calibrated" if kind == STATIC else kind,
            embedding_modules(works),
            granularity=scheme.granularity,
        ),
        dropped={name: why for name, why in opened.dropped.items() if name not in carried},
    )


def _with_input(entry: QuantizedEntry, scales: Inputs, layout: Layout) -> QuantizedEntry:
    """An entry with the activation scale of its module, if there is one."""
    module = module_of(entry.name)
    if module not in scales:
        return entry
    spec = TensorSpec(f"{module}{FP8_INPUT_SUFFIX}", "F32", layout.activation_shape)
    return with_changes(entry, constants=(*entry.constants, Constant(spec, scales[module])))
