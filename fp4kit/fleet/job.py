# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What is asked for, and the plan that each worker makes of it by itself.

A plan is never sent: it follows from the headers of the source, its JSON files and the options. Its
hash is sent with every task, so that a worker that sees another source, has other options or
another version refuses.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from dataclasses import replace as with_changes
from pathlib import Path
from typing import Any

from fp4kit import __version__
from fp4kit.checkpoint.operations import OPERATIONS, open_checkpoint, planned
from fp4kit.checkpoint.options import CommonOptions
from fp4kit.checkpoint.plan.checkpoint_plan import CheckpointPlan, Shard
from fp4kit.checkpoint.read.components import is_pipeline
from fp4kit.checkpoint.read.other_files import STATE_DIR
from fp4kit.checkpoint.write.output import planned_files
from fp4kit.checkpoint.write.state import FLEET, PLAN_FILE, fingerprint
from fp4kit.errors import FileFormatError, OptionError
from fp4kit.io.read.open import check_source
from fp4kit.io.read.ranges import ranges_of, size_of

from .mirror import opened
from .places import Place
from .remote_files import CACHE_BYTES
from .urls import is_url

#: Version of the notes that workers share.
VERSION = 1
#: Where the plan of a result lies in it.
PLAN = f"{STATE_DIR}/{PLAN_FILE}"


@dataclass(frozen=True)
class Job:
    """A conversion that several workers share.

    Attributes:
        operation: `quantize`, `dequantize` or `convert`.
        source: path or URL of a model directory.
        target: path or URL of the result.
        options: what is asked for; its type is that of the operation.
        device: where each worker computes, as `--device` says it.
    """

    operation: str
    source: str
    target: str
    options: CommonOptions
    device: str = "cpu"

    def notes(self, hash: str, files: list[str]) -> bytes:
        """What the place of the result says about it until it is finished."""
        content = {
            FLEET: VERSION,
            "plan": hash,
            "fp4kit": __version__,
            "operation": self.operation,
            "source": self.source if is_url(self.source) else str(Path(self.source).absolute()),
            "options": asdict(self.options),
            "planned": files,
        }
        return (json.dumps(content, indent=2) + "\n").encode()


@dataclass(frozen=True)
class Notes:
    """What the place of an unfinished result says about it.

    Attributes:
        plan: hash of the plan.
        version: of fp4kit.
        operation: as in :class:`Job`.
        source: as in :class:`Job`.
        options: as plain data.
    """

    plan: str
    version: str
    operation: str
    source: str
    options: dict[str, Any]

    def job(self, target: str, source: str | None) -> Job:
        """The job again, its source perhaps seen from another machine.

        Raises:
            OptionError: if another version has begun it.
        """
        if self.version != __version__:
            raise OptionError(
                f"{target}: was begun by fp4kit {self.version}, this is {__version__}; use the "
                "same version on all workers"
            )
        _, kind = OPERATIONS[self.operation]
        names = {field.name for field in fields(kind)}
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in self.options.items()
            if name in names
        }
        return Job(self.operation, source or self.source, target, kind(**given))


def read_notes(place: Place) -> Notes | None:
    """What a place says about an unfinished result, None if there is none.

    Raises:
        OptionError: if a single process has begun it.
        FileFormatError: if the notes are damaged.
    """
    data = place.read(PLAN)
    if data is None:
        return None
    try:
        content = json.loads(data)
    except ValueError:
        content = None
    if isinstance(content, dict) and FLEET not in content:
        raise OptionError(
            f"{place.name}: holds an unfinished conversion of a single process; finish it with "
            "--resume alone, or remove it"
        )
    texts = ("plan", "fp4kit", "operation", "source")
    if (
        not isinstance(content, dict)
        or content[FLEET] != VERSION
        or not all(isinstance(content.get(name), str) for name in texts)
        or content["operation"] not in OPERATIONS
        or not isinstance(content.get("options"), dict)
    ):
        raise FileFormatError(
            f"{place.name}: {PLAN} is damaged, or of another version of fp4kit; remove the "
            "directory and start over"
        )
    plan, version, operation, source = (content[name] for name in texts)
    return Notes(plan, version, operation, source, content["options"])


@dataclass(frozen=True)
class Planned:
    """A plan and its hash.

    Attributes:
        job: what it was made of.
        plan: what becomes of every tensor.
        hash: SHA-256 of all that the bytes of the result depend on.
    """

    job: Job
    plan: CheckpointPlan
    hash: str

    @property
    def shards(self) -> list[Shard]:
        """The files of weights; a task is a position in them."""
        return self.plan.shards

    @property
    def files(self) -> list[str]:
        """Every file of the result."""
        return planned_files(self.plan)

    def source_bytes(self, number: int) -> int:
        """Bytes of the source that a task reads, in which progress is counted."""
        return sum(work.tensor.spec.nbytes for work in self.shards[number].works)


@contextmanager
def opened_job(job: Job) -> Iterator[Planned]:
    """The plan of a job, while its source is open.

    Raises:
        OptionError: for options that contradict each other, or a source that is no model directory.
        FileFormatError: if the source cannot be read.
    """
    operation, _ = OPERATIONS[job.operation]
    # Beside the shard that is being written, so that three take the space of all.
    cache = 2 * getattr(job.options, "max_shard_size", CACHE_BYTES // 2)
    with opened(job.source, cache=min(cache, CACHE_BYTES)) as source:
        check_source(source)
        if is_pipeline(source):
            raise OptionError(
                f"{job.source}: is a diffusers pipeline; give the folder of its transformer or "
                "U-Net to workers, and copy the others"
            )
        with open_checkpoint(source, job.options) as checkpoint:
            if not checkpoint.is_directory:
                raise OptionError(
                    f"{job.source}: is a file; --part, --scheduler and URLs are for model "
                    "directories"
                )
            plan = planned(operation, checkpoint, job.options)
            yield Planned(job, plan, _hash(job, plan))


def content_mark(path: Path) -> str:
    """What a store says of the content of a file, "" on a disk: copies have times of their own."""
    ranges = ranges_of(path)
    return "" if ranges is None else ranges.mark


def _hash(job: Job, plan: CheckpointPlan) -> str:
    """SHA-256 of the source's headers and sizes, the options, the version, and what follows."""
    checkpoint = plan.source.checkpoint
    content = fingerprint(checkpoint, job.options, content_mark)
    content["operation"] = job.operation
    content["others"] = {name: size_of(checkpoint.path / name) for name in checkpoint.others.copied}
    shards = hashlib.sha256()
    for shard in plan.shards:
        shards.update(f"{shard.name}\n".encode())
        for spec in shard.specs:
            shards.update(f"{spec.name}\t{spec.dtype}\t{spec.shape}\n".encode())
    content["shards"] = shards.hexdigest()
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def begin(place: Place, planned: Planned) -> bool:
    """Notes the plan in the place of the result; any worker may do it, once or twice.

    Returns:
        Whether it was begun before.

    Raises:
        OptionError: if something else is there, or another plan.
    """
    if _agrees(place, planned):
        return True
    # A worker that came a moment earlier may have written since.
    if place.names() and not _agrees(place, planned):
        raise OptionError(
            f"{place.name}: is not empty, and holds no conversion that could be joined (fp4kit "
            "finish says whether it is whole); choose another directory, or remove what is there"
        )
    needed = planned.plan.nbytes + planned.plan.source.checkpoint.others.nbytes
    place.create(needed)
    place.write(PLAN, planned.job.notes(planned.hash, planned.files))
    return False


def _agrees(place: Place, planned: Planned) -> bool:
    """Whether a place holds the notes of the same plan; False without any.

    Raises:
        OptionError: if it holds another one's.
    """
    notes = read_notes(place)
    if notes is None:
        return False
    if notes.plan != planned.hash:
        raise OptionError(_difference(notes, planned, place.name))
    return True


def _difference(notes: Notes, planned: Planned, where: str) -> str:
    """How a plan differs from that which a result was begun with."""
    job = with_changes(planned.job, source=notes.source)
    now = json.loads(job.notes(planned.hash, []))
    wrong = f"{where}: was begun with another plan"
    if notes.version != now["fp4kit"]:
        return f"{wrong}: by fp4kit {notes.version}, this is {now['fp4kit']}"
    if notes.operation != now["operation"]:
        return f"{wrong}: to {notes.operation}, not to {now['operation']}"
    for name, value in now["options"].items():
        if notes.options.get(name) != value:
            return f"{wrong}: option {name} was {notes.options.get(name)!r}, is {value!r}"
    return f"{wrong}: the source {planned.job.source} has other headers, sizes or JSON files"
