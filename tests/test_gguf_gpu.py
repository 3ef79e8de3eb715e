# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""GGUF models through the GPU's pipeline: the bytes are those of the CPU."""

import pytest
from gguf import GGMLQuantizationType as Kind

from fp4kit.io.dequantize import dequantize_file
from fp4kit.io.quantize import quantize_file
from fp4kit.io.report import QuantizeOptions
from fp4kit.io.stream import gpu_pipeline
from fp4kit.scheme import Scheme
from gguf_models import weights, write_model


@pytest.mark.parametrize("resident", [1 << 30, 20 << 10, 0], ids=["held", "some", "twice"])
@pytest.mark.parametrize("kind", [Kind.BF16, Kind.Q8_0], ids=["bf16", "q8_0"])
@pytest.mark.parametrize(
    ("architecture", "experts"), [("llama", 0), ("qwen2", 0), ("qwen3moe", 3)]
)  # qwen2: block scales alone
@pytest.mark.parametrize("chunk", [4 << 10, 64 << 20])
def test_same_bytes(fake_gpu, tmp_path, monkeypatch, resident, kind, architecture, experts, chunk):
    monkeypatch.setattr(gpu_pipeline, "RESIDENT_BYTES", resident)
    monkeypatch.setattr(gpu_pipeline, "GPU_CHUNK_BYTES", chunk)
    monkeypatch.setattr(gpu_pipeline, "RESULT_BYTES", 8 << 10)
    arrays = weights(layers=1, experts=experts)
    source = write_model(tmp_path / "m.gguf", arrays, architecture, kind=kind)
    for form in ("nvfp4", "mxfp4"):
        files = {}
        for device in ("cpu", "cuda"):
            target, back = tmp_path / f"{device}.gguf", tmp_path / f"{device}-back.gguf"
            options = QuantizeOptions(Scheme(form), device=device, force=True)
            report = quantize_file(source, target, options)
            dequantize_file(target, back, "bfloat16", device=device, force=True)
            files[device] = target.read_bytes(), back.read_bytes()
            files[device, "mse"] = [t.stats.mse for t in report.tensors if t.stats]
        assert files["cpu"] == files["cuda"]
        assert files["cuda", "mse"] == pytest.approx(files["cpu", "mse"], rel=1e-12)
