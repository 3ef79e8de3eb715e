# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are quantized already: recognized, then decoded or refused; calibrations."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest

from fp4kit.checkpoint.models.fusion import fusion_group
from fp4kit.checkpoint.operations import dequantize_checkpoint, quantize_checkpoint
from fp4kit.checkpoint.options import CheckpointOptions, DequantizeOptions
from fp4kit.checkpoint.read.config_facts import detect
from fp4kit.checkpoint.verify.structure import structure_faults
from fp4kit.checkpoint.verify.values import value_faults
from fp4kit.errors import FileFormatError, OptionError

LAYOUTS = ("compressed-tensors", "modelopt", "comfy")
EXPERTS = "model.layers.0.mlp.experts"


def refuse(source, match, kind=FileFormatError, **options):
    target = source.with_name("out")
    with pytest.raises(kind, match=match):
        quantize_checkpoint(source, target, CheckpointOptions(**options))
    assert not target.exists()


# ------------------------------------------------------------------------------------------------
# Nothing is quantized twice
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("again", LAYOUTS)
@pytest.mark.parametrize("strip", ["nothing", "config.json", "every JSON file"])
def test_every_layout_is_recognized(checkpoints, tmp_path, layout, again, strip):
    """E15: by its JSON, by the other JSON, by names and element types alone."""
    tensors, config = checkpoints.llama(1)
    source = checkpoints.save(tmp_path / "in", tensors, config)
    quantized = tmp_path / "q"
    quantize_checkpoint(source, quantized, CheckpointOptions(layout=layout))
    if strip != "nothing":
        checkpoints.write_json(quantized / "config.json", config)
    if strip == "every JSON file":
        for path in quantized.glob("*.json"):
            path.unlink()
    refuse(
        quantized, rf"quantized already .*nvfp4 in layout {layout}.*fp4kit convert", layout=again
    )
    dequantize_checkpoint(quantized, tmp_path / "d", DequantizeOptions())
    assert checkpoints.read(tmp_path / "d").keys() == tensors.keys()


@pytest.mark.parametrize(
    "method", ["gptq", "awq", "bitsandbytes", "hqq", "quanto", "torchao", "fbgemm_fp8", None]
)
@pytest.mark.parametrize("place", ["quantization_config", "compression_config", "text_config"])
def test_methods_of_others_are_named(checkpoints, tmp_path, method, place):
    tensors, config = checkpoints.llama(1)
    given = {"bits": 4} if method is None else {"quant_method": method}
    config |= {place: {"quantization_config": given} if place == "text_config" else given}
    source = checkpoints.save(tmp_path / "in", tensors, config)
    refuse(source, f"already by {method or 'an unnamed method'}, which is not read here")
    with pytest.raises(FileFormatError, match="which is not read here"):
        dequantize_checkpoint(source, tmp_path / "out", DequantizeOptions())


@pytest.mark.parametrize(
    ("config", "hf_quant", "match"),
    [
        ({"quant_method": "compressed-tensors", "format": "int-quantized"}, None, "int-quantized"),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
            None,
            "pack-quantized",
        ),
        ({"quant_method": "modelopt", "quant_algo": "INT4_AWQ"}, None, "INT4_AWQ"),
        # Its weights need a low-rank correction that nothing here applies.
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_SVD"}, None, "NVFP4_SVD"),
        (None, {"quantization": {"quant_algo": "INT8_SQ"}}, "INT8_SQ"),
        (None, {"quantization": {}}, "None"),
        (None, {"quantization": []}, "None"),
        (None, {"quantization": "NVFP4"}, "no object"),
    ],
)
def test_forms_that_are_not_read(config, hf_quant, match):
    """E21: an unknown format is an error before any work, whoever knows the method."""
    if config is not None:
        config = {"quantization_config": {"config_groups": {"group_0": {}}, **config}}
    with pytest.raises(FileFormatError, match=match):
        detect(config or {}, hf_quant, [])


@pytest.mark.parametrize("dtype", ["F8_E4M3", "U8"])
def test_stray_codes_are_not_taken_for_floats(checkpoints, tmp_path, dtype):
    """E15, A28: no metadata at all, but one tensor without what it would need."""
    tensors, config = checkpoints.llama(1)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = dtype, np.zeros((96, 32), np.uint8)
    if dtype == "U8":
        tensors[f"{name}_scale"] = "F32", np.ones((96, 1), np.float32)
    source = checkpoints.save(tmp_path / "in", tensors, config)
    refuse(source, name)


def test_a_missing_second_level_is_no_dequantization(checkpoints, tmp_path):
    """A28: nor is one assumed."""
    tensors, config = checkpoints.moe(2)
    source = checkpoints.save(tmp_path / "in", tensors, config)
    for layout, suffix in zip(LAYOUTS, ("_global_scale", "_scale_2", "_scale_2"), strict=True):
        quantized = tmp_path / layout
        quantize_checkpoint(source, quantized, CheckpointOptions(layout=layout))
        (path,) = quantized.glob("*.safetensors")
        stored, metadata = checkpoints.read_file(path)
        lost = f"{EXPERTS}.1.up_proj.weight{suffix}"
        kept = {n: (t[0], checkpoints.array(t)) for n, t in stored.items() if n != lost}
        checkpoints.write_file(path, kept, metadata)
        with pytest.raises(FileFormatError, match=rf"{EXPERTS}\.1\.up_proj\.weight"):
            dequantize_checkpoint(quantized, tmp_path / "d", DequantizeOptions())
        assert not (tmp_path / "d").exists()


# ------------------------------------------------------------------------------------------------
# Quantized sources
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("assign", ["together", "apart"])
def test_fp8_blocks(checkpoints, tmp_path, layout, format, assign):
    """Weight and scale in different shards; old metadata and scales are gone; bytes are exact."""
    if format == "mxfp4" and layout != "compressed-tensors":
        return
    tensors, config, decoded = checkpoints.fp8_llama()
    place = {n: int(n.endswith("scale_inv")) for n in tensors} if assign == "apart" else None
    source = checkpoints.save(tmp_path / "in", tensors, config, shards=2, assign=place)
    options = CheckpointOptions(format=format, layout=layout, exclude=("*o_proj*",))
    quantize_checkpoint(source, tmp_path / "out", options)
    written = checkpoints.read(tmp_path / "out")
    assert not any("scale_inv" in name for name in written)
    shared = {}
    for name, values in decoded.items():
        shared[fusion_group(name) or name] = max(
            shared.get(fusion_group(name) or name, 0.0), checkpoints.amax(values)
        )
    packed = "_packed" if layout == "compressed-tensors" else ""
    order = {"nibble_order": "high_first"} if layout == "comfy" else {}
    for name, values in decoded.items():
        if "o_proj" in name:  # an engine reads no FP8 beside FP4
            expected = values.astype(ml_dtypes.bfloat16)
            assert written[name] == ("BF16", values.shape, expected.tobytes())
            continue
        q = checkpoints.quantized(values, shared[fusion_group(name) or name], format, **order)
        assert written[f"{name}{packed}"][2] == np.asarray(q.packed).tobytes()
    method = checkpoints.config_of(tmp_path / "out").get("quantization_config", {})
    assert method.get("quant_method") == (None if layout == "comfy" else layout)
    assert structure_faults(tmp_path / "out") == []
    assert value_faults(tmp_path / "out", source) == []


def test_fp8_is_dequantized_too(checkpoints, tmp_path):
    tensors, config, decoded = checkpoints.fp8_llama()
    source = checkpoints.save(tmp_path / "in", tensors, config, shards=3)
    for dtype, kind in (("float32", np.float32), ("bfloat16", ml_dtypes.bfloat16)):
        dequantize_checkpoint(source, tmp_path / dtype, DequantizeOptions(dtype))
        written = checkpoints.read(tmp_path / dtype)
        assert written.keys() == {n for n in tensors if not n.endswith("scale_inv")}
        for name, values in decoded.items():
            assert written[name][2] == values.astype(kind).tobytes()
        assert "quantization_config" not in checkpoints.config_of(tmp_path / dtype)


def test_orphan_scales_are_dropped(checkpoints, tmp_path):
    """Of an older quantization, with the reason."""
    tensors, config, _ = checkpoints.fp8_llama()
    orphan, old = "model.layers.9.gone.weight_scale_inv", "model.layers.0.mlp.up_proj.input_scale"
    tensors[orphan] = checkpoints.normal((1, 1), "F32")
    tensors[old] = checkpoints.normal((), "F32")
    source = checkpoints.save(tmp_path / "in", tensors, config)
    report = quantize_checkpoint(source, tmp_path / "out", CheckpointOptions())
    assert report.dropped.keys() == {orphan, old}
    assert "not there" in report.dropped[orphan]
    assert not report.dropped.keys() & checkpoints.read(tmp_path / "out").keys()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("spread", [0, 17, 18, 40])
def test_mxfp4_without_loss_where_it_can_be(checkpoints, tmp_path, layout, spread):
    """E17: the exponents of a whole fusion group decide, zero blocks aside; else it is said so."""
    tensors, config = checkpoints.llama(1)
    rng = np.random.default_rng(spread)
    source_weights = {}
    for name in [n for n in tensors if "_proj.weight" in n]:
        rows, cols = tensors.pop(name)[1].shape
        scale = np.full((rows, cols // 32), 120, np.uint8)
        packed = rng.integers(0, 256, (rows, cols // 2), np.uint8)
        if name.endswith("k_proj.weight"):  # the smallest exponent, far from its siblings'
            scale[3, 1] = 120 - spread
        packed[5, :16], scale[5, 0] = 0x80, 1  # zeros have any exponent
        tensors[f"{name}_packed"], tensors[f"{name}_scale"] = ("U8", packed), ("U8", scale)
        source_weights[name] = packed, scale
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}}},
        "ignore": ["lm_head"],
    }
    source = checkpoints.save(tmp_path / "in", tensors, config)
    report = quantize_checkpoint(source, tmp_path / "out", CheckpointOptions(layout=layout))
    assert structure_faults(tmp_path / "out") == []
    assert value_faults(tmp_path / "out", source) == []
    fused = {"q_proj", "k_proj", "v_proj"}
    for tensor in report.tensors:
        if tensor.name not in source_weights:
            continue
        if spread > 17 and tensor.name.split(".")[-2] in fused:
            assert tensor.action == "quantize"
            assert "requantized: 1 of" in tensor.reason
        else:
            assert tensor.action == "transfer"
            assert "no value changes" in tensor.reason
    for name, folder in (("in", source), ("out", tmp_path / "out")):
        dequantize_checkpoint(folder, tmp_path / f"{name}-d", DequantizeOptions("float32"))
    before, after = (checkpoints.read(tmp_path / f"{name}-d") for name in ("in", "out"))
    for name in source_weights:
        got, wanted = (checkpoints.array(found[name]) for found in (after, before))
        if spread <= 17 or name.split(".")[-2] not in fused:
            assert (got == wanted).all()


@pytest.mark.parametrize("model_type", ["qwen3_5_moe", "qwen3_vl_moe", "gpt_oss"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fused_experts_are_quantized_one_by_one(checkpoints, tmp_path, model_type, layout):
    """E7, E8: never skipped in silence; each expert has a second level of its own."""
    tensors, config = checkpoints.fused_moe(model_type)
    gate_up = tensors[f"{EXPERTS}.gate_up_proj"][1]
    if model_type != "qwen3_5_moe":  # stored [E, in, out]
        for name in ("gate_up_proj", "down_proj"):
            dtype, array = tensors[f"{EXPERTS}.{name}"]
            tensors[f"{EXPERTS}.{name}"] = dtype, np.ascontiguousarray(array.transpose(0, 2, 1))
    source = checkpoints.save(tmp_path / "in", tensors, config)
    report = quantize_checkpoint(source, tmp_path / "out", CheckpointOptions(layout=layout))
    written = checkpoints.read(tmp_path / "out")
    half = slice(0, None, 2) if model_type == "gpt_oss" else slice(0, gate_up.shape[1] // 2)
    packed = "_packed" if layout == "compressed-tensors" else ""
    order = {"nibble_order": "high_first"} if layout == "comfy" else {}
    for expert in range(3):
        q = checkpoints.quantized(
            np.ascontiguousarray(gate_up[expert, half]), checkpoints.amax(gate_up[expert]), **order
        )
        codes = written[f"{EXPERTS}.{expert}.gate_proj.weight{packed}"]
        assert codes[2] == np.asarray(q.packed).tobytes()
    assert not any("gate_up" in name for name in written)
    assert not any("unquantized" in warning for warning in report.warnings)
    assert structure_faults(tmp_path / "out") == []
    assert value_faults(tmp_path / "out", source) == []


def test_experts_that_stay_fused_are_reported(checkpoints, tmp_path):
    """E7: so many bytes are left unquantized."""
    tensors, config = checkpoints.fused_moe()
    source = checkpoints.save(tmp_path / "in", tensors, config)
    options = CheckpointOptions(exclude=("*experts*",))
    report = quantize_checkpoint(source, tmp_path / "out", options)
    size = sum(array.nbytes for _, array in tensors.values() if array.ndim == 3)
    assert any(f"{size} bytes of 2 tensors" in warning for warning in report.warnings)
    written = checkpoints.read(tmp_path / "out")
    for name in ("gate_up_proj", "down_proj"):
        assert written[f"{EXPERTS}.{name}"] == checkpoints.stored(tensors)[f"{EXPERTS}.{name}"]
    assert structure_faults(tmp_path / "out") == []


# ------------------------------------------------------------------------------------------------
# Activation scales
# ------------------------------------------------------------------------------------------------


def calibrate(tmp_path, amaxes):
    path = tmp_path / "amax.json"
    path.write_text(json.dumps(amaxes))
    return str(path)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("wrapped", [False, True])
def test_calibrated_activations(checkpoints, tmp_path, layout, wrapped):
    """Fused modules read one input: they share the largest; zero is a dead module."""
    tensors, config = checkpoints.moe(2)
    source = checkpoints.save(tmp_path / "in", tensors, config)
    modules = [n.removesuffix(".weight") for n in tensors if n.endswith(".weight")]
    amaxes = {module: 0.5 + number * 7 % 11 for number, module in enumerate(modules)}
    dead = f"{EXPERTS}.0.down_proj"
    amaxes[dead] = 0
    given = {m: {"input_amax": a} for m, a in amaxes.items()} if wrapped else amaxes
    path = calibrate(tmp_path, given)
    options = CheckpointOptions(layout=layout, activations=path)
    quantize_checkpoint(source, tmp_path / "out", options)
    written = checkpoints.read(tmp_path / "out")
    suffix = ".input_global_scale" if layout == "compressed-tensors" else ".input_scale"
    found = {n.removesuffix(suffix): t for n, t in written.items() if n.endswith(suffix)}
    quantized = {n.removesuffix(".weight_scale") for n in written if n.endswith(".weight_scale")}
    assert found.keys() == quantized
    for module, tensor in found.items():
        key = fusion_group(f"{module}.weight")
        mates = [m for m in quantized if key and fusion_group(f"{m}.weight") == key] or [module]
        amax = np.float32(max(amaxes[mate] for mate in mates))
        with np.errstate(divide="ignore"):
            expected = np.float32(2688) / amax if "global" in suffix else amax / np.float32(2688)
        assert tensor[:2] == ("F32", (1,) if "global" in suffix else ())
        assert checkpoints.array(tensor) == (1 if module == dead else expected)
    assert structure_faults(tmp_path / "out") == []


def test_uncalibrated_activations_say_so(checkpoints, tmp_path):
    tensors, config = checkpoints.llama(1)
    source = checkpoints.save(tmp_path / "in", tensors, config)
    options = CheckpointOptions(layout="modelopt", activations="uncalibrated")
    report = quantize_checkpoint(source, tmp_path / "out", options)
    assert any("uncalibrated" in warning for warning in report.warnings)
    written = checkpoints.read(tmp_path / "out")
    scales = [checkpoints.array(t) for n, t in written.items() if n.endswith(".input_scale")]
    assert len(scales) == 7
    assert all(scale == 1 for scale in scales)


@pytest.mark.parametrize(
    ("change", "kind", "match"),
    [
        (lambda a: a.popitem(), OptionError, "no activation amax for 1 of 7 modules"),
        (lambda a: a.clear(), OptionError, "no activation amax for 7 of 7 .* and 4 more"),
        (lambda a: a.update(x=-1), FileFormatError, "'x' is -1; it must be finite"),
        (lambda a: a.update(x=1e999), FileFormatError, "damaged JSON|must be finite"),
        (lambda a: a.update(x=float("nan")), FileFormatError, "must be finite"),
        (lambda a: a.update(x="6"), FileFormatError, "'x' is no number"),
        (lambda a: a.update(x=True), FileFormatError, "'x' is no number"),
        (lambda a: a.update(x=[6]), FileFormatError, "'x' is no number"),
        (lambda a: a.update(x={"amax": 6}), FileFormatError, "'x' is no number"),
    ],
)
def test_calibrations_that_cannot_be_used(checkpoints, tmp_path, change, kind, match):
    tensors, config = checkpoints.llama(1)
    source = checkpoints.save(tmp_path / "in", tensors, config)
    modules = [n.removesuffix(".weight") for n in tensors if "_proj.weight" in n]
    amaxes = dict.fromkeys(modules, 2.0)
    change(amaxes)
    refuse(source, match, kind, activations=calibrate(tmp_path, amaxes))
    refuse(source, "cannot be read", activations=str(tmp_path / "none.json"))
