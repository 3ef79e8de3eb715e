# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""`fp4kit.survey` and `fp4kit survey`: errors as a conversion has them, and budgets."""

from __future__ import annotations

import itertools
import json
import re

import numpy as np
import pytest

import fp4kit
from fp4kit.checkpoint.survey import choice_groups
from fp4kit.errors import OptionError
from fp4kit.files.budget import Allocation, Budget, allocate
from fp4kit.files.survey_report import CandidateError, ChoiceGroup, SurveyedTensor
from fp4kit.io.moments import InputMoments, write_moments
from fp4kit.io.write.files import Output
from survey_models import contents, fails

FORMATS = ("nvfp4", "nvfp4+sweep", "mxfp4", "mxfp8", "fp8", "bf16")


# ------------------------------------------------------------------------------------------------
# Errors
# ------------------------------------------------------------------------------------------------


def test_errors_are_those_of_conversions(moe_model, tmp_path):
    before = contents(tmp_path)
    report = fp4kit.survey(moe_model, FORMATS)
    assert contents(tmp_path) == before
    found = {tensor.name: tensor for tensor in report.tensors}
    for name in ("nvfp4", "nvfp4+sweep", "mxfp4", "fp8"):
        scheme, _, search = name.partition("+")
        converted = fp4kit.quantize_checkpoint(
            moe_model, tmp_path / name, scheme, **({"scale_search": search} if search else {})
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


def test_slabs_and_chunks_change_nothing(dense_model, monkeypatch):
    whole = fp4kit.survey(dense_model, FORMATS)
    monkeypatch.setattr("fp4kit.io.survey_tensors.SLAB_BYTES", 1)
    monkeypatch.setattr("fp4kit.io.survey_tensors.STEP", 1)
    monkeypatch.setattr("fp4kit.io.stream.chunks.WHOLE_BYTES", 4096)
    monkeypatch.setattr("fp4kit.io.stream.chunks.CHUNK_BYTES", 2048)
    pieces = fp4kit.survey(dense_model, FORMATS)
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


def test_moments_weigh_the_channels(dense_model, tmp_path):
    name = "model.layers.0.mlp.down_proj"
    plain = {tensor.name: tensor for tensor in fp4kit.survey(dense_model, ["nvfp4"]).tensors}
    tensor = plain[f"{name}.weight"]
    weight = fp4kit.open(dense_model)[tensor.name].astype(np.float32)
    moments = np.random.default_rng(1).random(tensor.shape[1]) ** 4
    file = tmp_path / "m.safetensors"
    write_moments(Output(file), InputMoments(file, {name: moments}, {name: 3.0}), {})
    report = fp4kit.survey(dense_model, ["nvfp4"], moments=tmp_path / "m.safetensors")
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


def test_experts_and_fused_weights_share_a_choice(moe_model):
    report = fp4kit.survey(moe_model, ["nvfp4+sweep", "fp8", "bf16"], budget=6.0)
    assert report.chosen.bits <= 6.0
    members = {group.key: group.members for group in report.groups}
    assert len({group.choice for group in report.groups}) > 1
    assert "model.layers.0.self_attn.{q_proj,k_proj,v_proj}" in members
    experts = members["model.layers.0.mlp.experts"]
    assert {name.split(".")[-2] for name in experts} == {"gate_proj", "up_proj", "down_proj"}
    assert choice_groups(["a.fc1.weight", "a.fc3.weight"]) == {
        "a.{fc1,fc3}": ["a.fc1.weight", "a.fc3.weight"]
    }


def test_only_one_format_of_four_bits(dense_model):
    report = fp4kit.survey(dense_model, budget=5.5)
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
def test_impossible_budgets(budget, message, dense_model, tmp_path):
    before = contents(tmp_path)
    for command in ("survey", "quantize"):
        assert re.search(message, fails(command, str(dense_model), "--budget", budget))
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
def test_bad_pins(pins, message, dense_model):
    flags = [part for pin in pins for part in ("--pin", pin)]
    assert re.search(message, fails("survey", str(dense_model), "--budget", "6", *flags))
