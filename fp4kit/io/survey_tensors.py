# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Measuring what several candidates do to the tensors of a source, in one pass over it.

The work is that of :mod:`.quantize_tensors` with nothing written: a unit is read once, its amax is
found, and then every candidate quantizes the same rows. Rows are taken a few megabytes at a time,
so that they stay in the cache from one candidate to the next, and memory stays what it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4kit.backend.jobs import Job
from fp4kit.layout import TILE

from .quantize_plan import Rows, TensorPlan
from .quantize_tensors import Quantizer, raise_nonfinite
from .read.source import Source, SourceTensor
from .storage import QuantizedEntry
from .stream.chunks import Tally, chunk_plan, row_ranges, rows_view, scale_bytes, scales_view
from .stream.device import DeviceBackend
from .stream.gpu_pipeline import open_pipeline

#: Bytes of rows that all candidates quantize before the next ones are looked at.
SLAB_BYTES = 4 << 20
#: Rows that scales of any layout or granularity need together.
STEP = max(TILE["swizzled_128x4"][0], 128)

#: The mean square of each input channel of a layer.
Moments = NDArray[np.float64]


@dataclass(eq=False, slots=True)
class SurveyWork(TensorPlan):
    """A tensor that is surveyed.

    Its own `entry` says how it is read and whether its amax is needed.

    Attributes:
        tries: what becomes of it under each candidate that quantizes it; their `sums` are filled.
        moments: second moment of each input channel, None where they are not known.
        effects: what an error of each output channel does to the model, None where not known.
        rows: rows of input that both were taken from.
        signal: with moments, sum of the squares of its elements, each times the moment of its
            column and the effect of its row: without effects the mean square of the layer's
            output, as far as channels are independent.
        noise: candidate to the same sum of its errors.
    """

    tries: dict[str, TensorPlan] = field(default_factory=dict)
    moments: Moments | None = None
    effects: Moments | None = None
    rows: float = 0.0
    signal: float = 0.0
    noise: dict[str, float] = field(default_factory=dict)

    def output_noise(self, name: str) -> float | None:
        """Noise over signal of the output under a candidate, None without moments."""
        if self.moments is None:
            return None
        noise = self.noise.get(name, 0.0)
        if not math.isfinite(noise):
            return math.inf
        return noise / self.signal if self.signal > 0 else 0.0


def survey_work(tensor: SourceTensor, entries: Mapping[str, QuantizedEntry]) -> SurveyWork:
    """The work of a tensor under some candidates, by name; at least one quantizes it."""
    tries = {name: TensorPlan(tensor, "survey", entry=entry) for name, entry in entries.items()}
    leading = next(
        (entry for entry in entries.values() if entry.plan.needs_amax), next(iter(entries.values()))
    )
    return SurveyWork(tensor, "survey", entry=leading, tries=tries)


class _Surveyor(Quantizer):
    """Launches the kernels of every candidate for every chunk."""

    def _second_level(self, backend: DeviceBackend, work: TensorPlan, amax: Any) -> dict[str, Any]:
        assert isinstance(work, SurveyWork)
        found = {}
        for name, each in work.tries.items():
            assert each.entry is not None
            plan = each.entry.plan
            if plan.needs_amax:
                second = backend.serving(plan).second_level(amax, plan, each.entry.dtype)
                found[name] = second
        return found

    def _encode(self, backend: DeviceBackend, rows: Rows, part: Any, second: Any) -> None:
        assert isinstance(rows.plan, SurveyWork)
        entry = rows.entry
        width, cols = rows.plan.tensor.row_bytes, entry.plan.cols
        limit = self._pipeline.chunk_bytes or SLAB_BYTES
        for first, last in row_ranges(rows.count, width, STEP, limit):
            x = rows_view(part[first * width : last * width], entry.dtype, last - first, cols)
            slab = Rows(rows.plan, rows.first + first, rows.first + last)
            if rows.plan.moments is not None:
                rows.plan.signal += _weighted(wide(x, entry.dtype), slab)
            for name in rows.plan.tries:
                self._try(backend, slab, name, x, (second or {}).get(name))

    def _try(self, backend: DeviceBackend, slab: Rows, name: str, x: Any, second: Any) -> None:
        """Quantizes and measures some rows under one candidate."""
        work = slab.plan
        assert isinstance(work, SurveyWork)
        entry = work.tries[name].entry
        assert entry is not None
        plan = chunk_plan(entry.plan, len(x))
        counts = [math.prod(plan.packed_shape), scale_bytes(plan)]
        buffer, (packed, scale) = self._pipeline.result(counts)
        codes, scales = packed.reshape(plan.packed_shape), scales_view(scale, plan)
        weights = work.tries[name].weights
        job = Job(plan, x, entry.dtype, second, codes, scales, weights=weights)
        self._pending.append((work.tries[name], backend.quantize(job)))
        if work.moments is not None:
            error = np.empty((plan.rows, plan.cols), np.float32)
            backend.serving(plan).dequantize(job, error, "float32")
            np.subtract(wide(x, entry.dtype), error, out=error)
            work.noise[name] = work.noise.get(name, 0.0) + _weighted(error, slab)
        self._pipeline.drop(buffer)


def _weighted(values: NDArray[np.float32], rows: Rows) -> float:
    """Sum of squares, each times the moment of its column and the effect of its row."""
    work = rows.plan
    assert isinstance(work, SurveyWork)
    assert work.moments is not None
    if work.effects is None:
        columns = np.einsum("ij,ij->j", values, values, dtype=np.float64)
        return float(columns @ work.moments)
    squares = np.square(values) @ work.moments
    return float(work.effects[rows.first : rows.last] @ squares)


def wide(x: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """Raw rows as float32."""
    if dtype == "bfloat16":
        return (x.astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float32, copy=False)


def survey_tensors(source: Source, works: Sequence[SurveyWork], device: str, tally: Tally) -> None:
    """Reads every tensor once and fills in the sums of its candidates.

    Args:
        source: where the tensors are read.
        works: what to measure; tensors that share a second level stand next to each other.
        device: where to compute; with moments `cpu`.
        tally: told about progress.

    Raises:
        NonFiniteError: if a tensor holds NaN or infinity.
    """
    if not works:
        return
    entries = [each.entry for work in works for each in work.tries.values() if each.entry]
    schemes = {entry.plan.scheme: entry.plan for entry in entries}
    dtypes = {entry.dtype for entry in entries}
    backend = DeviceBackend(device, dtypes, "quantize", schemes.values())
    with open_pipeline(backend, source) as pipeline:
        bad = _Surveyor(backend, pipeline, lambda *_: None).run(source, list(works), tally)
    if bad is not None:
        raise_nonfinite(source, bad, backend)
