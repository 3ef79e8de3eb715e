# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Scale searches for files: flags, metadata, and decoding without flags."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from click.testing import CliRunner

import fp4kit
from fp4kit.cli.main import cli
from fp4kit.errors import FileFormatError
from fp4kit.io.dequantize import dequantize_file
from fp4kit.io.metadata import METADATA_KEY, find_quantized
from fp4kit.io.read.open import open_source
from fp4kit.reference import codecs

F32 = np.float32
CHECKPOINTS = Path(__file__).parent / "golden" / "checkpoints"
SEARCHES = [
    ("four_over_six", "mse", 448),
    ("four_over_six", "mae", 256),
    ("sweep", "mse", 448),
    ("sweep", "mae_scaled", 256),
]


@pytest.fixture
def source(tmp_path):
    rng = np.random.default_rng(0)
    path = tmp_path / "model.npz"
    np.savez(
        path,
        a=rng.standard_normal((40, 64)).astype(F32),
        b=rng.standard_t(3, (3, 8, 32)).astype(F32),
    )
    return path


def call(*arguments):
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.output


def content(path):
    """(header, data) of a safetensors file."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def rewritten(path, header, data):
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize(("search", "error", "e4m3_max"), SEARCHES)
@pytest.mark.parametrize("layout", ["linear", "swizzled_128x4"])
def test_files_hold_and_decode_what_memory_does(
    search, error, e4m3_max, layout, source, tmp_path, assert_bits, fast_backend
):
    target, back = tmp_path / "q.safetensors", tmp_path / "back.npz"
    flags = ["--scale-search", search, "--search-error", error, "--e4m3-max", e4m3_max]
    flags += ["--device", fast_backend.name, "--report", tmp_path / "report.json"]
    call("quantize", source, "-o", target, "--scale-layout", layout, *flags)
    call("dequantize", target, "-o", back, "--device", fast_backend.name)
    report = json.loads((tmp_path / "report.json").read_text())
    stats = {tensor["name"]: tensor["stats"] for tensor in report["tensors"]}
    with open_source(target) as opened, np.load(source) as original, np.load(back) as decoded:
        entries = {entry.name: entry for entry in find_quantized(opened)}
        for name, x in original.items():
            q = fp4kit.quantize(
                x, scale_search=search, search_error=error, e4m3_max=e4m3_max, scale_layout=layout
            )
            entry = entries[name]
            assert entry.plan.scheme == q.scheme
            stored = np.empty(q.packed.nbytes, np.uint8)
            opened.read(entry.names.packed, 0, stored.data)
            assert_bits(stored.reshape(q.packed.shape), q.packed)
            assert_bits(entry.second, q.amax)
            assert_bits(decoded[name], fp4kit.dequantize(q))
            expected = fp4kit.error_stats(x, q).to_dict()
            assert stats[name] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("search", "error", "e4m3_max"), SEARCHES)
def test_other_readers_decode_by_the_global_scale(search, error, e4m3_max, source, tmp_path):
    """`_global_scale` is 6 * e4m3_max / amax: code * scale / global, whoever reads it."""
    target = tmp_path / "q.safetensors"
    flags = ["--scale-search", search, "--search-error", error, "--e4m3-max", e4m3_max]
    call("quantize", source, "-o", target, "--device", "cpu", *flags)
    header, data = content(target)
    del header["__metadata__"][METADATA_KEY]
    rewritten(target, header, data)
    back = tmp_path / "back.npz"
    call("dequantize", target, "-o", back, "--device", "cpu")
    with np.load(source) as original, np.load(back) as decoded:
        for name, x in original.items():
            q = fp4kit.quantize(x, scale_search=search, search_error=error, e4m3_max=e4m3_max)
            np.testing.assert_allclose(decoded[name], fp4kit.dequantize(q), rtol=1e-6)


def test_the_version_says_that_scales_were_searched(source, tmp_path):
    """Readers of version 1 would decode scales up to 256 with 448: they must refuse."""
    for flags, version in (([], 1), (["--scale-search", "sweep"], 2)):
        target = tmp_path / f"{version}.safetensors"
        call("quantize", source, "-o", target, "--device", "cpu", *flags)
        metadata = json.loads(content(target)[0]["__metadata__"][METADATA_KEY])
        assert metadata["version"] == version
        assert ("scale_search" in metadata["tensors"]["a"]) == (version == 2)
    assert "sweep (mse, 448)" in call("inspect", tmp_path / "2.safetensors")


@pytest.mark.parametrize("damage", [
    {"scale_search": "guess"},
    {"search_error": None},
    {"search_error": "worst"},
    {"error": "worst"},
    {"e4m3_max": 300},
    {"e4m3_max": "256"},
    {"recipe": "modelopt"},
])  # fmt: skip
def test_damaged_facts_are_refused(damage, source, tmp_path):
    target = tmp_path / "q.safetensors"
    call("quantize", source, "-o", target, "--device", "cpu", "--scale-search", "sweep")
    header, data = content(target)
    metadata = json.loads(header["__metadata__"][METADATA_KEY])
    metadata["tensors"]["a"] |= damage
    header["__metadata__"][METADATA_KEY] = json.dumps(metadata)
    rewritten(target, header, data)
    with pytest.raises(FileFormatError, match="tensor 'a': damaged"):
        dequantize_file(target, tmp_path / "back.npz", "float32")


@pytest.mark.parametrize(("flags", "message"), [
    (["--search-error", "mse"], "belongs to --scale-search"),
    (["--e4m3-max", "256"], "belongs to --scale-search"),
    (["--scale-search", "sweep", "--recipe", "comfy"], "with recipe te, not recipe comfy"),
    (["--scale-search", "sweep", "--format", "mxfp8"], "with recipe te, not mxfp8"),
    (["--scale-search", "best"], "four_over_six"),
    (["--scale-search", "sweep", "--e4m3-max", "300"], "256"),
])  # fmt: skip
def test_wrong_usage(flags, message, source, tmp_path):
    arguments = ["quantize", str(source), "-o", str(tmp_path / "q.safetensors"), *flags]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert not (tmp_path / "q.safetensors").exists()


def test_a_search_lowers_the_reported_error(source, tmp_path):
    values = []
    for flags in (
        [],
        ["--scale-search", "four_over_six", "--e4m3-max", "256"],
        ["--scale-search", "sweep"],
    ):
        target = tmp_path / f"{len(values)}.safetensors"
        output = call("quantize", source, "-o", target, "--device", "cpu", "--json", *flags)
        report = json.loads(output[output.index("{") : output.rindex("}") + 1])
        values.append(report["tensors"][0]["stats"]["mse"])
    assert values[2] < values[1] < values[0]


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize(("search", "error", "e4m3_max"), [SEARCHES[1], SEARCHES[2]])
def test_checkpoints_decode_by_their_own_tensors(
    search, error, e4m3_max, layout, tmp_path, assert_bits
):
    model = CHECKPOINTS / "llama-tiny"
    flags = ["--scale-search", search, "--search-error", error, "--e4m3-max", e4m3_max]
    decoded = {}
    for name, more in (("plain", []), ("searched", flags)):
        target, back = tmp_path / name, tmp_path / f"{name}-back"
        call("quantize", model, "-o", target, "--layout", layout, "--device", "cpu", *more)
        assert "no fault" in call("verify", target)
        call("dequantize", target, "-o", back, "--device", "cpu", "--dtype", "float32")
        decoded[name] = safetensors.numpy.load_file(back / "model.safetensors")
    header = content(tmp_path / "searched" / "model.safetensors")[0]["__metadata__"]
    facts = {"scale_search": search, "search_error": error, "e4m3_max": e4m3_max}
    assert json.loads(header["fp4kit_scale_search"]) == facts
    with open_source(model / "model.safetensors") as opened:
        for module in ("model.layers.0.mlp.down_proj", "model.layers.1.self_attn.o_proj"):
            name = f"{module}.weight"
            spec = opened.tensors[name].spec
            raw = np.empty(spec.nbytes, np.uint8)
            opened.read(name, 0, raw.data)
            x = codecs.to_float32(raw.view(np.uint16).reshape(spec.shape), "bfloat16")
            errors = [np.sum((decoded[kind][name] - x) ** 2) for kind in ("plain", "searched")]
            assert errors[1] < 0.95 * errors[0], name
            q = fp4kit.quantize(x, scale_search=search, search_error=error, e4m3_max=e4m3_max)
            np.testing.assert_allclose(decoded["searched"][name], fp4kit.dequantize(q), rtol=1e-6)


def test_what_files_called_the_error_before_is_read(source, tmp_path):
    """Files of version 2 said `error` where a Scheme says `search_error`."""
    target, old = tmp_path / "q.safetensors", tmp_path / "old.safetensors"
    call("quantize", source, "-o", target, "--device", "cpu", "--scale-search", "four_over_six",
         "--search-error", "mae", "--e4m3-max", "256")  # fmt: skip
    header, data = content(target)
    metadata = json.loads(header["__metadata__"][METADATA_KEY])
    metadata["tensors"]["a"]["error"] = metadata["tensors"]["a"].pop("search_error")
    header["__metadata__"][METADATA_KEY] = json.dumps(metadata)
    rewritten(old, header, data)
    assert "four_over_six (mae, 256)" in call("inspect", old)
    for path in (target, old):
        dequantize_file(path, tmp_path / f"{path.stem}.npz", "float32")
    assert (tmp_path / "q.npz").read_bytes() == (tmp_path / "old.npz").read_bytes()
