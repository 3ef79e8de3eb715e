# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""JSON of strangers: strict, and bounded in count and depth before anything is built."""

from __future__ import annotations

import json
import math
import tracemalloc

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from fp4kit.errors import Fp4kitError, brief
from fp4kit.io.read import json_text
from fp4kit.io.read.json_text import strict_json

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('a"\\[]{},:é\n'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text('k"\\[{,'), inner),
)


def size_and_depth(value):
    """Separators and brackets of a document, and how deep it goes, from what was parsed."""
    if not isinstance(value, (list, dict)):
        return 0, 0
    members = list(value.values()) if isinstance(value, dict) else value
    inside = [size_and_depth(member) for member in members]
    colons = len(value) if isinstance(value, dict) else 0
    own = 1 + colons + max(len(members) - 1, 0)
    return own + sum(size for size, _ in inside), 1 + max((d for _, d in inside), default=0)


@settings(deadline=None)
@given(json_values, st.booleans(), st.sampled_from([1, 7, 1 << 20]))
def test_values_and_depth_are_counted_outside_of_strings(value, ascii_only, chunk):
    text = json.dumps(value, ensure_ascii=ascii_only)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_text, "_CHUNK", chunk)
        count, depth = size_and_depth(value)
        assert json_text._measure(text.encode()) == (count, depth)
        assert strict_json(text, max_values=count, max_depth=depth) == value
        if count > 0:
            with pytest.raises(ValueError, match="at most"):
                strict_json(text, max_values=count - 1)
            with pytest.raises(ValueError, match="nested too deeply"):
                strict_json(text, max_depth=depth - 1)


@pytest.mark.parametrize(
    "text",
    [b"[" + b"[]," * 3_000_000 + b"1]", b"[" * 3_000_000, b'{"a":[' + b"1," * 3_000_000 + b"1]}"],
    ids=["lists", "depth", "numbers"],
)
def test_floods_are_refused_before_they_are_built(text):
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="at most 2000000 are read"):
            strict_json(text)
        assert tracemalloc.get_traced_memory()[1] < 3 * len(text)
    finally:
        tracemalloc.stop()


def test_depth_is_bounded_whatever_the_stack():
    with pytest.raises(ValueError, match="nested too deeply: 129 levels, at most 128 are read"):
        strict_json("[" * 129 + "]" * 129)
    assert strict_json("[" * 128 + "]" * 128)


def test_constants_only_where_asked():
    assert strict_json('{"a": Infinity, "b": [-Infinity]}', constants=True) == {
        "a": math.inf,
        "b": [-math.inf],
    }
    assert math.isnan(strict_json("NaN", constants=True))
    for constant in ("NaN", "Infinity", "-Infinity"):
        with pytest.raises(ValueError, match=f"^{constant} is not JSON$"):
            strict_json(f"[{constant}]")


@pytest.mark.parametrize("text", [b'"\xed\xa0\x80"', '"\\ud800"', '"\ud800\\ud800"', b"\xff"])
def test_unpaired_surrogates_and_other_encodings_are_refused(text):
    with pytest.raises(ValueError, match="codec can't"):
        strict_json(text)


def test_surrogate_pairs_are_characters():
    assert strict_json('"\\ud83d\\ude00"') == "\U0001f600"


def test_a_key_that_appears_twice_is_named_briefly():
    key = "k" * 1_000_000
    with pytest.raises(ValueError, match=r"^the key 'k+\.{3}k+' appears twice$") as caught:
        strict_json(f'{{"{key}": 1, "b": 2, "{key}": 3}}')
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("value", ["x" * 10**6, b"x" * 10**6, [1] * 10**6, (None,) * 10**6])
def test_values_in_messages_are_cut_in_the_middle(value):
    text = brief(value)
    assert len(text) <= 100
    assert "..." in text
    assert brief(value[:3]) == repr(value[:3])


def test_no_message_is_longer_than_a_screen():
    text = str(Fp4kitError(f"first {'x' * 10**6} last"))
    assert len(text) == 4000
    assert text.startswith("first ")
    assert text.endswith(" last")
    assert str(Fp4kitError("short")) == "short"
