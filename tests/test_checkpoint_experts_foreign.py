# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Experts that another tool separated, or that are incomplete: the model type tells, or nobody."""

from __future__ import annotations

import json

import numpy as np
import pytest

from checkpoints import DTYPES, normal, read, read_file, save, write_file
from command_line import fail, succeed
from fp4kit.checkpoint.operations import convert_checkpoint
from fp4kit.checkpoint.options import ConvertOptions
from fp4kit.checkpoint.plan.expert_restore import EXPERTS_KEY
from fp4kit.errors import FileFormatError, OptionError
from fused_experts import (
    KINDS,
    assert_restored,
    dequantize,
    joined,
    model,
    quantize,
    rewrite,
    singles,
    without_note,
)

# -- without a note -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "brand_new"])
@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_the_model_type_tells(tmp_path, kind, layout):
    tensors, config = model(kind)
    out = quantize(save(tmp_path / "source", tensors, config), tmp_path / "out", layout=layout)
    back, report = dequantize(without_note(out), tmp_path / "back")
    assert_restored(back, singles(out, tmp_path / "single"), tensors, kind)
    assert report.warnings == []


def test_a_type_that_is_read_single_stays_so(tmp_path):
    tensors, config = model("mistral4")
    out = quantize(save(tmp_path / "s", tensors, config), tmp_path / "out")
    config["model_type"] = "qwen3_moe"
    saved = json.loads((out / "config.json").read_text()) | {"model_type": "qwen3_moe"}
    (out / "config.json").write_text(json.dumps(saved))
    back, report = dequantize(without_note(out), tmp_path / "back")
    assert "model.layers.0.mlp.experts.0.gate_proj.weight" in back
    assert report.warnings == []


def test_an_unknown_type_is_named(tmp_path):
    tensors, config = model("brand_new")
    out = quantize(save(tmp_path / "s", tensors, config), tmp_path / "out")
    back, report = dequantize(without_note(out), tmp_path / "back")
    assert "model.layers.0.mlp.experts.0.gate_proj.weight" in back
    (warning,) = report.warnings
    assert "'model.layers.0.mlp.experts', 'model.layers.1.mlp.experts'" in warning
    assert "model type brand_new is not known" in warning
    assert "--experts-layout out_in|in_out|interleaved" in warning
    # The way out that it names works.
    again, report = dequantize(out, tmp_path / "again", experts_layout="in_out")
    assert report.warnings == []
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert again[name][2] == joined(back, "brand_new")[f"{name}.weight"].tobytes()
    _, report = dequantize(out, tmp_path / "quiet", experts_layout="single")
    assert report.warnings == []


@pytest.mark.parametrize("kind", ["llama4_text", "brand_new"])
def test_what_was_single_stays_single(tmp_path, kind):
    """The source's own experts were single: an empty note says so."""
    tensors, config = model(kind)
    out = quantize(save(tmp_path / "1", tensors, config), tmp_path / "2")
    single = singles(out, tmp_path / "3")
    again = {
        name: (dtype, np.frombuffer(data, DTYPES[dtype]).reshape(shape))
        for name, (dtype, shape, data) in single.items()
    }
    source = save(tmp_path / "4", again, config)
    out = quantize(source, tmp_path / "5")
    assert json.loads(read_file(out / "model.safetensors")[1][EXPERTS_KEY])["tensors"] == []
    convert_checkpoint(out, tmp_path / "6", ConvertOptions("modelopt"))
    for number, result in enumerate((out, tmp_path / "6")):
        back, report = dequantize(result, tmp_path / f"back{number}")
        assert set(back) == set(again)
        assert report.warnings == []


# -- refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize("noted", [True, False])
@pytest.mark.parametrize(
    "drop", ["layers.0.mlp.experts.1.", "layers.0.mlp.experts.2.", "experts.1.up_proj"]
)
def test_incomplete_experts_are_refused(tmp_path, noted, drop):
    """Never random: a reader would not say that they are missing."""
    tensors, config = model("mistral4")
    out = quantize(save(tmp_path / "s", tensors, config), tmp_path / "out")
    path = out / "model.safetensors"
    metadata = read_file(path)[1]
    if not noted:
        del metadata[EXPERTS_KEY]
    rewrite(path, metadata, [drop])
    with pytest.raises(FileFormatError, match=r"layers.0.mlp.experts.*--experts-layout single"):
        dequantize(out, tmp_path / "back")
    assert not (tmp_path / "back").exists()
    assert "model.layers.1.mlp.experts.0.up_proj.weight" in singles(out, tmp_path / "single")


@pytest.mark.parametrize(
    "note",
    [
        "[]",
        "{",
        '{"version":1}',
        '{"version":1,"tensors":[{}]}',
        '{"version":1,"tensors":[{"shape":[2,4,4],"transposed":1,"interleaved":0,"names":[]}]}',
        '{"version":1,"tensors":[{"shape":[2,4],"transposed":true,"interleaved":true,'
        '"names":["x"]}]}',
        '{"version":1,"tensors":[{"shape":[2,3,4],"transposed":false,"interleaved":true,'
        '"names":["a.gate_up_proj"]}]}',
        '{"version":1,"tensors":[{"shape":[2,4,-4],"transposed":false,"interleaved":true,'
        '"names":["a.gate_up_proj"]}]}',
        '{"version":1,"tensors":[{"shape":[2,4,4],"transposed":false,"interleaved":true,'
        '"names":["a.gate_up_proj","a.gate_up_proj"]}]}',
    ],
)
def test_a_damaged_note(tmp_path, note):
    path = save_quantized(tmp_path, note)
    with pytest.raises(FileFormatError, match=f"metadata '{EXPERTS_KEY}': damaged"):
        dequantize(path, tmp_path / "back")


def save_quantized(tmp_path, note):
    tensors, config = model("mistral4", layers=1)
    out = quantize(save(tmp_path / "s", tensors, config), tmp_path / "out")
    path = out / "model.safetensors"
    rewrite(path, read_file(path)[1] | {EXPERTS_KEY: note})
    return out


def test_a_note_of_a_later_version(tmp_path):
    path = save_quantized(tmp_path, '{"version":2,"tensors":[{"new":1}]}')
    with pytest.raises(FileFormatError, match="version 2 is not known, this fp4kit reads 1"):
        dequantize(path, tmp_path / "back")


def test_a_note_of_another_model_says_nothing(tmp_path):
    note = (
        '{"version":1,"tensors":[{"shape":[1000000000,4,4],"transposed":false,'
        '"interleaved":true,"names":["other.experts.gate_up_proj"]}]}'
    )
    back, _ = dequantize(save_quantized(tmp_path, note), tmp_path / "back")
    assert "model.layers.0.mlp.experts.0.up_proj.weight" in back


def test_an_unknown_layout_option(tmp_path):
    path = save_quantized(tmp_path, '{"version":1,"tensors":[]}')
    with pytest.raises(OptionError, match="choose one of out_in, in_out, interleaved, single"):
        dequantize(path, tmp_path / "back", experts_layout="sideways")


# -- the command line ------------------------------------------------------------------------------


def test_the_option_of_the_command(tmp_path):
    tensors, config = model("brand_new")
    out = without_note(quantize(save(tmp_path / "s", tensors, config), tmp_path / "out"))
    result = succeed("dequantize", str(out), "-o", str(tmp_path / "warned"))
    assert "model type brand_new is not known" in " ".join(result.stderr.split())
    assert "model.layers.0.mlp.experts.0.gate_proj.weight" in read(tmp_path / "warned")
    back = tmp_path / "back"
    result = succeed("dequantize", str(out), "-o", str(back), "--experts-layout", "in_out")
    assert "not known" not in result.stderr
    assert "model.layers.0.mlp.experts.gate_up_proj" in read(back)


def test_the_option_is_for_directories(tmp_path):
    path = tmp_path / "x.safetensors"
    write_file(path, {"x": normal((2, 32))})
    succeed("quantize", str(path), "-o", str(tmp_path / "q.safetensors"))
    given = ("-o", str(tmp_path / "y.safetensors"), "--experts-layout", "single")
    error = fail("dequantize", str(tmp_path / "q.safetensors"), *given, code=2)
    assert "--experts-layout is for model directories" in error
