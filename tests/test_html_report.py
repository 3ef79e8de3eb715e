# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""`--html`: the file that is written, without a browser. `test_browser.py` has one."""

import json
from importlib.resources import files

import numpy as np
import pytest
import safetensors.numpy

import fp4kit
from command_line import succeed
from fp4kit.report import page as pages
from fp4kit.report.histograms import count_codes
from fp4kit.report.model import Run, page_data
from fp4kit.report.names import places
from html_pages import RISKY, check_safe, drawn, read
from report_samples import HOSTILE, entry_of, quantize_report, survey_report

# ------------------------------------------------------------------------------------------------
# The file
# ------------------------------------------------------------------------------------------------


def test_a_page_is_whole_and_holds_the_report(model_file, tmp_path):
    target, report, html = (tmp_path / name for name in ("q.safetensors", "q.json", "q.html"))
    succeed("quantize", model_file, "-o", target, "--report", report, "--html", html)
    found = check_safe(html.read_text())
    assert found.data["report"] == json.loads(report.read_text())
    assert found.data["kind"] == "quantize"
    assert found.data["command"].startswith(f"fp4kit quantize {model_file} -o {target} --report")
    assert found.data["versions"]["fp4kit"] == fp4kit.__version__
    assert {"Vega", "Vega-Lite", "Python", "NumPy"} <= found.data["versions"].keys()
    assert found.data["summary"][0] == "2 of 5 tensors are quantized to nvfp4."
    assert [place[0] for place in found.data["places"]] == [None, 0, 0, 0, 0]
    ((_, title),) = found.of("title")
    assert title == "Quantization of model.safetensors"


@pytest.mark.parametrize("make", [quantize_report, survey_report])
def test_a_page_of_5000_tensors_is_small(make):
    report = make(layers=40, experts=40) if make is quantize_report else make(layers=715)
    number = len(report["tensors"])
    assert number > 5000
    text = drawn(report, "quantize" if make is quantize_report else "survey")
    assert len(text) <= 3_000_000 + 1000 * number
    assert check_safe(text).data["report"] == json.loads(json.dumps(report))


def test_hostile_names_stay_names():
    report = quantize_report([entry_of(name, (64, 64), 15 + at) for at, name in enumerate(HOSTILE)])
    report["source"] = "</title><script>alert(1)</script>\x00\n\ud800"
    report["warnings"] = list(HOSTILE)
    report["options"] = {name: name for name in HOSTILE}
    text = drawn(report)
    found = check_safe(text)
    assert found.data["report"] == report
    assert len(found.of("title")) == 1


def test_scripts_never_make_markup_of_data():
    """Neither of text nor of code: all that is shown goes through text nodes."""
    assets = files("fp4kit.report") / "assets"
    names = [asset.name for asset in assets.iterdir() if asset.name.endswith(".js")]
    assert sorted(names) == sorted(pages.SCRIPTS)
    for name in names:
        text = (assets / name).read_text()
        for risky in RISKY:
            assert risky not in text, (name, risky)
        assert text.count("\n") <= 400
    style = (assets / "report.css").read_text()
    assert "url(" not in style
    assert "@import" not in style


def test_a_library_cannot_end_its_element():
    library = pages.Library('const a = "</script><!-- \xb5\U0001f600";', {})
    text = pages.page(page_data(quantize_report([]), Run("quantize", "fp4kit")), library)
    assert len(check_safe(text).of("script")) == 3
    assert '"<\\/script><\\!-- \\u00b5\\ud83d\\ude00"' in text


# ------------------------------------------------------------------------------------------------
# What it says
# ------------------------------------------------------------------------------------------------


def test_layers_and_types_are_read_from_names():
    names = ["model.layers.2.mlp.experts.7.up_proj.weight", "lm_head.weight", "x"]
    assert places(names) == [(2, "mlp.experts.*.up_proj"), (None, "lm_head"), (None, "x")]
    assert places(["3", "4.weight"]) == [(3, "3"), (4, "4.weight")]
    names = ["vision.layers.0.fc.weight", "text.layers.1.fc.weight", "text.norm.weight"]
    assert [place.type for place in places(names)] == ["vision.layers: fc", "text.layers: fc",
                                                      "text.norm"]  # fmt: skip


def values_of(bars):
    return {bar["label"]: bar["count"] for bar in bars if bar["count"]}


@pytest.mark.parametrize("layout", ["linear", "swizzled_128x4"])
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_histograms_count_every_code_and_scale(tmp_path, name, layout):
    rng = np.random.default_rng(3)
    x = rng.standard_normal((70, 90), np.float32) * np.exp(rng.normal(size=(70, 1)) * 4)
    x[5] = 0
    x[6] *= 1e-9
    np.save(tmp_path / "x.npy", x.astype(np.float32))
    target = tmp_path / "q.safetensors"
    fp4kit.quantize_file(tmp_path / "x.npy", target, name, pad=True, scale_layout=layout)
    found = count_codes(target, ["x"])["x"]
    q = fp4kit.quantize(x.astype(np.float32), name, pad=True)
    packed = q.packed.reshape(70, -1)
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(70, -1)[:, :90]
    numbers = [f"{number:g}" for number in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
    labels = [*numbers, *(f"-{one}" for one in numbers)]
    expected = dict(zip(labels, np.bincount(codes.ravel(), minlength=16).tolist(), strict=True))
    assert {bar["label"]: bar["count"] for bar in found["codes"]["bars"]} == expected
    assert [bar["label"] for bar in found["codes"]["bars"]][::5] == ["-6", "-1", "1", "6"]
    scales = found["scales"]
    assert scales["count"] == q.block_scale.size == sum(bar["count"] for bar in scales["bars"])
    kinds = dict.fromkeys(("zero", "subnormal", "normal", "max"), 0)
    for bar in scales["bars"]:
        kinds[bar["kind"]] += bar["count"]
    raw = np.asarray(q.block_scale).view(np.uint8)
    if name == "nvfp4":
        assert kinds["zero"] == (raw == 0).sum() > 0
        assert kinds["subnormal"] == ((raw > 0) & (raw < 8)).sum() > 0
        assert kinds["max"] == (raw == 0x7E).sum() > 0
    else:
        assert kinds["subnormal"] == (raw == 0).sum() > 0
        assert values_of(scales["bars"])["2^-127"] == kinds["subnormal"]


@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
def test_histograms_of_fp8(tmp_path, granularity):
    x = np.random.default_rng(3).standard_normal((130, 200), np.float32)
    np.save(tmp_path / "x.npy", x)
    fp4kit.quantize_file(tmp_path / "x.npy", tmp_path / "q.safetensors", "fp8",
                         granularity=granularity)  # fmt: skip
    found = count_codes(tmp_path / "q.safetensors", ["x"])["x"]
    q = fp4kit.quantize(x, "fp8", granularity=granularity)
    codes = np.asarray(q.packed).view(np.uint8)
    bars = values_of(found["codes"]["bars"])
    assert sum(bars.values()) == x.size
    assert bars["448"] == ((codes & 127) == 0x7E).sum() > 0
    assert bars["2^7"] == ((codes & 127) // 8 == 14).sum() > 0
    assert found["scales"]["count"] == {"tensor": 1, "channel": 130, "block": 4}[granularity]
    assert sum(bar["count"] for bar in found["scales"]["bars"]) == found["scales"]["count"]
    assert found["second_level"] is None


def test_the_worst_ten_are_counted(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        f"layers.{at}.w": (rng.standard_normal((16, 64)) ** (1 + at)).astype(np.float32)
        for at in range(12)
    }
    safetensors.numpy.save_file(arrays, tmp_path / "m.safetensors")
    target, html = tmp_path / "q.safetensors", tmp_path / "q.html"
    succeed("quantize", tmp_path / "m.safetensors", "-o", target, "--html", html)
    data = read(html).data
    sqnrs = {row["name"]: row["stats"]["sqnr"] for row in data["report"]["tensors"]}
    worst = sorted(sqnrs, key=sqnrs.get)[:10]
    assert [one["name"] for one in data["worst"]] == worst
    for one in data["worst"]:
        (row,) = [row for row in data["report"]["tensors"] if row["name"] == one["name"]]
        largest = sum(bar["count"] for bar in one["codes"]["bars"] if bar["kind"] == "max")
        assert largest / one["codes"]["count"] == pytest.approx(row["stats"]["saturated"])
