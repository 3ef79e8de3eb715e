# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Layout mlx without MLX: names, words and JSON, and every way in and out of it.

`tests/test_engines_mlx.py` has MLX decode and mlx-lm load the same.
"""

import json

import numpy as np
import pytest

import fp4kit
from command_line import fail, succeed
from fp4kit.errors import FileFormatError, OptionError

FORMATS = {"mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}
UP = "model.layers.0.mlp.up_proj"
#: How each format is asked for in the array API.
SCHEMES = {"nvfp4": {"recipe": "nvfuser", "second_level": "none"}}


@pytest.fixture
def source(checkpoints, tmp_path):
    tensors, config = checkpoints.llama(layers=1, hidden=64, intermediate=96)
    return checkpoints.save(tmp_path / "model", tensors, config, others=("tokenizer.json",))


def quantize(source, name, format, **options):
    target = source.with_name(name)
    report = fp4kit.quantize_checkpoint(source, target, format, **options)
    return target, report


@pytest.mark.parametrize("format", FORMATS)
def test_command_line_writes_what_mlx_lm_reads(format, source, checkpoints, tmp_path):
    target = tmp_path / "out"
    succeed("quantize", source, "-o", target, "--layout", "mlx", "--format", format)
    given, stored = checkpoints.read(source), checkpoints.read(target)
    size, bits = FORMATS[format]
    said = {"group_size": size, "bits": bits, "mode": format}
    config = checkpoints.config_of(target)
    assert config["quantization"] == config["quantization_config"] == said
    assert (target / "tokenizer.json").is_file()
    x = checkpoints.array(given[f"{UP}.weight"])
    q = fp4kit.quantize(x, format, **SCHEMES.get(format, {}))
    assert stored[f"{UP}.weight"] == ("U32", (96, 64 * bits // 32), q.packed.tobytes())
    assert stored[f"{UP}.scales"] == ("U8", (96, 64 // size), q.block_scale.tobytes())
    kept = ("lm_head", "model.embed_tokens", "model.norm")
    for name in kept:
        assert stored[f"{name}.weight"] == given[f"{name}.weight"]
        assert f"{name}.scales" not in stored
    assert fp4kit.verify(target, against=source).faults == []


@pytest.mark.parametrize("format", FORMATS)
def test_reading(format, source, checkpoints, tmp_path):
    target, _ = quantize(source, "out", format, layout="mlx")
    x = checkpoints.array(checkpoints.read(source)[f"{UP}.weight"])
    q = fp4kit.quantize(x, format, **SCHEMES.get(format, {}))
    with fp4kit.open(target) as opened:
        assert opened.layout == "mlx"
        held = opened[f"{UP}.weight"]
        assert f"{UP}.scales" not in opened
    assert held.packed.tobytes() == q.packed.tobytes()
    np.testing.assert_array_equal(fp4kit.dequantize(held), fp4kit.dequantize(q))
    back = tmp_path / "back"
    succeed("dequantize", target, "-o", back, "--dtype", "float32")
    assert not {"quantization", "quantization_config"} & checkpoints.config_of(back).keys()
    decoded = checkpoints.array(checkpoints.read(back)[f"{UP}.weight"])
    np.testing.assert_array_equal(decoded, fp4kit.dequantize(q))
    said = json.loads(succeed("inspect", target, "--json").stdout)
    (entry,) = [one for one in said["tensors"] if one["name"] == f"{UP}.weight"]
    assert (entry["format"], entry["shape"]) == (format, [96, 64])
    said = json.loads(succeed("compare", source, target, "--json").stdout)
    (line,) = [one for one in said["tensors"] if one["name"] == f"{UP}.weight"]
    assert line["stats"]["sqnr"] > (30 if format == "mxfp8" else 15)


def test_mxfp4_goes_there_and_back_verbatim(source, checkpoints, tmp_path):
    first, _ = quantize(source, "first", "mxfp4")
    between, back = tmp_path / "between", tmp_path / "back"
    succeed("convert", first, "-o", between, "--layout", "mlx")
    succeed("convert", between, "-o", back, "--layout", "compressed-tensors")
    before, words = checkpoints.read(first), checkpoints.read(between)
    assert checkpoints.read(back) == before
    assert words[f"{UP}.weight"][2] == before[f"{UP}.weight_packed"][2]
    assert words[f"{UP}.scales"][2] == before[f"{UP}.weight_scale"][2]
    assert checkpoints.config_of(back) == checkpoints.config_of(first)
    assert fp4kit.verify(between, against=source).faults == []


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt", "comfy"])
def test_nvfp4_leaves_with_a_second_level_of_one(layout, source, checkpoints, tmp_path):
    first, _ = quantize(source, "first", "nvfp4", layout="mlx")
    away, back = tmp_path / "away", tmp_path / "back"
    fp4kit.convert_checkpoint(first, away, layout)
    values = [fp4kit.open(folder, decode="float32")[f"{UP}.weight"] for folder in (first, away)]
    np.testing.assert_array_equal(*values)
    report = fp4kit.convert_checkpoint(away, back, "mlx")
    assert checkpoints.read(back) == checkpoints.read(first)
    assert not [text for text in report.warnings if "quantized again" in text]


def test_two_levels_become_one_by_requantization(source, checkpoints, tmp_path):
    first, _ = quantize(source, "first", "nvfp4", layout="modelopt")
    target = tmp_path / "out"
    said = succeed("convert", first, "-o", target, "--layout", "mlx")
    assert "7 weights are quantized again" in " ".join(said.output.split())
    decoded = fp4kit.open(first, decode="float32")[f"{UP}.weight"]
    q = fp4kit.quantize(decoded, "nvfp4", **SCHEMES["nvfp4"])
    assert checkpoints.read(target)[f"{UP}.weight"][2] == q.packed.tobytes()
    planned = fp4kit.convert_checkpoint(first, tmp_path / "no", "mlx", dry_run=True)
    reasons = {(one.action, one.reason) for one in planned.tensors if one.format}
    assert reasons == {("quantize", "requantized: the layout keeps no second level")}


def test_activation_scales_are_left_out_and_named(source, checkpoints, tmp_path):
    first, _ = quantize(source, "first", "nvfp4", layout="modelopt", activations="uncalibrated")
    report = fp4kit.convert_checkpoint(first, tmp_path / "out", "mlx")
    assert f"{UP}.input_scale" in report.dropped
    assert f"{UP}.input_scale" not in checkpoints.read(tmp_path / "out")


def test_mxfp8_has_no_other_layout(source, tmp_path):
    first, _ = quantize(source, "first", "mxfp8", layout="mlx")
    with pytest.raises(OptionError, match="holds mxfp8; layout modelopt takes"):
        fp4kit.convert_checkpoint(first, tmp_path / "out", "modelopt")


def test_saving_what_was_opened(source, checkpoints, tmp_path):
    first, _ = quantize(source, "first", "nvfp4", layout="mlx")
    with fp4kit.open(first) as opened:
        fp4kit.save(tmp_path / "copy", opened, layout="mlx", config=first)
    assert checkpoints.read(tmp_path / "copy") == checkpoints.read(first)
    two = fp4kit.quantize(np.ones((32, 64), np.float32))
    with pytest.raises(OptionError, match="keeps no second-level scale, and this has one"):
        fp4kit.save(tmp_path / "two", {"a.weight": two}, layout="mlx", config={})
    one = fp4kit.quantize(np.ones((32, 64), np.float32), **SCHEMES["nvfp4"])
    with pytest.raises(OptionError, match="keeps a second-level scale, and this has none"):
        fp4kit.save(tmp_path / "one", {"a.weight": one}, layout="modelopt", config={})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--format", "fp8"), "layout mlx holds mxfp4 or mxfp8 or nvfp4, not fp8"),
        (("--activations", "uncalibrated"), "leave --activations out"),
        (("--recipe", "modelopt"), "only recipe nvfuser is defined; leave --recipe modelopt out"),
        (("--scale-search", "sweep"), "leave --scale-search sweep out"),
    ],
)
def test_what_it_does_not_hold_is_refused(options, message, source, tmp_path):
    said = fail("quantize", source, "-o", tmp_path / "out", "--layout", "mlx", *options)
    assert message in " ".join(said.split())
    assert not (tmp_path / "out").exists()


def changed(checkpoints, source, path, quantization):
    """A copy with another `quantization` in config.json."""
    config = checkpoints.config_of(source)
    tensors = {
        name: (dtype, checkpoints.array((dtype, shape, data)))
        for name, (dtype, shape, data) in checkpoints.read(source).items()
    }
    config["quantization"] = config["quantization_config"] = quantization
    return checkpoints.save(path, tensors, config)


def test_modules_with_parameters_of_their_own(source, checkpoints, tmp_path):
    first, _ = quantize(source, "first", "mxfp4", layout="mlx")
    base = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    own = changed(checkpoints, first, tmp_path / "own", base | {UP: dict(base), "lm_head": False})
    assert fp4kit.verify(own, against=source).faults == []
    affine = base | {"model.layers.0.mlp.gate": {"group_size": 64, "bits": 8}}
    mixed = changed(checkpoints, first, tmp_path / "mixed", affine)
    with pytest.raises(FileFormatError, match=r"MLX \(mode 'affine': .*mlp.gate\)"):
        fp4kit.dequantize_checkpoint(mixed, tmp_path / "back")
    odd = changed(checkpoints, first, tmp_path / "odd", base | {UP: base | {"global_scale": True}})
    with pytest.raises(FileFormatError, match=r"global_scale.*not understood"):
        fp4kit.dequantize_checkpoint(odd, tmp_path / "back")
    wrong = changed(checkpoints, first, tmp_path / "wrong", base | {"group_size": 64})
    assert any("group_size is 64, mxfp4 has 32" in f for f in fp4kit.verify(wrong).faults)
    other = {"group_size": 32, "bits": 8, "mode": "mxfp8"}
    wrong = changed(checkpoints, first, tmp_path / "mode", other)
    assert any("stored as mxfp4, the config says mxfp8" in f for f in fp4kit.verify(wrong).faults)


def test_affine_is_refused_by_name(checkpoints, tmp_path):
    tensors, config = checkpoints.llama(layers=1)
    codes = np.zeros((96, 8), np.uint32), np.ones((96, 1), np.float16)
    tensors[f"{UP}.weight"], tensors[f"{UP}.scales"] = ("U32", codes[0]), ("F16", codes[1])
    tensors[f"{UP}.biases"] = ("F16", codes[1])
    config["quantization"] = {"group_size": 64, "bits": 4}
    path = checkpoints.save(tmp_path / "affine", tensors, config)
    for command in ("dequantize", "quantize"):
        said = " ".join(fail(command, path, "-o", tmp_path / "out").split())
        assert "quantized already by MLX (mode 'affine'" in said


def test_experts_that_mlx_lm_stacks(checkpoints, tmp_path):
    tensors, config = checkpoints.moe()
    source = checkpoints.save(tmp_path / "moe", tensors, config)
    target, _ = quantize(source, "out", "mxfp4", layout="mlx")
    stored = checkpoints.read(target)
    assert stored["model.layers.0.mlp.experts.2.up_proj.scales"][1] == (32, 2)
    assert fp4kit.verify(target, against=source).faults == []
    other = checkpoints.save(tmp_path / "other", tensors, config | {"model_type": "minimax"})
    said = fail("quantize", other, "-o", tmp_path / "no", "--layout", "mlx", "--format", "mxfp4")
    assert "does not put 9 quantized experts of model type 'minimax' together" in said
    assert not (tmp_path / "no").exists()
    kept, _ = quantize(other, "kept", "mxfp4", layout="mlx", exclude=["*experts.*"])
    assert "model.layers.0.mlp.experts.2.up_proj.scales" not in checkpoints.read(kept)
    first, _ = quantize(other, "first", "mxfp4")
    with pytest.raises(OptionError, match="does not put 9 quantized experts"):
        fp4kit.convert_checkpoint(first, tmp_path / "no", "mlx")


def test_what_mlx_lm_takes_apart_is_kept(checkpoints, tmp_path):
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    tensors, config = checkpoints.llama(layers=1)
    source = checkpoints.save(
        tmp_path / "mla", tensors | {name: checkpoints.normal((64, 64))}, config
    )
    _, report = quantize(source, "out", "mxfp4", layout="mlx")
    (line,) = [one for one in report.tensors if one.name == name]
    assert (line.action, line.reason) == ("keep", "taken apart by mlx-lm as it loads")
    first, _ = quantize(source, "first", "mxfp4")
    with pytest.raises(OptionError, match="cannot be quantized in layout mlx"):
        fp4kit.convert_checkpoint(first, tmp_path / "no", "mlx")


def test_models_that_mlx_lm_changes_are_refused(checkpoints, tmp_path):
    tensors, config = checkpoints.llama(layers=1)
    config["model_type"] = "falcon_h1"
    source = checkpoints.save(tmp_path / "in", tensors, config)
    said = fail("quantize", source, "-o", tmp_path / "out", "--layout", "mlx", "--dry-run")
    assert "multiplies the weights of model type 'falcon_h1'" in said


def test_experts_that_mlx_lm_wants_stacked(checkpoints, tmp_path):
    tensors, config = checkpoints.moe()
    config["model_type"] = "qwen3_moe"
    source = checkpoints.save(tmp_path / "moe", tensors, config)
    target, _ = quantize(source, "out", "mxfp4", layout="mlx")
    stored = checkpoints.read(target)
    prefix = "model.layers.0.mlp"
    dtype, shape, data = stored[f"{prefix}.switch_mlp.up_proj.weight"]
    assert (dtype, shape) == ("U32", (3, 32, 8))
    assert stored[f"{prefix}.switch_mlp.up_proj.scales"][:2] == ("U8", (3, 32, 2))
    assert not [name for name in stored if ".experts." in name]
    each = [
        fp4kit.quantize(tensors[f"{prefix}.experts.{number}.up_proj.weight"][1], "mxfp4")
        for number in range(3)
    ]
    assert data == b"".join(q.packed.tobytes() for q in each)
    assert fp4kit.verify(target, against=source).faults == []
    with fp4kit.open(target) as opened:
        name = f"{prefix}.experts.2.up_proj.weight"
        np.testing.assert_array_equal(opened[name], fp4kit.dequantize(each[2]))
    back = tmp_path / "back"
    fp4kit.dequantize_checkpoint(target, back, "float32", experts_layout="single")
    found = checkpoints.array(checkpoints.read(back)[name])
    np.testing.assert_array_equal(found, fp4kit.dequantize(each[2]))
    # Codes of MXFP4 are taken over.
    first, again = tmp_path / "first", tmp_path / "again"
    fp4kit.quantize_checkpoint(source, first, "mxfp4")
    succeed("quantize", first, "-o", again, "--layout", "mlx", "--format", "mxfp4", "--lossless")
    assert checkpoints.read(again) == stored
    with pytest.raises(OptionError, match="want its experts stacked"):
        fp4kit.convert_checkpoint(first, tmp_path / "no", "mlx")
    with pytest.raises(OptionError, match="holds weights in FP8 or another form"):
        fp4kit.convert_checkpoint(target, tmp_path / "no", "compressed-tensors")
    with pytest.raises(OptionError, match="only 2 of 3 are quantized"):
        quantize(source, "no", "mxfp4", layout="mlx", exclude=["*experts.1.up_proj*"])
