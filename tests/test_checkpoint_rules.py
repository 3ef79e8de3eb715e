# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Which weights are quantized: default rules, patterns, tied weights, and the ignore list."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp4kit.checkpoint.layouts.ignore_list import IgnoreList
from fp4kit.checkpoint.operations import plan_quantize_checkpoint, quantize_checkpoint
from fp4kit.checkpoint.options import CheckpointOptions
from fp4kit.checkpoint.plan.rules import Rules, is_embedding, is_linear_weight
from fp4kit.checkpoint.verify.structure import structure_faults
from fp4kit.errors import OptionError
from weight_names import KEPT, PREFIXES, QUANTIZED, L


def reason(name, shape=(64, 64), dtype="bfloat16", include=(), exclude=(), config=None):
    return Rules(tuple(include), tuple(exclude), config or {}).reason_to_keep(name, shape, dtype)


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_linear_layers_are_quantized(name, dtype):
    assert reason(name, dtype=dtype) == ""
    assert is_linear_weight(name, (64, 64))


@pytest.mark.parametrize(("name", "why"), KEPT.items())
def test_what_engines_keep(name, why):
    assert why in reason(name)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_what_wraps_a_model_changes_nothing(prefix):
    """A rule that is anchored at the root of the names would fail in the next file."""
    for name, why in KEPT.items():
        assert why in reason(prefix + name), name
    for name in QUANTIZED:
        assert reason(prefix + name) == "", name


@pytest.mark.parametrize("config", [{}, {"num_experts": 4}, {"text_config": {"num_experts": 4}}])
@pytest.mark.parametrize("experts", ["experts.0.w1.weight", "experts.gate_up_proj"])
@pytest.mark.parametrize("parent", ["layers.1", "model.layers.1.anything", "model.layers.1.mlp"])
def test_routers_beside_experts(parent, experts, config):
    """By what stands around it, whatever the parent; by its rows, whatever its own name."""
    names = [f"{parent}.{name}" for name in (experts, "gate.weight", "chooser.weight")]
    rules = Rules((), (), config, names)
    assert rules.reason_to_keep(names[1], (4, 64), "bfloat16") == "router"
    chooser = rules.reason_to_keep(names[2], (4, 64), "bfloat16")
    assert chooser == ("router" if config else "")
    assert rules.reason_to_keep(names[2], (64, 64), "bfloat16") == ""


@pytest.mark.parametrize(
    "kind", ["AutoencoderKL", "AutoencoderKLWan", "AsymmetricAutoencoderKL", "VQModel"]
)
def test_autoencoders_are_kept_whole(kind):
    assert "autoencoder" in reason("any.attn.to_q.weight", config={"_class_name": kind})
    assert reason("any.attn.to_q.weight", config={"_class_name": "UNet2DConditionModel"}) == ""


@pytest.mark.parametrize("name", QUANTIZED + list(KEPT))
@pytest.mark.parametrize(
    ("shape", "dtype", "why"),
    [
        ((64,), "bfloat16", "1-D"),
        ((), "float32", "0-D"),
        ((8, 8, 3), "bfloat16", "3-D"),
        ((8, 8, 3, 3), "float16", "4-D"),
        ((64, 64), "int64", "int64 is not quantized"),
        ((64, 64), "uint8", "uint8 is not quantized"),
        ((64, 64), "float64", "float64 is not quantized"),
    ],
)
def test_shapes_and_types_that_are_never_quantized(name, shape, dtype, why):
    """E22: not even if it is asked for."""
    assert why in reason(name, shape, dtype)
    assert why in reason(name, shape, dtype, include=["*"])


@pytest.mark.parametrize("name", [f"{L}.mlp.down_proj.bias", "x", f"{L}.self_attn.sinks"])
def test_only_weights_of_layers(name):
    assert "not the weight" in reason(name)
    assert not is_linear_weight(name, (64, 64))


@given(
    parts=st.lists(
        st.sampled_from(["gate", "router", "visual", "mtp", "embed", "shared"]), max_size=3
    ),
    front=st.sampled_from(["", "x", "my_"]),
    back=st.sampled_from(["_proj", "x", "_", "2"]),
)
def test_rules_match_whole_parts_of_names(parts, front, back):
    """E10: a rule about `gate` does not catch `gate_proj`, nor one about anything else."""
    changed = [front + part + back for part in parts]
    changed = [part for part in changed if part != "router_proj"]  # it is a router
    assert reason(".".join(["model", *changed, "dense.weight"])) == ""
    assert reason(".".join(["model.mlp", *changed, "gate_proj.weight"])) == ""


@pytest.mark.parametrize("model_type", ["gpt2", "imagegpt"])
def test_transposed_linear_layers(model_type):
    """GPT-2 stores [in, out]: blocks would run along the wrong axis, even if it is asked for."""
    nested = {"model_type": "vision-encoder-decoder", "decoder": {"model_type": model_type}}
    for last in ("c_attn", "c_proj", "c_fc"):
        name = f"h.0.attn.{last}.weight"
        for config in ({"model_type": model_type}, nested):
            assert "transposed" in reason(name, config=config)
            assert "transposed" in reason(name, config=config, include=["*"])
            assert is_linear_weight(name, (64, 64))  # engines build it, so the list names it
        assert reason(name, config={"model_type": "gpt_bigcode"}) == ""


@pytest.mark.parametrize(("layer", "kept"), [(59, False), (60, False), (61, True), (62, True)])
def test_layers_beyond_the_last_are_prediction_heads(layer, kept):
    config = {"num_hidden_layers": 61, "num_nextn_predict_layers": 1}
    name = f"model.layers.{layer}.mlp.up_proj.weight"
    assert ("multi-token" in reason(name, config=config)) == kept
    assert ("multi-token" in reason(name, config={"text_config": config})) == kept
    assert reason(name, config={"num_hidden_layers": 61}) == ""


@pytest.mark.parametrize("where", ["", "model.", "transformer.pooler."])
def test_heads_have_a_row_for_each_word(where):
    for config in ({"vocab_size": 96}, {"text_config": {"vocab_size": 96}}):
        assert reason(f"{where}unheard_of.weight", (96, 64), config=config) == "output head"
        assert reason(f"{where}unheard_of.weight", (97, 64), config=config) == ""
        assert reason(f"{L}.mlp.up_proj.weight", (96, 64), config=config) == ""


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_is_in_the_ignore_list_or_no_layer(name):
    """A layer that the list leaves out is built quantized, and its weight finds no place."""
    assert is_linear_weight(name, (64, 64)) != (is_embedding(name) or KEPT[name] == "norm")


# ------------------------------------------------------------------------------------------------
# Patterns
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("*mlp.gate*", f"{L}.mlp.gate.weight", True),
        ("*mlp.gate", f"{L}.mlp.gate.weight", True),  # the module
        ("*mlp.gate", f"{L}.mlp.gate_proj.weight", False),
        ("*.mlp.gate.weight", f"{L}.mlp.gate_proj.weight", False),
        ("mlp.down_proj", f"{L}.mlp.down_proj.weight", False),  # globs match whole names
        ("*down_proj", f"{L}.mlp.down_proj.weight", True),
        ("model.layers.[0-3].*", f"{L}.mlp.down_proj.weight", True),
        ("model.layers.[0-2].*", f"{L}.mlp.down_proj.weight", False),
        ("re:.*down", f"{L}.mlp.down_proj.weight", True),
        ("re:down", f"{L}.mlp.down_proj.weight", False),  # anchored at the start
        (r"re:model\.layers\.\d+\.mlp", f"{L}.mlp.down_proj.weight", True),
        (r"re:.*mlp\.gate$", f"{L}.mlp.gate.weight", True),
        (r"re:.*mlp\.gate$", f"{L}.mlp.gate_proj.weight", False),
        ("lm_head", "lm_head.weight", True),
        ("LM_HEAD", "lm_head.weight", False),
    ],
)
def test_patterns(pattern, name, matches):
    assert ("excluded" in reason(name, exclude=[pattern])) == matches
    assert (reason("lm_head.weight", include=[pattern]) == "") == (
        matches and name == "lm_head.weight"
    )


@pytest.mark.parametrize("name", KEPT)
def test_include_wins_over_defaults_and_exclude_over_include(name):
    # An embedding looks rows up and a norm multiplies them: no engine reads either quantized.
    never = is_embedding(name) or KEPT[name] == "norm"
    assert (reason(name, include=["*"]) == "") == (not never)
    assert "excluded" in reason(name, include=["*"], exclude=["*"])


@pytest.mark.parametrize("option", ["include", "exclude"])
@pytest.mark.parametrize("pattern", ["*typo*", "re:typo", "lm_heads", "re:self_attn"])
def test_patterns_that_match_nothing(option, pattern):
    """G3: most likely misspelt, so the result would not be what was asked for."""
    names = [*QUANTIZED, *KEPT]
    rules = Rules(**{"include": (), "exclude": (), option: ("*", pattern)}, config={})
    with pytest.raises(OptionError, match=rf"no tensor matches {option}="):
        rules.check_used(names)
    Rules((), (), {}).check_used(names)


# ------------------------------------------------------------------------------------------------
# Whole checkpoints
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize(
    "patterns",
    [
        {},
        {"exclude": ("*down_proj*",)},
        {"exclude": ("*q_proj*",)},
        {"exclude": ("re:.*experts.1",)},
        {"exclude": ("*mlp.experts.*",)},
        {"include": ("lm_head",)},
        {"include": ("*mlp.gate", "lm_head"), "exclude": ("*up_proj*",)},
    ],
)
def test_the_ignore_list_is_what_was_left(checkpoints, tmp_path, layout, patterns):
    """E9: exactly the linear weights that are not quantized, looked at in what was written.

    transformers also loads the base model alone, whose modules have no `model.` before them; its
    experts are no modules.
    """
    tensors, config = checkpoints.moe()
    source = checkpoints.save(tmp_path / "in", tensors, config)
    report = quantize_checkpoint(
        source, tmp_path / "out", CheckpointOptions(layout=layout, **patterns)
    )
    written = checkpoints.read(tmp_path / "out")
    kept = {
        name.removesuffix(".weight")
        for name, (dtype, shape, _) in written.items()
        if name.endswith(".weight") and len(shape) == 2 and dtype != "U8"
    }
    scheme = checkpoints.config_of(tmp_path / "out")["quantization_config"]
    embeddings = {"model.embed_tokens"}
    listed = set(scheme["ignore"])
    linear = {name for name in kept - embeddings if ".experts." not in name}
    base = {name.removeprefix("model.") for name in linear}
    assert listed == (kept if layout == "modelopt" else kept - embeddings | base)
    assert len(scheme["ignore"]) == len(listed)
    quantized = {name.removesuffix(".weight_scale") for name in written if "weight_scale" in name}
    assert not any(IgnoreList(listed, layout).matches(module) for module in quantized)
    assert all(IgnoreList(listed, layout).matches(module) for module in kept - embeddings)
    assert structure_faults(tmp_path / "out") == []
    assert set(report.ignore) | embeddings == kept | (base if layout != "modelopt" else set())


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("include", [(), ("*",)])
def test_tied_weights(checkpoints, tmp_path, head, nested, include):
    """E14: an alias is never quantized; what the source had is in the result, and nothing else."""
    tensors, config = checkpoints.llama(1, head=False)
    if head:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    assert config["tie_word_embeddings"]
    if nested:
        text = {"tie_word_embeddings": config.pop("tie_word_embeddings")}
        config["text_config"] = text
    source = checkpoints.save(tmp_path / "in", tensors, config)
    quantize_checkpoint(source, tmp_path / "out", CheckpointOptions(include=include))
    written, given = checkpoints.read(tmp_path / "out"), checkpoints.stored(tensors)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert written.get(name) == given.get(name)
    assert "lm_head" in checkpoints.config_of(tmp_path / "out")["quantization_config"]["ignore"]
    assert not any("lm_head" in name or "embed" in name for name in written.keys() - given.keys())


def test_untied_heads_can_be_quantized(checkpoints, tmp_path):
    tensors, config = checkpoints.llama(1)
    source = checkpoints.save(tmp_path / "in", tensors, config)
    quantize_checkpoint(source, tmp_path / "out", CheckpointOptions(include=("lm_head",)))
    written = checkpoints.read(tmp_path / "out")
    assert "lm_head.weight_packed" in written
    assert "lm_head.weight" not in written
    assert structure_faults(tmp_path / "out") == []


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("absent", [("k", "v"), ("q",), ("v",)])
def test_absent_siblings_are_ignored_too(checkpoints, tmp_path, layout, absent):
    """An engine builds the fused module whole, and asks the list about every member."""
    tensors, config = checkpoints.llama(1)
    parent = "model.layers.0.self_attn"
    for member in absent:
        tensors.pop(f"{parent}.{member}_proj.weight")
    source = checkpoints.save(tmp_path / "in", tensors, config)
    options = CheckpointOptions(layout=layout, exclude=("*self_attn*",))
    report = plan_quantize_checkpoint(source, options)
    assert {f"{parent}.{member}_proj" for member in "qkvo"} <= set(report.ignore)
    assert all(t.reason for t in report.tensors if t.action == "keep")
