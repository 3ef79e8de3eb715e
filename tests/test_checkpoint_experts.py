# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Fused experts as single linear layers: every layout, who decides it, and all kinds together."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4kit.checkpoint.read.directory import Checkpoint
from fp4kit.checkpoint.views import base as views
from fp4kit.checkpoint.views import experts as expert_views
from fp4kit.checkpoint.views import search as view_search
from fp4kit.checkpoint.views.base import ViewOptions
from fp4kit.cpu.matrices import transpose
from fp4kit.errors import FileFormatError, OptionError
from fp4kit.io.containers import TensorSpec
from fp4kit.io.write.safetensors import SafetensorsWriter

P = "model.layers.0.mlp.experts"
RAW = {"F32": np.uint32, "BF16": np.uint16, "F16": np.uint16}
#: (model type, transposed, interleaved) of each known kind.
KINDS = [
    ("qwen3_5_moe", False, False),
    ("gemma4", False, False),
    ("minimax", False, False),
    ("llama4_text", True, False),
    ("aria_text", True, False),
    ("qwen3_vl_moe", True, False),
    ("qwen3_vl_moe", False, False),
    ("gpt_oss", True, True),
]


def fused_experts(experts, hidden, intermediate, dtype, transposed, interleaved, bias=False):
    """(stored tensors, expected per-expert tensors by name) of random bits."""
    rng = np.random.default_rng(0)

    def random(*shape):
        return rng.integers(0, 1 << 15, shape).astype(RAW[dtype])

    gate, up = random(experts, intermediate, hidden), random(experts, intermediate, hidden)
    down = random(experts, hidden, intermediate)
    halves = random(experts, intermediate), random(experts, intermediate)

    def fuse(first, second):
        if interleaved:
            return np.stack([first, second], 2).reshape(experts, -1, *first.shape[2:])
        return np.concatenate([first, second], 1)

    gate_up = fuse(gate, up)
    stored = {"gate_up_proj": gate_up, "down_proj": down}
    if transposed:
        stored = {name: array.transpose(0, 2, 1) for name, array in stored.items()}
    expected = {}
    for expert in range(experts):
        for name, array in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
            expected[f"{P}.{expert}.{name}.weight"] = array[expert]
        if bias:
            for name, array in zip(("gate_proj", "up_proj"), halves, strict=True):
                expected[f"{P}.{expert}.{name}.bias"] = array[expert]
    if bias:
        stored["gate_up_proj_bias"] = fuse(*halves)
    return {f"{P}.{name}": (dtype, array) for name, array in stored.items()}, expected


def config_of(model_type, experts, hidden, intermediate):
    text = {
        "model_type": model_type,
        "hidden_size": hidden,
        "moe_intermediate_size": intermediate,
        "intermediate_size": 7 * intermediate,
        "num_experts": experts,
    }
    vision = {"model_type": "some_vision", "hidden_size": 8 * hidden + 3}
    return {"model_type": "composite", "text_config": text, "vision_config": vision}


def assert_views(stored, found, expected, dtype):
    assert {view.tensor.name for view in found} == set(expected)
    for view in found:
        array = expected[view.tensor.name]
        assert view.tensor.spec.dtype == dtype
        assert view.tensor.spec.shape == array.shape
        assert (stored.read_all(view, RAW[dtype]) == array).all()


@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from(KINDS),
    experts=st.integers(1, 4),
    hidden=st.integers(1, 40),
    intermediate=st.integers(1, 40),
    dtype=st.sampled_from(sorted(RAW)),
    bias=st.booleans(),
    data=st.data(),
)
def test_every_layout(stored, kind, experts, hidden, intermediate, dtype, bias, data):
    model_type, transposed, interleaved = kind
    tensors, expected = fused_experts(
        experts, hidden, intermediate, dtype, transposed, interleaved, bias
    )
    source = stored.ArraySource(tensors)
    config = data.draw(
        st.sampled_from(
            [config_of(model_type, experts, hidden, intermediate), {"model_type": model_type}]
        )
    )
    found = expert_views.find_views(source, ViewOptions(config))
    assert source.reads == []
    assert_views(stored, found, expected, dtype)
    assert {name for view in found for name in view.consumed} == set(tensors)
    assert sum(view.tensor.stored for view in found) == sum(a.nbytes for _, a in tensors.values())
    view = data.draw(st.sampled_from(found))
    stored.check_ranges(data, view, expected[view.tensor.name])


@settings(deadline=None, max_examples=40)
@given(
    layout=st.sampled_from([("out_in", False), ("in_out", True), ("interleaved", True)]),
    config=st.sampled_from([{}, {"model_type": "new"}, config_of("gemma4", 9, 999, 999)]),
    hidden=st.integers(1, 20),
    intermediate=st.integers(1, 20),
    bias=st.booleans(),
)
def test_the_override_decides(stored, layout, config, hidden, intermediate, bias):
    """Against the model type and the sizes in config.json too."""
    name, transposed = layout
    tensors, expected = fused_experts(
        2, hidden, intermediate, "BF16", transposed, name == "interleaved", bias
    )
    found = expert_views.find_views(stored.ArraySource(tensors), ViewOptions(config, name))
    assert_views(stored, found, expected, "BF16")


@pytest.mark.parametrize("transposed", [False, True])
def test_unknown_model_type_is_decided_by_shapes(stored, transposed):
    tensors, expected = fused_experts(2, 32, 16, "F32", transposed, False)
    found = expert_views.find_views(stored.ArraySource(tensors), ViewOptions({"model_type": "new"}))
    assert_views(stored, found, expected, "F32")


@pytest.mark.parametrize(
    ("gate_up", "down"),
    [("gate_up_proj.weight", "down_proj.weight"), ("fc1.weight", "fc2.weight")],
)
def test_other_names(stored, gate_up, down):
    tensors, expected = fused_experts(2, 32, 16, "F32", True, False)
    renamed = {
        f"{P}.{gate_up}": tensors[f"{P}.gate_up_proj"],
        f"{P}.{down}": tensors[f"{P}.down_proj"],
    }
    found = expert_views.find_views(
        stored.ArraySource(renamed), ViewOptions({"model_type": "aria_text"})
    )
    assert_views(stored, found, expected, "F32")


@pytest.mark.parametrize("kind", [("llama4", True, False), ("gpt_oss", True, True)])
def test_transposed_experts_are_streamed(stored, kind, monkeypatch):
    model_type, *layout = kind
    tensors, expected = fused_experts(3, 300, 200, "BF16", *layout)
    source = stored.ArraySource(tensors)
    found = expert_views.find_views(source, ViewOptions({"model_type": model_type}))
    monkeypatch.setattr(expert_views, "READ_BYTES", 8000)
    monkeypatch.setattr(views, "CHUNK_BYTES", 3000)
    source.reads.clear()
    assert_views(stored, found, expected, "BF16")
    assert max(count for _, _, count in source.reads) <= 8000
    for view in found:
        # Few columns: nothing but them is read; a misaligned buffer goes through pieces.
        array = expected[view.tensor.name]
        source.reads.clear()
        piece = stored.read_range(view, 0, array[:2].nbytes)
        assert (piece.view(np.uint16) == array[:2].reshape(-1)).all()
        assert sum(count for _, _, count in source.reads) <= 2 * array[:2].nbytes
        shifted = stored.read_range(view, 0, array.nbytes, misaligned=1).tobytes()
        assert shifted == array.tobytes()


# -- refused ------------------------------------------------------------------------------------


def shapes(gate_up=None, down=None, bias=None):
    found = {"gate_up_proj": gate_up, "down_proj": down, "gate_up_proj_bias": bias}
    return {
        f"{P}.{name}": ("F16", np.zeros(shape, np.float16))
        for name, shape in found.items()
        if shape is not None
    }


LLAMA = config_of("llama4", 2, 32, 16)


@pytest.mark.parametrize(
    ("tensors", "config", "layout", "message"),
    [
        # Contradicts the model type.
        (shapes((2, 32, 32), (2, 32, 16)), LLAMA, None, "are no fused experts as model type"),
        (shapes((2, 64, 8), (2, 8, 32)), {"model_type": "llama4"}, None, "model type llama4"),
        (shapes((2, 8, 64), (2, 32, 8)), {"model_type": "gemma4"}, None, "model type gemma4"),
        # Contradicts the sizes in config.json.
        (shapes((2, 64, 16), (2, 32, 64)), LLAMA, None, r"with hidden_size \[32, 259\]"),
        (shapes((2, 32, 34), (2, 17, 32)), LLAMA, None, r"moe_intermediate_size \[16, 112\]"),
        (shapes((3, 32, 32), (3, 16, 32)), LLAMA, None, r"the number of experts with config"),
        (shapes((2, 32, 32), (3, 16, 32)), {}, None, "do not agree on the number of experts"),
        # Contradict each other.
        (shapes((2, 32, 32), (2, 32, 32)), {}, None, "are no fused experts"),
        (shapes((2, 32, 33), (2, 16, 32)), {}, None, "are no fused experts"),
        # Alone, and nothing tells.
        (shapes((2, 32, 64)), {}, None, "could be out x in or in x out"),
        (shapes(None, (2, 32, 64)), {"model_type": "new"}, None, "model type new does not tell"),
        (shapes((2, 32, 32)), config_of("new", 2, 32, 16), None, "could be out x in"),
        # Biases are known from interleaved experts only.
        (shapes((2, 32, 34), (2, 17, 32), (2, 34)), {"model_type": "new"}, None, "may alternate"),
        # The override cannot be either.
        (shapes((2, 32, 34), (2, 17, 32)), {}, "out_in", "as --experts-layout out_in stores them"),
        (shapes((2, 34, 32), (2, 32, 17)), {}, "in_out", "as --experts-layout in_out stores them"),
        (shapes((2, 34, 32), (2, 32, 17)), {}, "sideways", "choose one of out_in, in_out, inter"),
    ],
)
def test_refused_with_what_was_found_and_the_override(stored, tensors, config, layout, message):
    source = stored.ArraySource(tensors)
    with pytest.raises(OptionError, match=message) as caught:
        expert_views.find_views(source, ViewOptions(config, layout))
    assert source.reads == []
    if layout is None and "number of experts" not in message:
        text = str(caught.value)
        assert text.startswith(f"model: tensor '{P}.")
        assert "--experts-layout out_in|in_out|interleaved" in text


def test_bias_that_does_not_fit(stored):
    tensors = shapes((2, 34, 32), (2, 32, 17), (2, 32))
    with pytest.raises(FileFormatError, match=r"bias': has shape \[2, 32\], .*needs \[2, 34\]"):
        expert_views.find_views(stored.ArraySource(tensors), ViewOptions({"model_type": "gemma4"}))


def test_what_is_no_fused_expert(stored):
    source = stored.ArraySource(
        {
            "mlp.down_proj.weight": ("F32", np.zeros((4, 4), np.float32)),
            "mlp.gate_up_proj.weight": ("F32", np.zeros((4, 4), np.float32)),
            "blocks.0.fc1.weight": ("F32", np.zeros((4, 4, 4), np.float32)),
            "conv.weight": ("F32", np.zeros((4, 4, 4), np.float32)),
            "mlp.gate_up_proj_bias": ("F32", np.zeros((4, 4), np.float32)),
        }
    )
    assert expert_views.find_views(source, ViewOptions({})) == []


# -- all kinds together ---------------------------------------------------------------------------


def test_fp8_experts_are_decoded_and_separated(stored):
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 120, (2, 512, 128), np.uint8)
    down = rng.integers(0, 120, (2, 128, 256), np.uint8)
    scale = rng.uniform(0.5, 2, (2, 4, 1)).astype(np.float32)
    source = stored.ArraySource(
        {
            f"{P}.gate_up_proj": ("F8_E4M3", codes),
            f"{P}.gate_up_proj_scale_inv": ("F32", scale),
            f"{P}.down_proj": ("F8_E4M3", down),
            f"{P}.down_proj_scale_inv": ("F32", np.ones((2, 1, 2), np.float32)),
        }
    )
    found = view_search.search(source, ViewOptions(config_of("qwen3_5_moe", 2, 128, 256)))
    assert found.dropped == {}
    by_name = {view.tensor.name: view for view in found.views}
    assert len(by_name) == 6
    value = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale.repeat(128, 1)
    view = by_name[f"{P}.1.up_proj.weight"]
    assert view.consumed == (f"{P}.gate_up_proj", f"{P}.gate_up_proj_scale_inv")
    assert (stored.read_all(view) == value[1, 256:]).all()


def test_experts_that_stay_fused_are_only_decoded(stored):
    tensors, _ = fused_experts(2, 32, 16, "BF16", True, True, bias=True)
    tensors["x.weight"] = ("F8_E4M3", np.zeros((4, 4), np.uint8))
    tensors["x.weight_scale"] = ("F32", np.ones(1, np.float32))
    source = stored.ArraySource(tensors)
    found = view_search.search(source, ViewOptions({"model_type": "gpt_oss"}, fused=False))
    assert [view.tensor.name for view in found.views] == ["x.weight"]


def test_dropped_scales_have_reasons(stored):
    one = ("F32", np.ones(1, np.float32))
    weight = ("F8_E4M3", np.zeros((4, 4), np.uint8))
    tensors = {
        "a.weight": weight,
        "a.weight_scale": one,
        "a.input_scale": one,
        "attn.k_scale": one,
        "attn.v_scale": ("F32", np.ones(8, np.float32)),
        "gone.weight_scale_inv": one,
        "gone.weight_scale": one,
        "gone.gate_up_proj_scales": one,
        "logit_scale": one,
    }
    found = view_search.search(stored.ArraySource(tensors), ViewOptions({}))
    assert [view.tensor.name for view in found.views] == ["a.weight"]
    assert found.dropped == {
        "a.input_scale": "activation scale of an older quantization",
        "attn.k_scale": "activation scale of an older quantization",
        "gone.weight_scale_inv": "scale of 'gone.weight', which is not there",
        "gone.weight_scale": "scale of 'gone.weight', which is not there",
        "gone.gate_up_proj_scales": "scale of 'gone.gate_up_proj_blocks', which is not there",
    }


def test_a_float_model_loses_nothing(stored):
    source = stored.ArraySource(
        {name: ("F32", np.ones(1, np.float32)) for name in ("a.k_scale", "a.input_scale")}
    )
    assert view_search.search(source, ViewOptions({})) == view_search.FoundViews([], {})


@pytest.mark.parametrize("twin", ["x.weight", f"{P}.0.gate_proj.weight"])
def test_two_tensors_of_one_name(stored, twin):
    tensors, _ = fused_experts(2, 32, 16, "F32", False, False)
    tensors["x.weight_packed"] = ("U8", np.zeros((2, 16), np.uint8))
    tensors["x.weight_scale"] = ("U8", np.zeros((2, 1), np.uint8))
    tensors[twin] = ("F32", np.zeros((2, 32), np.float32))
    with pytest.raises(FileFormatError, match=f"{twin}': is stored, and .*of the same name"):
        view_search.search(stored.ArraySource(tensors), ViewOptions({"model_type": "gemma4"}))


def test_parts_in_different_shards(tmp_path, stored):
    """From real files: the index says where, and each part of a tensor is elsewhere."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 120, (300, 200), np.uint8)
    scale = rng.uniform(0.5, 2, (3, 2)).astype(np.float32)
    tensors, expected = fused_experts(2, 64, 32, "BF16", False, False)
    blocks = rng.integers(0, 256, (64, 2, 16), np.uint8)
    scales = rng.integers(0, 253, (64, 2), np.uint8)
    tensors |= {
        "x_blocks": ("U8", blocks),
        "a.weight": ("F8_E4M3", codes),
        "b.weight": ("F32", np.zeros((2, 2), np.float32)),
        "x_scales": ("U8", scales),
        "a.weight_scale_inv": ("F32", scale),
    }
    weight_map = {
        name: f"model-{number % 2 + 1:05}-of-00002.safetensors"
        for number, name in enumerate(tensors)
    }
    for file in sorted(set(weight_map.values())):
        names = [name for name in tensors if weight_map[name] == file]
        specs = [TensorSpec(name, tensors[name][0], tensors[name][1].shape) for name in names]
        with SafetensorsWriter(tmp_path / file, specs, {}) as writer:
            for name in names:
                writer.write(name, 0, np.ascontiguousarray(tensors[name][1]).tobytes())
            writer.finish()
    index = {"metadata": {}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weight_map["a.weight"] != weight_map["a.weight_scale_inv"]
    assert weight_map["x_blocks"] != weight_map["x_scales"]
    with Checkpoint(tmp_path) as checkpoint:
        found = view_search.search(checkpoint, ViewOptions({"model_type": "gemma4"}))
        by_name = {view.tensor.name: view for view in found.views}
        assert by_name.keys() == {"a.weight", "x", *expected}
        value = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        full = scale.repeat(128, 0)[:300].repeat(128, 1)[:, :200]
        assert (stored.read_all(by_name["a.weight"]) == value * full).all()
        for name, array in expected.items():
            assert (stored.read_all(by_name[name], np.uint16) == array).all()
        memory = stored.ArraySource({name: tensors[name] for name in ("x_blocks", "x_scales")})
        (same,) = view_search.search(memory, ViewOptions({})).views
        assert (stored.read_all(by_name["x"]) == stored.read_all(same)).all()


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.float32])
@pytest.mark.parametrize(("first", "step"), [(0, 1), (3, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("shape", [(200, 5003), (1, 300_001), (64, 128)])
def test_transposition_in_many_threads(monkeypatch, dtype, first, step, shape):
    monkeypatch.setenv("FP4KIT_NUM_THREADS", "3")
    source = np.random.default_rng(0).integers(0, 1 << 16, shape).astype(dtype)
    expected = source[:, first::step].T
    out = np.zeros((len(expected), shape[0] + 2), dtype)
    transpose(source, first, step, out, 1)
    assert (out[:, 1:-1] == expected).all()
    assert not out[:, [0, -1]].any()


@pytest.mark.parametrize("shape", [(0, 0, 0), (3, 5, 7), (2, 32, 32)])
def test_a_weight_with_three_axes_is_not_yet_an_expert(stored, shape):
    """Only `down_proj`, outside of any experts: nothing says that it is one, so it stays whole."""
    tensors = {"a.down_proj.weight": ("BF16", np.zeros(shape, np.uint16))}
    assert expert_views.find_views(stored.ArraySource(tensors), ViewOptions({})) == []


def test_empty_experts_stay_whole(stored):
    tensors = {f"{P}.down_proj": ("BF16", np.zeros((0, 4, 4), np.uint16))}
    assert expert_views.find_views(stored.ArraySource(tensors), ViewOptions({})) == []
