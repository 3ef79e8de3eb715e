# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What a task leaves behind once its shard is whole: the last thing that it writes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from fp4kit.checkpoint.plan.checkpoint_plan import Shard
from fp4kit.checkpoint.read.other_files import STATE_DIR
from fp4kit.checkpoint.write.shards import is_complete

from .places import Place


@dataclass(frozen=True)
class Receipt:
    """A shard that is written.

    Attributes:
        shard: its name.
        plan: hash of the plan.
        size: bytes of the file.
        sha256: of the file, as it was read back from the disk.
        mark: what the store said of its content after the upload, "" if nothing.
        results: what became of its tensors, as plain data.
        retries: how often something had to be tried again.
    """

    shard: str
    plan: str
    size: int
    sha256: str
    mark: str
    results: dict[str, Any]
    retries: int = 0

    def is_kept(self, place: Place) -> bool:
        """Whether the shard is still what was written.

        The store's own mark decides where there is one, else the checksum, which reads the file.
        """
        found = place.mark(self.shard)
        if found is None or found[0] != self.size:
            return False
        if self.mark and found[1]:
            return found[1] == self.mark
        return place.sha256(self.shard) == self.sha256


def _name(shard: Shard) -> str:
    return f"{STATE_DIR}/{shard.name}.json"


def write_receipt(place: Place, shard: Shard, receipt: Receipt) -> None:
    """Says that a shard is whole."""
    place.write(_name(shard), (json.dumps(asdict(receipt)) + "\n").encode())


def read_receipt(place: Place, shard: Shard, plan: str) -> Receipt | None:
    """The receipt of a shard, None if there is none of this plan; the shard is not looked at."""
    data = place.read(_name(shard))
    if data is None:
        return None
    try:
        receipt = Receipt(**json.loads(data))
    except (ValueError, TypeError):  # cut off, or changed by somebody: the shard is made again
        return None
    texts = (receipt.shard, receipt.plan, receipt.sha256, receipt.mark)
    if not all(isinstance(text, str) for text in texts) or type(receipt.size) is not int:
        return None
    if (receipt.shard, receipt.plan) != (shard.name, plan):
        return None
    if not isinstance(receipt.results, dict) or not is_complete(shard, receipt.results):
        return None
    return receipt
