# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The safetensors container: which headers are refused, agreement with the common package."""

import json

import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError

from fp4kit.errors import FileFormatError
from fp4kit.io.containers import DTYPES
from fp4kit.io.read.open import open_source
from fp4kit.io.read.safetensors import parse_header
from tensor_files import entry, file_bytes


def parse(content):
    return parse_header(content, len(content), "f.safetensors")


def common_reader_accepts(content):
    try:
        safetensors.deserialize(content)
    except SafetensorError:
        return False
    return True


MALFORMED = {
    "empty": (b"", "the file is empty"),
    "short": (b"\x01\x02\x03", "too short"),
    "length zero": (file_bytes(b"", length=0), "header of 0 bytes"),
    "length 2^64-1": (file_bytes({}, length=2**64 - 1), "18446744073709551615 bytes long"),
    "length over 100 MB": (file_bytes({}, length=100_000_001), "at most 100000000"),
    "length beyond the file": (file_bytes({}, length=1000), "truncated: the header takes 1008"),
    "not JSON": (file_bytes(b"{'a': 1}"), "damaged header"),
    "not UTF-8": (file_bytes(b'{"\xff": 1}'), "damaged header"),
    "unpaired surrogate": (file_bytes(b'{"\\ud800": {}}'), "damaged header"),
    "a list": (file_bytes([1, 2]), "no JSON object"),
    "nested too deeply": (file_bytes(b'{"a":' + b"[" * 200_000), "nested too deeply"),
    "NaN": (file_bytes(b'{"a": NaN}'), "NaN is not JSON"),
    "duplicate key": (
        file_bytes(b'{"a":%s,"a":%s}' % ((json.dumps(entry()).encode(),) * 2), bytes(4)),
        "'a' appears twice",
    ),
    "no shape": (file_bytes({"a": {"dtype": "U8"}}), "needs dtype, shape and data_offsets"),
    "entry no object": (file_bytes({"a": 3}), "needs dtype, shape"),
    "unknown dtype (D15)": (
        file_bytes({"a": entry("Q4", (8,), (2**63, 2**63 + 8))}),
        "unknown dtype 'Q4'",
    ),
    "dtype no string": (file_bytes({"a": entry(["U8"])}, bytes(4)), "unknown dtype"),
    "negative size": (file_bytes({"a": entry(shape=(-4,))}, bytes(4)), "not a list of sizes"),
    "fractional size": (file_bytes({"a": entry(shape=(4.0,))}, bytes(4)), "not a list of sizes"),
    "boolean size": (
        file_bytes({"a": entry(shape=(True,), offsets=(0, 1))}, bytes(1)),
        "not a list of sizes",
    ),
    "shape no list": (file_bytes({"a": {**entry(), "shape": 4}}, bytes(4)), "not a list of sizes"),
    "overflow (D14)": (file_bytes({"a": entry(shape=(2**62, 8))}, bytes(4)), "overflows 64 bits"),
    "overflow hidden by 0": (
        file_bytes({"a": entry(shape=(2**62, 8, 0), offsets=(0, 0))}),
        "overflows 64 bits",
    ),
    "size beyond 64 bits": (file_bytes({"a": entry(shape=(2**70,))}), "not a list of sizes"),
    "1000x1000 in 8 bytes (D14)": (
        file_bytes({"a": entry(shape=(1000, 1000), offsets=(0, 8))}, bytes(8)),
        "takes 1000000 bytes, data_offsets [0, 8] hold 8",
    ),
    "odd F4 (D7)": (file_bytes({"a": entry("F4", (3,), (0, 2))}, bytes(2)), "fill whole bytes"),
    "offsets backwards": (file_bytes({"a": entry(offsets=(4, 0))}, bytes(4)), "[begin, end]"),
    "offsets negative": (file_bytes({"a": entry(offsets=(-4, 0))}, bytes(4)), "[begin, end]"),
    "three offsets": (file_bytes({"a": entry(offsets=(0, 4, 4))}, bytes(4)), "[begin, end]"),
    "two names on one range (D14)": (
        file_bytes({"a": entry(), "b": entry()}, bytes(4)),
        "'b': overlaps tensor 'a'",
    ),
    "overlap": (
        file_bytes({"a": entry(), "b": entry(offsets=(2, 6))}, bytes(6)),
        "'b': overlaps tensor 'a'",
    ),
    "hole (D14)": (
        file_bytes({"a": entry(), "b": entry(offsets=(6, 10))}, bytes(10)),
        "'b': leaves a hole of 2 bytes after tensor 'a'",
    ),
    "hole at the start": (
        file_bytes({"a": entry(offsets=(8, 12))}, bytes(12)),
        "leaves a hole of 8 bytes after the header",
    ),
    "cut by 4 bytes (D14)": (file_bytes({"a": entry()}), "truncated: the header describes"),
    "two trailing bytes (D16)": (file_bytes({"a": entry()}, bytes(6)), "2 trailing bytes"),
    "metadata integer (D11)": (file_bytes({"__metadata__": {"steps": 3}}), "'steps' is int"),
    "metadata list": (file_bytes({"__metadata__": []}), "must be an object of strings"),
    "tensor named __metadata__ (D9)": (
        file_bytes({"__metadata__": entry()}, bytes(4)),
        "a tensor is named __metadata__",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_is_refused_with_one_line(case):
    content, fault = MALFORMED[case]
    with pytest.raises(FileFormatError) as caught:
        parse(content)
    message = str(caught.value)
    assert message.startswith("f.safetensors: ")
    assert fault in message
    assert "\n" not in message
    assert len(message) < 400
    # Nothing that the common reader refuses is a matter of taste.
    assert not common_reader_accepts(content) or case in ("duplicate key", "unpaired surrogate")


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_files_are_refused_when_opened(case, tmp_path):
    path = tmp_path / "f.safetensors"
    path.write_bytes(MALFORMED[case][0])
    with pytest.raises(FileFormatError, match=r"f\.safetensors: "):
        open_source(path)


# Shared machines stall at times; only the outcome counts.
fuzz = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@fuzz
@given(st.binary(max_size=200))
def test_any_bytes_parse_or_are_refused(content):
    try:
        parse(content)
    except FileFormatError:
        return


words = st.text("adst\n\u00e9", max_size=3)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=4,
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPES, "Q4"]),
        "shape": st.lists(st.integers(-1, 2**62) | st.integers(0, 4), max_size=3),
        "data_offsets": st.lists(st.integers(0, 40), min_size=2, max_size=2),
    }
)


@fuzz
@given(
    st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), entries | json_values, max_size=3),
    st.integers(0, 40),
)
def test_any_header_parses_or_is_refused_as_the_common_reader_does(header, data):
    content = file_bytes(header, bytes(data))
    try:
        parse(content)
        accepted = True
    except FileFormatError:
        accepted = False
    # Ours may be stricter, never laxer.
    assert not accepted or common_reader_accepts(content)


VALID = file_bytes(
    {"__metadata__": {"k": "v"}, "a": entry(), "b": entry("BF16", (2, 2), (4, 12))}, bytes(12)
)


@fuzz
@given(st.integers(0, len(VALID) - 1), st.binary(min_size=1, max_size=3))
def test_a_damaged_header_parses_or_is_refused_as_the_common_reader_does(position, patch):
    content = VALID[:position] + patch + VALID[position + len(patch) :]
    try:
        parse(content)
    except FileFormatError:
        return
    assert common_reader_accepts(content)


@pytest.mark.parametrize("value", [None, {}])
def test_empty_metadata_counts_as_absent(value):
    header = parse(file_bytes({"__metadata__": value, "a": entry()}, bytes(4)))
    assert header.metadata == {}
    assert list(header.tensors) == ["a"]
