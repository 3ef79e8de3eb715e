# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Surveys and comparisons in shares; the command line of shared conversions."""

from __future__ import annotations

import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import numpy as np
import pytest

import fp4kit
from command_line import invoke
from fp4kit.errors import OptionError
from fp4kit.fleet import shares, tasks
from fp4kit.io.moments import InputMoments, read_moments, write_moments
from fp4kit.io.write.files import Output

pytestmark = pytest.mark.usefixtures("no_open_source")


@pytest.fixture
def model(fleet_model):
    return fleet_model


@pytest.fixture
def wanted(fleet_wanted):
    return fleet_wanted


# ------------------------------------------------------------------------------------------------
# Surveys and comparisons in shares
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share_bytes", [1 << 40, 20_000, 1000])
def test_a_survey_in_shares(model, monkeypatch, share_bytes):
    monkeypatch.setattr(shares, "SHARE_BYTES", share_bytes)
    names = ["nvfp4", "mxfp4", "nvfp4+sweep", "fp8", "bf16"]
    alone = fp4kit.survey(model, names, budget=7.0, device="cpu")
    with ThreadPoolExecutor(2) as executor:
        shared = fp4kit.survey(model, names, budget=7.0, device="cpu", workers=executor)
    assert shared.tensors == alone.tensors
    assert shared.plan == alone.plan
    assert shared.groups == alone.groups
    one, other = alone.to_json(), shared.to_json()
    assert {**one, "seconds": 0} == {**other, "seconds": 0}


@pytest.mark.parametrize("share_bytes", [1 << 40, 20_000, 1000])
def test_a_comparison_in_shares(checkpoints, model, tmp_path, monkeypatch, share_bytes):
    monkeypatch.setattr(shares, "SHARE_BYTES", share_bytes)
    fp4kit.quantize_checkpoint(model, tmp_path / "q")
    tensors, config = checkpoints.moe(3)
    for name, other in checkpoints.moe(3, seed=1)[0].items():
        if "experts.1" in name or "gate" in name:  # some tensors are far off
            tensors[name] = other
    model = checkpoints.save(tmp_path / "other", tensors, config)
    alone = fp4kit.verify(tmp_path / "q", model)
    with ThreadPoolExecutor(2) as executor:
        shared = fp4kit.verify(tmp_path / "q", model, workers=executor)
    assert len(alone.faults) > 3
    assert len(alone.tensors) > 10
    assert shared.faults == alone.faults
    assert shared.tensors == alone.tensors


@pytest.fixture
def moments(model, tmp_path):
    """Moments of all modules, which weigh the errors of a sweep."""
    random = np.random.default_rng(5)
    tensors = fp4kit.survey(model, ["nvfp4"], device="cpu").tensors
    second = {t.name.removesuffix(".weight"): random.random(t.shape[1]) ** 4 for t in tensors}
    file = tmp_path / "moments.safetensors"
    write_moments(Output(file), InputMoments(file, second), {})
    return file


def test_moments_go_to_workers_too(checkpoints, model, moments, tmp_path, monkeypatch):
    monkeypatch.setattr(shares, "SHARE_BYTES", 20_000)
    monkeypatch.chdir(tmp_path)
    sweep = fp4kit.Scheme("nvfp4", scale_search="sweep")
    options = {"moments": moments.name, "max_shard_size": "1MB"}
    alone = fp4kit.survey(model, ["nvfp4", "nvfp4+sweep"], moments=moments.name)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), os.chdir, ("/",)) as executor:
        fp4kit.quantize_checkpoint(model, "out", sweep, workers=executor, **options)
        shared = fp4kit.survey(
            model, ["nvfp4", "nvfp4+sweep"], moments=moments.name, workers=executor
        )
    fp4kit.quantize_checkpoint(model, "alone", sweep, **options)
    assert checkpoints.digest(tmp_path / "out") == checkpoints.digest(tmp_path / "alone")
    assert shared.tensors == alone.tensors
    assert all(t.errors["nvfp4"].output_noise is not None for t in shared.tensors)
    # Other moments are another plan.
    fp4kit.quantize_checkpoint(model, "parts", sweep, workers="1/2", **options)
    write_moments(Output(moments, replace=True), _doubled(moments), {})
    tasks.close_idle()
    with pytest.raises(OptionError, match="was begun with another plan"):
        fp4kit.quantize_checkpoint(model, "parts", sweep, workers="2/2", **options)


def _doubled(file):
    second = {name: 2 * values for name, values in read_moments(file).second.items()}
    return InputMoments(file, second)


def test_shares_are_refused_where_there_are_none(checkpoints, model, tmp_path):
    tensors, _ = checkpoints.llama(1)
    file = checkpoints.write_file(tmp_path / "one.safetensors", tensors)
    quantized = tmp_path / "one-nvfp4.safetensors"
    fp4kit.quantize_file(file, quantized)
    with ThreadPoolExecutor(1) as executor:
        with pytest.raises(OptionError, match="is no model directory, which workers are for"):
            fp4kit.survey(file, workers=executor)
        with pytest.raises(OptionError, match="is no model directory; workers compare two"):
            fp4kit.verify(quantized, file, workers=executor)
        with pytest.raises(OptionError, match="workers compare values; say against what"):
            fp4kit.verify(quantized, workers=executor)
    with pytest.raises(OptionError, match="a survey has no parts; give a scheduler"):
        fp4kit.survey(model, workers="1/2")
    with pytest.raises(OptionError, match="verify has no parts; give a scheduler"):
        fp4kit.verify(model, model, workers="1/2")


def test_a_share_of_another_source_is_refused(checkpoints, model):
    wanted = shares.hash_of(model)
    config = checkpoints.config_of(model)
    checkpoints.write_json(model / "config.json", {**config, "vocab_size": 81})
    with pytest.raises(OptionError, match="this worker sees other headers"):
        shares.check_hash(wanted, model)


# ------------------------------------------------------------------------------------------------
# Command line
# ------------------------------------------------------------------------------------------------


def test_an_array_of_jobs(checkpoints, model, tmp_path):
    alone = invoke("quantize", model, "-o", tmp_path / "alone", "--json", "--max-shard-size", "1MB")
    for number in (1, 2):
        result = invoke(
            "quantize", model, "-o", tmp_path / "out", "--max-shard-size", "1MB",
            "--part", f"{number}/2",
        )  # fmt: skip
        assert result.exit_code == 0, result.stderr
        assert f"Wrote part {number}/2 of" in result.stderr
        assert f"fp4kit finish {tmp_path / 'out'}" in result.stderr
    result = invoke("finish", tmp_path / "out", "--json", "--report", tmp_path / "report.json")
    assert result.exit_code == 0, result.stderr
    report, whole = json.loads(result.stdout), json.loads(alone.stdout)
    assert report["tensors"] == whole["tensors"]
    assert report["shards"] == whole["shards"]
    assert json.loads((tmp_path / "report.json").read_text())["tensors"] == whole["tensors"]
    assert checkpoints.digest(tmp_path / "out") == checkpoints.digest(tmp_path / "alone")
    again = invoke("finish", tmp_path / "out")
    assert again.exit_code == 0
    assert "is finished already, and no fault was found" in again.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--part", "1/2", "--scheduler", "local:2"), "exclude each other"),
        (("--part", "1/2", "--force"), "--force is not for --scheduler, --part and URLs"),
        (("--part", "1/2", "--resume"), "--resume is not for --part"),
        (("--part", "1/2", "--budget", "5"), "--budget is not for --part"),
        (("--part", "1/2", "--report", "r.json"), "not for --part; fp4kit finish has them"),
    ],
)
def test_options_that_exclude_parts(model, tmp_path, options, said):
    result = invoke("quantize", model, "-o", tmp_path / "out", *options)
    assert result.exit_code == 2
    assert said in result.stderr


def test_parts_need_an_output(model):
    result = invoke("quantize", model, "--part", "1/2")
    assert result.exit_code == 2
    assert "need -o OUT" in result.stderr


def test_a_dry_run_of_a_scheduler_plans_alone(model, tmp_path):
    job = fp4kit.quantize_checkpoint(model, tmp_path / "out", workers="1/2", dry_run=True)
    assert job.target is None
    assert not (tmp_path / "out").exists()
