# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Quantizing a GGUF model into one that llama.cpp runs: names, metadata and the rest stay."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from dataclasses import replace as with_changes
from pathlib import Path

import numpy as np

from fp4kit.errors import OptionError
from fp4kit.float_mode import by_ieee
from fp4kit.formats import DTYPES, E2M1
from fp4kit.io.coded import coded_entries, coded_storage
from fp4kit.io.ggml import BLOCK_LAYOUTS, BlockLayout
from fp4kit.io.gguf_model import (
    architecture_of,
    check_target,
    coded_as,
    in_blocks,
    output_files,
    second_levels,
    verbatim,
)
from fp4kit.io.gguf_rules import kept, never, why_one_level
from fp4kit.io.quantize_plan import SecondLevel, TensorPlan, refuse_nothing
from fp4kit.io.quantize_tensors import quantize_tensors
from fp4kit.io.read.gguf import GgufSource, VerbatimSource, bytes_of
from fp4kit.io.read.gguf_header import GgufTensor
from fp4kit.io.read.source import OpaqueTensor, SourceTensor
from fp4kit.io.report import FileReport, QuantizeOptions, TensorReport, grouped, overflow_warnings
from fp4kit.io.storage import QuantizedEntry
from fp4kit.io.stream.chunks import Progress, Tally
from fp4kit.io.stream.device import DeviceBackend
from fp4kit.io.tensor_names import Patterns
from fp4kit.io.write.gguf import GgufOutput, GgufWriter
from fp4kit.plan import Plan, plan_of


@dataclass(eq=False)
class _Work:
    """One stored tensor and what becomes of it.

    Attributes:
        tensor: as it is listed: a float tensor, or one in blocks.
        plan: what is done with it.
        outputs: what is written for it.
        one_level: why its second level is 1; "" if it has one of its own, or none by its format.
    """

    tensor: SourceTensor | QuantizedEntry
    plan: TensorPlan
    outputs: list[GgufOutput]
    one_level: str = ""

    def report(self, measured: bool) -> TensorReport:
        """The report of the tensor."""
        if self.plan.entry is None:
            return TensorReport.of(self.tensor, "keep", self.plan.reason, self.tensor.stored)
        report = self.plan.report(measured)
        after = sum(output.nbytes for output in self.outputs)
        facts = {**report.facts, "one_level": self.one_level} if self.one_level else report.facts
        return with_changes(report, bytes_after=after, facts=facts)


def check_options(source: Path, options: QuantizeOptions) -> BlockLayout:
    """The layout of what is asked for.

    Raises:
        OptionError: for what GGUF does not hold.
    """
    scheme = options.scheme
    if scheme.format not in BLOCK_LAYOUTS:
        raise OptionError(
            f"{source}: ggml has no {scheme.format}; choose {' or '.join(BLOCK_LAYOUTS)}"
        )
    fixed = {"scale_layout": "linear", "nibble_order": "low_first", "pad": False}
    for name, value in fixed.items():
        if getattr(scheme, name) != value:
            raise OptionError(f"{source}: {name} is ggml's own in a GGUF file; leave it out")
    for name in ("void_dtype", "cast"):
        if getattr(options, name) is not None:
            raise OptionError(f"{source}: {name} is for NumPy's files; leave it out")
    return BLOCK_LAYOUTS[scheme.format]


def _reason_to_keep(
    tensor: SourceTensor | QuantizedEntry, options: QuantizeOptions, layout: BlockLayout
) -> str:
    """Why a tensor is not quantized; "" if it is."""
    name, shape = tensor.name, tensor.shape
    if isinstance(tensor, QuantizedEntry):
        return f"is {tensor.format} already"
    if len(shape) < 2:
        return f"{len(shape)}-D"
    reason = never(name)
    if reason:
        return reason
    if isinstance(tensor, OpaqueTensor):
        return f"{tensor.dtype} is not decoded; give the model in F32, F16, BF16 or Q8_0"
    if tensor.dtype not in DTYPES:
        return f"{tensor.dtype} is not quantized"
    excluded = Patterns(options.exclude, "exclude").match(name)
    if excluded is not None:
        return f"excluded by {excluded}"
    reason = kept(name)
    if reason and Patterns(options.include, "include").match(name) is None:
        return reason
    if 0 in shape:
        return "empty"
    if shape[-1] % layout.type.elements:
        return f"rows of {shape[-1]} are not whole blocks of {layout.type.elements}"
    return ""


def _given_second(plan: Plan) -> SecondLevel:
    """The second level under which the decode scale is 1, as the recipe keeps it."""
    assert plan.recipe is not None
    amax = np.float32(plan.scheme.e4m3_max * E2M1.max)
    value = amax if plan.recipe.keeps == "amax" else np.float32(1)
    return SecondLevel(np.array([value], np.float32), given=True)


def _quantized(
    tensor: SourceTensor, options: QuantizeOptions, layout: BlockLayout, why: str
) -> _Work:
    """What becomes of a tensor that is quantized; `why` it has one level only."""
    has_second = layout.format.has_second_level
    scales = second_levels(tensor.shape, tensor.name) if has_second and not why else 1
    plan = plan_of(tensor.shape, options.scheme.parts[0], scales)
    coded = coded_as(tensor.name, tensor.shape, plan.format.name, second=has_second and not why)
    storage = coded_storage(coded, scales)
    entry = QuantizedEntry(tensor.name, tensor.shape, tensor.dtype, plan, storage=storage)
    second = _given_second(plan) if has_second and why else SecondLevel()
    work = TensorPlan(tensor, "quantize", entry=entry, second=second)
    return _Work(tensor, work, in_blocks(tensor.name, coded, scales), why if has_second else "")


def plan_model(
    source: GgufSource, options: QuantizeOptions, layout: BlockLayout
) -> dict[str, _Work]:
    """What becomes of every stored tensor, by name.

    Raises:
        OptionError: for a pattern that matches nothing, or if nothing is quantized and that is not
            allowed.
    """
    coded = {entry.name: entry for entry in coded_entries(source)}
    for name, patterns in (("include", options.include), ("exclude", options.exclude)):
        Patterns(patterns, name).check_used(source.stored, f"{source.path}: ")
    architecture, works = architecture_of(source), {}
    for name, (_, stored) in source.stored.items():
        tensor = coded.get(name) or source.tensors[name]
        reason = _reason_to_keep(tensor, options, layout)
        if reason or isinstance(tensor, QuantizedEntry):
            works[name] = _Work(tensor, _kept(stored, reason), verbatim(stored))
        else:
            why = why_one_level(architecture, name, source.stored)
            works[name] = _quantized(tensor, options, layout, why)
    if not options.allow_nothing:
        plans = [work.plan for work in works.values()]
        refuse_nothing(source.path, plans, _idle(works, options), padding=False)
    return works


def _kept(stored: GgufTensor, reason: str) -> TensorPlan:
    return TensorPlan(bytes_of(stored), "keep", reason)


def _idle(works: dict[str, _Work], options: QuantizeOptions) -> list[str]:
    reasons = {name: work.plan.reason for name, work in works.items()}
    return Patterns(options.include, "include").idle(reasons)


def _one_level_warnings(works: Collection[_Work]) -> list[str]:
    """A line about weights whose second level is 1 because llama.cpp applies none."""
    reasons = [work.one_level for work in works if work.one_level]
    if not reasons:
        return []
    return [
        f"{len(reasons)} tensors have block scales alone, which is less accurate for small "
        f"weights: {grouped(reasons)}"
    ]


@by_ieee
def quantize_gguf(
    source: GgufSource,
    target: Path | None,
    options: QuantizeOptions,
    progress: Progress | None = None,
) -> FileReport:
    """Quantizes the weights of a GGUF model that llama.cpp itself would.

    Args:
        source: the open model.
        target: .gguf file to write, atomically; None to plan from the headers alone. Of a model in
            several shards, the first of as many.
        options: how to quantize.
        progress: called with (bytes done, bytes in all) of the source.

    Returns:
        One entry per stored tensor, with error statistics of those quantized.

    Raises:
        OptionError: for options and targets that do not go with it.
        NonFiniteError: if a weight holds NaN or infinity.
        OutputError: if the target cannot be written.
    """
    started = time.perf_counter()
    layout = check_options(source.path, options)
    if target is not None:
        check_target(source, target)
    works = plan_model(source, options, layout)
    if target is not None:
        _write(source, target, works, layout, options, progress)
    tensors = [work.report(measured=target is not None) for work in works.values()]
    nothing = all(work.plan.entry is None for work in works.values())
    return FileReport(
        source=str(source.path),
        target=None if target is None else str(target),
        tensors=tensors,
        options=options.to_dict(),
        seconds=time.perf_counter() - started,
        warnings=_idle(works, options)
        + _one_level_warnings(works.values())
        + ["no tensor is quantized; all are kept"] * nothing
        + overflow_warnings(tensors),
    )


def _write(
    source: GgufSource,
    target: Path,
    works: dict[str, _Work],
    layout: BlockLayout,
    options: QuantizeOptions,
    progress: Progress | None,
) -> None:
    plans = [work.plan for work in works.values()]
    entries = [plan.entry for plan in plans if plan.entry is not None]
    backend = None
    if entries:
        dtypes = {entry.dtype for entry in entries}
        backend = DeviceBackend(options.device, dtypes, "quantize", [entries[0].plan])
    becomes = {name: work.outputs for name, work in works.items()}
    files = output_files(source, target, becomes, layout.file_type, force=options.force)
    tally = Tally(progress, sum(plan.tensor.spec.nbytes for plan in plans))
    copied = [name for name, work in works.items() if work.plan.entry is None]
    with GgufWriter(files) as writer:
        quantize_tensors(VerbatimSource(source, copied), plans, backend, writer.write, tally)
        source.check_unchanged()
        writer.finish()
