# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""`fp4kit.survey` and `fp4kit survey`: errors as a conversion has them, and nothing written."""

from __future__ import annotations

import itertools
import json
import re

import numpy as np
import pytest

import fp4kit
from command_line import invoke, succeed
from fp4kit.checkpoint.inspect import inspect_checkpoint
from fp4kit.checkpoint.survey import choice_groups
from fp4kit.errors import OptionError
from fp4kit.files.budget import Allocation, Budget, allocate
from fp4kit.files.survey_report import CandidateError, ChoiceGroup, SurveyedTensor
from fp4kit.io.moments import InputMoments, write_moments
from fp4kit.io.write.files import Output

FORMATS = ("nvfp4", "nvfp4+sweep", "mxfp4", "mxfp8", "fp8", "bf16")


@pytest.fixture
def source(checkpoints, tmp_path):
    tensors, config = checkpoints.moe(2)
    return checkpoints.save(tmp_path / "in", tensors, config, shards=2)


@pytest.fixture
def dense(checkpoints, tmp_path):
    tensors, config = checkpoints.llama()
    return checkpoints.save(tmp_path / "in", tensors, config)


def fails(*args, code=1):
    """One line that says why, and no file."""
    result = invoke(*args)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    assert result.stderr.count("Error: ") == 1
    return result.stderr


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# ------------------------------------------------------------------------------------------------
# Errors
# ------------------------------------------------------------------------------------------------


def test_errors_are_those_of_conversions(source, tmp_path):
    before = contents(tmp_path)
    report = fp4kit.survey(source, FORMATS)
    assert contents(tmp_path) == before
    found = {tensor.name: tensor for tensor in report.tensors}
    for name in ("nvfp4", "nvfp4+sweep", "mxfp4", "fp8"):
        scheme, _, search = name.partition("+")
        converted = fp4kit.quantize_checkpoint(
            source, tmp_path / name, scheme, **({"scale_search": search} if search else {})
        )
        quantized = [tensor for tensor in converted.tensors if tensor.action == "quantize"]
        assert {tensor.name for tensor in quantized} == found.keys()
        for tensor in quantized:
            error = found[tensor.name].errors[name]
            assert error.nbytes == tensor.bytes_after
            assert error.relative_rms == pytest.approx(tensor.stats.relative_rms, rel=1e-12)
            assert error.sqnr == pytest.approx(tensor.stats.sqnr, rel=1e-12)
    assert all(tensor.errors["bf16"].noise == 0 for tensor in report.tensors)
    assert {tensor.name for tensor in report.kept}.isdisjoint(found)
    assert json.loads(json.dumps(report.to_json(), allow_nan=False))["candidates"] == list(FORMATS)


def test_slabs_and_chunks_change_nothing(dense, monkeypatch):
    whole = fp4kit.survey(dense, FORMATS)
    monkeypatch.setattr("fp4kit.io.survey_tensors.SLAB_BYTES", 1)
    monkeypatch.setattr("fp4kit.io.survey_tensors.STEP", 1)
    monkeypatch.setattr("fp4kit.io.stream.chunks.WHOLE_BYTES", 4096)
    monkeypatch.setattr("fp4kit.io.stream.chunks.CHUNK_BYTES", 2048)
    pieces = fp4kit.survey(dense, FORMATS)
    for one, other in zip(whole.tensors, pieces.tensors, strict=True):
        for name in FORMATS:
            assert one.errors[name].noise == pytest.approx(other.errors[name].noise, rel=1e-9)


def test_a_file(tmp_path):
    values = np.random.default_rng(0).standard_normal((32, 96), np.float32)
    fp4kit.save(
        tmp_path / "x.safetensors", {"a": values, "b": values[:, :48].copy(), "c": values[0]}
    )
    report = fp4kit.survey(tmp_path / "x.safetensors", ["nvfp4", "mxfp4"])
    assert {t.name: list(t.errors) for t in report.tensors} == {
        "a": ["nvfp4", "mxfp4"],
        "b": ["nvfp4"],
    }
    assert [tensor.name for tensor in report.kept] == ["c"]
    with pytest.raises(OptionError, match="follow_links is for model directories"):
        fp4kit.survey(tmp_path / "x.safetensors", follow_links=True)


def test_moments_weigh_the_channels(dense, tmp_path):
    name = "model.layers.0.mlp.down_proj"
    plain = {tensor.name: tensor for tensor in fp4kit.survey(dense, ["nvfp4"]).tensors}
    tensor = plain[f"{name}.weight"]
    weight = fp4kit.open(dense)[tensor.name].astype(np.float32)
    moments = np.random.default_rng(1).random(tensor.shape[1]) ** 4
    file = tmp_path / "m.safetensors"
    write_moments(Output(file), InputMoments(file, {name: moments}, {name: 3.0}), {})
    report = fp4kit.survey(dense, ["nvfp4"], moments=tmp_path / "m.safetensors")
    assert "no moments for" in report.warnings[0]
    found = {tensor.name: tensor for tensor in report.tensors}[tensor.name].errors["nvfp4"]
    back = fp4kit.dequantize(fp4kit.quantize(weight.astype(np.float32)))
    expected = ((weight - back) ** 2 @ moments).sum() / (weight**2 @ moments).sum()
    assert found.output_noise == pytest.approx(expected, rel=1e-4)
    assert found.noise == tensor.errors["nvfp4"].noise
    assert found.cost == found.output_noise


# ------------------------------------------------------------------------------------------------
# Budgets
# ------------------------------------------------------------------------------------------------


def test_a_budget_is_the_best_mixture():
    random = np.random.default_rng(3)
    names = ["nvfp4", "fp8", "bf16"]
    tensors = [
        SurveyedTensor(
            f"{number}.weight",
            (16, 64 * (1 + number % 3)),
            "bfloat16",
            2048,
            str(number),
            {
                name: CandidateError(int(bits * 128 * (1 + number % 3)), noise)
                for name, bits, noise in zip(
                    names, (4.5, 8, 16), (*sorted(random.random(2))[::-1], 0.0), strict=True
                )
            },
        )
        for number in range(6)
    ]
    groups = [ChoiceGroup(tensor.group, (tensor.name,)) for tensor in tensors]
    allocation = Allocation(tensors, groups, 100)
    _, frontier = allocate(allocation, names, Budget.of("16"), 100)
    every = [allocation.point(choices) for choices in itertools.product(names, repeat=6)]
    for point in frontier:
        assert point.error <= 1e-9 + min(p.error for p in every if p.nbytes <= point.nbytes)
    for bits in (4.6, 6, 9):
        choices, _ = allocate(allocation, names, Budget.of(bits), 100)
        assert allocation.point(choices).bits <= bits


def test_experts_and_fused_weights_share_a_choice(source):
    report = fp4kit.survey(source, ["nvfp4+sweep", "fp8", "bf16"], budget=6.0)
    assert report.chosen.bits <= 6.0
    members = {group.key: group.members for group in report.groups}
    assert len({group.choice for group in report.groups}) > 1
    assert "model.layers.0.self_attn.{q_proj,k_proj,v_proj}" in members
    experts = members["model.layers.0.mlp.experts"]
    assert {name.split(".")[-2] for name in experts} == {"gate_proj", "up_proj", "down_proj"}
    assert choice_groups(["a.fc1.weight", "a.fc3.weight"]) == {
        "a.{fc1,fc3}": ["a.fc1.weight", "a.fc3.weight"]
    }


def test_only_one_format_of_four_bits(dense):
    report = fp4kit.survey(dense, budget=5.5)
    assert len({name.partition("+")[0] for name in report.plan.values()} & {"nvfp4", "mxfp4"}) == 1


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ("3", "is too small: the least that .* allow is 4.* bits a weight"),
        ("1KB", "bytes with all tensors"),
        ("much", "is neither bits a weight, like 4.8, nor a size"),
        ("0", "is neither bits a weight"),
    ],
)
def test_impossible_budgets(budget, message, dense, tmp_path):
    before = contents(tmp_path)
    for command in ("survey", "quantize"):
        assert re.search(message, fails(command, str(dense), "--budget", budget))
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        (["*nothing*=fp8"], "no tensor matches pin="),
        (["*down_proj=fp8", "re:.*layers.0.*=bf16"], "overlap: .* cannot be both fp8 and bf16"),
        (["*q_proj=fp8", "*k_proj=bf16"], "overlap"),
        (["*q_proj"], "is no pin; give PATTERN=FORMAT"),
        (["*q_proj=int4"], "is no format that can be chosen"),
    ],
)
def test_bad_pins(pins, message, dense):
    flags = [part for pin in pins for part in ("--pin", pin)]
    assert re.search(message, fails("survey", str(dense), "--budget", "6", *flags))


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


def test_a_plan_is_written_edited_and_taken(source, tmp_path):
    plan, out = tmp_path / "plan.json", tmp_path / "out"
    result = succeed(
        *("survey", str(source), "--formats", "nvfp4+sweep,fp8,bf16", "--budget", "6"),
        *("--save-plan", str(plan), "--json", "--report", str(tmp_path / "report.json")),
    )
    assert json.loads(result.stdout) == json.loads((tmp_path / "report.json").read_text())
    content = json.loads(plan.read_text())
    edited = "model.layers.0.self_attn.o_proj"
    content["groups"][edited] = "mxfp4"
    plan.write_text(json.dumps(content))
    succeed("quantize", str(source), "-o", str(out), "--plan", str(plan))
    found = stored_formats(out)
    assert found[f"{edited}.weight"] == NAMES["mxfp4"]
    for key, names in choice_groups(list(found)).items():
        chosen = content["groups"][key].partition("+")[0]
        assert {found[name] for name in names} == {NAMES[chosen]}
    succeed("verify", str(out), "--against", str(source))
    succeed("dequantize", str(out), "-o", str(tmp_path / "back"))
    succeed("inspect", str(out))
    succeed("compare", str(source), str(out), "--min-sqnr", "15")


def test_quantize_takes_a_budget(dense, tmp_path):
    out = tmp_path / "out"
    flags = ("--formats", "nvfp4,fp8,bf16", "--budget", "7", "--pin", "*o_proj=bf16")
    plan = tmp_path / "plan.json"
    result = succeed("quantize", str(dense), "-o", str(out), *flags, "--save-plan", str(plan))
    assert "Frontier" in result.stdout
    formats = {t.name: t.format for t in inspect(out)}
    assert formats["model.layers.0.self_attn.o_proj.weight"] is None
    assert {"nvfp4", "fp8"} <= set(formats.values())
    groups = json.loads(plan.read_text())["groups"]
    assert fp4kit.quantize_checkpoint(dense, tmp_path / "again", plan=groups).total_stats
    assert contents(out) == {
        out / path.relative_to(tmp_path / "again"): data
        for path, data in contents(tmp_path / "again").items()
    }


def test_modelopt_writes_mixed_precision(dense, tmp_path):
    out = tmp_path / "out"
    succeed(
        *("quantize", str(dense), "-o", str(out), "--layout", "modelopt", "--budget", "6"),
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
    succeed("verify", str(out), "--against", str(dense))
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
def test_bad_plans(text, message, dense, tmp_path):
    plan = tmp_path / "plan.json"
    plan.write_text(text)
    before = contents(tmp_path)
    said = fails("quantize", str(dense), "-o", str(tmp_path / "out"), "--plan", str(plan))
    assert message in said
    assert contents(tmp_path) == before


def test_a_plan_of_another_layout(dense, tmp_path):
    report = fp4kit.survey(dense, ["nvfp4", "fp8"], budget=6)
    with pytest.raises(OptionError, match=r"has no form for several formats|holds nvfp4, not fp8"):
        fp4kit.quantize_checkpoint(dense, tmp_path / "o", layout="comfy", plan=report.plan)
    with pytest.raises(OptionError, match="leave format and scheme out"):
        fp4kit.quantize_checkpoint(dense, tmp_path / "o", "mxfp4", plan=report.plan)


def test_wrong_usage(dense, tmp_path):
    plan = str(tmp_path / "plan.json")
    assert "give one" in fails("quantize", str(dense), "--pin", "*=fp8", code=2)
    assert "give one" in fails("survey", str(dense), "--save-plan", plan, code=2)
    both = fails("quantize", str(dense), "--plan", plan, "--budget", "5", code=2)
    assert "exclude each other" in both
    one = fails("quantize", str(dense), "--budget", "5", "--format", "mxfp4", code=2)
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
def test_moments_of_another_model(second, message, dense, tmp_path):
    file = tmp_path / "m.safetensors"
    write_moments(Output(file), InputMoments(file, second), {})
    before = contents(tmp_path)
    report = str(tmp_path / "report.json")
    flags = ("--moments", str(tmp_path / "m.safetensors"), "--report", report)
    assert message in fails("survey", str(dense), *flags)
    assert contents(tmp_path) == before


def test_what_is_no_file_of_moments(dense):
    said = fails("survey", str(dense), "--moments", str(dense / "model.safetensors"))
    assert "holds no moments" in said


# ------------------------------------------------------------------------------------------------
# What the config says, and activations
# ------------------------------------------------------------------------------------------------


def test_verify_sees_groups_that_are_wrong(dense, tmp_path):
    out = tmp_path / "out"
    report = fp4kit.survey(dense, ["nvfp4", "fp8"], budget=6)
    fp4kit.quantize_checkpoint(dense, out, plan=report.plan)
    assert fp4kit.verify(out).ok
    config = json.loads((out / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    one, other = groups["group_0"], groups["group_1"]
    one["targets"], other["targets"] = other["targets"], ["model.layers.7"]
    (out / "config.json").write_text(json.dumps(config))
    faults = fp4kit.verify(out).faults
    assert any("the config says" in fault for fault in faults)
    assert any("the config has no group for it" in fault for fault in faults)


def test_activations_from_moments(dense, tmp_path):
    report = fp4kit.survey(dense, ["nvfp4"])
    modules = [tensor.name.removesuffix(".weight") for tensor in report.tensors]
    amaxes = {module: 2.0 + number for number, module in enumerate(modules)}
    second = {t.name.removesuffix(".weight"): np.ones(t.shape[1]) for t in report.tensors}
    file = tmp_path / "m.safetensors"
    write_moments(Output(file), InputMoments(file, second, amaxes), {})
    (tmp_path / "m.json").write_text(json.dumps(amaxes))
    for name in ("m.safetensors", "m.json"):
        fp4kit.quantize_checkpoint(dense, tmp_path / name[2:], activations=tmp_path / name)
    one, other = (contents(tmp_path / name) for name in ("safetensors", "json"))
    assert list(one.values()) == list(other.values())


def test_values_that_a_candidate_loses(checkpoints, tmp_path):
    tensors, config = checkpoints.llama(dtype="F32")
    name = "model.layers.0.mlp.down_proj.weight"
    dtype, values = tensors[name]
    tensors[name] = dtype, np.full_like(values, 2.0) * np.float32(1e38)
    source = checkpoints.save(tmp_path / "in", tensors, config)
    report = fp4kit.survey(source, ["nvfp4", "fp8"], budget=7)
    assert report.plan[name.removesuffix(".weight")] == "fp8"
    content = json.loads(json.dumps(report.to_json(), allow_nan=False))
    errors = next(each for each in content["tensors"] if each["name"] == name)["errors"]
    assert errors["nvfp4"]["noise"] is None
    assert errors["fp8"]["noise"] < 0.01
    succeed("survey", str(source), "--formats", "nvfp4,fp8")


def test_convert_refuses_what_it_would_say_wrongly(dense, tmp_path):
    for name, formats in (("fp8", ["nvfp4", "fp8"]), ("mxfp4", ["nvfp4", "mxfp4"])):
        report = fp4kit.survey(dense, ["nvfp4"], budget=5)
        plan = dict.fromkeys(report.plan, formats[0]) | {next(iter(report.plan)): formats[1]}
        fp4kit.quantize_checkpoint(dense, tmp_path / name, plan=plan)
        fails("convert", str(tmp_path / name), "-o", str(tmp_path / "o"), "--layout", "modelopt")
        assert not (tmp_path / "o").exists()
