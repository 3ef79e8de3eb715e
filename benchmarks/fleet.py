# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""How a conversion scales with the number of worker processes of one machine.

Usage: python benchmarks/fleet.py [--folder /dev/shm] [--gigabytes 16] [--shard 64MB]
       [--workers 1 2 4 8] [--how executor|parts|dask] [--repeat 3] [--copy] [--json]

A Llama-shaped bfloat16 checkpoint is written to a tmpfs and quantized to NVFP4 by so many
processes of one thread each. `executor` (concurrent.futures) and `dask` count the tasks alone, with
the processes started, kernels loaded and plans made, as in a long run; `parts` counts the whole of
N commands `fp4kit quantize --part I/N`, start included, and `fp4kit finish`. `efficiency` is the
time of one worker over N times that of N. Times are the best of the repeats, which are interleaved.

`--copy` has the same processes read the same bytes of the source and write as many bytes as the
result has, and nothing else: the bandwidth of the tmpfs that bounds any conversion. The first lines
are the steps of a task in seconds of one processor, as benchmarks/fleet_simulation.py reads them
from --json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np

from fp4kit.checkpoint.options import CheckpointOptions, parse_size
from fp4kit.fleet import executors, tasks
from fp4kit.fleet.executors import Course
from fp4kit.fleet.job import Job, begin, opened_job
from fp4kit.fleet.places import sha256_of
from fp4kit.fleet.shards import ShardWork
from fp4kit.fleet.stores import place_of
from fp4kit.io.containers import TensorSpec
from fp4kit.io.write.safetensors import SafetensorsWriter

HIDDEN, INTERMEDIATE = 4096, 14336
#: Files of the source, and layers of experts of the model whose plan is timed.
FILES, EXPERT_LAYERS = 8, 20
_barrier: Barrier | None = None


def layer_shapes(number: int) -> dict[str, tuple[int, ...]]:
    """The weights of a layer of Llama 3 8B: 436 MB."""
    prefix = f"model.layers.{number}"
    return {
        f"{prefix}.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
        f"{prefix}.self_attn.k_proj.weight": (HIDDEN // 4, HIDDEN),
        f"{prefix}.self_attn.v_proj.weight": (HIDDEN // 4, HIDDEN),
        f"{prefix}.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        f"{prefix}.mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
        f"{prefix}.mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
        f"{prefix}.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        f"{prefix}.input_layernorm.weight": (HIDDEN,),
    }


def write_source(folder: Path, gigabytes: float) -> Path:
    """A checkpoint of about so many bytes, in several files."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    # Normal values, cut to bfloat16; every tensor begins elsewhere in them.
    values = (rng.standard_normal(1 << 24, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    values = np.concatenate([values, values[: 1 << 20]])
    layers: list[dict[str, tuple[int, ...]]] = []
    total = 0.0
    while total < gigabytes * 1e9:
        layers.append(layer_shapes(len(layers)))
        total += sum(2.0 * np.prod(shape) for shape in layers[-1].values())
    per = -(-len(layers) // FILES)
    groups = [layers[first : first + per] for first in range(0, len(layers), per)]
    weight_map = {}
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        shapes = {key: shape for each in group for key, shape in each.items()}
        specs = [TensorSpec(key, "BF16", shape) for key, shape in shapes.items()]
        with SafetensorsWriter(folder / name, specs, {"format": "pt"}) as writer:
            for spec in specs:
                left, at = spec.nbytes // 2, 0
                while left:
                    first = int(rng.integers(1 << 20))
                    piece = values[first : first + min(left, 1 << 24)]
                    writer.write(spec.name, at, piece.view(np.uint8))
                    left, at = left - len(piece), at + 2 * len(piece)
            writer.finish()
        weight_map |= dict.fromkeys(shapes, name)
    size = sum(path.stat().st_size for path in folder.iterdir())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {"model_type": "llama", "dtype": "bfloat16", "num_hidden_layers": len(layers)}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _prepare(barrier: Barrier, job: Job, warm: str) -> None:
    """A worker's start: kernels loaded, source open, plan made."""
    global _barrier
    _barrier = barrier
    os.environ["FP4KIT_NUM_THREADS"] = "1"
    with opened_job(Job(job.operation, job.source, warm, job.options)) as planned:
        place = place_of(warm)
        begin(place, planned)
    tasks.run_task(Job(job.operation, job.source, warm, job.options), planned.hash, 0)
    with tasks.using(job):
        pass


def _meet(_: int) -> int:
    """Waits until every worker is ready; its process."""
    assert _barrier is not None
    _barrier.wait()
    return os.getpid()


def _peak(_: int) -> tuple[int, int]:
    """Peak memory of a worker, in bytes."""
    assert _barrier is not None
    _barrier.wait()
    return os.getpid(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextmanager
def pool_of(count: int, job: Job, warm: Path) -> Iterator[ProcessPoolExecutor]:
    """So many workers, ready to work."""
    context = multiprocessing.get_context("spawn")
    names = (context.Barrier(count), job, str(warm))
    with ProcessPoolExecutor(count, context, _prepare, names) as pool:
        assert len(set(pool.map(_meet, range(count)))) == count
        yield pool


def by_executor(count: int, job: Job, scratch: Path) -> tuple[float, int]:
    """Seconds of the tasks on an executor, and the largest memory of a worker."""
    warm = scratch / "warm"
    shutil.rmtree(warm, ignore_errors=True)
    with opened_job(job) as planned, pool_of(count, job, warm) as pool:
        begin(place_of(job.target), planned)
        course = Course(ShardWork(planned), range(len(planned.shards)), None)
        started = time.perf_counter()
        executors.run_on_executor(course, pool)
        seconds = time.perf_counter() - started
        return seconds, max(peak for _, peak in pool.map(_peak, range(count)))


def by_dask(count: int, job: Job, scratch: Path) -> tuple[float, int]:
    """Seconds of the tasks on dask, with its workers started."""
    import distributed

    from fp4kit.fleet.dask_scheduler import run_on_dask

    env = {"FP4KIT_NUM_THREADS": "1"}
    with (
        distributed.LocalCluster(
            n_workers=count, threads_per_worker=1, dashboard_address=None, env=env
        ) as cluster,
        opened_job(job) as planned,
    ):
        with distributed.Client(cluster) as client:
            warm = Job(job.operation, job.source, str(scratch / "warm"), job.options)
            shutil.rmtree(warm.target, ignore_errors=True)
            with opened_job(warm) as other:
                begin(place_of(warm.target), other)
            client.run(tasks.run_task, warm, other.hash, 0)
        begin(place_of(job.target), planned)
        course = Course(ShardWork(planned), range(len(planned.shards)), None)
        started = time.perf_counter()
        run_on_dask(course, cluster.scheduler_address)
        return time.perf_counter() - started, 0


def by_parts(count: int, job: Job, scratch: Path) -> tuple[float, int]:
    """Seconds of N commands at once, from their start to the end of `finish`."""
    size = f"{job.options.max_shard_size}B"  # type: ignore[attr-defined]
    command = [sys.executable, "-m", "fp4kit"]
    started = time.perf_counter()
    running = [
        subprocess.Popen(
            [
                *(*command, "quantize", job.source, "-o", job.target, "--device", "cpu"),
                *("--threads", "1", "--max-shard-size", size, "--part", f"{number}/{count}"),
            ],
            stdout=subprocess.DEVNULL,
        )
        for number in range(1, count + 1)
    ]
    assert not any(process.wait() for process in running)
    subprocess.run([*command, "finish", job.target], check=True, stdout=subprocess.DEVNULL)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return time.perf_counter() - started, peak


def _copy(given: tuple[str, str, list[int], int]) -> int:
    """Reads bytes of the source, and writes as many as the result of a task has."""
    source, target, span, size = given
    buffer = np.empty(64 << 20, np.uint8)
    with Path(source).open("rb", buffering=0) as file:
        file.seek(span[0])
        left = span[1] - span[0]
        while left > 0 and (count := file.readinto(buffer[: min(left, len(buffer))].data)):
            left -= count
    with Path(target).open("wb", buffering=0) as out:
        while size > 0:
            size -= out.write(buffer[: min(size, len(buffer))].data)
    return 0


def copied(count: int, job: Job, scratch: Path) -> float:
    """Seconds of the same bytes read and written by so many processes, without any work."""
    out = scratch / "copied"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    files = sorted(Path(job.source).glob("*.safetensors"))
    with opened_job(job) as planned, pool_of(count, job, scratch / "warm") as pool:
        pieces = []
        for number, shard in enumerate(planned.shards):
            file = files[number % len(files)]
            nbytes = planned.source_bytes(number)
            first = (number * nbytes) % max(file.stat().st_size - nbytes, 1)
            size = sum(spec.nbytes for spec in shard.specs)
            pieces.append((str(file), str(out / shard.name), [first, first + nbytes], size))
        started = time.perf_counter()
        list(pool.map(_copy, pieces))
        seconds = time.perf_counter() - started
    shutil.rmtree(out)
    return seconds


def plan_time(folder: Path) -> float:
    """Processor seconds of the plan of a model with many experts, for each tensor."""
    source = folder / "experts"
    source.mkdir()
    weight_map = {}
    for layer in range(EXPERT_LAYERS):
        name = f"model-{layer + 1:05d}-of-{EXPERT_LAYERS:05d}.safetensors"
        prefix = f"model.layers.{layer}.mlp.experts"
        specs = [
            TensorSpec(f"{prefix}.{expert}.{part}_proj.weight", "BF16", (1, 16))
            for expert in range(256)
            for part in ("gate", "up", "down")
        ]
        with SafetensorsWriter(source / name, specs, {"format": "pt"}) as writer:
            for spec in specs:
                writer.write(spec.name, 0, bytes(spec.nbytes))
            writer.finish()
        weight_map |= dict.fromkeys((spec.name for spec in specs), name)
    index = {"metadata": {"total_size": 32 * len(weight_map)}, "weight_map": weight_map}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {"model_type": "deepseek_v3", "num_hidden_layers": EXPERT_LAYERS}
    (source / "config.json").write_text(json.dumps(config))
    started = time.process_time()
    with opened_job(Job("quantize", str(source), "out", CheckpointOptions())) as planned:
        return (time.process_time() - started) / len(planned.plan.works)


def step_times(job: Job, folder: Path) -> dict[str, float]:
    """What each step of a conversion takes here, in seconds of one processor.

    They are those that the processor spent on this process: others who share it are left out.
    """
    os.environ["FP4KIT_NUM_THREADS"] = "1"
    shutil.rmtree(job.target, ignore_errors=True)
    with opened_job(job) as planned:
        place = place_of(job.target)
        begin(place, planned)
        tasks.run_task(job, planned.hash, 0)  # kernels
        numbers = range(1, len(planned.shards))
        started = time.process_time()
        for number in numbers:
            tasks.run_task(job, planned.hash, number)
        working = time.process_time() - started
        read = sum(map(planned.source_bytes, numbers))
        paths = [Path(job.target) / planned.shards[number].name for number in numbers]
        started = time.process_time()
        for path in paths:
            sha256_of(path)
        hashing = time.process_time() - started
        written = sum(path.stat().st_size for path in paths)
    return {
        "plan_seconds_per_tensor": plan_time(folder),
        "task_seconds_per_gb": (working - hashing) / read * 1e9,
        "hash_seconds_per_gb_of_result": hashing / written * 1e9,
        "result_bytes_per_source_byte": written / read,
    }


HOW: dict[str, Callable[[int, Job, Path], tuple[float, int]]] = {
    "executor": by_executor,
    "parts": by_parts,
    "dask": by_dask,
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description="scaling of shared conversions")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--gigabytes", type=float, default=16.0)
    parser.add_argument("--shard", type=parse_size, default=parse_size("64MB"))
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--how", choices=sorted(HOW), default="executor")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--copy", action="store_true")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Everything that the table shows."""
    folder.mkdir(exist_ok=True)
    source = write_source(folder / "source", options.gigabytes)
    nbytes = sum(path.stat().st_size for path in source.iterdir())
    job = Job(
        "quantize", str(source), str(folder / "out"),
        CheckpointOptions(max_shard_size=options.shard, allow_nothing=False),
    )  # fmt: skip
    steps = step_times(job, folder)
    seconds: dict[int, float] = {}
    peaks: dict[int, int] = {}
    copies: dict[int, float] = {}
    for _ in range(options.repeat):
        for count in options.workers:
            shutil.rmtree(job.target, ignore_errors=True)
            took, peak = HOW[options.how](count, job, folder)
            seconds[count] = min(seconds.get(count, took), took)
            peaks[count] = max(peaks.get(count, 0), peak)
            if options.copy:
                took = copied(count, job, folder)
                copies[count] = min(copies.get(count, took), took)
    first = options.workers[0]
    return {
        "machine": {"cores": os.cpu_count(), "processor": platform.processor()},
        "how": options.how,
        "source_bytes": nbytes,
        "shard_bytes": options.shard,
        "steps": steps,
        "workers": [
            {
                "workers": count,
                "seconds": seconds[count],
                "gb_per_second": nbytes / seconds[count] / 1e9,
                "efficiency": seconds[first] * first / (count * seconds[count]),
                "peak_bytes": peaks[count],
                "copy_seconds": copies.get(count),
            }
            for count in options.workers
        ],
    }


def main() -> None:
    """Measures and prints."""
    options = parse()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="fp4kit-fleet-") as folder:
        found = measure(options, Path(folder))
    if options.json:
        print(json.dumps(found, indent=2))
        return
    print(f"{found['source_bytes'] / 1e9:.2f} GB in shards of {options.shard / 1e6:.0f} MB")  # type: ignore[operator]
    for name, value in found["steps"].items():  # type: ignore[attr-defined]
        print(f"  {name}: {value:.4g}")
    print("workers  seconds   GB/s  efficiency  peak MB  copy alone")
    for row in found["workers"]:  # type: ignore[attr-defined]
        copy = f"{row['copy_seconds']:.2f} s" if row["copy_seconds"] else "-"
        print(
            f"{row['workers']:7}  {row['seconds']:7.2f}  {row['gb_per_second']:5.2f}  "
            f"{row['efficiency']:10.2f}  {row['peak_bytes'] / 1e6:7.0f}  {copy:>10}"
        )


if __name__ == "__main__":
    main()
