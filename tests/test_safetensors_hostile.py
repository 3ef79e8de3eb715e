# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Headers written to do harm: one short line, before memory is spent."""

from __future__ import annotations

import json
import time
import tracemalloc

import pytest

from fp4kit.errors import FileFormatError
from fp4kit.io.containers import TensorSpec
from fp4kit.io.read import safetensors
from fp4kit.io.read.open import open_source
from fp4kit.io.read.safetensors import parse_header
from fp4kit.io.write import safetensors as write_safetensors
from fp4kit.io.write.safetensors import SafetensorsWriter, build_header
from tensor_files import entry, file_bytes

LONG = 1_000_000


def fault(header, data=b""):
    content = file_bytes(header, data)
    with pytest.raises(FileFormatError) as caught:
        parse_header(content, len(content), "f.safetensors")
    text = str(caught.value)
    assert text.startswith("f.safetensors: ")
    assert "\n" not in text
    assert len(text) < 500
    return text.removeprefix("f.safetensors: ")


NAME = "n" * LONG
FAULTS = {
    "name without facts": ({NAME: 1}, "needs dtype, shape and data_offsets"),
    "name with a wrong type": ({NAME: entry("X")}, "unknown dtype 'X'"),
    "name with a hole": (
        {NAME: entry(offsets=(4, 8))},
        "leaves a hole of 4 bytes after the header",
    ),
    "two names": ({NAME: entry(), NAME + "x": entry(offsets=(3, 7))}, "overlaps tensor 'nnn"),
    "dtype": ({"w": entry("D" * LONG)}, "unknown dtype 'DDD"),
    "dtype in a list": ({"w": {**entry(), "dtype": ["D" * LONG] * 3}}, "unknown dtype ['DDD"),
    "dims": ({"w": entry(shape=[1] * LONG)}, "has 1000000 dimensions"),
    "zeros": ({"w": entry(shape=[0] * LONG)}, "at most 1000 are read"),
    "1000 dims": ({"w": entry(shape=[1] * 1000)}, "takes 1 bytes"),
    "sizes": ({"w": entry(shape=[10**4000] * 3)}, "is not a list of sizes"),
    "shape of text": ({"w": {**entry(), "shape": "9" * LONG}}, "is not a list of sizes"),
    "offsets": ({"w": entry(offsets=[0] * LONG)}, "are not [begin, end]"),
    "metadata": ({"__metadata__": {"k" * LONG: 1}}, "metadata value of 'kkk"),
    "deep": (b'{"w":' + b"[" * LONG + b"]" * LONG + b"}", "nested too deeply"),
    "deep metadata": (b'{"__metadata__":' + b'{"":' * 200 + b"1" + b"}" * 201, "nested too deeply"),
    "twice": (f'{{"{NAME}":1,"{NAME}":2}}'.encode(), "appears twice"),
    "constant": (b'{"w": NaN}', "NaN is not JSON"),
    "huge number": (b'{"w": ' + b"9" * 5000 + b"}", "damaged header"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_faults_are_short(case):
    header, message = FAULTS[case]
    assert message in fault(header)


def test_metadata_that_looks_like_a_tensor():
    texts = dict.fromkeys(("dtype", "shape", "data_offsets"), "text")
    content = file_bytes({"__metadata__": texts})
    assert parse_header(content, len(content), "f").metadata == texts
    assert "reserves" in fault({"__metadata__": entry(shape=(0,), offsets=(0, 0))})
    assert "must be a string" in fault({"__metadata__": {**texts, "shape": [1]}})
    assert "must be a string" in fault({"__metadata__": {**texts, "dtype": 1}})
    # The header itself, as an object of these keys.
    content = file_bytes(dict.fromkeys(texts, entry(shape=(0,), offsets=(0, 0))))
    assert set(parse_header(content, len(content), "f").tensors) == set(texts)


def test_members_of_an_entry_in_any_order_and_number():
    whole = {"note": [1, {}], **dict(reversed(entry().items()))}
    content = file_bytes({"w": whole}, b"abcd")
    assert parse_header(content, len(content), "f").tensors["w"][0] == TensorSpec("w", "U8", (4,))


def many(count, nbytes=0):
    """A header of small tensors, as text."""
    lines = (
        f'"model.layers.{i}.weight":{{"dtype":"U8","shape":[1,{nbytes}],'
        f'"data_offsets":[{i * nbytes},{(i + 1) * nbytes}]}}'
        for i in range(count)
    )
    return ("{" + ",".join(lines) + "}").encode()


def test_the_number_of_tensors_is_bounded(monkeypatch, tmp_path):
    monkeypatch.setattr(safetensors, "MAX_TENSORS", 100)
    monkeypatch.setattr(write_safetensors, "MAX_TENSORS", 100)
    assert "holds 101 tensors; at most 100 are read from one file: split" in fault(many(101))
    content = file_bytes(many(100))
    assert len(parse_header(content, len(content), "f").tensors) == 100
    specs = [TensorSpec(f"w{i}", "U8", (0,)) for i in range(101)]
    with pytest.raises(FileFormatError, match="101 tensors are too many for one file"):
        build_header(specs, {}, "f")
    path = tmp_path / "f.safetensors"
    with SafetensorsWriter(path, specs[:100], {}) as writer:
        writer.finish()
    with open_source(path) as source:
        assert len(source.tensors) == 100


def test_headers_of_more_values_are_refused_before_they_are_built(monkeypatch):
    monkeypatch.setattr(safetensors, "_MAX_VALUES", 1_000_000)
    content = file_bytes(b'{"w":[' + b"[]," * 1_000_000 + b"1]}")
    tracemalloc.start()
    try:
        with pytest.raises(FileFormatError, match="damaged header: holds 2000003 values; at most"):
            parse_header(content, len(content), "f")
        assert tracemalloc.get_traced_memory()[1] < 5 * len(content)
    finally:
        tracemalloc.stop()


def test_time_and_memory_of_many_tensors():
    """The promise: a kilobyte a tensor, and time that grows with their number."""
    took = []
    for count in (1_000, 10_000):
        content = file_bytes(many(count, 2), bytes(2 * count))
        tracemalloc.start()
        started = time.process_time()
        header = parse_header(content, len(content), "f")
        took.append((time.process_time() - started) / count)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(header.tensors) == count
        assert peak < 1024 * count
    assert took[1] < 5 * took[0] + 1e-4


def test_order_of_the_file_and_of_empty_tensors():
    header = {
        "b": entry(shape=(2,), offsets=(2, 4)), "e2": entry(shape=(0,), offsets=(2, 2)),
        "a": entry(shape=(2,), offsets=(0, 2)), "e1": entry(shape=(0,), offsets=(2, 2)),
        "e0": entry(shape=(0,), offsets=(0, 0)),
    }  # fmt: skip
    content = file_bytes(header, b"wxyz")
    tensors = parse_header(content, len(content), "f").tensors
    assert list(tensors) == ["e0", "a", "e2", "e1", "b"]
    first = content.index(b"wxyz")
    assert [at - first for _, at in tensors.values()] == [0, 0, 2, 2, 2]
    assert json.loads(content[8:first]) == header
