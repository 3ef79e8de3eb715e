# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""How long a conversion of a large checkpoint takes with so many workers: a simulation.

Usage: python benchmarks/fleet_simulation.py [--measured FILE] [--terabytes 1.5] [--tensors 90000]
       [--workers 8 64 512] [--shards 5GB 1GB 250MB] [--seed 0] [--json]

FILE is what benchmarks/fleet.py --json printed: processor time of a task for a gigabyte, of its
checksum, and of a plan. Without it MEASURED below is taken. The rest are assumptions:

- A worker is a machine of CORES cores, whose tasks use them with EFFICIENCY; LINK bytes a second go
  in or out of it. Reading is ahead of computing, so that a task takes the longer of the two; its
  checksum and its upload come after.
- Three stores: an object store that gives every worker its whole link, a shared file system of
  SHARED bytes a second for all workers together, and one of SLOW. Who uses it at a time gets equal
  shares.
- Each task takes SPREAD (standard deviation of a logarithm) more or less than the mean, and one
  worker in SLOW_EVERY is SLOW_FACTOR times as slow as the others.
- Whoever makes the plan, the process that starts the run and then each worker, needs START seconds
  for itself, LATENCY for each file of the source whose header it reads (CONNECTIONS side by side),
  and the time of the plan. The scheduler gives out a task in DISPATCH seconds. `finish` reads a
  receipt for each shard and the block scales of the result through one machine's link.

Nothing fails. What bounds a run is said for each: the number of shards (workers without a task),
the store, the workers' own work, or the steps that one machine does alone.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fp4kit.checkpoint.options import parse_size

#: benchmarks/fleet.py on two cores of a shared machine (see NOTES.md): one worker, one thread.
MEASURED = {
    "plan_seconds_per_tensor": 0.00014,
    "task_seconds_per_gb": 2.6,
    "hash_seconds_per_gb_of_result": 0.9,
    "result_bytes_per_source_byte": 0.2813,
}
CORES, EFFICIENCY = 16, 0.85
LINK, SHARED, SLOW = 1.25e9, 20e9, 2e9
SPREAD, SLOW_EVERY, SLOW_FACTOR = 0.1, 20, 1.5
START, LATENCY, CONNECTIONS, DISPATCH = 5.0, 0.03, 16, 0.001
#: Bytes of a file of the source, and share of the result that are block scales.
SOURCE_FILE, SCALES = 5e9, 1 / 9
STORES = {"object store": math.inf, "shared 20 GB/s": SHARED, "shared 2 GB/s": SLOW}


@dataclass(frozen=True)
class Case:
    """What is simulated.

    Attributes:
        workers: machines.
        shard: bytes of a shard of the result.
        store: bytes a second for all workers together.
        source: bytes of the source.
        tensors: how many it has.
    """

    workers: int
    shard: float
    store: float
    source: float
    tensors: int


@dataclass(frozen=True)
class Outcome:
    """What comes of it.

    Attributes:
        seconds: of the whole.
        alone: of that, the steps of one machine alone.
        tasks: number of shards.
        busy: share of the workers' time in which they had a task.
        bound: what bounds it.
    """

    seconds: float
    alone: float
    tasks: int
    busy: float
    bound: str


def simulate(case: Case, measured: dict[str, float], seed: int = 0) -> Outcome:
    """Runs one case."""
    rng = np.random.default_rng(seed)
    ratio = measured["result_bytes_per_source_byte"]
    count = max(math.ceil(case.source * ratio / case.shard), 1)
    read, written = case.source / count, case.source * ratio / count
    compute = measured["task_seconds_per_gb"] * read / 1e9 / (CORES * EFFICIENCY)
    # The checksum uses one core.
    digest = measured["hash_seconds_per_gb_of_result"] * written / 1e9
    plan = measured["plan_seconds_per_tensor"] * case.tensors
    files = math.ceil(case.source / SOURCE_FILE)
    begin = START + plan + LATENCY * math.ceil(files / CONNECTIONS)
    slow = np.where(np.arange(case.workers) % SLOW_EVERY == SLOW_EVERY - 1, SLOW_FACTOR, 1.0)
    luck = rng.lognormal(0.0, SPREAD, count)
    # The process that starts the run plans, then each worker does so when its first task comes.
    free = [(2 * begin, worker) for worker in range(min(case.workers, count))]
    heapq.heapify(free)
    rate = min(LINK, case.store / min(case.workers, count))
    working, last, given = 0.0, 0.0, 0.0
    for task in range(count):
        at, worker = heapq.heappop(free)
        given = max(given + DISPATCH, at)
        own = max(read / rate, compute * slow[worker]) + digest * slow[worker] + written / rate
        took = own * luck[task] + LATENCY * 4
        end = given + took
        working += took
        heapq.heappush(free, (end, worker))
        last = max(last, end)
    finish = LATENCY * 3 * math.ceil(count / CONNECTIONS)
    finish += written * count * SCALES / min(LINK, case.store)
    alone = 2 * begin + finish  # the workers plan side by side, but nothing else goes on
    busy = working / (case.workers * (last - 2 * begin))
    bound = _bound(case, count, last, alone, read / rate > compute)
    return Outcome(last + finish, alone, count, busy, bound)


def _bound(case: Case, count: int, last: float, alone: float, waits: bool) -> str:
    """What bounds a run: what a further worker would not change, or what workers do."""
    if case.workers > count:
        return "shards"
    if alone > last / 2:
        return "plan, finish"
    if waits and case.store / case.workers < LINK:
        return "store"
    return "links" if waits else "cores"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description="simulated scaling of shared conversions")
    parser.add_argument("--measured", type=Path)
    parser.add_argument("--terabytes", type=float, default=1.5)
    parser.add_argument("--tensors", type=int, default=90_000)
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--shards", nargs="+", default=["5GB", "1GB", "250MB"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


def main() -> None:
    """Simulates and prints."""
    options = parse()
    measured = MEASURED
    if options.measured is not None:
        measured = json.loads(options.measured.read_text())["steps"]
    rows = []
    for name, store in STORES.items():
        for text in options.shards:
            shard, source = parse_size(text), options.terabytes * 1e12
            one = simulate(Case(1, shard, store, source, options.tensors), measured, options.seed)
            for workers in options.workers:
                case = Case(workers, shard, store, source, options.tensors)
                found = simulate(case, measured, options.seed)
                rows.append(
                    {
                        "store": name,
                        "shard": text,
                        "workers": workers,
                        "minutes": found.seconds / 60,
                        "efficiency": one.seconds / workers / found.seconds,
                        "tasks": found.tasks,
                        "busy": found.busy,
                        "alone_minutes": found.alone / 60,
                        "bound": found.bound,
                    }
                )
    if options.json:
        print(json.dumps({"measured": measured, "rows": rows}, indent=2))
        return
    print("store           shards  workers  minutes  efficiency  tasks   busy  alone  bound by")
    for row in rows:
        print(
            f"{row['store']:15} {row['shard']:>6}  {row['workers']:7}  {row['minutes']:7.1f}  "
            f"{row['efficiency']:10.2f}  {row['tasks']:5}  {row['busy']:5.2f}  "
            f"{row['alone_minutes']:5.1f}  {row['bound']}"
        )


if __name__ == "__main__":
    main()
