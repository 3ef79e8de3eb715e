# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The last step: receipts checked, index and JSON files written, the result verified.

Any worker may do it, once or twice, also two at once: all of it has the same bytes every time.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

from fp4kit.checkpoint.read.json_files import listed
from fp4kit.checkpoint.report import CheckpointReport, make_report
from fp4kit.checkpoint.verify.structure import structure_faults
from fp4kit.checkpoint.write.output import check_result, write_documents
from fp4kit.checkpoint.write.shards import restore
from fp4kit.errors import FileFormatError
from fp4kit.io.stream.chunks import Progress, Tally
from fp4kit.io.write.files import OutputError

from .job import Planned, read_notes
from .places import Place
from .receipts import Receipt, read_receipt
from .stores import place_of
from .tasks import using


def finish(
    target: str, source: str | None = None, progress: Progress | None = None
) -> CheckpointReport | None:
    """Completes a result whose shards are written.

    Args:
        target: path or URL of it.
        source: where its source is from here, None for where the first worker saw it.
        progress: called with (bytes done, bytes in all) of the shards that are checked.

    Returns:
        The report of the whole; None if the result was finished before.

    Raises:
        OutputError: if shards are missing or damaged, naming them.
        FileFormatError: if there is nothing to finish.
        OptionError: if this process makes another plan.
    """
    place = place_of(target)
    notes = read_notes(place)
    if notes is None:
        _check_finished(place)
        return None
    with using(notes.job(target, source)) as opened:
        try:
            return finish_planned(opened.planned, place, progress)
        except OutputError:
            if read_notes(place) is not None:
                raise
    _check_finished(place)  # another worker has come to the end meanwhile
    return None


def finish_planned(
    planned: Planned, place: Place, progress: Progress | None = None
) -> CheckpointReport:
    """As :func:`finish`, of a plan that is known."""
    started = time.perf_counter()
    notes = read_notes(place)
    if notes is not None and notes.plan != planned.hash:
        raise OutputError(
            f"{place.name}: was begun with another plan ({notes.plan[:12]}) than this process "
            f"makes ({planned.hash[:12]}): the source has changed, or is another; give it with "
            "--source"
        )
    for shard, receipt in zip(planned.shards, _receipts(planned, place, progress), strict=True):
        restore(shard, receipt.results)
    checkpoint = planned.plan.source.checkpoint
    checkpoint.check_unchanged()
    with place.documents() as folder:
        write_documents(planned.plan, folder)
    with place.folder() as folder:
        check_result(planned.plan, folder)
    place.remove_notes()
    others = checkpoint.others.nbytes
    seconds = time.perf_counter() - started
    return make_report(planned.plan, place.name, others, seconds)


def _receipts(planned: Planned, place: Place, progress: Progress | None) -> list[Receipt]:
    """The receipt of every shard, once all shards are what their receipts say.

    Raises:
        OutputError: naming those that are missing or damaged.
    """
    tally = Tally(progress, planned.plan.nbytes)

    def checked(number: int) -> Receipt | None:
        shard = planned.shards[number]
        receipt = read_receipt(place, shard, planned.hash)
        kept = receipt is not None and receipt.is_kept(place)
        tally.add(sum(spec.nbytes for spec in shard.specs))
        return receipt if kept else None

    numbers = range(len(planned.shards))
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 16), "fp4kit-check") as pool:
        found = list(pool.map(checked, numbers))
    missing = [planned.shards[n].name for n in numbers if found[n] is None]
    if missing:
        raise OutputError(
            f"{place.name}: {len(missing)} of {len(found)} shards are missing or damaged: "
            f"{listed(missing)}; run the parts that make them again (the same --part), or the "
            "command of --scheduler with --resume, and finish again"
        )
    return [receipt for receipt in found if receipt is not None]


def _check_finished(place: Place) -> None:
    """Makes sure that a place without notes holds a whole result."""
    if not place.names():
        raise FileFormatError(
            f"{place.name}: holds no conversion; run its parts first (--part 1/N and so on)"
        )
    with place.folder() as folder:
        faults = structure_faults(folder, unfinished=True, plain=True)
    if faults:
        raise FileFormatError(
            f"{place.name}: holds no unfinished conversion, and no whole one: {faults[0]}"
        )
    place.remove_notes()  # what a late worker, or one that was killed at the end, has left
