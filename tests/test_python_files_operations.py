# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Operations on files from Python: reports, targets, what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

import checkpoints as c
import fp4kit
from command_line import succeed
from fp4kit import Scheme
from python_files import CONFIG, NAME, Q, X, one_line


def told(seen):
    return lambda done, total: seen.append((done, total))


def test_reports_are_the_numbers_of_the_command_line(tmp_path):
    tensors, config = c.llama(1)
    source = c.save(tmp_path / "model", tensors, config)
    file = c.write_file(tmp_path / "in.safetensors", tensors)
    for function, place, out in (
        (fp4kit.quantize_file, file, "q.safetensors"),
        (fp4kit.quantize_checkpoint, source, "q"),
    ):
        seen = []
        report = function(place, tmp_path / out, device="cpu", progress=told(seen))
        assert seen == sorted(seen)
        assert seen[-1][0] == seen[-1][1] > 0
        said = json.loads(
            succeed(
                "quantize", place, "-o", tmp_path / f"c{out}", "--device", "cpu", "--json"
            ).stdout
        )
        assert [t["name"] for t in said["tensors"]] == [t.name for t in report.tensors]
        for ours, theirs in zip(report.tensors, said["tensors"], strict=True):
            assert (ours.stats and ours.stats.to_dict()) == theirs["stats"]
        if out == "q":
            assert c.digest(tmp_path / "q") == c.digest(tmp_path / "cq")
        else:
            assert (tmp_path / out).read_bytes() == (tmp_path / f"c{out}").read_bytes()
        plan = function(place, tmp_path / "none", dry_run=True)
        assert plan.target is None
        assert [t.action for t in plan.tensors] == [t.action for t in report.tensors]
        assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("whole", [False, True])
def test_a_scheme_is_the_same_as_its_fields(tmp_path, whole):
    tensors, config = c.llama(1)
    source = c.save(tmp_path / "model", tensors, config)
    function = fp4kit.quantize_checkpoint if whole else fp4kit.quantize_file
    fields = {"scale_search": "sweep", "e4m3_max": 256} | (
        {} if whole else {"scale_layout": "swizzled_8x4", "nibble_order": "high_first"}
    )
    results = []
    for name, call in (("a", (Scheme(**fields), {})), ("b", ("nvfp4", fields))):
        target = tmp_path / (name if whole else f"{name}.safetensors")
        place = source if whole else source / "model.safetensors"
        function(place, target, call[0], device="cpu", **call[1])
        results.append(c.read(target) if whole else target.read_bytes())
    assert results[0] == results[1]


def test_default_targets(tmp_path, monkeypatch):
    tensors, config = c.llama(1)
    source = c.save(tmp_path / "model", tensors, config)
    c.write_file(tmp_path / "in.safetensors", tensors)
    monkeypatch.chdir(tmp_path)
    assert fp4kit.quantize_file("in.safetensors", None, "mxfp8").target == "in-mxfp8.safetensors"
    monkeypatch.chdir(source)
    assert fp4kit.quantize_checkpoint(".").target == str(tmp_path / "model-nvfp4")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda p: fp4kit.quantize_file(p / "m"), "use quantize_checkpoint"),
        (lambda p: fp4kit.dequantize_file(p / "m", p / "x.npz"), "use dequantize_checkpoint"),
        (lambda p: fp4kit.quantize_file(p / "x.npy", includ=["*"]), "'includ' is no option"),
        (lambda p: fp4kit.quantize_checkpoint(p / "m", p / "n", pad=True), "'pad' is no option"),
        (lambda p: fp4kit.quantize_file(p / "x.npy", None, Scheme(rht=True)), "rht=True is not"),
        (lambda p: fp4kit.quantize_file(p / "x.npy", None, Scheme(direction="both")), "direction"),
        (lambda p: fp4kit.quantize_file(p / "x.npy", None, Scheme(), pad=True), "beside a Scheme"),
        (lambda p: fp4kit.quantize_checkpoint(p / "m", None, Scheme(pad=True)), "pad=True is not"),
        (lambda p: fp4kit.quantize_file(p / "x.npy", device="gpu"), "choose auto, cpu"),
        (lambda p: fp4kit.quantize_file(p / "x.npy", p / "x.npz"), "must end in .safetensors"),
        (lambda p: fp4kit.quantize_file(p / "x.npy", exclude=["*"]), "no tensor is quantized"),
        (lambda p: fp4kit.convert_checkpoint(p / "m", p / "n", "comfy"), "holds no"),
        (lambda p: fp4kit.verify(p / "nothing"), "no such file"),
        (lambda p: fp4kit.verify(p / "m", p / "nothing"), "no such file"),
    ],
)
def test_operations_that_are_refused(tmp_path, call, said):
    np.save(tmp_path / "x.npy", X)
    fp4kit.save(tmp_path / "m", {NAME: X}, config=CONFIG)
    with pytest.raises(fp4kit.Fp4kitError) as error:
        call(tmp_path)
    assert said in one_line(error)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "x.npy"]


def test_verify_names_faults(tmp_path):
    fp4kit.save(tmp_path / "m", {NAME: Q}, config=CONFIG)
    assert fp4kit.verify(tmp_path / "m") == fp4kit.VerifyReport(str(tmp_path / "m"), [], [])
    fp4kit.save(tmp_path / "other", {NAME: X + 9}, config=CONFIG)
    report = fp4kit.verify(tmp_path / "m", tmp_path / "other")
    assert not report.ok
    (fault,) = report.faults
    assert NAME in fault


def test_resume_and_force_are_those_of_the_command_line(tmp_path):
    fp4kit.save(tmp_path / "m", {NAME: X}, config=CONFIG)
    out = tmp_path / "q"
    with pytest.raises(fp4kit.FileFormatError, match="no unfinished conversion"):
        fp4kit.quantize_checkpoint(tmp_path / "m", out, resume=True)
    fp4kit.quantize_checkpoint(tmp_path / "m", out)
    with pytest.raises(fp4kit.OptionError, match="not empty"):
        fp4kit.quantize_checkpoint(tmp_path / "m", out)
    fp4kit.quantize_checkpoint(tmp_path / "m", out, layout="modelopt", force=True)
    assert fp4kit.open(out).layout == "modelopt"
