# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Fused experts come back from `dequantize` as they were: names, shapes, orientation and order."""

from __future__ import annotations

import json

import numpy as np
import pytest

from checkpoints import DTYPES, NAMES, array, config_of, normal, read, read_file, save, write_file
from fp4kit.checkpoint import expert_join
from fp4kit.checkpoint.convert import (
    convert_checkpoint,
    dequantize_checkpoint,
    quantize_checkpoint,
)
from fp4kit.checkpoint.expert_record import EXPERTS_KEY
from fp4kit.checkpoint.options import CheckpointOptions, ConvertOptions, DequantizeOptions
from fp4kit.checkpoint.verify import structure_faults
from fp4kit.checkpoint.verify_values import value_faults
from fp4kit.errors import FileFormatError, OptionError
from fp4kit.io import slabs

E, H, M = 3, 96, 64
#: Model type to how its files hold experts: (layout, names of the fused tensors, biases).
KINDS = {
    "qwen3_vl_moe": ("out_in", ("gate_up_proj", "down_proj"), False),
    "mistral4": ("out_in", ("gate_up_proj", "down_proj"), False),
    "brand_new": ("in_out", ("gate_up_proj.weight", "down_proj.weight"), False),
    "llama4_text": ("in_out", ("gate_up_proj", "down_proj"), False),
    "aria_text": ("in_out", ("fc1.weight", "fc2.weight"), False),
    "gpt_oss": ("interleaved", ("gate_up_proj", "down_proj"), True),
}


def fuse(gate, up, down, layout):
    """(gate_up, down) as a layout has them, of (E, M, H), (E, M, H) and (E, H, M)."""
    if layout == "interleaved":
        both = np.stack([gate, up], 2).reshape(len(gate), -1, gate.shape[2])
    else:
        both = np.concatenate([gate, up], 1)
    if layout == "out_in":
        return both, down
    return both.transpose(0, 2, 1), down.transpose(0, 2, 1)


def model(kind, dtype="BF16", prefix="model.layers", layers=2, seed=0):
    """(tensors, config) of attention and fused experts of a model type."""
    layout, (gate_up, down), bias = KINDS[kind]
    tensors = {}
    for layer in range(layers):
        base = f"{prefix}.{layer}"
        tensors[f"{base}.self_attn.o_proj.weight"] = normal((H, H), dtype, seed)
        weights = [
            normal(shape, dtype, seed + 7 * layer + number, 2.0**number)[1]
            for number, shape in enumerate(((E, M, H), (E, M, H), (E, H, M)))
        ]
        for name, value in zip((gate_up, down), fuse(*weights, layout), strict=True):
            tensors[f"{base}.mlp.experts.{name}"] = dtype, np.ascontiguousarray(value)
        if bias:
            for name, size in (("gate_up_proj_bias", 2 * M), ("down_proj_bias", H)):
                tensors[f"{base}.mlp.experts.{name}"] = normal((E, size), dtype, seed + size)
        tensors[f"{base}.mlp.router.weight"] = normal((E, H), dtype, seed)
    config = {
        "model_type": kind,
        "dtype": NAMES[dtype],
        "hidden_size": H,
        "intermediate_size": M,
        "num_local_experts": E,
        "num_hidden_layers": layers,
    }
    return tensors, config


def rewrite(path, metadata, drop=()):
    """Another header for a file, without the tensors in whose names some text is."""
    tensors = {
        name: (dtype, np.frombuffer(data, DTYPES[dtype]).reshape(shape))
        for name, (dtype, shape, data) in read_file(path)[0].items()
        if not any(text in name for text in drop)
    }
    write_file(path, tensors, metadata)


def quantize(source, out, **options):
    quantize_checkpoint(source, out, CheckpointOptions(**options))
    assert structure_faults(out) == []
    return out


def dequantize(source, back, dtype="BF16", **options):
    report = dequantize_checkpoint(source, back, DequantizeOptions(NAMES[dtype], **options))
    return read(back), report


def singles(out, folder, dtype="BF16", **options):
    """The same, experts left single: what the fused tensors must consist of."""
    tensors, _ = dequantize(out, folder, dtype, experts_layout="single", **options)
    return tensors


def joined(single, kind, prefix="model.layers", layer=0):
    """Fused experts of one layer, from single ones by NumPy alone."""
    layout, (gate_up, down), bias = KINDS[kind]
    base = f"{prefix}.{layer}.mlp.experts"

    def stacked(name, part):
        return np.stack([array(single[f"{base}.{e}.{name}.{part}"]) for e in range(E)])

    weights = [stacked(name, "weight") for name in ("gate_proj", "up_proj", "down_proj")]
    both, last = fuse(*weights, layout)
    found = {f"{base}.{gate_up}": both, f"{base}.{down}": last}
    if bias:
        halves = [stacked(name, "bias") for name in ("gate_proj", "up_proj")]
        found[f"{base}.gate_up_proj_bias"] = np.stack(halves, 2).reshape(E, -1)
        found[f"{base}.down_proj_bias"] = stacked("down_proj", "bias")
    return found


def assert_restored(back, single, source, kind, prefix="model.layers"):
    """Names, order, shapes and element types of the source; the values of the single experts."""
    assert {name: (dtype, a.shape) for name, (dtype, a) in source.items()} == {
        name: (dtype, shape) for name, (dtype, shape, _) in back.items()
    }
    for layer in range(2):
        for name, value in joined(single, kind, prefix, layer).items():
            assert back[name][2] == value.tobytes(), name


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
    assert read_file(tmp_path / "back/model.safetensors")[1] == {"format": "pt"}


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
    """A tensor larger than a slab, whose slabs end in the midst of an expert and of its rows."""
    tensors, config = model(kind)
    out = quantize(save(tmp_path / "source", tensors, config), tmp_path / "out", layout=layout)
    single = singles(out, tmp_path / "single")
    monkeypatch.setattr(slabs, "WHOLE_BYTES", 3000)
    monkeypatch.setattr(slabs, "SLAB_BYTES", 3000)
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


# -- without a note -------------------------------------------------------------------------------


def without_note(out, drop=()):
    """The same checkpoint as another tool would have written it."""
    path = out / "model.safetensors"
    metadata = read_file(path)[1]
    del metadata[EXPERTS_KEY]
    rewrite(path, metadata, drop)
    return out


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
