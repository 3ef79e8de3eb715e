# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""One checkpoint over many machines, from and to wherever it lies.

Whoever works on a conversion makes the same plan from the headers of the source; its hash tells
that it is the same. A task is a number: it writes that shard of the plan, reading exactly what it
needs, and leaves a receipt. Any worker may run any task, once or twice, with the same bytes. The
last step checks all receipts and writes what is not weights. Each module imports only those above
it:

- `patience.py`: what is tried again, and for how long.
- `urls.py`: paths and URLs, and what may not stand in one.
- `places.py`, `stores.py`: where a result is written: a directory, or a prefix of an object store.
- `remote_files.py`, `mirror.py`: a source that lies elsewhere, as a directory of stand-ins.
- `job.py`: what is asked for, the plan that each worker makes of it, and its hash.
- `receipts.py`: what a task leaves behind.
- `tasks.py`: one shard, written and receipted.
- `executors.py`, `dask_scheduler.py`, `workers.py`: who runs tasks of any kind, and what becomes of
  those that fail.
- `shards.py`, `shares.py`: the shards of a job, and shares of a look at a checkpoint, as tasks.
- `finish.py`: receipts checked, JSON files written, the result verified.
- `run.py`: all of it, for the functions on files.
"""
