# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of llm-compressor and ModelOpt: verified, decoded as they decode, written as they do.

Made by the tools that `golden/checkpoints/manifest.json` names; each export beside its source.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

import fp4kit
from fp4kit.checkpoint.operations import dequantize_checkpoint, quantize_checkpoint
from fp4kit.checkpoint.options import CheckpointOptions, DequantizeOptions
from fp4kit.checkpoint.verify.structure import structure_faults
from fp4kit.checkpoint.verify.values import value_faults

GOLDEN = Path(__file__).parent / "golden" / "checkpoints"
MANIFEST = json.loads((GOLDEN / "manifest.json").read_text("utf-8"))
ALL = {one["name"]: one for one in MANIFEST["checkpoints"]}
EXPORTS = [name for name, one in ALL.items() if one["kind"] == "export"]
SOURCES = [name for name, one in ALL.items() if one["kind"] == "source"]
#: llm-compressor gives gate and up of one expert scales of their own; engines use one for both.
APART = "qwen3moe-tiny--llmcompressor-NVFP4A16"
#: Keys of compressed-tensors' schema that only say what we leave out: defaults of the reader.
DEFAULTS = {
    "actorder": None,
    "block_structure": None,
    "observer": None,
    "observer_kwargs": {},
    "zp_dtype": None,
}


@pytest.fixture(scope="module")
def decoded():
    """(checkpoint, module) to the peer's weight, as its bits."""
    data = np.load(GOLDEN / "decoded.npz", allow_pickle=False)
    return {
        (case["checkpoint"], case["module"]): {
            kind: data[f"{case['case']}_decoded_{kind}"] for kind in ("fp32", "bf16")
        }
        for case in MANIFEST["cases"]
    }


def test_the_files_are_unchanged():
    for one in ALL.values():
        for name, digest in one["sha256"].items():
            data = (GOLDEN / one["name"] / name).read_bytes()
            assert hashlib.sha256(data).hexdigest() == digest
    data = (GOLDEN / "decoded.npz").read_bytes()
    assert hashlib.sha256(data).hexdigest() == MANIFEST["decoded"]["sha256"]
    assert {path.name for path in GOLDEN.iterdir() if path.is_dir()} == ALL.keys()


@pytest.mark.parametrize("name", EXPORTS)
def test_verify(name):
    """Works on other tools' output; the one real fault among them is found, and nothing else."""
    source = GOLDEN / ALL[name]["source"]
    faults = structure_faults(GOLDEN / name)
    if name == APART:
        assert len(faults) == 8  # two layers of four experts
        assert all("different second-level scales" in fault for fault in faults)
        assert all("gate_proj" in fault and "up_proj" in fault for fault in faults)
    else:
        assert faults == []
    assert value_faults(GOLDEN / name, source) == []


@pytest.mark.parametrize("name", SOURCES)
def test_sources_are_not_quantized(name):
    (fault,) = structure_faults(GOLDEN / name)
    assert "holds no quantized weight" in fault


@pytest.mark.parametrize("name", EXPORTS)
def test_decoded_as_by_the_peer(checkpoints, decoded, tmp_path, name):
    """bfloat16 equals what the peer's own code gives; float32 the formula without rounding.

    ModelOpt's code decodes E2M1's -0 to +0, and recipe `modelopt` does; the data set's float32
    formula keeps the sign, so zeros are compared by value there.
    """
    wanted = {module: case for (owner, module), case in decoded.items() if owner == name}
    assert wanted
    source = checkpoints.read(GOLDEN / ALL[name]["source"])
    quantized = {f"{module}.weight" for module in ALL[name]["quantized_modules"]}
    signless = "modelopt-NVFP4" in name or "modelopt-W4A16" in name
    for dtype, kind, bits in (("float32", "fp32", np.uint32), ("bfloat16", "bf16", np.uint16)):
        dequantize_checkpoint(GOLDEN / name, tmp_path / dtype, DequantizeOptions(dtype))
        written = checkpoints.read(tmp_path / dtype)
        for module, case in wanted.items():
            got = checkpoints.array(written[f"{module}.weight"])
            if kind == "fp32" and signless:
                assert (got == case[kind]).all()
                differ = got.view(bits) != case[kind].view(bits)
                assert not np.signbit(got[got == 0]).any()
                assert (case[kind][differ] == 0).all()
            else:
                assert (got.view(bits) == case[kind].view(bits)).all()
        assert written.keys() == source.keys()
        for tensor, (_, shape, data) in source.items():
            if tensor not in quantized:
                assert written[tensor][2] == data
            assert written[tensor][1] == shape
        config = checkpoints.config_of(tmp_path / dtype)
        assert "quantization_config" not in config
        assert not (tmp_path / dtype / "hf_quant_config.json").exists()


def compare_json(ours, theirs, **indent):
    """Same values in the same order; ModelOpt indents by its own width."""
    text = json.dumps(json.loads(ours.read_text("utf-8")), **indent)
    assert text == theirs.read_text("utf-8").rstrip("\n")


@pytest.mark.parametrize("model", ["llama-tiny", "qwen3moe-tiny"])
@pytest.mark.parametrize("scheme", ["W4A16_NVFP4_CFG", "NVFP4_DEFAULT_CFG"])
def test_written_as_by_modelopt(checkpoints, tmp_path, model, scheme):
    """Every tensor and both JSON files, byte by byte; W4A4 with ModelOpt's own calibration."""
    export = GOLDEN / f"{model}--modelopt-{scheme}"
    theirs = checkpoints.read(export)
    activations = None
    if scheme == "NVFP4_DEFAULT_CFG":
        amaxes = {
            name.removesuffix(".input_scale"): amax_of(float(checkpoints.array(tensor)))
            for name, tensor in theirs.items()
            if name.endswith(".input_scale")
        }
        activations = str(tmp_path / "amax.json")
        Path(activations).write_text(json.dumps(amaxes))
    options = CheckpointOptions(layout="modelopt", recipe="modelopt", activations=activations)
    target = tmp_path / "out"
    quantize_checkpoint(GOLDEN / model, target, options)
    assert checkpoints.read(target) == theirs
    for name in ("config.json", "hf_quant_config.json"):
        compare_json(target / name, export / name, indent=4)
    for path in (target, export):
        header = checkpoints.read_file(path / "model.safetensors")[1]
        assert header.pop("fp4kit_checkpoint", "1") == "1"  # ours says who wrote it
        assert header == {"format": "pt"}
    ours, expected = checkpoints.digest(target), checkpoints.digest(export)
    assert ours.keys() == expected.keys()
    assert ours["generation_config.json"] == expected["generation_config.json"]


def amax_of(scale):
    """The amax whose decode scale is exactly this one."""
    near = np.float32(scale) * np.float32(2688)
    for value in (near, np.nextafter(near, np.float32(0)), np.nextafter(near, np.float32(np.inf))):
        if value / np.float32(2688) == np.float32(scale):
            return float(value)
    raise AssertionError("no float32 has this scale")


@pytest.mark.parametrize("model", ["llama-tiny", "llama-tiny-sharded", "qwen3moe-tiny"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_written_as_by_llm_compressor(checkpoints, tmp_path, model, format):
    """Every tensor byte by byte, but for the experts whose second levels it leaves apart.

    Of gate and up of one expert, the member with the larger amax equals its counterpart: the other
    has the shared scale. What else differs, and why: it writes an index beside a single file, as it
    does for several; its `ignore` holds the patterns that its user gave, ours the modules; it
    names the group after the scheme, and spells the reader's defaults out.
    """
    export = GOLDEN / f"{model}--llmcompressor-{format.upper()}A16"
    options = CheckpointOptions(format=format, recipe="compressed-tensors")
    if format == "mxfp4":
        options = CheckpointOptions(format=format)
    target = tmp_path / "out"
    quantize_checkpoint(GOLDEN / model, target, options)
    ours, theirs = checkpoints.read(target), read_flat(checkpoints, export)
    assert ours.keys() == theirs.keys()
    apart = {name for name in ours if ours[name] != theirs[name]}
    if export.name == APART:
        modules = {name.rpartition(".weight")[0] for name in apart}
        assert len(modules) == 8  # one member of each expert, in two layers of four
        for module in modules:
            parent, _, member = module.rpartition(".")
            other = {"gate_proj": "up_proj", "up_proj": "gate_proj"}[member]
            second, sibling = (f"{parent}.{m}.weight_global_scale" for m in (member, other))
            assert ".mlp.experts." in parent
            assert ours[second] == ours[sibling] == theirs[sibling]
            assert checkpoints.array(ours[second]) < checkpoints.array(theirs[second])
    else:
        assert apart == set()
    config, expected = checkpoints.config_of(target), checkpoints.config_of(export)
    scheme, wanted = config.pop("quantization_config"), expected.pop("quantization_config")
    assert config == expected
    (group,), (other,) = (one["config_groups"].values() for one in (scheme, wanted))
    assert group | {"weights": group["weights"] | DEFAULTS} == other
    for key in ("format", "quant_method", "quantization_status", "kv_cache_scheme"):
        assert scheme[key] == wanted[key]
    assert scheme.keys() | {"transform_config"} == wanted.keys()


def read_flat(checkpoints, folder):
    """Like `checkpoints.read`, without looking at the index."""
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= checkpoints.read_file(path)[0]
    return tensors


@pytest.mark.parametrize("name", EXPORTS)
def test_no_export_is_quantized_again(tmp_path, name):
    """E15: refused; but MXFP4 of compressed-tensors is a source of NVFP4."""
    if name.endswith("llmcompressor-MXFP4A16"):
        report = quantize_checkpoint(GOLDEN / name, tmp_path / "out", CheckpointOptions())
        assert "transfer" in {tensor.action for tensor in report.tensors}
        return
    with pytest.raises(fp4kit.errors.FileFormatError, match="quantized"):
        quantize_checkpoint(GOLDEN / name, tmp_path / "out", CheckpointOptions())
    assert not (tmp_path / "out").exists()
