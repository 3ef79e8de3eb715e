# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""One task: a shard of the plan, written and receipted. It depends on the job and a number alone.

A process keeps the plan of its last job, with the source open, as the next task needs it again.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue

from fp4kit.api.backends import backend_status, get_backend
from fp4kit.checkpoint.write.shards import fresh, make_backend, results_of, write_shard
from fp4kit.errors import OptionError
from fp4kit.float_mode import by_ieee
from fp4kit.io.read.ranges import ranges_of
from fp4kit.io.stream.chunks import Tally
from fp4kit.io.stream.device import DeviceBackend
from fp4kit.io.write.files import OutputError, permissions_of

from .job import PLAN, Job, Planned, opened_job
from .places import Place, sha256_of
from .receipts import Receipt, read_receipt, write_receipt
from .stores import place_of


class OpenJob:
    """A job whose source this process has open.

    Attributes:
        planned: its plan.
        users: tasks that work on it at the moment.
    """

    def __init__(self, job: Job) -> None:
        """Opens the source and makes the plan."""
        self.users = 0
        self._lock = threading.Lock()
        self._stack = ExitStack()
        # Made when the first task asks: whoever only plans needs no device.
        self._backends: SimpleQueue[DeviceBackend | None] | None = None
        try:
            self.planned = self._stack.enter_context(opened_job(job))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the source."""
        self._stack.close()

    @contextmanager
    def backend(self) -> Iterator[DeviceBackend | None]:
        """A device of this process that no other task of the job uses.

        Raises:
            BackendUnavailableError: if the job's device cannot be used here.
        """
        with self._lock:
            if self._backends is None:
                self._backends = SimpleQueue()
                for device in devices_of(self.planned.job.device):
                    self._backends.put(make_backend(self.planned.plan, device))
        backend = self._backends.get()
        try:
            yield backend
        finally:
            self._backends.put(backend)


_lock = threading.Lock()
_open: list[OpenJob] = []


@contextmanager
def using(job: Job) -> Iterator[OpenJob]:
    """A job with its source open; it stays so until this process works on another one."""
    with _lock:
        found = next((each for each in _open if each.planned.job == job), None)
        if found is None:
            _close_idle()
            found = OpenJob(job)
            _open.append(found)
        found.users += 1
    try:
        yield found
    finally:
        with _lock:
            found.users -= 1


def _close_idle() -> None:
    for each in [each for each in _open if not each.users]:
        _open.remove(each)
        each.close()


@atexit.register
def close_idle() -> None:
    """Closes the sources that no task of this process reads."""
    with _lock:
        _close_idle()


def devices_of(device: str) -> tuple[str, ...]:
    """The devices of this process: for `auto` and `cuda` every GPU that it sees."""
    if device not in ("auto", "cuda"):
        return (device,)
    cuda = next(status for status in backend_status() if status.name == "cuda")
    if cuda.available:
        return tuple(get_backend("cuda").devices())
    return ("cpu" if device == "auto" else device,)


@by_ieee
def run_task(job: Job, plan: str, number: int) -> Receipt:
    """Makes sure that a shard is written, as the plan says; the same bytes whoever does it.

    Args:
        job: what is asked for.
        plan: hash that the plan must have.
        number: which shard.

    Returns:
        Its receipt, an older one if the shard is still what that says.

    Raises:
        OptionError: if this process makes another plan of the job.
        Fp4kitError: if the source cannot be read or the shard cannot be written.
    """
    with using(job) as opened:
        planned = opened.planned
        if planned.hash != plan:
            raise OptionError(
                f"{job.source}: this worker makes another plan of it ({planned.hash[:12]}, wanted "
                f"{plan[:12]}): its copy of the source, or its fp4kit, is another; nothing was "
                "written"
            )
        place = place_of(job.target)
        shard = planned.shards[number]
        found = read_receipt(place, shard, plan)
        if found is not None and found.is_kept(place):
            return found
        return _write(opened, place, number)


def _write(opened: OpenJob, place: Place, number: int) -> Receipt:
    planned = opened.planned
    checkpoint = planned.plan.source.checkpoint
    shard = fresh(planned.shards[number])
    before = _retries(planned)
    with (
        opened.backend() as backend,
        place.written(shard.name, permissions_of(*checkpoint.weight_files())) as output,
    ):
        write_shard(planned.plan, shard, output, backend, Tally(None, 1))
        checkpoint.check_unchanged()
        size, sha256 = output.path.stat().st_size, sha256_of(output.path)
    mark = place.mark(shard.name)
    if mark is None or mark[0] != size:
        raise OutputError(f"{place.name}: {shard.name} is not there although it was written")
    retries = _retries(planned) - before + place.retries
    receipt = Receipt(shard.name, planned.hash, size, sha256, mark[1], results_of(shard), retries)
    if place.read(PLAN) is None:
        # Another worker had written the shard before, and the result was finished meanwhile.
        return receipt
    write_receipt(place, shard, receipt)
    return receipt


def _retries(planned: Planned) -> int:
    """How often something of the source had to be fetched again so far."""
    paths = planned.plan.source.checkpoint.weight_files()
    return max((ranges.retries for path in paths if (ranges := ranges_of(path))), default=0)
