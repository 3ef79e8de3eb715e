# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on GPUs: the CPU's bytes, whatever stays on the device and whoever takes which shard.

Every test runs with fake devices, and the same tests once more with a real one where there is one.
"""

from __future__ import annotations

import threading

import ml_dtypes
import numpy as np
import pytest

from fp4kit.api.backends import get_backend
from fp4kit.checkpoint.operations import dequantize_checkpoint, quantize_checkpoint
from fp4kit.checkpoint.options import CheckpointOptions, DequantizeOptions
from fp4kit.checkpoint.read.directory import Checkpoint
from fp4kit.checkpoint.views.base import RowView
from fp4kit.checkpoint.write import shards
from fp4kit.errors import NonFiniteError
from fp4kit.io.stream import gpu_pipeline
from fp4kit.io.write.files import AtomicFile, OutputError

#: Bytes that stay on a device: all groups, some of them, none.
RESIDENT = {"held": 1 << 30, "some": 24 << 10, "twice": 0}
THREE = ("cuda:0", "cuda:1", "cuda:2")


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.gpu)])
def gpu(request):
    """Makes the devices that the tests name; of real ones only `cuda` is sure to be there."""
    request.getfixturevalue(f"{request.param}_gpu")
    return request.param


@pytest.fixture
def small(monkeypatch):
    """Slabs of a few rows, and results that have to wait for writers."""
    monkeypatch.setattr(gpu_pipeline, "GPU_CHUNK_BYTES", 4 << 10)
    monkeypatch.setattr(gpu_pipeline, "RESULT_BYTES", 8 << 10)


def mixed(checkpoints):
    """A dense model whose fused weights have different element types, the odd one anywhere."""
    tensors, config = checkpoints.llama(layers=3)
    for number, role in enumerate(("q_proj", "k_proj", "v_proj")):
        name = f"model.layers.{number}.self_attn.{role}.weight"
        tensors[name] = "F32", tensors[name][1].astype(np.float32) * np.float32(1.0001)
    return tensors, config


def transposed(checkpoints):
    """Experts that are fused [E, in, out]."""
    tensors, config = checkpoints.fused_moe("llama4")
    for name, (dtype, array) in tensors.items():
        if array.ndim == 3:
            tensors[name] = dtype, np.ascontiguousarray(array.transpose(0, 2, 1))
    return tensors, config


MODELS = {
    "llama": lambda checkpoints: checkpoints.llama(layers=3),
    "moe": lambda checkpoints: checkpoints.moe(),
    "mixed": mixed,
    "transposed": transposed,
    "fp8": lambda checkpoints: checkpoints.fp8_llama(layers=2)[:2],
}


def both(function, tmp_path, name, devices, *args, **options):
    """The same operation on the CPU and on devices: (reports, output directories)."""
    folders = [tmp_path / f"{name}-{kind}" for kind in ("cpu", "gpu")]
    reports = [
        function(*args[:1], folder, *args[1:], devices=on, **options)
        for folder, on in zip(folders, (("cpu",), devices), strict=True)
    ]
    return reports, folders


def assert_equal(checkpoints, reports, folders):
    """Every byte of every file, and statistics but for the order of sums."""
    assert checkpoints.digest(folders[0]) == checkpoints.digest(folders[1])
    for cpu, gpu in zip(*(report.tensors for report in reports), strict=True):
        assert (cpu.name, cpu.action, cpu.facts) == (gpu.name, gpu.action, gpu.facts)
        assert (cpu.stats is None) == (gpu.stats is None)
        if cpu.stats is not None:
            assert cpu.stats.saturated == gpu.stats.saturated
            assert cpu.stats.max_abs_error == gpu.stats.max_abs_error
            assert gpu.stats.mse == pytest.approx(cpu.stats.mse, rel=1e-12)


@pytest.mark.parametrize("resident", RESIDENT)
@pytest.mark.parametrize("model", MODELS)
def test_quantize(gpu, small, checkpoints, tmp_path, monkeypatch, model, resident):
    """Fusion groups that fit on the device and that do not, kept tensors and views between them."""
    monkeypatch.setattr(gpu_pipeline, "RESIDENT_BYTES", RESIDENT[resident])
    source = checkpoints.save(tmp_path / "in", *MODELS[model](checkpoints), shards=2)
    options = CheckpointOptions(max_shard_size=40_000)
    calls = []
    reports, folders = both(
        quantize_checkpoint,
        tmp_path,
        "q",
        ("cuda",),
        source,
        options,
        progress=lambda *done: calls.append(done),
    )
    assert calls[-1][0] == calls[-1][1]
    assert_equal(checkpoints, reports, folders)


@pytest.mark.parametrize("resident", ["held", "twice"])
@pytest.mark.parametrize(
    "options",
    [
        {"format": "mxfp4"},
        {"layout": "modelopt", "activations": "uncalibrated"},
        {"layout": "comfy"},
        {"recipe": "compressed-tensors"},
        {"recipe": "modelopt", "layout": "modelopt"},
    ],
    ids=lambda options: "-".join(options.values()),
)
def test_options(gpu, small, checkpoints, tmp_path, monkeypatch, options, resident):
    monkeypatch.setattr(gpu_pipeline, "RESIDENT_BYTES", RESIDENT[resident])
    source = checkpoints.save(tmp_path / "in", *mixed(checkpoints), shards=3)
    chosen = CheckpointOptions(max_shard_size=60_000, **options)
    result = both(quantize_checkpoint, tmp_path, "q", ("cuda",), source, chosen)
    assert_equal(checkpoints, *result)


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt", "comfy"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dequantize(gpu, small, checkpoints, tmp_path, layout, dtype):
    source = checkpoints.save(tmp_path / "in", *checkpoints.llama(), shards=2)
    quantized = tmp_path / "q"
    quantize_checkpoint(source, quantized, CheckpointOptions(layout=layout))
    options = DequantizeOptions(dtype, 40_000)
    result = both(dequantize_checkpoint, tmp_path, "d", ("cuda",), quantized, options)
    assert_equal(checkpoints, *result)


def test_decoded_tensors(gpu, small, checkpoints, tmp_path):
    """FP8 weights are no codes of ours: views compute them on the way."""
    tensors, config, _ = checkpoints.fp8_llama()
    source = checkpoints.save(tmp_path / "in", tensors, config, shards=2)
    options = DequantizeOptions("bfloat16", 40_000)
    result = both(dequantize_checkpoint, tmp_path, "d", ("cuda",), source, options)
    assert_equal(checkpoints, *result)


def test_views_are_read_in_whole_slabs_and_stored_tensors_in_pieces(
    fake_gpu, small, checkpoints, tmp_path, monkeypatch
):
    """A view passes through a whole matrix for any number of rows; files have many readers."""
    computed, stored = set(), set()

    def recording(kind, sizes, only):
        read = kind.read

        def recorded(self, *args):
            if threading.current_thread().name.startswith("fp4kit-read") and only(self, args):
                sizes.add((threading.current_thread(), len(args[-1])))
            return read(self, *args)

        monkeypatch.setattr(kind, "read", recorded)

    tensors, config = transposed(checkpoints)
    source = checkpoints.save(tmp_path / "in", tensors, config)
    recording(RowView, computed, lambda *_: True)
    recording(Checkpoint, stored, lambda _, args: tensors[args[0]][1].ndim == 2)
    quantize_checkpoint(source, tmp_path / "q", CheckpointOptions(), devices=("cuda",))
    # Down: 64 rows of 64 bytes; gate and up: 32 of 128. Each is one chunk of 4 KiB.
    assert {size for _, size in computed} == {4 << 10}
    assert max(size for _, size in stored) == gpu_pipeline.PIECE_BYTES
    assert len({thread for thread, _ in computed | stored}) > 1


# ------------------------------------------------------------------------------------------------
# Several devices
# ------------------------------------------------------------------------------------------------


@pytest.fixture
def taken(monkeypatch):
    """Which thread converts which shard; the first ones wait until every device has one."""
    found, barrier = {}, threading.Barrier(len(THREE), timeout=60)
    write_shard = shards.write_shard

    def recorded(plan, shard, *args):
        thread = threading.current_thread()
        if thread not in found.values() and thread is not threading.main_thread():
            barrier.wait()
        found[shard.name] = thread
        write_shard(plan, shard, *args)

    monkeypatch.setattr(shards, "write_shard", recorded)
    return found


@pytest.mark.parametrize("resident", RESIDENT)
def test_devices_share_the_shards(
    fake_gpu, small, taken, checkpoints, tmp_path, monkeypatch, resident
):
    """Each shard is converted once, by one of three at a time."""
    monkeypatch.setattr(gpu_pipeline, "RESIDENT_BYTES", RESIDENT[resident])
    source = checkpoints.save(tmp_path / "in", *checkpoints.llama(layers=4), shards=2)
    options = CheckpointOptions(max_shard_size=12_000)
    reports, folders = both(quantize_checkpoint, tmp_path, "q", THREE, source, options)
    assert_equal(checkpoints, reports, folders)
    assert len(set(taken.values()) - {threading.main_thread()}) == len(THREE)
    assert sorted(taken) == sorted(path.name for path in folders[1].glob("*.safetensors"))

    options = DequantizeOptions("bfloat16", 20_000)
    result = both(dequantize_checkpoint, tmp_path, "d", THREE, folders[1], options)
    assert_equal(checkpoints, *result)


@pytest.mark.gpu
def test_every_gpu_of_the_machine(real_gpu, small, checkpoints, tmp_path):
    source = checkpoints.save(tmp_path / "in", *checkpoints.llama(layers=4), shards=2)
    options = CheckpointOptions(max_shard_size=12_000)
    devices = tuple(get_backend("cuda").devices())
    reports, folders = both(quantize_checkpoint, tmp_path, "q", devices, source, options)
    assert_equal(checkpoints, reports, folders)
    options = DequantizeOptions("bfloat16", 20_000)
    result = both(dequantize_checkpoint, tmp_path, "d", devices, folders[1], options)
    assert_equal(checkpoints, *result)


def test_more_devices_than_shards(fake_gpu, checkpoints, tmp_path):
    source = checkpoints.save(tmp_path / "in", *checkpoints.llama(layers=1))
    result = both(quantize_checkpoint, tmp_path, "q", THREE, source, CheckpointOptions())
    assert_equal(checkpoints, *result)


def test_nothing_to_quantize_needs_no_device(fake_gpu, checkpoints, tmp_path):
    source = checkpoints.save(tmp_path / "in", *checkpoints.llama(), shards=2)
    options = CheckpointOptions(exclude=("*",), max_shard_size=20_000)
    result = both(quantize_checkpoint, tmp_path, "q", THREE, source, options)
    assert_equal(checkpoints, *result)


# ------------------------------------------------------------------------------------------------
# Faults
# ------------------------------------------------------------------------------------------------


def no_thread_left():
    return not [thread for thread in threading.enumerate() if "fp4kit-" in thread.name]


@pytest.mark.parametrize("devices", [("cuda",), THREE], ids=["one", "three"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("resident", ["held", "twice"])
def test_nonfinite(fake_gpu, small, checkpoints, tmp_path, monkeypatch, devices, value, resident):
    """In the last member of a group that is only converted later."""
    monkeypatch.setattr(gpu_pipeline, "RESIDENT_BYTES", RESIDENT[resident])
    tensors, config = checkpoints.llama(layers=3)
    tensors["model.layers.2.self_attn.v_proj.weight"][1][5, 7] = ml_dtypes.bfloat16(value)
    source = checkpoints.save(tmp_path / "in", tensors, config, shards=2)
    messages = []
    for name, on in (("cpu", ("cpu",)), ("gpu", devices)):
        target = tmp_path / name
        with pytest.raises(NonFiniteError) as caught:
            quantize_checkpoint(
                source, target, CheckpointOptions(max_shard_size=12_000), devices=on
            )
        messages.append(str(caught.value))
        assert not (target / "config.json").exists()
        assert (target / ".fp4kit-incomplete").is_dir()
        assert not list(target.glob(".*tmp"))
    assert messages[0] == messages[1]
    assert "(5, 7)" in messages[0]
    assert no_thread_left()


@pytest.mark.parametrize("devices", [("cuda",), THREE], ids=["one", "three"])
def test_a_full_disk_and_then_resume(fake_gpu, small, checkpoints, tmp_path, monkeypatch, devices):
    """What was finished stays, what was not is done again, on any number of devices."""
    source = checkpoints.save(tmp_path / "in", *checkpoints.llama(layers=4), shards=2)
    options = CheckpointOptions(max_shard_size=12_000)
    expected = tmp_path / "cpu"
    quantize_checkpoint(source, expected, options)
    target = tmp_path / "gpu"
    write_at = AtomicFile.write_at

    def full(self, offset, data):
        if self.target.suffix == ".safetensors" and list(target.glob("*.safetensors")):
            raise OSError(28, "No space left on device")
        write_at(self, offset, data)

    with monkeypatch.context() as patch:
        patch.setattr(AtomicFile, "write_at", full)
        with pytest.raises(OutputError, match="No space"):
            quantize_checkpoint(source, target, options, devices=devices)
    assert no_thread_left()
    done = {path.name: path.stat().st_mtime_ns for path in target.glob("*.safetensors")}
    assert 0 < len(done) < len(list(expected.glob("*.safetensors")))
    assert not (target / "config.json").exists()
    quantize_checkpoint(source, target, options, devices=THREE, resume=True)
    assert checkpoints.digest(target) == checkpoints.digest(expected)
    assert {name: (target / name).stat().st_mtime_ns for name in done} == done


def test_an_interrupt_stops_every_device(fake_gpu, checkpoints, tmp_path, monkeypatch):
    """It reaches the main thread; the others must not go on through all shards."""
    source = checkpoints.save(tmp_path / "in", *checkpoints.llama(layers=4), shards=2)
    started, write_shard = threading.Semaphore(0), shards.write_shard
    interrupted = threading.Event()
    count = []

    def slow(*args):
        count.append(args)
        started.release()
        assert interrupted.wait(60)
        write_shard(*args)

    class Pool(shards.ThreadPoolExecutor):
        def submit(self, *args):
            future = super().submit(*args)

            def result():
                for _ in THREE:
                    assert started.acquire(timeout=60)
                # The threads go on only once the main one has seen it.
                threading.Timer(0.2, interrupted.set).start()
                raise KeyboardInterrupt

            future.result = result
            return future

    monkeypatch.setattr(shards, "write_shard", slow)
    monkeypatch.setattr(shards, "ThreadPoolExecutor", Pool)
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(
            source, tmp_path / "q", CheckpointOptions(max_shard_size=12_000), devices=THREE
        )
    assert len(count) == len(THREE)
    assert len(list((tmp_path / "q").glob("*.safetensors"))) == len(THREE)
