# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""A dask scheduler and workers as processes of their own, which tests may kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

#: What a worker does before it works, by name: code of a preload.
PRELOADS = {
    "plain": "",
    # Holds each task once its shard is half written, until a file is there.
    "held": """
import os, time
from pathlib import Path
from fp4kit.fleet import tasks
real = tasks.write_shard
def held(plan, shard, output, backend, tally):
    folder = Path(os.environ["FLEET_FOLDER"])
    (folder / f"{os.getpid()}.begun").write_text(shard.name)
    while not (folder / "go").exists():
        time.sleep(0.02)
    real(plan, shard, output, backend, tally)
tasks.write_shard = held
""",
    "slow": """
import time
from fp4kit.fleet import tasks
real = tasks.write_shard
def slow(*arguments):
    time.sleep(1.5)
    real(*arguments)
tasks.write_shard = slow
""",
    # A disk that takes a few bytes of each shard.
    "full": """
import errno, os
real = os.pwrite
def full(fd, data, offset):
    if offset > 2000:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return real(fd, data, offset)
os.pwrite = full
""",
    "other version": """
import fp4kit
fp4kit.__version__ = "0.0.1"
""",
    # As fp4kit sees it: dask's own heartbeats are not what is tested.
    "other clock": """
import time
from types import SimpleNamespace
from fp4kit.fleet import places
from fp4kit.io.write import files
late = lambda: time.time() - 86400 * 3
files.time = places.time = SimpleNamespace(
    time=late, monotonic=time.monotonic, sleep=time.sleep
)
""",
}


class Cluster:
    """A scheduler and its workers; what is left ends with the block.

    Attributes:
        address: of the scheduler.
        workers: processes, in the order that they were started.
    """

    def __init__(self, folder):
        self.folder = folder
        self.workers = []
        self._file = folder / "scheduler.json"
        self._log = (folder / "cluster.log").open("ab")
        self.scheduler = self._start("scheduler", "--host", "127.0.0.1", "--port", "0")
        self._wait(self._file.exists)
        self.address = json.loads(self._file.read_text())["address"]

    def _start(self, kind, *options):
        # Workers import numba's cache and not the tests; warnings are not theirs to judge.
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "dask", kind, *options),
                *("--scheduler-file", str(self._file), "--no-dashboard"),
            ],
            env=os.environ | {"FLEET_FOLDER": str(self.folder), "FP4KIT_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            cwd=self.folder,
        )

    def add(self, count=1, does="plain", *options):
        """Starts workers, without the nanny that would start a killed one anew."""
        preload = self.folder / f"{does.replace(' ', '_')}.py"
        # dask loads it twice.
        code = textwrap.indent(PRELOADS[does] or "pass", "    ")
        once = 'import sys\nif not hasattr(sys, "fleet_preload"):\n    sys.fleet_preload = True\n'
        preload.write_text(once + code)
        for _ in range(count):
            worker = self._start(
                *("worker", "--no-nanny", "--nthreads", "1", "--preload", str(preload)),
                *("--local-directory", str(self.folder), "--memory-limit", "0", *options),
            )
            self.workers.append(worker)
        return self.workers[-count:]

    @staticmethod
    def _wait(done, seconds=60):
        until = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < until
            time.sleep(0.02)

    def wait_begun(self, count=1):
        """Waits until some workers hold a task; their process numbers."""
        self._wait(lambda: len(list(self.folder.glob("*.begun"))) >= count)
        return [int(path.stem) for path in self.folder.glob("*.begun")]

    def go(self):
        """Lets held tasks go on."""
        (self.folder / "go").touch()

    @staticmethod
    def kill(process):
        process.send_signal(signal.SIGKILL)
        process.wait()

    @property
    def log(self):
        return (self.folder / "cluster.log").read_text(errors="replace")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in (*self.workers, self.scheduler):
            if process.poll() is None:
                self.kill(process)
        self._log.close()
