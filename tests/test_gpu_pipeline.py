# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The GPU pipeline's order and bookkeeping, with the CPU backend behind a device of host memory."""

import threading

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from fp4kit.errors import NonFiniteError
from fp4kit.io.dequantize import dequantize_file
from fp4kit.io.quantize import quantize_file
from fp4kit.io.report import QuantizeOptions
from fp4kit.io.stream import gpu_pipeline
from fp4kit.scheme import Scheme


def arrays():
    rng = np.random.default_rng(0)
    result = {}
    for name, shape, dtype in [
        ("a", (515, 64), ml_dtypes.bfloat16),
        ("b", (3, 90, 64), np.float32),
        ("row", (1, 1 << 14), np.float16),
        ("kept.rows", (999, 7), np.float32),
        ("tiny", (2, 32), np.float32),
    ]:
        result[name] = rng.standard_normal(shape).astype(dtype)
    result |= {f"s{i}": rng.standard_normal((i + 1, 64)).astype(np.float32) for i in range(30)}
    return result | {"kept": np.arange(9000), "none": np.zeros((0, 16), np.float32)}


@pytest.mark.parametrize("resident", [1 << 30, 20 << 10, 0], ids=["held", "some", "twice"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
@pytest.mark.parametrize("layout", ["linear", "swizzled_128x4"])
@pytest.mark.parametrize("chunk", [4 << 10, 64 << 20])
def test_same_bytes(fake_gpu, tmp_path, monkeypatch, resident, format, layout, chunk):
    monkeypatch.setattr(gpu_pipeline, "RESIDENT_BYTES", resident)
    monkeypatch.setattr(gpu_pipeline, "GPU_CHUNK_BYTES", chunk)
    monkeypatch.setattr(gpu_pipeline, "RESULT_BYTES", 8 << 10)
    source = tmp_path / "in.safetensors"
    safetensors.numpy.save_file(arrays(), source)
    files = {}
    for device in ("cpu", "cuda"):
        q = tmp_path / f"{device}.safetensors"
        calls = []
        report = quantize_file(
            source,
            q,
            QuantizeOptions(Scheme(format, scale_layout=layout), device=device),
            lambda *done, calls=calls: calls.append(done),
        )
        assert calls[-1][0] == calls[-1][1]
        outs = [q.read_bytes()]
        for suffix in ("safetensors", "npz"):
            back = tmp_path / f"{device}-back.{suffix}"
            dequantize_file(q, back, "bfloat16", device=device)
            outs.append(back.read_bytes())
        files[device] = outs
        files[device, "stats"] = [t.stats.saturated for t in report.tensors if t.stats]
        files[device, "mse"] = [t.stats.mse for t in report.tensors if t.stats]
    assert files["cpu"] == files["cuda"]
    assert files["cpu", "stats"] == files["cuda", "stats"]
    assert files["cuda", "mse"] == pytest.approx(files["cpu", "mse"], rel=1e-12)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8"])
@pytest.mark.parametrize("layout", ["linear", "swizzled_128x4"])
def test_same_bytes_of_padded_and_cast_rows(fake_gpu, tmp_path, monkeypatch, format, layout):
    monkeypatch.setattr(gpu_pipeline, "GPU_CHUNK_BYTES", 4 << 10)
    rng = np.random.default_rng(1)
    source = tmp_path / "in.npz"
    np.savez(source, wide=rng.standard_normal((300, 77)), odd=rng.standard_normal((2, 9, 5)))
    files = {}
    for device in ("cpu", "cuda"):
        q, back = tmp_path / f"{device}.safetensors", tmp_path / f"{device}-back.npz"
        options = QuantizeOptions(
            Scheme(format, scale_layout=layout, pad=True), device=device, cast="float32"
        )
        quantize_file(source, q, options)
        dequantize_file(q, back, "float32", device=device)
        files[device] = q.read_bytes(), back.read_bytes()
    assert files["cpu"] == files["cuda"]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nonfinite(fake_gpu, tmp_path, monkeypatch, value):
    monkeypatch.setattr(gpu_pipeline, "GPU_CHUNK_BYTES", 4 << 10)
    x = arrays()
    x["b"][1, 3, 5] = value
    source = tmp_path / "in.safetensors"
    safetensors.numpy.save_file(x, source)
    messages = []
    for device in ("cpu", "cuda"):
        with pytest.raises(NonFiniteError) as caught:
            quantize_file(source, tmp_path / "q.safetensors", QuantizeOptions(device=device))
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert list(tmp_path.iterdir()) == [source]


def test_failing_writer(fake_gpu, tmp_path, monkeypatch):
    from fp4kit.io.write.files import AtomicFile, OutputError

    monkeypatch.setattr(gpu_pipeline, "GPU_CHUNK_BYTES", 4 << 10)
    monkeypatch.setattr(gpu_pipeline, "RESULT_BYTES", 8 << 10)
    source = tmp_path / "in.safetensors"
    safetensors.numpy.save_file(arrays(), source)

    def full(self, *args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(AtomicFile, "write_at", full)
    with pytest.raises(OutputError, match="No space"):
        quantize_file(source, tmp_path / "q.safetensors", QuantizeOptions(device="cuda"))
    assert list(tmp_path.iterdir()) == [source]
    assert not [t for t in threading.enumerate() if t.name.startswith("fp4kit-write")]
