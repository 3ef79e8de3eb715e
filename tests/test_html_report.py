# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""`--html`: the file that is written, without a browser. `test_browser.py` has one."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

import fp4kit
from command_line import fail, invoke, succeed
from fp4kit.report import page as pages
from fp4kit.report.histograms import count_codes
from fp4kit.report.model import Run, page_data
from fp4kit.report.names import places
from report_samples import HOSTILE, entry_of, quantize_report, survey_report

#: Elements that are never closed.
VOID = {"meta", "link"}
#: Everything that a page may be made of before its scripts run.
ELEMENTS = {"html", "head", "meta", "title", "link", "style", "body", "a", "main", "noscript", "p"}
ELEMENTS |= {"div", "script"}


#: What makes markup or code of text, or loads something.
RISKY = ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "Function(")
RISKY += ("DOMParser", "createContextualFragment", "http:", "https:", "fetch(", "XMLHttpRequest")


class Page(HTMLParser):
    """The elements of a page; it must be well-formed."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.elements, self.texts = [], [], {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        names = [name for name, _ in attributes]
        assert len(names) == len(set(names))
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append((tag, len(self.elements) - 1))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if self.open:
            _, number = self.open[-1]
            self.texts[number] = self.texts.get(number, "") + data

    def of(self, tag):
        return [
            (attributes, self.texts.get(number, ""))
            for number, (name, attributes) in enumerate(self.elements)
            if name == tag
        ]

    @property
    def data(self):
        ((_, text),) = [one for one in self.of("script") if one[0].get("id") == "data"]
        return json.loads(text)


def read(path):
    return Page(Path(path).read_bytes().decode("ascii"))


def drawn(report, kind="quantize", **more):
    """The page of a report, as text."""
    library = pages.load_library()
    run = Run(kind, f"fp4kit {kind}", versions=library.versions, **more)
    return pages.page(page_data(report, run), library)


# ------------------------------------------------------------------------------------------------
# The file
# ------------------------------------------------------------------------------------------------


def check_safe(text):
    """Well-formed, nothing but the template's elements, nothing that would be fetched or run."""
    found = Page(text)
    assert {tag for tag, _ in found.elements} <= ELEMENTS
    assert text.isascii()
    assert "\x00" not in text
    data, *scripts = found.of("script")
    assert data[0] == {"type": "application/json", "id": "data"}
    assert [attributes for attributes, _ in scripts] == [{}, {}]
    for tag, attributes in found.elements:
        assert not {"src", "onload", "onerror", "style"} & attributes.keys()
        assert attributes.get("href", "#").startswith(("#", "data:,")), tag
    (policy,) = [
        attributes["content"]
        for attributes, _ in found.of("meta")
        if attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    hashes = re.findall(r"'sha256-([^']+)'", policy)
    assert hashes == [
        base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for _, script in scripts
    ]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy
    assert "script-src 'unsafe" not in policy
    return found


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


# ------------------------------------------------------------------------------------------------
# The commands
# ------------------------------------------------------------------------------------------------


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
