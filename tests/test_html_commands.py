# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""`--html` of every command: what its page says, and what is refused."""

import json

import pytest

from command_line import fail, invoke, succeed
from fp4kit.report import page as pages
from html_pages import check_safe, read


def test_who_asks_for_none_pays_nothing(model_file, tmp_path, monkeypatch):
    monkeypatch.setattr("fp4kit.report.model.count_codes", None)
    monkeypatch.setattr("fp4kit.cli.html_report.load_library", None)
    succeed("quantize", model_file, "-o", tmp_path / "q.safetensors")
    succeed("verify", tmp_path / "q.safetensors", "--against", model_file)
    succeed("compare", model_file, tmp_path / "q.safetensors")


def test_a_dry_run_has_a_page(model_file, tmp_path):
    html = tmp_path / "q.html"
    succeed("quantize", model_file, "--dry-run", "--html", html)
    data = read(html).data
    assert data["worst"] == []
    assert data["summary"][0] == "2 of 5 tensors would be quantized to nvfp4."


def test_compare_shows_an_earlier_run(model_file, quantized_file, tmp_path):
    earlier, html, better = (tmp_path / name for name in ("a.json", "c.html", "better.safetensors"))
    succeed("quantize", model_file, "-o", tmp_path / "a.safetensors", "--report", earlier)
    succeed("quantize", model_file, "-o", better, "--scale-search", "sweep")
    flags = ("--before", earlier, "--html", html, "--min-sqnr", "90")
    assert "SQNR below 90 dB" in fail_after_output("compare", model_file, better, *flags)
    data = read(html).data
    assert len(data["worst"]) == 2
    assert data["report"]["below"]
    now = [row["stats"] and row["stats"]["sqnr"] for row in data["report"]["tensors"]]
    then = [row["sqnr"] for row in data["before"]["tensors"]]
    improved = [a > b for a, b in zip(now, then, strict=True) if a is not None and b is not None]
    assert improved == [True, True]
    assert data["before"]["total"]["sqnr"] < data["report"]["total"]["stats"]["sqnr"]


def fail_after_output(*args):
    result = invoke(*args)
    assert result.exit_code == 1, result.output
    return result.stderr


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"source": 1, "target": null, "total": 3, "tensors": []}',
             '{"source": "", "target": null, "total": {"stats": null, "bytes_after": NaN},'
             ' "tensors": []}', "[" * 100_000]
)  # fmt: skip
def test_an_earlier_run_must_be_a_report(model_file, quantized_file, tmp_path, text):
    (tmp_path / "b.json").write_text(text)
    html = tmp_path / "c.html"
    flags = ("--html", html, "--before", tmp_path / "b.json")
    assert "report" in fail("compare", model_file, quantized_file, *flags)
    assert not html.exists()


def test_verify_has_a_page(model_file, quantized_file, tmp_path):
    plain, against = tmp_path / "v.html", tmp_path / "a.html"
    succeed("verify", quantized_file, "--html", plain)
    data = read(plain).data
    assert data["summary"] == ["No fault found."]
    assert {one["name"] for one in data["worst"]} == {"layers.0.q_proj.weight",
                                                      "layers.0.up_proj.weight"}  # fmt: skip
    succeed("verify", quantized_file, "--against", model_file, "--html", against)
    data = read(against).data
    sqnrs = [row["stats"]["sqnr"] for row in data["report"]["tensors"] if row["format"]]
    assert all(sqnr > 15 for sqnr in sqnrs)
    assert data["report"]["options"]["against"] == str(model_file)


def test_faults_have_a_page(quantized_file, tmp_path):
    raw = bytearray(quantized_file.read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    at = start + header["layers.0.q_proj.weight_scale"]["data_offsets"][0]
    raw[at] = 0x7F
    quantized_file.write_bytes(raw)
    html = tmp_path / "v.html"
    fail_after_output("verify", quantized_file, "--html", html)
    data = read(html).data
    assert data["summary"] == ["1 fault found."]
    assert data["report"]["faults"] == [
        "layers.0.q_proj.weight_scale: 1 of 192 block scales are NaN"
    ]
    assert sum(row["action"] == "quantized" for row in data["report"]["tensors"]) == 2
    assert data["worst"] == []
    quantized_file.write_bytes(b"nothing")
    fail_after_output("verify", quantized_file, "--html", html, "--force")
    assert read(html).data["report"]["tensors"] == []


def test_a_missing_library_is_said_before_work(model_file, tmp_path, monkeypatch):
    pages.load_library.cache_clear()
    monkeypatch.setattr(pages, "find_spec", lambda name: None)
    said = fail("quantize", model_file, "-o", tmp_path / "q", "--html", tmp_path / "q.html")
    assert "pip install 'fp4kit[report]'" in said
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("place", ["model.safetensors", "q.safetensors", "q.json", "none/q.html"])
def test_pages_destroy_nothing(model_file, tmp_path, place):
    flags = ("--report", tmp_path / "q.json", "--html", tmp_path / place, "--force")
    said = fail("quantize", model_file, "-o", tmp_path / "q.safetensors", *flags)
    assert "--html" in said or "no directory" in said
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("command", ["compare", "verify"])
def test_pages_of_readers_destroy_nothing(model_file, quantized_file, tmp_path, command):
    given = [model_file, quantized_file] if command == "compare" else [quantized_file]
    before = {path: path.read_bytes() for path in given}
    old = tmp_path / "old.html"
    old.write_text("mine")
    for place in given:
        assert "would lie in the input" in fail(command, *given, "--html", place, "--force")
    assert "--force" in fail(command, *given, "--html", old)
    assert old.read_text() == "mine"
    assert {path: path.read_bytes() for path in given} == before
    succeed(command, *given, "--html", old, "--force")
    assert read(old).data["kind"] == command


def test_an_earlier_run_needs_a_page(model_file, quantized_file):
    said = fail("compare", model_file, quantized_file, "--before", "x.json", code=2)
    assert "--html" in said


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt", "comfy"])
def test_the_worst_of_a_checkpoint(checkpoints, tmp_path, layout):
    folder = checkpoints.save(tmp_path / "in", *checkpoints.llama(1), others=["tokenizer.json"])
    html = tmp_path / "q.html"
    given = folder / "model.safetensors" if layout == "comfy" else folder
    target = tmp_path / ("q.safetensors" if layout == "comfy" else "q")
    succeed("quantize", given, "-o", target, "--layout", layout, "--html", html)
    data = read(html).data
    done = [row for row in data["report"]["tensors"] if row["format"]]
    assert len(data["worst"]) == min(len(done), 10) > 1
    for one in data["worst"]:
        (row,) = [row for row in done if row["name"] == one["name"]]
        largest = sum(bar["count"] for bar in one["codes"]["bars"] if bar["kind"] == "max")
        assert largest / one["codes"]["count"] == pytest.approx(row["stats"]["saturated"])
        assert one["codes"]["count"] == row["stats"]["elements"]


def test_the_worst_of_a_pipeline(checkpoints, tmp_path):
    folder = tmp_path / "in"
    index = {"_class_name": "FluxPipeline", "transformer": ["diffusers", "FluxTransformer2DModel"]}
    config = {"_class_name": "FluxTransformer2DModel"}
    weights = {"blocks.0.attn.to_q.weight": checkpoints.normal((64, 64))}
    checkpoints.save(folder / "transformer", weights, config, base="diffusion_pytorch_model")
    (folder / "model_index.json").write_text(json.dumps(index))
    html = tmp_path / "q.html"
    succeed("quantize", folder, "-o", tmp_path / "out", "--html", html)
    assert [one["name"] for one in read(html).data["worst"]] == [
        "transformer/blocks.0.attn.to_q.weight"
    ]


def test_a_survey_has_a_page(model_file, tmp_path):
    report, html = tmp_path / "s.json", tmp_path / "s.html"
    flags = ("--budget", "6", "--report", report, "--html", html)
    succeed("survey", model_file, *flags)
    data = check_safe(html.read_text()).data
    assert data["report"] == json.loads(report.read_text())
    assert data["summary"] == data["report"]["recommendation"]
    assert len(data["places"]) == 5
    said = fail("survey", model_file, "--budget", "6", "--save-plan", html, "--html", html)
    assert "--save-plan and --html" in said


def test_a_budget_shows_what_it_chose_from(model_file, tmp_path):
    html = tmp_path / "q.html"
    checkpoint = tmp_path / "in"
    checkpoint.mkdir()
    model_file.rename(checkpoint / "model.safetensors")
    (checkpoint / "config.json").write_text('{"model_type": "llama"}')
    succeed("quantize", checkpoint, "-o", tmp_path / "out", "--budget", "6", "--html", html)
    data = read(html).data
    assert data["kind"] == "quantize"
    assert data["choice"]["chosen"]["bits"] <= 6
    assert "fp8" in {point["label"] for point in data["choice"]["uniform"]}
