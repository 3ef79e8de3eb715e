# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""A sweep whose errors are weighed by the moments of the columns."""

from __future__ import annotations

import json

import numpy as np
import pytest

import fp4kit
from command_line import invoke, succeed
from fp4kit.api.backends import get_backend
from fp4kit.backend.jobs import Job
from fp4kit.checkpoint.options import CheckpointOptions
from fp4kit.checkpoint.read.directory import Checkpoint
from fp4kit.checkpoint.write.state import fingerprint
from fp4kit.io.moments import InputMoments, write_moments
from fp4kit.io.write.files import Output
from fp4kit.plan import plan_of
from fp4kit.scheme import Scheme

SWEEP = Scheme(format="nvfp4", scale_search="sweep")


def swept(backend, x, weights, scheme=SWEEP, dtype="float32"):
    """Codes and scales of a sweep under weights of columns."""
    plan = plan_of(x.shape, scheme.parts[0])
    packed = np.zeros(plan.packed_shape, np.uint8)
    scale = np.zeros(plan.scale_shape, np.uint8)
    amax = np.array([np.abs(x.astype(np.float32)).max()], np.float32)
    backend = get_backend(backend)
    second = backend.second_level(amax, plan, dtype)
    backend.quantize(Job(plan, x, dtype, second, packed, scale, weights=weights))
    out = np.empty(x.shape, np.float32)
    backend.dequantize(Job(plan, None, dtype, second, packed, scale), out, "float32")
    return packed, scale, out


@pytest.mark.parametrize("shape", [(1, 16), (3, 48), (33, 336), (70, 1008)])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_bytes_of_the_reference(shape, dtype, assert_bits):
    random = np.random.default_rng(shape[1])
    x = random.standard_normal(shape).astype(dtype)
    weights = (random.random(shape[1]) ** 6).astype(np.float32)
    weights[3] = 0
    found, expected = (swept(name, x, weights, dtype=dtype) for name in ("cpu", "reference"))
    for one, other in zip(found, expected, strict=True):
        assert_bits(one, other)


def test_equal_weights_choose_what_none_do(assert_bits):
    x = np.random.default_rng(0).standard_normal((40, 96), np.float32)
    for backend in ("cpu", "reference"):
        plain = swept(backend, x, None)
        for one, other in zip(swept(backend, x, np.ones(96, np.float32)), plain, strict=True):
            assert_bits(one, other)


def test_no_scale_of_the_sweep_would_be_better():
    random = np.random.default_rng(1)
    x = random.standard_normal((16, 64), np.float32)
    weights = (random.random(64) ** 4).astype(np.float32)

    def error(out):
        return ((out - x) ** 2 * weights).reshape(16, 4, 16).sum(-1)

    plain, weighed = swept("cpu", x, None)[2], swept("cpu", x, weights)[2]
    assert (error(weighed) <= error(plain) * (1 + 1e-5)).all()
    assert error(weighed).sum() < 0.95 * error(plain).sum()


@pytest.fixture
def moments(dense_model, tmp_path):
    """Moments that differ from channel to channel, for all modules."""
    random = np.random.default_rng(5)
    report = fp4kit.survey(dense_model, ["nvfp4"])
    second = {
        t.name.removesuffix(".weight"): random.random(t.shape[1]) ** 4 for t in report.tensors
    }
    file = tmp_path / "m.safetensors"
    write_moments(Output(file), InputMoments(file, second), {})
    return file


def test_a_survey_measures_what_quantize_writes(dense_model, moments, tmp_path):
    report = fp4kit.survey(dense_model, ["nvfp4", "nvfp4+sweep"], moments=moments)
    plain = fp4kit.survey(dense_model, ["nvfp4+sweep"])
    fp4kit.quantize_checkpoint(dense_model, tmp_path / "o", SWEEP, moments=moments)
    back, source = fp4kit.open(tmp_path / "o"), fp4kit.open(dense_model)
    second = _second(moments)
    for tensor, before in zip(report.tensors, plain.tensors, strict=True):
        w = source[tensor.name].astype(np.float32)
        d = w - fp4kit.dequantize(back[tensor.name])
        weights = second[tensor.name.removesuffix(".weight")]
        found = tensor.errors["nvfp4+sweep"]
        assert found.output_noise == pytest.approx(
            (d**2 @ weights).sum() / (w**2 @ weights).sum(), rel=1e-4
        )
        assert found.noise > before.errors["nvfp4+sweep"].noise  # the price
        assert found.output_noise < 0.9 * tensor.errors["nvfp4"].output_noise
    assert fp4kit.verify(tmp_path / "o", dense_model).ok


def _second(file):
    from fp4kit.io.moments import read_moments

    return read_moments(file).second


def test_the_command_line(dense_model, moments, tmp_path):
    plan = tmp_path / "plan.json"
    flags = ("--moments", str(moments), "--budget", "5.5", "--formats", "nvfp4+sweep,fp8")
    said = succeed("survey", str(dense_model), *flags, "--save-plan", str(plan))
    assert f"--plan {plan} --moments {moments}" in said.stderr.replace("\n", " ")
    assert "nvfp4+sweep" in json.loads(plan.read_text())["groups"].values()
    out = tmp_path / "o"
    succeed(
        "quantize", str(dense_model), "-o", str(out), "--plan", str(plan), "--moments", str(moments)
    )
    succeed("quantize", str(dense_model), "-o", str(tmp_path / "p"), *flags)
    fp4kit.quantize_checkpoint(dense_model, tmp_path / "plain", plan=plan)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("o", "p", "plain")]
    assert files[0] == files[1] != files[2]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "and there is none"),
        (("--scale-search", "four_over_six"), "there is none"),
        (("--scale-search", "sweep", "--device", "cuda"), "moments are for the CPU"),
    ],
)
def test_where_nothing_is_weighed(flags, message, dense_model, moments, tmp_path):
    result = invoke(
        "quantize", str(dense_model), "-o", str(tmp_path / "o"), "--moments", str(moments), *flags
    )
    assert result.exit_code == 1
    assert message in result.stderr.replace("\n", " ")
    assert not (tmp_path / "o").exists()


def test_other_moments_are_another_run(dense_model, moments, tmp_path):
    options = CheckpointOptions(scale_search="sweep", moments=str(moments))
    with Checkpoint(dense_model) as checkpoint:
        before = fingerprint(checkpoint, options)
        assert fingerprint(checkpoint, options) == before
        turned = {name: values[::-1] for name, values in _second(moments).items()}
        write_moments(Output(moments, replace=True), InputMoments(moments, turned), {})
        assert fingerprint(checkpoint, options)["documents"] != before["documents"]
