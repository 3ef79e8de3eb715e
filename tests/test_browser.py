# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Pages of `--html` in a browser: `make browser`. Needs Playwright and a Chromium.

`FP4KIT_SCREENSHOTS=FOLDER` also writes the pictures of the documentation.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
import safetensors.numpy

from command_line import succeed
from fp4kit.report.before import read_before
from fp4kit.report.model import Run, page_data
from fp4kit.report.page import load_library, page
from report_samples import (
    HOSTILE,
    entry_of,
    model_tensors,
    quantize_report,
    stats_of,
    survey_report,
)

playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright (make browser)")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium")
#: Seconds after which 5,000 tensors must be there to be sorted and searched.
INTERACTIVE = 2.0
WIDE = {"width": 1280, "height": 900}


@pytest.fixture(scope="module")
def chromium():
    with playwright.sync_playwright() as running:
        # The pages are this test's own; containers have no user for the sandbox.
        browser = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Opened:
    """A page in a tab, with all that went wrong and all that was asked of the network."""

    def __init__(self, tab, path):
        self.tab, self.wrong, self.asked = tab, [], []
        tab.on("console", lambda said: self.wrong.append(said.text))
        tab.on("pageerror", lambda error: self.wrong.append(str(error)))
        tab.on("dialog", lambda dialog: self.wrong.append(dialog.message) or dialog.dismiss())
        tab.on("request", lambda request: self.asked.append(request.url))
        # Time of the processor: the machine may be busy with something else.
        self._meter = tab.context.new_cdp_session(tab)
        self._meter.send("Performance.enable", {"timeDomain": "threadTicks"})
        tab.goto(path.as_uri())
        tab.wait_for_selector("tbody tr")
        tab.wait_for_selector("html[data-drawn]", state="attached")

    def seconds(self):
        """What the thread of the page has worked since it was opened."""
        found = self._meter.send("Performance.getMetrics")["metrics"]
        return {one["name"]: one["value"] for one in found}["TaskDuration"]

    def check(self, path):
        assert self.wrong == []
        assert self.asked == [path.as_uri()]

    def column(self, number):
        return self.tab.locator(f"tbody tr td:nth-child({number})").all_inner_texts()

    def found(self):
        return self.tab.locator("#found").inner_text()


@pytest.fixture
def show(chromium, tmp_path):
    """Draws a report and opens it."""
    opened = []

    def run(report, kind="quantize", scheme="light", before=None):
        library = load_library()
        given = Run(kind, f"fp4kit {kind}", before=before, versions=library.versions)
        path = tmp_path / f"{len(opened)}.html"
        path.write_text(page(page_data(report, given), library))
        tab = chromium.new_page(viewport=WIDE, color_scheme=scheme)
        opened.append((Opened(tab, path), path))
        return opened[-1][0]

    yield run
    for one, path in opened:
        one.check(path)
        one.tab.close()


def test_5000_tensors_are_there_in_time(show):
    """Read and drawn within the time; then sorted, searched and turned to the next rows, too."""
    report = quantize_report(layers=40, experts=40)
    shown = show(report)
    assert len(report["tensors"]) == 5002
    opened = shown.seconds()
    assert 0.01 < opened < INTERACTIVE
    assert shown.found() == "5,002 tensors, rows 1 to 100"
    tab = shown.tab
    tab.get_by_role("button", name="SQNR dB").click()
    first = shown.column(8)[0]
    tab.locator("#query").fill("experts.7. down_proj")
    assert shown.found() == "40 of 5,002 tensors"
    tab.locator("#query").fill("")
    tab.locator("#next").click()
    assert shown.found() == "5,002 tensors, rows 101 to 200"
    assert shown.seconds() - opened < INTERACTIVE
    sqnrs = [row["stats"]["sqnr"] for row in report["tensors"] if row["stats"]]
    assert float(first) == pytest.approx(min(sqnrs), abs=0.006)
    tab.locator("#many").select_option(label="all")
    assert len(shown.column(1)) == 5002


def test_headings_sort_by_keyboard(show):
    report = quantize_report(layers=4)
    shown = show(report)
    tab, heading = shown.tab, shown.tab.locator("th", has_text="SQNR dB")
    assert heading.get_attribute("aria-sort") == "none"
    tab.locator("#many").focus()
    for _ in range(9):  # the scrolled table, then the headings
        tab.keyboard.press("Tab")
    focused = tab.evaluate("document.activeElement.textContent")
    assert focused == "SQNR dB"
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert tab.evaluate(outline) == "solid"
    tab.keyboard.press("Enter")
    assert heading.get_attribute("aria-sort") == "ascending"
    up = [float(text) for text in shown.column(8) if text]
    assert up == sorted(up)
    assert shown.column(8)[-1] == ""  # what has none comes last, in both directions
    tab.keyboard.press("Enter")
    assert heading.get_attribute("aria-sort") == "descending"
    down = [float(text) for text in shown.column(8) if text]
    assert down == up[::-1]
    assert shown.column(8)[-1] == ""
    tab.get_by_role("button", name="Tensor").click()
    assert heading.get_attribute("aria-sort") == "none"
    assert shown.column(1)[1].startswith("model.embed_tokens")


def test_searching_says_what_it_found(show):
    shown = show(quantize_report(layers=32))
    query = shown.tab.locator("#query")
    query.fill("LAYER:3 proj")
    assert shown.found() == "7 of 258 tensors"
    assert set(shown.column(2)) == {"3"}
    query.fill("no such thing")
    assert shown.column(1) == ["No tensor has all of these words."]


def test_the_heat_map_tells_and_leads_to_the_table(show):
    report = quantize_report(layers=8)
    shown = show(report)
    tab = shown.tab
    cells = tab.locator("figure .mark-rect.role-mark path")
    assert cells.count() == 56
    cells.nth(10).hover()
    tip = tab.locator("#tip")
    assert tip.is_visible()
    assert "SQNR, dB" in tip.inner_text()
    tab.mouse.move(5, 5)
    assert tip.is_hidden()
    figure = tab.locator("figure[tabindex]")
    figure.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        tab.keyboard.press(key)
    said = tab.locator("section[aria-labelledby=layers] p[role=status]").inner_text()
    assert said.startswith("Layer 1, self_attn.k_proj: Tensor model.layers.1.self_attn.k_proj")
    tab.keyboard.press("Enter")
    assert tab.locator("#query").input_value() == "layer:1 self_attn.k_proj"
    assert shown.column(1) == ["model.layers.1.self_attn.k_proj.weight"]
    before = figure.inner_html()
    tab.locator("#measure").select_option(label="RMS error, %")
    tab.wait_for_function("text => document.querySelector('figure').innerHTML !== text", arg=before)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("media", ["screen", "print"])
def test_text_can_be_read(show, scheme, media):
    """Contrast of text on its ground, in the page and in the pictures."""
    shown = show(quantize_report(layers=4), scheme=scheme)
    shown.tab.emulate_media(media=media)
    ratios = shown.tab.evaluate(CONTRASTS)
    assert len(ratios) > 20
    assert {text: ratio for text, ratio in ratios.items() if ratio < 4.5} == {}
    ground = shown.tab.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert (ground == "rgb(15, 20, 25)") == (scheme == "dark" and media == "screen")


#: Text to the contrast that it has, as WCAG counts it.
CONTRASTS = """() => {
  const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (color) => {
    const parts = numbers(color).slice(0, 3).map((one) => one / 255)
      .map((one) => one <= .04045 ? one / 12.92 : ((one + .055) / 1.055) ** 2.4);
    return .2126 * parts[0] + .7152 * parts[1] + .0722 * parts[2];
  };
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = getComputedStyle(at).backgroundColor;
      if (numbers(color)[3] !== 0) return color;
    }
  };
  const found = {};
  for (const element of document.querySelectorAll("h1,h2,h3,p,li,dt,dd,small,td,button,label,svg text")) {
    const text = element.textContent.trim();
    if (!text || !element.getClientRects().length || element.disabled) continue;
    const style = getComputedStyle(element);
    const own = light(element.closest("svg") ? style.fill : style.color);
    const below = light(ground(element));
    const [low, high] = own < below ? [own, below] : [below, own];
    found[element.tagName + " " + text.slice(0, 40)] = (high + .05) / (low + .05);
  }
  return found;
}"""  # noqa: E501


def test_paper_has_headings_on_every_sheet(show, tmp_path):
    shown = show(quantize_report(layers=12))
    pdf = shown.tab.pdf(prefer_css_page_size=True)
    assert pdf.startswith(b"%PDF")
    shown.tab.emulate_media(media="print")
    assert shown.tab.locator(".tools").first.is_hidden()
    assert shown.tab.locator("thead .paper").first.is_visible()
    assert shown.tab.locator("thead button").first.is_hidden()  # else Chromium repeats no heading


def test_hostile_names_are_only_shown(show):
    names = [*HOSTILE, *(f"layers.{at}.{name}" for at, name in enumerate(HOSTILE))]
    tensors = [entry_of(name, (64, 64), 12 + at) for at, name in enumerate(names)]
    report = quantize_report(tensors)
    report["warnings"] = list(HOSTILE)
    report["options"] = {name: name for name in HOSTILE}
    shown = show(report)
    assert shown.tab.locator("img, b:not(#tip b), iframe, object").count() == 0
    assert shown.column(1)[0] == "</script><script>alert(1)</script>"
    assert shown.column(1)[4] == "line\\x0afeed\\x09tab\\x00null\\x1b[31mred"
    for cell in shown.tab.locator("figure .role-mark path").all():
        cell.hover()
    # A name may be as long as it likes: the page is no wider than the window.
    assert shown.tab.evaluate("document.documentElement.scrollWidth") <= WIDE["width"]


@pytest.mark.parametrize("number", [0, 1])
def test_few_tensors(show, number):
    shown = show(quantize_report([entry_of("w", (64, 64), 20.4)] * number))
    assert shown.found() == ("1 tensor" if number else "0 tensors")
    assert shown.tab.locator("#next").is_hidden()


def test_nothing_measured(show):
    report = quantize_report(layers=2)
    for tensor in (*report["tensors"], report["total"]):
        tensor["stats"] = None
    shown = show(report | {"dry_run": True, "target": None})
    assert "no error is known" in shown.tab.locator("section[aria-labelledby=layers]").inner_text()
    assert shown.tab.locator("th", has_text="SQNR").count() == 0


def test_errors_that_are_no_numbers(show):
    tensors = [entry_of(f"layers.{at}.w", (64, 64), 20.0 + at) for at in range(3)]
    tensors[1] |= {"overflow": True, "stats": stats_of(1, 64) | {"sqnr": None, "mse": None}}
    tensors[2] |= {"exact": True, "stats": stats_of(90, 64) | {"sqnr": None}}
    shown = show(quantize_report(tensors[:1]) | {"tensors": tensors})
    shown.tab.get_by_role("button", name="SQNR dB").click()
    assert shown.column(8) == ["not finite", "20.00", "exact"]


@pytest.mark.parametrize("budget", [True, False])
def test_a_survey(show, budget):
    report = survey_report(layers=4, budget=budget)
    shown = show(report, "survey")
    frontier = shown.tab.locator("section[aria-labelledby=frontier]")
    assert ("chosen" in frontier.locator("figure").inner_text()) == budget
    assert shown.found() == "29 tensors"
    shown.tab.locator("#measure").select_option(label="RMS error of mxfp8, %")
    headings = shown.tab.locator("th button").all_inner_texts()
    assert ("Choice" in headings) == budget
    assert "nvfp4+sweep dB" in headings


def test_an_earlier_run(show, tmp_path):
    report, earlier = quantize_report(layers=4), tmp_path / "a.json"
    earlier.write_text(json.dumps(quantize_report(layers=4, seed=5)))
    shown = show(report, "compare", before=read_before(earlier))
    section = shown.tab.locator("section[aria-labelledby=before]")
    assert section.locator("tbody tr").count() == 4
    assert section.locator("figure .mark-symbol path").count() == 28 + 3  # and the key
    assert "Change dB" in shown.tab.locator("th button").all_inner_texts()


# ------------------------------------------------------------------------------------------------
# Pictures of the documentation
# ------------------------------------------------------------------------------------------------

#: Picture to the page, the part of it, the scheme and the size.
PICTURES = {
    "report-summary": ("quantize", "main", "light", (1100, 900)),
    "report-worst": ("quantize", "#worst", "dark", (1100, 700)),
    "report-table": ("quantize", "#tensors", "light", (1100, 420)),
    "report-frontier": ("survey", "#frontier", "light", (1000, 460)),
    "report-before": ("compare", "#before", "dark", (1000, 660)),
}
#: Of the documentation's pictures.
LARGEST = 200_000


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Pages of three commands that were run on a small model."""
    folder = tmp_path_factory.mktemp("model")
    model = folder / "tiny-llama"
    model.mkdir()
    safetensors.numpy.save_file(model_tensors(), model / "model.safetensors", {"format": "pt"})
    (model / "config.json").write_text(json.dumps({"model_type": "llama"}))
    kept = os.getcwd()  # noqa: PTH109 so that the pages show short paths
    os.chdir(folder)
    try:
        plain, better, earlier = "tiny-llama-nvfp4", "tiny-llama-sweep", "nvfp4.json"
        succeed("quantize", model.name, "-o", plain, "--html", "quantize.html", "--report", earlier)
        succeed("quantize", model.name, "-o", better, "--scale-search", "sweep")
        succeed("compare", model.name, better, "--before", earlier, "--html", "compare.html")
        succeed("survey", model.name, "--budget", "5.0", "--html", "survey.html")
    finally:
        os.chdir(kept)
    return folder


@pytest.mark.parametrize("name", PICTURES)
def test_screenshot(chromium, written, tmp_path, name):
    command, part, scheme, (width, height) = PICTURES[name]
    path = written / f"{command}.html"
    tab = chromium.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    shown = Opened(tab, path)
    tab.locator(part).evaluate("part => part.scrollIntoView()")
    picture = Path(os.environ.get("FP4KIT_SCREENSHOTS", tmp_path)) / f"{name}.png"
    tab.screenshot(path=picture)
    shown.check(path)
    tab.close()
    assert picture.stat().st_size < LARGEST
