# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Plans and moments of surveys: what is written from them, and what is refused."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

import fp4kit
from command_line import succeed
from fp4kit.checkpoint.inspect import inspect_checkpoint
from fp4kit.checkpoint.survey import choice_groups
from fp4kit.errors import OptionError
from fp4kit.io.moments import PRIOR_ROWS, InputMoments, write_moments
from fp4kit.io.write.files import Output
from survey_models import contents, fails

# ------------------------------------------------------------------------------------------------
# Plans
# ------------------------------------------------------------------------------------------------


def stored_formats(folder):
    """Weight to format, by what config.json says of the modules that the file holds."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    found = {}
    names = [tensor.name for tensor in inspect(folder) if tensor.action == "quantized"]
    for name in names:
        module = name.removesuffix(".weight")
        fits = [
            group["format"]
            for group in config["config_groups"].values()
            if any(
                re.match(target[3:], module) if target.startswith("re:") else target == module
                for target in group["targets"]
            )
        ]
        assert len(fits) == 1, name
        found[name] = fits[0]
    return found


def inspect(folder):
    return inspect_checkpoint(folder).tensors


NAMES = {"nvfp4": "nvfp4-pack-quantized", "mxfp4": "mxfp4-pack-quantized", "fp8": "float-quantized"}


def test_a_plan_is_written_edited_and_taken(moe_model, tmp_path):
    plan, out = tmp_path / "plan.json", tmp_path / "out"
    result = succeed(
        *("survey", str(moe_model), "--formats", "nvfp4+sweep,fp8,bf16", "--budget", "6"),
        *("--save-plan", str(plan), "--json", "--report", str(tmp_path / "report.json")),
    )
    assert json.loads(result.stdout) == json.loads((tmp_path / "report.json").read_text())
    content = json.loads(plan.read_text())
    edited = "model.layers.0.self_attn.o_proj"
    content["groups"][edited] = "mxfp4"
    plan.write_text(json.dumps(content))
    succeed("quantize", str(moe_model), "-o", str(out), "--plan", str(plan))
    found = stored_formats(out)
    assert found[f"{edited}.weight"] == NAMES["mxfp4"]
    for key, names in choice_groups(list(found)).items():
        chosen = content["groups"][key].partition("+")[0]
        assert {found[name] for name in names} == {NAMES[chosen]}
    succeed("verify", str(out), "--against", str(moe_model))
    succeed("dequantize", str(out), "-o", str(tmp_path / "back"))
    succeed("inspect", str(out))
    succeed("compare", str(moe_model), str(out), "--min-sqnr", "15")


def test_quantize_takes_a_budget(dense_model, tmp_path):
    out = tmp_path / "out"
    flags = ("--formats", "nvfp4,fp8,bf16", "--budget", "7", "--pin", "*o_proj=bf16")
    plan = tmp_path / "plan.json"
    result = succeed("quantize", str(dense_model), "-o", str(out), *flags, "--save-plan", str(plan))
    assert "Frontier" in result.stdout
    formats = {t.name: t.format for t in inspect(out)}
    assert formats["model.layers.0.self_attn.o_proj.weight"] is None
    assert {"nvfp4", "fp8"} <= set(formats.values())
    groups = json.loads(plan.read_text())["groups"]
    assert fp4kit.quantize_checkpoint(dense_model, tmp_path / "again", plan=groups).total_stats
    assert contents(out) == {
        out / path.relative_to(tmp_path / "again"): data
        for path, data in contents(tmp_path / "again").items()
    }


def test_modelopt_writes_mixed_precision(dense_model, tmp_path):
    out = tmp_path / "out"
    succeed(
        *("quantize", str(dense_model), "-o", str(out), "--layout", "modelopt", "--budget", "6"),
        *("--formats", "nvfp4,fp8", "--activations", "uncalibrated"),
    )
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    quantization = json.loads((out / "hf_quant_config.json").read_text())["quantization"]
    assert config["quant_algo"] == quantization["quant_algo"] == "MIXED_PRECISION"
    assert config["quantized_layers"] == quantization["quantized_layers"]
    targets = [name for group in config["config_groups"].values() for name in group["targets"]]
    assert sorted(targets) == sorted(quantization["quantized_layers"])
    said = {facts["quant_algo"] for facts in quantization["quantized_layers"].values()}
    assert said == {"NVFP4", "FP8"}
    succeed("verify", str(out), "--against", str(dense_model))
    succeed("dequantize", str(out), "-o", str(tmp_path / "back"))


def plan_of(groups, **more):
    return json.dumps({"fp4kit_plan": 1, "groups": groups, **more})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "plan.json"),
        ("[]", "plan.json"),
        ('{"groups": {}}', "is no plan"),
        (plan_of({"model.layers.9.mlp.down_proj": "fp8"}), "can not be quantized here or do not"),
        (plan_of({"lm_head": "fp8"}), "output head"),
        (plan_of({"model.layers.0.mlp.down_proj": "fp8"}), "says nothing of"),
        (plan_of({"model.layers.0.mlp.down_proj": "int8"}), "is no format that can be chosen"),
        (plan_of({"model.layers.0.mlp.down_proj": 8}), "is no string"),
    ],
)
def test_bad_plans(text, message, dense_model, tmp_path):
    plan = tmp_path / "plan.json"
    plan.write_text(text)
    before = contents(tmp_path)
    said = fails("quantize", str(dense_model), "-o", str(tmp_path / "out"), "--plan", str(plan))
    assert message in said
    assert contents(tmp_path) == before


def test_a_plan_of_another_layout(dense_model, tmp_path):
    report = fp4kit.survey(dense_model, ["nvfp4", "fp8"], budget=6)
    with pytest.raises(OptionError, match=r"has no form for several formats|holds nvfp4, not fp8"):
        fp4kit.quantize_checkpoint(dense_model, tmp_path / "o", layout="comfy", plan=report.plan)
    with pytest.raises(OptionError, match="leave format and scheme out"):
        fp4kit.quantize_checkpoint(dense_model, tmp_path / "o", "mxfp4", plan=report.plan)


def test_wrong_usage(dense_model, tmp_path):
    plan = str(tmp_path / "plan.json")
    assert "give one" in fails("quantize", str(dense_model), "--pin", "*=fp8", code=2)
    assert "give one" in fails("survey", str(dense_model), "--save-plan", plan, code=2)
    both = fails("quantize", str(dense_model), "--plan", plan, "--budget", "5", code=2)
    assert "exclude each other" in both
    one = fails("quantize", str(dense_model), "--budget", "5", "--format", "mxfp4", code=2)
    assert "which says the format of each tensor" in one


# ------------------------------------------------------------------------------------------------
# Moments
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"model.layers.7.mlp.down_proj": np.ones(8)}, "moments of another model"),
        ({"model.layers.0.mlp.down_proj": np.ones(8)}, "has 8 input channels there"),
    ],
)
def test_moments_of_another_model(second, message, dense_model, tmp_path):
    file = tmp_path / "m.safetensors"
    write_moments(Output(file), InputMoments(file, second), {})
    before = contents(tmp_path)
    report = str(tmp_path / "report.json")
    flags = ("--moments", str(tmp_path / "m.safetensors"), "--report", report)
    assert message in fails("survey", str(dense_model), *flags)
    assert contents(tmp_path) == before


def test_what_is_no_file_of_moments(dense_model):
    said = fails("survey", str(dense_model), "--moments", str(dense_model / "model.safetensors"))
    assert "holds no moments" in said


def test_effects_say_what_hangs_on_a_tensor(dense_model, tmp_path):
    """Errors count by row and column; a budget goes where the model's output hangs."""
    file, random, rows = tmp_path / "m.safetensors", np.random.default_rng(2), 48.0
    plain = fp4kit.survey(dense_model, ["nvfp4", "fp8"])
    modules = {t.name.removesuffix(".weight"): t.shape for t in plain.tensors}
    second = {name: random.random(shape[1]) for name, shape in modules.items()}
    stored = fp4kit.open(dense_model)
    # Weights of this model are of very different sizes.
    sizes = {name: (stored[f"{name}.weight"].astype(np.float32) ** 2).sum() for name in modules}
    effect = {name: random.random(shape[0]) / sizes[name] for name, shape in modules.items()}
    heavy = "model.layers.1.mlp.down_proj"
    effect[heavy] *= 1000
    counts = dict.fromkeys(modules, rows)
    write_moments(Output(file), InputMoments(file, second, {}, counts, effect), {})
    report = fp4kit.survey(dense_model, ["nvfp4", "fp8"], moments=file, budget=5.2)
    fp4kit.quantize_checkpoint(dense_model, tmp_path / "o")
    back, signals = fp4kit.open(tmp_path / "o"), {}
    for tensor in report.tensors:
        name = tensor.name.removesuffix(".weight")
        columns, along = (
            (rows * each[name] + PRIOR_ROWS * each[name].mean()) / (rows + PRIOR_ROWS)
            for each in (second, effect)
        )
        w = stored[tensor.name].astype(np.float32)
        d = w - fp4kit.dequantize(back[tensor.name])
        signals[tensor.name] = along @ w**2 @ columns
        noise = along @ d**2 @ columns / signals[tensor.name]
        assert tensor.errors["nvfp4"].output_noise == pytest.approx(noise, rel=1e-4)
    mean = sum(signals.values()) / len(signals)
    for tensor in report.tensors:
        expected = (rows * signals[tensor.name] / mean + PRIOR_ROWS) / (rows + PRIOR_ROWS)
        assert tensor.sensitivity == pytest.approx(expected, rel=1e-4)
    assert report.plan[heavy] == "fp8"
    assert report.worst("nvfp4", 1)[0].name == f"{heavy}.weight"
    assert all(tensor.sensitivity == 1 for tensor in plain.tensors)


def test_effects_of_another_model(dense_model, tmp_path):
    file, name = tmp_path / "m.safetensors", "model.layers.0.mlp.down_proj"
    made = InputMoments(file, {name: np.ones(96)}, {}, {name: 4.0}, {name: np.ones(9)})
    write_moments(Output(file), made, {})
    assert "has 9 output channels there" in fails(
        "survey", str(dense_model), "--moments", str(file)
    )
    lacking = InputMoments(file, {name: np.ones(96)}, effect={name: np.ones(64)})
    write_moments(Output(file, replace=True), lacking, {})
    assert "without model.layers.0" in fails("survey", str(dense_model), "--moments", str(file))


# ------------------------------------------------------------------------------------------------
# What the config says, and activations
# ------------------------------------------------------------------------------------------------


def test_verify_sees_groups_that_are_wrong(dense_model, tmp_path):
    out = tmp_path / "out"
    report = fp4kit.survey(dense_model, ["nvfp4", "fp8"], budget=6)
    fp4kit.quantize_checkpoint(dense_model, out, plan=report.plan)
    assert fp4kit.verify(out).ok
    config = json.loads((out / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    one, other = groups["group_0"], groups["group_1"]
    one["targets"], other["targets"] = other["targets"], ["model.layers.7"]
    (out / "config.json").write_text(json.dumps(config))
    faults = fp4kit.verify(out).faults
    assert any("the config says" in fault for fault in faults)
    assert any("the config has no group for it" in fault for fault in faults)


def test_activations_from_moments(dense_model, tmp_path):
    report = fp4kit.survey(dense_model, ["nvfp4"])
    modules = [tensor.name.removesuffix(".weight") for tensor in report.tensors]
    amaxes = {module: 2.0 + number for number, module in enumerate(modules)}
    second = {t.name.removesuffix(".weight"): np.ones(t.shape[1]) for t in report.tensors}
    file = tmp_path / "m.safetensors"
    write_moments(Output(file), InputMoments(file, second, amaxes), {})
    (tmp_path / "m.json").write_text(json.dumps(amaxes))
    for name in ("m.safetensors", "m.json"):
        fp4kit.quantize_checkpoint(dense_model, tmp_path / name[2:], activations=tmp_path / name)
    one, other = (contents(tmp_path / name) for name in ("safetensors", "json"))
    assert list(one.values()) == list(other.values())


def test_values_that_a_candidate_loses(checkpoints, tmp_path):
    tensors, config = checkpoints.llama(dtype="F32")
    name = "model.layers.0.mlp.down_proj.weight"
    dtype, values = tensors[name]
    tensors[name] = dtype, np.full_like(values, 2.0) * np.float32(1e38)
    moe_model = checkpoints.save(tmp_path / "in", tensors, config)
    report = fp4kit.survey(moe_model, ["nvfp4", "fp8"], budget=7)
    assert report.plan[name.removesuffix(".weight")] == "fp8"
    content = json.loads(json.dumps(report.to_json(), allow_nan=False))
    errors = next(each for each in content["tensors"] if each["name"] == name)["errors"]
    assert errors["nvfp4"]["noise"] is None
    assert errors["fp8"]["noise"] < 0.01
    succeed("survey", str(moe_model), "--formats", "nvfp4,fp8")


def test_convert_refuses_what_it_would_say_wrongly(dense_model, tmp_path):
    for name, formats in (("fp8", ["nvfp4", "fp8"]), ("mxfp4", ["nvfp4", "mxfp4"])):
        report = fp4kit.survey(dense_model, ["nvfp4"], budget=5)
        plan = dict.fromkeys(report.plan, formats[0]) | {next(iter(report.plan)): formats[1]}
        fp4kit.quantize_checkpoint(dense_model, tmp_path / name, plan=plan)
        fails("convert", str(tmp_path / name), "-o", str(tmp_path / "o"), "--layout", "modelopt")
        assert not (tmp_path / "o").exists()


# ------------------------------------------------------------------------------------------------
# Files
# ------------------------------------------------------------------------------------------------


@pytest.fixture
def weights(tmp_path):
    random = np.random.default_rng(0)
    shapes = {"a": (64, 64), "b": (64, 64), "c": (8, 40), "bias": (64,)}
    tensors = {name: random.standard_normal(s, np.float32) for name, s in shapes.items()}
    np.savez(tmp_path / "in.npz", **tensors)
    return tmp_path / "in.npz"


def test_a_plan_for_a_file(weights, tmp_path):
    plan = {"a": "nvfp4+sweep", "b": "bf16", "c": "fp8"}
    report = fp4kit.quantize_file(weights, tmp_path / "out.safetensors", plan=plan)
    assert {t.name: t.format for t in report.tensors if t.format} == {"a": "nvfp4", "c": "fp8"}
    kept = {t.name: t.reason for t in report.tensors if t.action == "keep"}
    assert kept == {"b": "kept by the plan", "bias": "1-D"}
    source, found = np.load(weights), fp4kit.open(tmp_path / "out.safetensors")
    expected = fp4kit.quantize(source["a"], "nvfp4", scale_search="sweep")
    np.testing.assert_array_equal(found["a"].packed, expected.packed)
    np.testing.assert_array_equal(found["c"].packed, fp4kit.quantize(source["c"], "fp8").packed)
    np.testing.assert_array_equal(found["b"], source["b"])


def test_a_budget_for_a_file(weights, tmp_path):
    flags = ("--formats", "nvfp4,fp8", "--budget", "7")
    plan, out = tmp_path / "plan.json", tmp_path / "out.safetensors"
    succeed("quantize", str(weights), "-o", str(out), *flags, "--save-plan", str(plan))
    groups = json.loads(plan.read_text())["groups"]
    assert groups.keys() == {"a", "b", "c"}
    assert {"nvfp4", "fp8"} == set(groups.values())
    assert groups["c"] == "fp8"
    succeed(
        "quantize", str(weights), "-o", str(tmp_path / "again.safetensors"), "--plan", str(plan)
    )
    assert out.read_bytes() == (tmp_path / "again.safetensors").read_bytes()
    assert fp4kit.verify(out, weights).ok


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"a": "fp8", "b": "fp8"}, "says nothing of 1 groups: 'c'"),
        ({"a": "fp8", "b": "fp8", "c": "fp8", "d": "fp8"}, "do not exist: 'd'"),
        ({"a": "fp8", "b": "fp8", "c": "fp8", "bias": "fp8"}, r"'bias' \(1-D\)"),
        ({"a": "fp8", "b": "fp8", "c": "mxfp4"}, "c cannot be mxfp4: its rows of 40"),
    ],
)
def test_bad_plans_for_a_file(groups, message, weights, tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps({"fp4kit_plan": 1, "groups": groups}))
    flags = ("-o", str(tmp_path / "o.safetensors"), "--plan", str(tmp_path / "plan.json"))
    assert re.search(message, fails("quantize", str(weights), *flags))
    assert not (tmp_path / "o.safetensors").exists()


def test_a_plan_leaves_no_other_choice(weights, tmp_path):
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"fp4kit_plan": 1, "groups": {}}))
    for flag in ("--pad", "--format=mxfp4", "--scale-layout=swizzled_128x4"):
        said = fails("quantize", str(weights), "--plan", str(plan), flag, code=2)
        assert "plan" in said
