# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Looking at a checkpoint in shares: nothing is written, and what was seen goes over the wire."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp4kit.checkpoint.options import CommonOptions
from fp4kit.checkpoint.read.directory import Checkpoint
from fp4kit.checkpoint.write.state import fingerprint
from fp4kit.errors import OptionError
from fp4kit.io.write.files import OutputError

from .executors import Work
from .job import content_mark

#: Bytes of the source that are looked at in a share, and shares at most.
SHARE_BYTES, MOST_SHARES = 4 << 30, 256


def share_count(nbytes: int) -> int:
    """Shares that so many bytes are looked at in."""
    return min(max(-(-nbytes // SHARE_BYTES), 1), MOST_SHARES)


def hash_of(*folders: Path) -> str:
    """SHA-256 of headers, sizes and JSON files of some model directories, and of the version."""
    found = []
    for folder in folders:
        with Checkpoint(folder) as checkpoint:
            found.append(fingerprint(checkpoint, CommonOptions(), content_mark))
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def check_hash(wanted: str, *folders: Path) -> None:
    """Refuses to look at other directories than the ones that are meant.

    Raises:
        OptionError: if they, or this version of fp4kit, are others.
    """
    if hash_of(*folders) != wanted:
        names = " and ".join(str(folder) for folder in folders)
        raise OptionError(
            f"{names}: this worker sees other headers, sizes or JSON files than the process that "
            "asks it, or has another fp4kit; nothing was looked at"
        )


@dataclass
class ShareWork(Work):
    """Shares of a look at a checkpoint, a task each.

    Attributes:
        kind: what is done, one word.
        device: where each worker computes.
        where: what is looked at, for messages.
        function: called with the arguments, the number of a share and how many there are.
        arguments: what is the same for all of them.
        nbytes: bytes of the source.
        results: of the shares that are done.
    """

    kind: str
    device: str
    where: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    nbytes: int
    results: dict[int, Any] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How many shares there are."""
        return share_count(self.nbytes)

    def call(self, number: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:  # noqa: D102
        return self.function, (*self.arguments, number, self.count)

    def name(self, number: int) -> str:  # noqa: D102
        return f"share-{number + 1:03d}-of-{self.count:03d}"

    def size(self, number: int) -> int:  # noqa: D102
        return self.nbytes // self.count

    def take(self, number: int, result: Any) -> None:  # noqa: D102
        self.results[number] = result

    def stopped(self, waiting: Iterable[int], why: str) -> OutputError:  # noqa: D102
        left = len(list(waiting))
        return OutputError(
            f"{self.where}: {left} of {self.count} shares were not looked at: {why}; run the "
            "command again"
        )

    def in_order(self) -> list[Any]:
        """The results of all shares."""
        return [self.results[number] for number in range(self.count)]


def interleaved(shares: list[list[Any]]) -> list[Any]:
    """What was dealt out one by one, in its first order."""
    longest = max(map(len, shares), default=0)
    return [share[at] for at in range(longest) for share in shares if at < len(share)]
