# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The variants in plain torch that benchmarks time beside fp4kit: they compute the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import fp4kit
from fp4kit import bench
from fp4kit.formats import E2M1

torch = pytest.importorskip("torch")
BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def modules():
    """(torch_references, torch_cases, variant_cases) of the folder of scripts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import torch_cases
        import torch_references
        import variant_cases

        yield torch_references, torch_cases, variant_cases


@pytest.fixture(scope="module")
def inputs(modules):
    machine = bench.open_machine("cpu")
    return modules[2].Inputs(machine, machine.random(256, 512, "bfloat16"))


def test_codes_of_every_kind_of_value(modules):
    """Ties, ends of binades, what is too large, and both zeros: as the formats say."""
    references = modules[0]
    values = np.arange(-8, 8.0625, 0.0625, np.float32)
    values = np.concatenate([values, np.array([-0.0, 1e-30, -1e-30], np.float32)])
    expected = fp4kit.reference.codecs.encode(values, E2M1)
    codes = references.nearest_codes(torch.from_numpy(values))
    np.testing.assert_array_equal(codes.numpy(), expected)
    decoded = references.code_values(codes).numpy()
    np.testing.assert_array_equal(decoded, fp4kit.reference.codecs.decode(expected, E2M1))
    whole = references.stochastic_codes(torch.from_numpy(decoded))
    np.testing.assert_array_equal(whole.numpy(), expected)


def test_stochastic_codes_have_the_right_mean(modules):
    references = modules[0]
    torch.manual_seed(0)
    for value in (0.3, 1.2, 2.25, 5.5):
        codes = references.stochastic_codes(torch.full((100_000,), value))
        mean = float(references.code_values(codes).mean())
        assert mean == pytest.approx(value, abs=0.01)


def test_references_agree(modules, inputs):
    names = []
    for reference in modules[1].all_references(inputs):
        result = reference.function(*reference.arguments)
        found = reference.agreement(result, *reference.ours)
        assert found > 0.9995, reference.name
        if reference.name in ("quantize rows", "quantize columns"):
            assert found == 1
        names.append(reference.name)
    assert len(names) == 6
    assert set(names) <= {name for name, _ in modules[2].builders(inputs)}


def test_wrong_results_are_not_timed(modules, inputs, monkeypatch):
    _, torch_cases, _ = modules
    monkeypatch.setattr(torch_cases.references, "SIGN_MASK", 0)
    skipped = {}
    cases = list(
        torch_cases.reference_cases(inputs, lambda name: "compiled" not in name, None, skipped)
    )
    assert len(cases) == 4
    for name in ("quantize rotated columns", "hadamard_transform rowwise"):
        assert "of its results agree" in skipped[f"torch eager: {name}"]


def test_without_a_compiler_the_reason_is_kept(modules, inputs):
    _, torch_cases, _ = modules
    skipped = {}
    cases = torch_cases.reference_cases(
        inputs, lambda name: name == "torch compiled: quantize rows", "no compiler", skipped
    )
    assert list(cases) == []
    assert skipped == {"torch compiled: quantize rows": "no compiler"}


def test_agreement_sees_differences(modules):
    references = modules[0]
    codes = torch.arange(256, dtype=torch.uint8)
    scales = torch.full((16,), 0x38, dtype=torch.uint8)
    same = codes, scales.view(torch.float8_e4m3fn)
    assert references.equal_share(same, codes, scales) == 1
    assert references.neighbour_share(same, codes, scales) == 1
    other = codes ^ 0x10
    assert references.equal_share(same, other, scales) == 0.5
    assert references.neighbour_share(same, other, scales) == 1
    assert references.neighbour_share(same, codes ^ 0x80, scales) == 0.5
    assert references.equal_share(same, codes, scales ^ 1) == 0
