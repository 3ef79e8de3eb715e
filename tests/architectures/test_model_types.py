# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Every model type of the installed transformers, quantized, verified, decoded and loaded.

A type that is new, or behaves otherwise than `expected` says, fails: also one that can be built,
quantized or read all of a sudden. Without `-m ""`, a fixed part of all types runs.
"""

from __future__ import annotations

import contextlib
import importlib

import pytest

from fp4kit.checkpoint.models.reader_faults import KNOWN

pytest.importorskip("torch", reason="the peers extra is not installed")
pytest.importorskip("compressed_tensors", reason="the peers extra is not installed")
transformers = pytest.importorskip("transformers", reason="the peers extra is not installed")

# Their own deprecations are not ours to fix.
pytestmark = pytest.mark.filterwarnings("ignore")

expected = importlib.import_module("expected")
model_types = importlib.import_module("model_types")
round_trips = importlib.import_module("round_trip")
CLASSES = model_types.class_names()


def by_share():
    """Every type; those that CI leaves out are marked as slow."""
    for model_type in CLASSES:
        marks = () if model_types.in_share(model_type) else (pytest.mark.slow,)
        yield pytest.param(model_type, marks=marks)


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    """Nothing need survive a power cut, and progress bars of transformers are not looked at."""
    monkeypatch.setattr("os.fsync", lambda fd: None)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.mark.parametrize("model_type", list(by_share()))
def test_model_type(model_type, tmp_path):
    check(model_type, "mxfp4", tmp_path)


@pytest.mark.parametrize("model_type", [name for name in CLASSES if model_types.in_sample(name)])
def test_model_type_in_nvfp4(model_type, tmp_path):
    """Its second-level scale too; where experts are stored one by one, transformers drops it."""
    check(model_type, "nvfp4", tmp_path)


def check(model_type, format_name, tmp_path):
    """A model type through a format and back."""
    unbuildable = model_type in expected.UNBUILDABLE
    # What a model type raises that cannot be built is its own choice.
    raised = pytest.raises(Exception) if unbuildable else contextlib.nullcontext()  # noqa: PT011
    with raised:
        model, source = round_trips.save(model_type, CLASSES[model_type], tmp_path)
    if unbuildable:
        return
    result = round_trips.round_trip(model, source, format_name)
    assert (result.quantized == 0) == (model_type in expected.NOTHING_QUANTIZED)
    faults = "\n".join(map(str, result.faults))
    if result.known:
        assert {fault.stage for fault in result.faults} == {"out"}, faults or result.known
        return
    assert not faults, faults
    if result.quantized:
        assert result.computed or model_type in expected.NOT_COMPUTED


def test_what_is_expected_is_of_known_types():
    tables = (
        expected.UNBUILDABLE,
        expected.NOTHING_QUANTIZED,
        expected.NOT_COMPUTED,
    )
    for table in (*tables, KNOWN):
        assert not set(table) - set(CLASSES)
