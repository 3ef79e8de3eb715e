# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""`fp4kit convert --layout gguf`: codes of a checkpoint in the places of a template's tensors."""

import json

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

import fp4kit
from command_line import fail, succeed
from gguf_checkpoints import EXPERT, MODEL_TYPES, checkpoint_of, expected
from gguf_models import EMBD, EXPERTS, FF, HEADS, opened, values, weights, write_model


def prepare(
    tmp_path, model_type, *, form="nvfp4", layout="compressed-tensors", shards=1, **choices
):
    """A quantized checkpoint, and the template of the same model."""
    architecture = MODEL_TYPES.get(model_type, model_type)
    experts = EXPERTS if model_type in EXPERT else 0
    found = {
        name: array.astype(ml_dtypes.bfloat16).astype(np.float32)
        for name, array in weights(experts=experts).items()
    }
    stored, template = checkpoint_of(found, model_type)
    config = {
        "model_type": model_type, "num_attention_heads": HEADS, "hidden_size": EMBD,
        "num_hidden_layers": 2, "architectures": [f"{model_type}ForCausalLM"],
    }  # fmt: skip
    arrays = {name: array.astype(ml_dtypes.bfloat16) for name, array in stored.items()}
    fp4kit.save(tmp_path / "hf", arrays, config=config)
    fp4kit.quantize_checkpoint(tmp_path / "hf", tmp_path / "q", form, layout=layout, **choices)
    more = [
        (f"{architecture}.attention.head_count", HEADS, gguf.GGUFValueType.UINT32),
        (f"{architecture}.attention.head_count_kv", HEADS, gguf.GGUFValueType.UINT32),
    ]
    path = write_model(tmp_path / "t.gguf", template, architecture, more=more, shards=shards)
    return tmp_path / "q", path


def decoded(found, name):
    """A weight of the result with its second level."""
    array = values(found[name])
    second = found.get(f"{name.removesuffix('.weight')}.scale")
    if second is None:
        return array
    return array * np.asarray(second.data).reshape(-1, *(1,) * (array.ndim - 1))


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_codes_and_scales_are_taken_over(model_type, layout, tmp_path):
    checkpoint, template = prepare(tmp_path, model_type, layout=layout)
    target = tmp_path / "out.gguf"
    succeed("convert", checkpoint, "-o", target, "--layout", "gguf", "--template", template)
    before, found = opened(template), opened(target)
    moved = 0
    for name, tensor in before.items():
        array, coded = expected(checkpoint, name, model_type) if "blk" in name else (None, None)
        if array is None:
            assert found[name].tensor_type == tensor.tensor_type
            assert np.array_equal(found[name].data, tensor.data)
            continue
        moved += 1
        assert found[name].tensor_type == Kind.NVFP4
        np.testing.assert_allclose(decoded(found, name), array, rtol=3e-7)
        # Not only the values: the very scale bytes.
        blocks = np.asarray(found[name].data).reshape(-1, 36)
        scales = np.concatenate([np.asarray(one.block_scale).reshape(-1) for one in coded])
        assert np.array_equal(np.sort(blocks[:, :4].reshape(-1)), np.sort(scales))
    assert moved == 14
    assert fp4kit.verify(target, template).ok


def test_mxfp4_and_q8_0_templates(tmp_path):
    checkpoint, template = prepare(tmp_path, "llama", form="mxfp4")
    kept = {name: np.array(values(tensor)) for name, tensor in opened(template).items()}
    more = [("llama.attention.head_count", HEADS, gguf.GGUFValueType.UINT32)]
    write_model(template, kept, kind=Kind.Q8_0, more=more)
    target = tmp_path / "out.gguf"
    fp4kit.convert_checkpoint(checkpoint, target, "gguf", template=template)
    found = opened(target)
    for name in found:
        if found[name].tensor_type == Kind.MXFP4:
            array, _ = expected(checkpoint, name, "llama")
            assert np.array_equal(decoded(found, name), array)
    assert found["output.weight"].tensor_type == Kind.Q8_0
    assert sum(tensor.tensor_type == Kind.MXFP4 for tensor in found.values()) == 14


def test_a_template_in_shards(tmp_path):
    checkpoint, template = prepare(tmp_path, "llama", shards=3)
    target = tmp_path / "out-00001-of-00003.gguf"
    succeed("convert", checkpoint, "-o", target, "--layout", "gguf", "--template", template)
    assert fp4kit.verify(target, template).ok
    assert (tmp_path / "out-00003-of-00003.gguf").exists()


def test_dry_run_and_json(tmp_path):
    checkpoint, template = prepare(tmp_path, "qwen3")
    options = ("--layout", "gguf", "--template", template, "--dry-run", "--json")
    result = succeed("convert", checkpoint, "-o", tmp_path / "out.gguf", *options)
    actions = [tensor["action"] for tensor in json.loads(result.stdout)["tensors"]]
    assert actions.count("transfer") == 14
    assert not (tmp_path / "out.gguf").exists()


def test_second_levels_that_llama_cpp_would_lose(tmp_path):
    checkpoint, template = prepare(tmp_path, "qwen2")
    options = ("--layout", "gguf", "--template", template)
    text = fail("convert", checkpoint, "-o", tmp_path / "out.gguf", *options)
    assert "applies no .scale of ffn_gate in architecture 'qwen2'" in text
    assert "quantize the .gguf itself" in text
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("model_type", ["qwen2", "gemma2", "gemma3"])
def test_other_families_in_mxfp4(model_type, tmp_path):
    checkpoint, template = prepare(tmp_path, model_type, form="mxfp4")
    target = tmp_path / "out.gguf"
    fp4kit.convert_checkpoint(checkpoint, target, "gguf", template=template)
    found = opened(target)
    for layer in range(2):
        for kind in ("attn_q", "attn_k", "ffn_down"):
            name = f"blk.{layer}.{kind}.weight"
            assert np.array_equal(decoded(found, name), expected(checkpoint, name, model_type)[0])


def test_the_wrong_template(tmp_path):
    checkpoint, template = prepare(tmp_path, "llama")
    target = tmp_path / "out.gguf"

    def refused(message, path=template, **more):
        options = ("--layout", "gguf", "--template", path, *more.get("options", ()))
        text = fail("convert", checkpoint, "-o", target, *options, code=more.get("code", 1))
        assert message in text
        assert not target.exists()

    other = write_model(tmp_path / "a.gguf", weights(), "qwen3")
    refused("is a model of architecture qwen3", other)
    other = write_model(tmp_path / "b.gguf", weights(), "phi3")
    refused("names of architecture 'phi3' are not known here, only those of llama", other)
    heads = [("llama.attention.head_count", HEADS, gguf.GGUFValueType.UINT32)]
    other = write_model(tmp_path / "c.gguf", weights(seed=1), more=heads)
    refused("its values are not those of model.layers.0.self_attn.q_proj.weight", other)
    # The checkpoint's own order of rows is another one.
    other = write_model(tmp_path / "d.gguf", weights(), more=heads)
    refused("its values are not those of model.layers.0.self_attn.q_proj.weight", other)
    other = write_model(tmp_path / "e.gguf", weights(layers=1), more=heads)
    refused("has no place for 7 quantized weights", other)
    other = write_model(
        tmp_path / "f.gguf", weights(), kinds=(("blk.0.attn_v.weight", Kind.MXFP4),)
    )
    refused("has tensors in FP4 itself", other)
    other = write_model(tmp_path / "g.gguf", weights())
    refused("rows are no heads of which llama.attention.head_count says ''", other)
    small = {name: a[: FF // 2] if "ffn_up" in name else a for name, a in weights().items()}
    other = write_model(tmp_path / "h.gguf", small, more=heads)
    refused("has shape [96, 128], model.layers.0.mlp.up_proj.weight in the checkpoint [192, 128]",
            other)  # fmt: skip
    refused("--resume is not for --layout gguf", options=("--resume",), code=2)
    text = fail("convert", checkpoint, "-o", target, "--layout", "gguf")
    assert "layout gguf needs a template" in text
    text = fail("convert", checkpoint, "-o", tmp_path / "x", "--layout", "modelopt", "--template",
                template, code=2)  # fmt: skip
    assert "--template is for --layout gguf" in text
    refused("the output must end in .gguf", options=("-o", tmp_path / "x.safetensors"))


def test_what_is_no_checkpoint(tmp_path):
    checkpoint, template = prepare(tmp_path, "llama")
    options = ("--layout", "gguf", "--template", template)
    text = fail("convert", tmp_path / "hf", "-o", tmp_path / "out.gguf", *options)
    assert "holds no quantized weight" in text
    assert checkpoint.exists()


def test_activation_scales_are_left_out(tmp_path):
    checkpoint, template = prepare(tmp_path, "llama", layout="modelopt", activations="uncalibrated")
    target = tmp_path / "out.gguf"
    report = fp4kit.convert_checkpoint(checkpoint, target, "gguf", template=template)
    assert "activation scales are left out: llama.cpp does not use them" in report.warnings
    assert not any("input" in name for name in opened(target))


def in_formats(tmp_path, formats):
    """A checkpoint whose attention and feed-forward weights are in two formats, and a template."""
    _, template = prepare(tmp_path, "llama")
    source, target = tmp_path / "hf", tmp_path / "mixed"
    groups = fp4kit.survey(source, ["nvfp4"], budget=8).plan
    plan = {group: formats["mlp" in group] for group in groups}
    fp4kit.quantize_checkpoint(source, target, plan=plan)
    return target, template


def test_fp8_weights_stay_as_the_template_has_them(tmp_path):
    """Pull request 28636: llama.cpp's converter refuses NVFP4 checkpoints with layers in FP8."""
    checkpoint, template = in_formats(tmp_path, ("fp8", "nvfp4"))
    target = tmp_path / "out.gguf"
    report = fp4kit.convert_checkpoint(checkpoint, target, "gguf", template=template)
    (note,) = report.warnings
    assert note.startswith("8 weights that are quantized in another way stay as the template has")
    before, found = opened(template), opened(target)
    for name, tensor in found.items():
        if name.startswith("blk.") and "ffn" in name and name.endswith("weight"):
            array, _ = expected(checkpoint, name, "llama") if "norm" not in name else (None, None)
            assert array is None or np.allclose(decoded(found, name), array, rtol=3e-7)
        elif name in before:
            assert np.array_equal(tensor.data, before[name].data)
    assert sum(tensor.tensor_type == Kind.NVFP4 for tensor in found.values()) == 6
    assert fp4kit.verify(target, template).ok


def test_a_format_that_ggml_does_not_have(tmp_path):
    checkpoint, template = prepare(tmp_path, "llama", form="fp8", granularity="channel")
    target = tmp_path / "out.gguf"
    text = fail("convert", checkpoint, "-o", target, "--layout", "gguf", "--template", template)
    assert "its weights are in fp8, which ggml does not have, only nvfp4 and mxfp4" in text


def test_both_formats_of_ggml_in_one_model(tmp_path):
    checkpoint, template = in_formats(tmp_path, ("nvfp4", "mxfp4"))
    target = tmp_path / "out.gguf"
    fp4kit.convert_checkpoint(checkpoint, target, "gguf", template=template)
    found = opened(target)
    kinds = [tensor.tensor_type for tensor in found.values()]
    assert (kinds.count(Kind.NVFP4), kinds.count(Kind.MXFP4)) == (8, 6)
    for name in ("blk.0.attn_q.weight", "blk.1.ffn_down.weight"):
        array, _ = expected(checkpoint, name, "llama")
        np.testing.assert_allclose(decoded(found, name), array, rtol=3e-7)
    # It says what most of its weights are.
    with fp4kit.open(target) as tensors:
        assert tensors.metadata["general.file_type"] == "39"
    assert fp4kit.verify(target, template).ok


def test_an_architecture_whose_names_are_not_known(tmp_path):
    """Issue 15415: DeepSeek-R1 in NVFP4, of which nothing here knows the parts of attention."""
    checkpoint, _ = prepare(tmp_path, "llama", layout="modelopt")
    template = write_model(tmp_path / "d.gguf", weights(experts=EXPERTS), "deepseek2")
    options = ("--layout", "gguf", "--template", template)
    text = fail("convert", checkpoint, "-o", tmp_path / "out.gguf", *options)
    assert "names of architecture 'deepseek2' are not known here" in text
    assert "quantize the .gguf itself" in text
    succeed("quantize", template, "-o", tmp_path / "q.gguf")
    assert fp4kit.verify(tmp_path / "q.gguf", template).ok


@pytest.mark.parametrize("model_type", EXPERT)
def test_experts_of_which_some_are_not_quantized(model_type, tmp_path):
    checkpoint, template = prepare(tmp_path, model_type, exclude=["*experts.1.*"])
    options = ("--layout", "gguf", "--template", template)
    text = fail("convert", checkpoint, "-o", tmp_path / "out.gguf", *options)
    assert "tensor 'blk.0.ffn_gate_exps.weight': stacks experts that are not in FP4: 'mode" in text
    assert "quantize the .gguf itself" in text
