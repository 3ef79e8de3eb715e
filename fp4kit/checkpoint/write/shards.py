# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Writing the weight files of a planned checkpoint, each atomically, on one or more devices."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import asdict, fields
from dataclasses import replace as with_changes
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from fp4kit.backend.interface import ErrorSums
from fp4kit.checkpoint.plan.checkpoint_plan import CheckpointPlan, Shard, WorkUnit
from fp4kit.formats import ALL_RECIPES
from fp4kit.io.dequantize import dequantize_tensors
from fp4kit.io.quantize_plan import TensorPlan
from fp4kit.io.quantize_tensors import quantize_tensors
from fp4kit.io.stream.chunks import Tally, Write
from fp4kit.io.stream.device import DeviceBackend
from fp4kit.io.write.files import Output, permissions_of
from fp4kit.io.write.safetensors import SafetensorsWriter

from .state import State
from .transfer import Transfer, run_transfers, transfers_of

#: What is noted about each tensor of a finished shard.
NOTED = {"action", "reason", "sums", "second", "recipe", "rounded"}


def make_backend(plan: CheckpointPlan, device: str) -> DeviceBackend | None:
    """The backend on a device, asked about everything that will occur; None if nothing will."""
    decoded = [
        (work.tensor.dtype, work.origin.plan)
        for work in plan.works
        if work.action == "dequantize" and work.origin is not None
    ]
    if decoded:
        return DeviceBackend(device, [decoded[0][0]], "dequantize", [each for _, each in decoded])
    entries = [
        work.entry for work in plan.works if work.entry is not None and work.action == "quantize"
    ]
    if not entries:
        return None
    dtypes = {entry.dtype for entry in entries}
    schemes = {entry.plan.scheme: entry.plan for entry in entries}
    return DeviceBackend(device, dtypes, "quantize", schemes.values())


def write_shard(
    plan: CheckpointPlan, shard: Shard, output: Output, backend: DeviceBackend | None, tally: Tally
) -> None:
    """Converts the tensors of one file and gives it its name once it is on the disk."""
    with SafetensorsWriter(output, shard.specs, plan.metadata(shard)) as writer:
        _convert(plan, shard, backend, writer.write, tally)
        if not plan.source.checkpoint.is_directory:  # all files of a directory: once, at the end
            plan.source.checkpoint.check_unchanged()
        writer.finish()


def _convert(
    plan: CheckpointPlan, shard: Shard, backend: DeviceBackend | None, write: Write, tally: Tally
) -> None:
    works: list[TensorPlan] = []
    transfers: list[Transfer] = []
    for unit in shard.units:
        taken = transfers_of(plan, unit)
        transfers += taken
        if not taken:
            works += unit.works
    # Fused experts have no origin: their source decodes them, to this they are copies.
    decoded = [work for work in works if work.action == "dequantize" and work.origin is not None]
    others = [work for work in works if work.action != "dequantize" or work.origin is None]
    quantize_tensors(plan.source, others, backend, write, tally)
    if decoded:
        assert backend is not None
        entries = [work.origin for work in decoded if work.origin is not None]
        size = sum(work.tensor.spec.nbytes for work in decoded)
        counted = tally.scaled(size / max(sum(entry.stored for entry in entries), 1))
        checkpoint, dtype = plan.source.checkpoint, decoded[0].tensor.dtype
        dequantize_tensors(backend, checkpoint, entries, dtype, write, counted)
    run_transfers(transfers, write, tally)


def fresh(shard: Shard) -> Shard:
    """The same shard with nothing done yet: what a task may use up, however often it is run."""
    units = []
    for unit in shard.units:
        seconds = {id(work.second): copy(work.second) for work in unit.works}
        works = [
            with_changes(work, second=seconds[id(work.second)], sums=ErrorSums())
            for work in unit.works
        ]
        units.append(WorkUnit(works, unit.key, unit.codes))
    return Shard(shard.name, units)


def results_of(shard: Shard) -> dict[str, Any]:
    """What a later run needs to know about a finished shard."""
    results = {}
    for work in shard.works:
        second = None if work.entry is None else work.entry.second
        results[work.tensor.name] = {
            "action": work.action,
            "reason": work.reason,
            "sums": asdict(work.sums),
            "rounded": work.rounded,
            "second": None if second is None else int(second.view(np.uint32)[0]),
            # That of the layout where MXFP4 codes were taken over.
            "recipe": work.entry.plan.recipe.name
            if work.entry and work.entry.plan.recipe
            else None,
        }
    return results


def is_complete(shard: Shard, results: dict[str, Any]) -> bool:
    """Whether notes are those of a shard: they lie where anyone may have changed them."""
    sums = {field.name for field in fields(ErrorSums)}
    for work in shard.works:
        noted = results.get(work.tensor.name)
        if not isinstance(noted, dict) or noted.keys() != NOTED:
            return False
        found, second, recipe = (noted[key] for key in ("sums", "second", "recipe"))
        if not all(isinstance(noted[key], str) for key in ("action", "reason")):
            return False
        if not isinstance(found, dict) or found.keys() != sums:
            return False
        if not all(type(value) in (int, float) for value in found.values()):
            return False
        if second is not None and not (type(second) is int and 0 <= second < 1 << 32):
            return False
        if type(noted["rounded"]) is not int or noted["rounded"] < 0:
            return False
        if recipe is not None and recipe not in list(ALL_RECIPES):
            return False
    return True


def restore(shard: Shard, results: dict[str, Any]) -> None:
    """Takes over what an earlier run noted."""
    for work in shard.works:
        noted = results[work.tensor.name]
        work.action, work.reason = noted["action"], noted["reason"]
        work.sums, work.rounded = ErrorSums(**noted["sums"]), noted["rounded"]
        if work.entry is not None and noted["second"] is not None:
            second = np.array([noted["second"]], np.uint32).view(np.float32)
            scheme = work.entry.plan.scheme
            if scheme.recipe != noted["recipe"]:
                # Codes taken over have the recipe of the layout; nothing was searched.
                scheme = scheme.replace(
                    recipe=noted["recipe"], scale_search=None, search_error=None, e4m3_max=448
                )
            plan = with_changes(work.entry.plan, scheme=scheme)
            work.entry = with_changes(work.entry, plan=plan, second=second)


class _Workers:
    """One thread per device; each takes the next shard until none is left or one has failed.

    What is finished is noted by a thread of its own, as it is read once more for its checksum. The
    last shard is not: without a note it is converted again if the run ends just after it.
    """

    def __init__(
        self, plan: CheckpointPlan, state: State, tally: Tally, notes: ThreadPoolExecutor
    ) -> None:
        self._plan = plan
        self._state = state
        self._tally = tally
        self._permissions = permissions_of(*plan.source.checkpoint.weight_files())
        self._queue: SimpleQueue[Shard] = SimpleQueue()
        self._failed = threading.Event()
        self._notes = notes
        self._noted: list[Future[None]] = []

    def run(self, backends: Sequence[DeviceBackend | None]) -> None:
        """Writes every shard that an earlier run has not finished, and waits for the notes."""
        for shard in self._plan.shards:
            results = self._state.done(shard.name)
            if results is None or not is_complete(shard, results):
                self._queue.put(shard)
            else:
                restore(shard, results)
                self._tally.add(sum(work.tensor.spec.nbytes for work in shard.works))
        if len(backends) == 1:
            self._work(backends[0])
        else:
            with ThreadPoolExecutor(len(backends), "fp4kit-device") as pool:
                try:
                    for future in [pool.submit(self._work, backend) for backend in backends]:
                        future.result()
                except BaseException:  # an interrupt reaches this thread only
                    self._failed.set()
                    raise
        for note in self._noted:
            note.result()

    def _work(self, backend: DeviceBackend | None) -> None:
        """Converts shards on one device."""
        try:
            while not self._failed.is_set():
                try:
                    shard = self._queue.get_nowait()
                except Empty:
                    return
                # One that an interrupted run finished but did not note is written again.
                path, again = self._state.target / shard.name, self._state.resumed
                output = Output(path, self._permissions, replace=again)
                write_shard(self._plan, shard, output, backend, self._tally)
                if not self._queue.empty():
                    note = partial(self._state.record, shard.name, results_of(shard))
                    self._noted.append(self._notes.submit(note))
        except BaseException:
            self._failed.set()
            raise


def write_shards(
    plan: CheckpointPlan, state: State, backends: Sequence[DeviceBackend | None], tally: Tally
) -> None:
    """Writes every file that an earlier run has not finished, one backend for each device."""
    with ThreadPoolExecutor(1, "fp4kit-notes") as notes:
        _Workers(plan, state, tally, notes).run(backends)
