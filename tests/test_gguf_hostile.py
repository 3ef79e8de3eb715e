# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""GGUF headers written to do harm: one short line, before memory is spent."""

import struct
import time
import tracemalloc

import numpy as np
import pytest

import fp4kit
from fp4kit.errors import FileFormatError
from fp4kit.io import gguf_rules
from fp4kit.io.read.files import InputFile
from fp4kit.io.read.gguf_header import MAX_ENTRIES, parse_header
from fp4kit.io.read.open import open_source
from fuzzing import damage_bytes, fuzz
from gguf_models import weights, write_model
from tensor_files import read_one

MORE = [pytest.param(1, id="some"), pytest.param(100, id="many", marks=pytest.mark.slow)]


def text(value):
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def entry(key, kind, data):
    return text(key) + struct.pack("<I", kind) + data


def tensor(name="w", shape=(4,), kind=0, offset=0):
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    return text(name) + dims + struct.pack("<IQ", kind, offset)


def content(entries=(), tensors=(), data=b"", *, counts=None, version=3, alignment=32):
    made = counts or (len(tensors), len(entries))
    head = b"GGUF" + struct.pack("<IQQ", version, *made) + b"".join([*entries, *tensors])
    return head + bytes(-len(head) % alignment) + data


def fault(data, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(FileFormatError) as caught:
        open_source(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    assert len(message) < 500
    return message.removeprefix(f"{path}: ")


W = bytes(16)
HUGE = 2**63
ALIGNMENT = "general.alignment"
FAULTS = {
    "nothing after the magic": (b"GGUF", "not a GGUF file, or cut off"),
    "version 1": (content(version=1), "version 1 of GGUF; versions 2 and 3 are read"),
    "big-endian": (content(version=3 << 24), "it is big-endian"),
    "tensors": (content(counts=(2**40, 0)), "holds 1099511627776 tensors; at most"),
    "entries": (content(counts=(0, MAX_ENTRIES + 1)), f"holds {MAX_ENTRIES + 1} entries; at most"),
    "fewer tensors": (content(counts=(3, 0)), "goes on beyond the end of the file"),
    "fewer entries": (content(counts=(0, 9)), "metadata entry 0 has no name"),
    "key": (content([struct.pack("<Q", HUGE)]), "the name of metadata entry 0 would be"),
    "empty key": (content([entry("", 0, b"x")]), "metadata entry 0 has no name"),
    "key of bytes": (content([entry(b"\xff\xfe", 0, b"x")]), "metadata entry 0 is no UTF-8"),
    "key twice": (content([entry("k", 0, b"x")] * 2), "metadata 'k' appears twice"),
    "type": (content([entry("k", 77, b"x")]), "metadata 'k': has type 77"),
    "text": (content([entry("k", 8, struct.pack("<Q", HUGE))]), "its text would be 9223372036"),
    "text of bytes": (content([entry("k", 8, text(b"\xff"))]), "its text is no UTF-8"),
    "nested": (content([entry("k", 9, struct.pack("<IQ", 9, 1))]), "an array of arrays"),
    "array type": (content([entry("k", 9, struct.pack("<IQ", 55, 1))]), "array of type 55"),
    "array": (content([entry("k", 9, struct.pack("<IQ", 4, 2**61))]), "array of 23058430092136"),
    "texts": (content([entry("k", 9, struct.pack("<IQ", 8, 2**40))]), "array of 1099511627776"),
    "text in array": (
        content([entry("k", 9, struct.pack("<IQ", 8, 1) + struct.pack("<Q", HUGE))]),
        "beyond the end of the file",
    ),
    "alignment 0": (content([entry(ALIGNMENT, 4, bytes(4))]), "general.alignment is 0"),
    "alignment 48": (content([entry(ALIGNMENT, 4, b"\x30\0\0\0")]), "a power of two as uint32"),
    "alignment of text": (content([entry(ALIGNMENT, 8, text("32"))]), "general.alignment is '32'"),
    "alignment beyond": (
        content([entry(ALIGNMENT, 4, struct.pack("<I", 1 << 31))], [tensor()], W),
        "truncated: its tensors end at byte",
    ),
    "long name": (content((), [tensor("n" * 64)], W), "its name is longer than 63 bytes"),
    "name of bytes": (content((), [tensor(b"\xff")], W), "the name of tensor 0 is no UTF-8"),
    "dimensions": (content((), [tensor(shape=(1,) * 5)], W), "has 5 dimensions; at most 4"),
    "many dimensions": (
        content((), [text("w") + struct.pack("<I", 2**32 - 1)], W),
        "has 4294967295 dimensions",
    ),
    "overflow": (content((), [tensor(shape=(2**40, 2**40))], W), "overflows 64 bits"),
    "overflow behind 0": (content((), [tensor(shape=(0, 2**63, 2**63))], W), "overflows 64 bits"),
    "no type": (content((), [tensor(kind=4)], W), "its type 4 is not known here"),
    "part of a block": (content((), [tensor(shape=(2, 48), kind=40)], W), "whole blocks of 64"),
    "twice": (content((), [tensor(), tensor(offset=32)], bytes(64)), "two tensors are named 'w'"),
    "hole": (content((), [tensor(offset=32)], bytes(64)), "begins at 32, 0 is expected"),
    "overlap": (content((), [tensor(), tensor("v")], bytes(64)), "'v': begins at 0, 32 is exp"),
    "offset": (content((), [tensor(offset=2**64 - 32)], W), "begins at 18446744073709551584"),
    "truncated": (content((), [tensor()], W[:-1]), "truncated: its tensors end at byte"),
    "trailing": (content((), [tensor()], bytes(33)), "17 trailing bytes after the last tensor"),
    "parts of one": (
        content((), [tensor("w", (1, 64), 40), tensor("w_packed", offset=64)], bytes(96)),
        "two tensors would be read under the name 'w_packed'",
    ),
    "parts of one, before": (
        content((), [tensor("w_scale"), tensor("w", (1, 64), 40, offset=32)], bytes(96)),
        "two tensors would be read under the name 'w_scale'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FAULTS)
def test_faults_are_short(case, tmp_path):
    data, message = FAULTS[case]
    assert message in fault(data, tmp_path)


@pytest.mark.parametrize("alignment", [1, 8, 64, 4096])
def test_other_alignments_are_read(alignment, tmp_path):
    path = tmp_path / "m.gguf"
    step = -(-16 // alignment) * alignment
    said = entry(ALIGNMENT, 4, struct.pack("<I", alignment))
    made = [tensor(), tensor("v", offset=step)]
    path.write_bytes(content([said], made, bytes(step) + bytes(range(16)), alignment=alignment))
    with open_source(path) as source:
        assert read_one(source, "v") == bytes(range(16))


def test_memory_and_time_are_bounded(tmp_path):
    path = tmp_path / "m.gguf"
    texts = struct.pack("<IQ", 8, 1_000_000) + bytes(8_000_000)
    path.write_bytes(content([entry("k", 9, texts)]) + bytes(1))
    started = time.process_time()
    tracemalloc.start()
    with InputFile(path) as file:
        assert parse_header(file).entries["k"].value == "1000000 of string"
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 * path.stat().st_size
    assert time.process_time() - started < 5


def test_an_array_of_the_rest_of_a_sparse_file_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry("k", 9, struct.pack("<IQ", 0, 2**37))
    path.write_bytes(head)
    with path.open("r+b") as file:
        file.truncate(2**38)
    tracemalloc.start()
    with InputFile(path) as file, pytest.raises(FileFormatError, match="takes more than 100000000"):
        parse_header(file)
    assert tracemalloc.get_traced_memory()[1] < 1 << 22
    tracemalloc.stop()


@pytest.mark.parametrize("times", MORE)
def test_damaged_files(times, tmp_path):
    """Whatever the damage, a file is read whole or refused in one line."""
    path = tmp_path / "m.gguf"
    small = {name: array[..., :64] for name, array in weights(layers=1).items()}
    fp4kit.quantize_file(write_model(tmp_path / "source.gguf", small), path)
    whole = path.read_bytes()
    header = whole.index(b"output.weight") + 60

    def case(rng):
        head = damage_bytes(rng, whole[:header], rng.choice([1, 1, 2, 4]))
        path.write_bytes(head + whole[header:])
        with fp4kit.open(path) as tensors:
            for name in tensors:
                np.asarray(tensors[name])
        assert all("\n" not in fault for fault in fp4kit.verify(path).faults)

    fuzz("gguf header", 300 * times, case)


def test_every_cut_of_a_file_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    small = {"blk.0.attn_q.weight": np.ones((2, 64), np.float32)}
    whole = write_model(path, small).read_bytes()
    for length in (*range(0, len(whole) - 200, 97), *range(len(whole) - 200, len(whole) - 1)):
        path.write_bytes(whole[:length])
        with pytest.raises(FileFormatError) as caught:
            open_source(path)
        assert "\n" not in str(caught.value)


def test_the_table_of_scales_is_sound():
    table = gguf_rules._scales()
    assert len(table) > 100
    known = {name for found in table.values() for name in found}
    assert {"attn_q", "ffn_down", "ffn_down_exps", "output"} <= known
    assert all(name.replace("_", "").isalnum() for name in known)
