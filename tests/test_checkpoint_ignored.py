# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Ignore lists name modules as they are stored and as they are built, whatever the model type."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fp4kit.checkpoint.layouts.ignore_list import IgnoreList
from fp4kit.checkpoint.models.architectures import TABLE, head_names, models, table, unknown_types
from fp4kit.checkpoint.operations import convert_checkpoint, quantize_checkpoint
from fp4kit.checkpoint.options import CheckpointOptions, ConvertOptions
from fp4kit.checkpoint.plan.ignored import is_built_linear
from fp4kit.checkpoint.verify.structure import structure_faults
from fp4kit.errors import Fp4kitError

LAYOUTS = ("compressed-tensors", "modelopt")
LLAVA = {
    "model_type": "llava",
    "architectures": ["LlavaForConditionalGeneration"],
    "text_config": {"model_type": "llama", "hidden_size": 64},
    "vision_config": {"model_type": "clip_vision_model"},
}
QWEN_VL = {"model_type": "qwen2_vl", "architectures": ["Qwen2VLForConditionalGeneration"]}
GPT_NEOX = {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"]}
#: Configuration, stored module that is kept, its name in the model, a module that is quantized.
RENAMED = [
    (
        LLAVA,
        "vision_tower.vision_model.encoder.layers.0.mlp.fc1",
        "model.vision_tower.encoder.layers.0.mlp.fc1",
        "language_model.model.layers.0.mlp.up_proj",
    ),
    (
        LLAVA,
        "multi_modal_projector.linear_1",
        "model.multi_modal_projector.linear_1",
        "language_model.model.layers.0.mlp.up_proj",
    ),
    (LLAVA, "language_model.lm_head", "lm_head", "language_model.model.layers.0.mlp.up_proj"),
    # New names stay as they are.
    (
        LLAVA,
        "model.multi_modal_projector.linear_1",
        "model.multi_modal_projector.linear_1",
        "model.language_model.layers.0.mlp.up_proj",
    ),
    (QWEN_VL, "visual.blocks.0.attn.qkv", "model.visual.blocks.0.attn.qkv", "model.layers.0.mlp.x"),
    (
        GPT_NEOX,
        "embed_out",
        "lm_head",
        "gpt_neox.layers.0.mlp.dense_h_to_4h",
    ),
    # A base model that is loaded with a head, and the other way round.
    ({"model_type": "bert", "architectures": ["BertModel"]}, "pooler.gate", "pooler.gate", "x.y"),
]


def bf16(rows, cols):
    return "BF16", np.full((rows, cols), 0x3F80, np.uint16)


def written(checkpoints, folder, tensors, config, layout="compressed-tensors", **options):
    source = checkpoints.save(folder / "in", tensors, config)
    report = quantize_checkpoint(
        source, folder / "out", CheckpointOptions(layout=layout, **options)
    )
    assert structure_faults(folder / "out") == []
    content = checkpoints.config_of(folder / "out")["quantization_config"]["ignore"]
    return content, report


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", RENAMED, ids=lambda case: f"{case[0]['model_type']}-{case[1]}")
def test_both_namespaces(checkpoints, tmp_path, layout, case):
    config, stored, built, quantized = case
    tensors = {f"{stored}.weight": bf16(16, 64), f"{quantized}.weight": bf16(16, 64)}
    ignore, _ = written(checkpoints, tmp_path, tensors, config, layout, exclude=(stored,))
    assert {stored, built} <= set(ignore)
    assert not any(pattern.startswith(("re:", "*")) for pattern in ignore)
    assert not IgnoreList(ignore, layout).matches(quantized)


def test_convert_gives_the_same_list(checkpoints, tmp_path):
    config, stored, built, quantized = RENAMED[0]
    tensors = {f"{stored}.weight": bf16(16, 64), f"{quantized}.weight": bf16(16, 64)}
    source = checkpoints.save(tmp_path / "in", tensors, config)
    lists = []
    for layout in LAYOUTS:
        quantize_checkpoint(source, tmp_path / layout, CheckpointOptions(layout=layout))
    for layout, other in zip(LAYOUTS, reversed(LAYOUTS), strict=True):
        convert_checkpoint(tmp_path / other, tmp_path / "c", ConvertOptions(layout=layout))
        for folder in (tmp_path / "c", tmp_path / layout):
            lists.append(checkpoints.config_of(folder)["quantization_config"]["ignore"])
        assert lists[-1] == lists[-2]
        assert {stored, built} <= set(lists[-1])
        (tmp_path / "c").rename(tmp_path / f"converted-{layout}")


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("backbone.layers.0.mixer.conv1d.weight", (96, 1, 4), True),
        ("model.layers.0.conv.conv.weight", (64, 1, 3), True),
        ("model.layers.0.short_conv.conv.weight", (64, 1, 3), True),
        ("model.layers.0.self_attn.q_conv1d.weight", (64, 1, 4), True),
        ("model.encoder.conv1.weight", (64, 80, 3), False),
        ("model.layers.0.mixer.conv1d.bias", (96,), False),
        ("visual.patch_embed.proj.weight", (64, 3, 2, 14, 14), False),
        ("model.layers.0.mlp.up_proj.weight", (96, 64), True),
        ("model.embed_tokens.weight", (96, 64), False),
    ],
)
def test_short_convolutions_count_as_linear(name, shape, expected):
    assert is_built_linear(name, shape) is expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_short_convolutions_are_listed(checkpoints, tmp_path, layout):
    """F10: engines build them as linear layers, though they are stored with three dimensions."""
    conv = "backbone.layers.0.mixer.conv1d"
    tensors = {
        f"{conv}.weight": ("BF16", np.zeros((64, 1, 4), np.uint16)),
        "backbone.layers.0.mixer.in_proj.weight": bf16(64, 64),
    }
    config = {"model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"]}
    ignore, _ = written(checkpoints, tmp_path, tensors, config, layout)
    assert conv in ignore


@pytest.mark.parametrize(
    ("model_type", "architecture", "head"),
    [
        ("electra", "ElectraForMaskedLM", "generator_lm_head"),
        ("convbert", "ConvBertForMaskedLM", "generator_lm_head"),
        ("biogpt", "BioGptForCausalLM", "output_projection"),
        ("trocr", "TrOCRForCausalLM", "output_projection"),
        ("xlm", "XLMWithLMHeadModel", "pred_layer.proj"),
        ("flaubert", "FlaubertWithLMHeadModel", "pred_layer.proj"),
        ("gpt_neox_japanese", "GPTNeoXJapaneseForCausalLM", "embed_out"),
        ("kosmos-2.5", "Kosmos2_5ForConditionalGeneration", "text_model.lm_head"),
        ("bert-generation", "BertGenerationDecoder", "lm_head.decoder"),
        ("vision-encoder-decoder", "VisionEncoderDecoderModel", "decoder.cls.predictions.decoder"),
        ("t5gemma2", "T5Gemma2ForConditionalGeneration", "lm_head.out_proj"),
        ("canary", "CanaryForConditionalGeneration", "proj_out"),
        ("ultrabert", "UltrabertForMaskedLM", "head.decoder"),
        ("whisper", "WhisperForConditionalGeneration", "proj_out"),
        ("llama", "LlamaForCausalLM", "lm_head"),
        ("gemma4_assistant", "Gemma4AssistantForCausalLM", "lm_head"),
        ("moonshine_streaming", "MoonshineStreamingForConditionalGeneration", "proj_out"),
    ],
)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("named", [True, False], ids=["class named", "model type only"])
def test_tied_heads(checkpoints, tmp_path, model_type, architecture, head, layout, named):
    """F2b: of every name that transformers has, by class and by model type."""
    config = {"model_type": model_type}
    if named:
        config["architectures"] = [architecture]
    tensors = {"x.layers.0.mlp.fc.weight": bf16(64, 64), "x.embed_tokens.weight": bf16(96, 64)}
    ignore, _ = written(checkpoints, tmp_path, tensors, config, layout)
    assert head in ignore
    content = checkpoints.config_of(tmp_path / "out")
    content["quantization_config"]["ignore"].remove(head)
    checkpoints.write_json(tmp_path / "out" / "config.json", content)
    if layout == "modelopt":
        other = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())
        other["quantization"]["exclude_modules"].remove(head)
        checkpoints.write_json(tmp_path / "out" / "hf_quant_config.json", other)
    (fault,) = structure_faults(tmp_path / "out")
    assert f"{head} is not quantized, but not in the ignore list" in fault


def test_heads_of_nested_model_types(checkpoints, tmp_path):
    """A decoder of another model type has another head."""
    config = {
        "model_type": "encoder-decoder",
        "architectures": ["EncoderDecoderModel"],
        "encoder": {"model_type": "bert"},
        "decoder": {"model_type": "gpt2"},
    }
    tensors = {"encoder.layer.0.fc.weight": bf16(64, 64)}
    ignore, _ = written(checkpoints, tmp_path, tensors, config)
    assert "decoder.lm_head" in ignore
    assert "decoder.cls.predictions.decoder" not in ignore


@pytest.mark.parametrize("kept", [True, False])
def test_a_head_that_shares_a_quantized_weight_is_not_listed(checkpoints, tmp_path, kept):
    """NeoMME ties its head to a linear layer and not to an embedding."""
    shared, head = "model.embed_tokens.embedding_projection", "unembedding_projection"
    tensors = {f"{shared}.weight": bf16(64, 64), "model.layers.0.x.fc.weight": bf16(64, 64)}
    exclude, include = ((shared,), ()) if kept else ((), (shared,))
    ignore, _ = written(
        checkpoints, tmp_path, tensors, {"model_type": "neomme"}, exclude=exclude, include=include
    )
    assert (head in ignore) is kept


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kept", [True, False])
def test_tied_layers_of_every_number(checkpoints, tmp_path, layout, kept):
    """Zamba repeats a block; what refers to it is only listed where the block is kept."""
    block = "model.layers.0.shared_transf.self_attn.q_proj"
    tensors = {f"{block}.weight": bf16(64, 64), "model.layers.0.x.fc.weight": bf16(64, 64)}
    config = {"model_type": "zamba", "architectures": ["ZambaForCausalLM"]}
    exclude = (block,) if kept else ()
    ignore, _ = written(checkpoints, tmp_path, tensors, config, layout, exclude=exclude)
    assert IgnoreList(ignore, layout).matches(block.replace("0", "12")) is kept


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_encoder_that_shares_the_weights_of_a_decoder(checkpoints, tmp_path, layout):
    """What is listed of the one follows what is quantized of the other."""
    decoder, encoder = "model.decoder.layers.0", "model.encoder.language_model.layers.0"
    tensors = {f"{decoder}.{name}.weight": bf16(64, 64) for name in ("mlp.up_proj", "router.proj")}
    ignore, _ = written(checkpoints, tmp_path, tensors, {"model_type": "diffusion_gemma"}, layout)
    listed = IgnoreList(ignore, layout)
    assert listed.matches(f"{encoder}.router.proj")
    assert not listed.matches(f"{encoder}.mlp.up_proj")


def test_a_head_that_is_not_tied_is_not_expected(checkpoints, tmp_path):
    config = {"model_type": "llama", "tie_word_embeddings": False}
    ignore, _ = written(checkpoints, tmp_path, {"x.up_proj.weight": bf16(64, 64)}, config)
    assert ignore == []


# ------------------------------------------------------------------------------------------------
# Model types that nobody has seen
# ------------------------------------------------------------------------------------------------

TOWER = "model.visual.blocks.{}.attn.qkv"
TEXT = "model.layers.{}.mlp.up_proj"


def unseen(layers=2):
    names = [form.format(number) for form in (TOWER, TEXT) for number in range(layers)]
    return {f"{name}.weight": bf16(64, 64) for name in names}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("config", [{"model_type": "never_seen"}, {}], ids=["unknown", "none"])
@pytest.mark.parametrize("wrapper", ["", "model.", "language_model.model.", "thinker."])
def test_unknown_model_types_have_patterns(checkpoints, tmp_path, layout, config, wrapper):
    """Whatever an engine puts before a name; what is quantized is never matched."""
    ignore, report = written(checkpoints, tmp_path, unseen(), config, layout)
    listed = IgnoreList(ignore, layout)
    for number in range(2):
        assert listed.matches(wrapper + TOWER.format(number).removeprefix("model."))
        assert not listed.matches(wrapper + TEXT.format(number).removeprefix("model."))
        assert TOWER.format(number) in ignore
    assert listed.matches(f"{wrapper}lm_head")
    (warning,) = [line for line in report.warnings if "model type" in line]
    assert repr(config.get("model_type", "none")) in warning


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pattern_never_matches_what_is_quantized(checkpoints, tmp_path, layout):
    """One layer is excluded: a pattern for all of them would leave the others away."""
    excluded = TEXT.format(1)
    ignore, _ = written(
        checkpoints, tmp_path, unseen(3), {"model_type": "new"}, layout, exclude=(excluded,)
    )
    listed = IgnoreList(ignore, layout)
    assert listed.matches(f"thinker.{excluded}")
    assert not any(listed.matches(TEXT.format(number)) for number in (0, 2))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_towers_that_are_named_like_the_text(checkpoints, tmp_path, layout):
    """The end of one name is the end of the other."""
    kept, quantized = "layers.0.mlp.up_proj", "decoder.layers.0.mlp.up_proj"
    tensors = {f"{name}.weight": bf16(64, 64) for name in (kept, quantized)}
    ignore, _ = written(
        checkpoints, tmp_path, tensors, {"model_type": "new"}, layout, exclude=(kept,)
    )
    assert kept in ignore
    assert not IgnoreList(ignore, layout).matches(quantized)


def test_unknown_parts_are_told(checkpoints, tmp_path):
    config = LLAVA | {"text_config": {"model_type": "never_seen"}}
    tensors = {"language_model.model.layers.0.mlp.up_proj.weight": bf16(64, 64)}
    _, report = written(checkpoints, tmp_path, tensors, config)
    assert any("'never_seen'" in warning for warning in report.warnings)


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe", "bert", "clip_vision_model", "t5"])
def test_known_model_types_have_no_warning(checkpoints, tmp_path, model_type):
    tensors = {"x.fc.weight": bf16(64, 64)}
    _, report = written(checkpoints, tmp_path, tensors, {"model_type": model_type})
    assert report.warnings == []


# ------------------------------------------------------------------------------------------------
# The table
# ------------------------------------------------------------------------------------------------


def test_the_table_is_whole():
    """Every class and model type that one row names has a row."""
    content = table()
    for model_type, classes in content["types"].items():
        assert len(classes) == 3, model_type
    for name, row in content["classes"].items():
        for path, key, part, *rest in row.get("parts", ()):
            assert path, name
            assert part in content["classes"], name
            assert key is None or isinstance(key, str), name
            assert rest[1:] in ([], ["any"]), name
    assert "lm_head" in head_names()
    assert len(content["types"]) > 600
    assert TABLE.stat().st_size < 1 << 19


@pytest.mark.parametrize("model_type", sorted(table()["types"]))
def test_every_model_type_can_be_looked_up(model_type):
    names = ["model.layers.0.mlp.up_proj.weight", "lm_head.weight", "x"]
    found = models({"model_type": model_type}, names)
    assert unknown_types({"model_type": model_type}, found) == []
    for model in found:
        assert all(model.built(name) for name in names)
        assert all(path for path in model.tied)


@pytest.mark.parametrize("value", [None, 3, "x", [], [[]], {}, {"model_type": []}])
@pytest.mark.parametrize(
    "key", ["model_type", "architectures", "text_config", "tie_word_embeddings", "decoder"]
)
def test_configurations_of_any_type(checkpoints, tmp_path, key, value):
    config = LLAVA | {key: value}
    tensors = {"model.layers.0.mlp.up_proj.weight": bf16(64, 64)}
    try:
        written(checkpoints, tmp_path, tensors, config)
    except Fp4kitError:
        assert not (tmp_path / "out").exists()
