# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Fused experts come back from `dequantize` as they were: names, shapes, orientation and order."""

from __future__ import annotations

import json

import numpy as np
import pytest

from checkpoints import NAMES, array, config_of, normal, read, read_file, save
from fp4kit.checkpoint.operations import convert_checkpoint
from fp4kit.checkpoint.options import ConvertOptions
from fp4kit.checkpoint.plan.expert_restore import EXPERTS_KEY
from fp4kit.checkpoint.verify.values import value_faults
from fp4kit.checkpoint.views import experts as expert_join
from fp4kit.io.stream import chunks
from fused_experts import (
    KINDS,
    E,
    H,
    M,
    assert_restored,
    dequantize,
    model,
    quantize,
    rewrite,
    singles,
)

# -- every kind -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("format", "layout"),
    [
        ("nvfp4", "compressed-tensors"),
        ("mxfp4", "compressed-tensors"),
        ("nvfp4", "modelopt"),
        ("nvfp4", "comfy"),
    ],
)
def test_every_kind_in_every_layout(tmp_path, kind, format, layout):
    tensors, config = model(kind)
    source = save(tmp_path / "source", tensors, config)
    out = quantize(source, tmp_path / "out", format=format, layout=layout)
    assert any(".experts.0." in name for name in read(out))
    assert value_faults(out, source) == []
    back, _ = dequantize(out, tmp_path / "back")
    assert set(back) == set(tensors)
    assert_restored(back, singles(out, tmp_path / "single"), tensors, kind)
    assert config_of(tmp_path / "back") == config
    assert EXPERTS_KEY not in read_file(tmp_path / "back/model.safetensors")[1]


@pytest.mark.parametrize("kind", ["mistral4", "llama4_text", "gpt_oss"])
@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("prefix", ["model.layers", "language_model.model.layers", "layers"])
def test_every_element_type_and_prefix(tmp_path, kind, dtype, prefix):
    tensors, config = model(kind, dtype, prefix)
    out = quantize(save(tmp_path / "source", tensors, config), tmp_path / "out")
    back, _ = dequantize(out, tmp_path / "back", dtype)
    assert_restored(back, singles(out, tmp_path / "single", dtype), tensors, kind, prefix)


@pytest.mark.parametrize("kind", ["mistral4", "llama4_text", "gpt_oss"])
def test_parts_in_many_shards(tmp_path, kind):
    """The parts of a fused tensor are in several files, and it is larger than a file may be."""
    tensors, config = model(kind)
    assign = {name: number % 2 for number, name in enumerate(tensors)}
    source = save(tmp_path / "source", tensors, config, shards=2, assign=assign)
    out = quantize(source, tmp_path / "out", max_shard_size=9000)
    assert len(list(out.glob("*.safetensors"))) > 4
    back, _ = dequantize(out, tmp_path / "back", max_shard_size=9000)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) >= 4
    assert_restored(back, singles(out, tmp_path / "single"), tensors, kind)


@pytest.mark.parametrize("kind", ["mistral4", "llama4_text", "gpt_oss"])
@pytest.mark.parametrize("layout", ["modelopt", "comfy", "compressed-tensors"])
def test_converted_in_between(tmp_path, kind, layout):
    tensors, config = model(kind)
    first = "compressed-tensors" if layout != "compressed-tensors" else "modelopt"
    out = quantize(save(tmp_path / "source", tensors, config), tmp_path / "out", layout=first)
    other = tmp_path / "other"
    convert_checkpoint(out, other, ConvertOptions(layout, max_shard_size=9000))
    back, _ = dequantize(other, tmp_path / "back")
    assert_restored(back, singles(other, tmp_path / "single"), tensors, kind)


def test_mxfp4_quantized_further(tmp_path):
    tensors, config = model("llama4_text")
    first = quantize(save(tmp_path / "source", tensors, config), tmp_path / "1", format="mxfp4")
    out = quantize(first, tmp_path / "2")
    back, _ = dequantize(out, tmp_path / "back")
    assert_restored(back, singles(out, tmp_path / "single"), tensors, "llama4_text")


def test_the_note_is_in_every_shard_and_small(tmp_path):
    tensors, config = model("gpt_oss")
    out = quantize(save(tmp_path / "s", tensors, config), tmp_path / "out", max_shard_size=9000)
    notes = {read_file(path)[1][EXPERTS_KEY] for path in out.glob("*.safetensors")}
    (note,) = notes
    content = json.loads(note)
    assert content["version"] == 1
    # Tensors of one shape share an entry: two weights and two biases, whatever the layers.
    assert [group["shape"] for group in content["tensors"]] == [
        [E, H, 2 * M],
        [E, M, H],
        [E, 2 * M],
        [E, H],
    ]
    assert all(len(group["names"]) == 2 for group in content["tensors"])


def test_one_header_left_is_enough(tmp_path):
    """Another tool wrote most of the files anew and lost their metadata."""
    tensors, config = model("brand_new")
    out = quantize(save(tmp_path / "s", tensors, config), tmp_path / "out", max_shard_size=30000)
    paths = sorted(out.glob("*.safetensors"))
    assert len(paths) > 2
    for path in paths[:-1]:
        rewrite(path, {"format": "pt"})
    back, _ = dequantize(out, tmp_path / "back")
    assert set(back) == set(tensors)


def test_dense_models_and_single_experts_have_no_note(tmp_path):
    tensors, config = model("llama4_text")
    attention = {name: value for name, value in tensors.items() if "experts" not in name}
    out = quantize(save(tmp_path / "s", attention, config), tmp_path / "out")
    assert EXPERTS_KEY not in read_file(out / "model.safetensors")[1]


# -- in pieces ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mistral4", "llama4_text", "gpt_oss"])
@pytest.mark.parametrize("layout", ["compressed-tensors", "comfy"])
def test_streamed_in_slabs(tmp_path, monkeypatch, kind, layout):
    """A tensor larger than a chunk, whose chunks end in the midst of an expert and of its rows."""
    tensors, config = model(kind)
    out = quantize(save(tmp_path / "source", tensors, config), tmp_path / "out", layout=layout)
    single = singles(out, tmp_path / "single")
    monkeypatch.setattr(chunks, "WHOLE_BYTES", 3000)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 3000)
    monkeypatch.setattr(expert_join, "READ_BYTES", 700)
    asked = []
    reading = expert_join.JoinedView.outputs

    def outputs(self, first, last, data):
        asked.append(data.nbytes)
        reading(self, first, last, data)

    monkeypatch.setattr(expert_join.JoinedView, "outputs", outputs)
    back, _ = dequantize(out, tmp_path / "back")
    assert_restored(back, single, tensors, kind)
    assert max(asked) <= 3000


# -- other sources --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "experts_layout", "transposed", "interleaved"),
    [
        ("gpt_oss", None, True, True),
        ("brand_new", "interleaved", False, True),
        ("brand_new", "out_in", False, False),
    ],
)
def test_mxfp4_blocks_come_back_as_floats(tmp_path, kind, experts_layout, transposed, interleaved):
    """As transformers has them: for gpt_oss [E, in, out], gate and up alternating."""
    rng = np.random.default_rng(0)
    base = "model.layers.0.mlp.experts"
    tensors = {}
    for role, out, cols in (("gate_up_proj", 2 * M, H), ("down_proj", H, M)):
        blocks = rng.integers(0, 256, (E, out, cols // 32, 16), np.uint8)
        scales = rng.integers(110, 130, (E, out, cols // 32), np.uint8)
        tensors[f"{base}.{role}_blocks"] = "U8", blocks
        tensors[f"{base}.{role}_scales"] = "U8", scales
        tensors[f"{base}.{role}_bias"] = normal((E, out))
    config = {"model_type": kind, "quantization_config": {"quant_method": "mxfp4"}}
    source = save(tmp_path / "source", tensors, config)
    out = quantize(source, tmp_path / "out", format="mxfp4", experts_layout=experts_layout)
    back, _ = dequantize(out, tmp_path / "back")
    # The blocks decoded by themselves: no code changed, and the orientation is that of the type.
    expected, _ = dequantize(source, tmp_path / "direct")
    assert back == expected
    shape = (E, H, 2 * M) if transposed else (E, 2 * M, H)
    assert back[f"{base}.gate_up_proj"][1] == shape
    single = read(out)
    name = f"{base}.0.up_proj.bias"
    whole = array(back[f"{base}.gate_up_proj_bias"])[0]
    assert (array(single[name]) == (whole[1::2] if interleaved else whole[M:])).all()


def test_fp8_experts_come_back_as_floats(tmp_path):
    rng = np.random.default_rng(0)
    base = "model.layers.0.mlp.experts"
    tensors = {}
    for role, shape in (("gate_up_proj", (E, 2 * M, H)), ("down_proj", (E, H, M))):
        tensors[f"{base}.{role}"] = "F8_E4M3", rng.integers(0, 120, shape, np.uint8)
        tensors[f"{base}.{role}_scale_inv"] = "F32", np.full((E, 1, 1), 0.5, np.float32)
    config = {"model_type": "mistral4", "quantization_config": {"quant_method": "fp8"}}
    out = quantize(save(tmp_path / "source", tensors, config), tmp_path / "out")
    back, _ = dequantize(out, tmp_path / "back")
    assert {name: value[:2] for name, value in back.items()} == {
        f"{base}.gate_up_proj": ("BF16", (E, 2 * M, H)),
        f"{base}.down_proj": ("BF16", (E, H, M)),
    }


@pytest.mark.parametrize("kept", ["F32", "BF16"])
def test_some_experts_kept(tmp_path, kept):
    """Their element type is that of the fused tensor: nothing of them is lost."""
    tensors, config = model("llama4_text", kept)
    exclude = ("*.1.mlp.experts.2.*", "*.0.mlp.experts.*.down_proj*")
    out = quantize(save(tmp_path / "source", tensors, config), tmp_path / "out", exclude=exclude)
    assert "model.layers.1.mlp.experts.2.up_proj.weight" in read(out)
    back, _ = dequantize(out, tmp_path / "back")
    name = "model.layers.0.mlp.experts.down_proj"
    assert back[name] == (kept, (E, M, H), tensors[name][1].tobytes())
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert back[name][:2] == (kept, (E, H, 2 * M))
    assert (array(back[name])[2] == tensors[name][1][2]).all()
    assert not (array(back[name])[1] == tensors[name][1][1]).all()
    single = singles(out, tmp_path / "single", kept)
    gate = array(single["model.layers.1.mlp.experts.1.gate_proj.weight"])
    assert (array(back[name])[1, :, :M] == gate.T).all()
