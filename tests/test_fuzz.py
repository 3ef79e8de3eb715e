# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Damaged files of every container: read as others read them, or refused in one line."""

from __future__ import annotations

import io
import json
import warnings
import zipfile

import numpy as np
import pytest
import safetensors

from fp4kit.io.containers import DTYPES
from fp4kit.io.dequantize import dequantize_file
from fp4kit.io.metadata import METADATA_KEY, find_quantized
from fp4kit.io.quantize import QuantizeOptions, quantize_file
from fp4kit.io.read import safetensors as reader
from fp4kit.io.read.npy import RECORD_MEMBER
from fp4kit.io.read.open import open_source
from fp4kit.scheme import Scheme
from fuzzing import NeverUnpickled, as_text, damage_bytes, damage_values, fuzz
from tensor_files import file_bytes, random_array, read_one, save

MORE = [pytest.param(1, id="some"), pytest.param(100, id="many", marks=pytest.mark.slow)]


# ------------------------------------------------------------------------------------------------
# safetensors
# ------------------------------------------------------------------------------------------------


def random_header(rng):
    """A valid header and the bytes that it describes."""
    header, at = {}, 0
    if rng.random() < 0.3:
        header["__metadata__"] = {"format": "pt", "k": "v"}
    for number in range(rng.randrange(5)):
        code = rng.choice(sorted(DTYPES))
        shape = [rng.choice([0, 1, 2, 3, 8, 40]) for _ in range(rng.randrange(4))]
        if DTYPES[code].bits < 8:
            shape.append(8)
        size = int(np.prod(shape, dtype=np.int64)) * DTYPES[code].bits // 8
        name = rng.choice(["w", "a.b", "é", "x y", ""]) + str(number)
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    return header, at


def officially(content):
    """What the official package reads, None if it refuses."""
    try:
        return dict(safetensors.deserialize(content))
    except safetensors.SafetensorError:
        return None


@pytest.mark.parametrize("times", MORE)
def test_safetensors_headers(times):
    read = [0, 0]

    def case(rng):
        header, size = random_header(rng)
        text = as_text(rng, damage_values(rng, header, rng.choice([0, 0, 1, 1, 2, 4])))
        text = damage_bytes(rng, text, rng.choice([0, 0, 0, 1, 3]))
        length = len(text)
        if rng.random() < 0.1:
            length = rng.choice([0, 1, 2, length - 1, length + 1, 2**32, 2**63, 2**64 - 1])
        data = rng.randbytes(max(size + rng.choice([0, 0, 0, 0, -1, 1]), 0))
        content = length.to_bytes(8, "little") + text + data
        parsed = reader.parse_header(content, len(content), "f.safetensors")
        read[0] += 1
        for spec, start in parsed.tensors.values():
            assert 8 <= start <= start + spec.nbytes <= len(content)
        official = officially(content)
        if official is not None:
            read[1] += 1
            assert {
                name: (spec.dtype, spec.shape, content[start : start + spec.nbytes])
                for name, (spec, start) in parsed.tensors.items()
            } == {
                name: (facts["dtype"], tuple(facts["shape"]), bytes(facts["data"]))
                for name, facts in official.items()
            }

    fuzz("safetensors", 600 * times, case)
    assert read[1] > 50 * times


# ------------------------------------------------------------------------------------------------
# fp4kit's metadata
# ------------------------------------------------------------------------------------------------


def split(path):
    """(header, bytes of the tensors) of a file."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


@pytest.mark.parametrize("times", MORE)
def test_metadata_blocks(times, tmp_path):
    source = save(tmp_path / "s.safetensors", {name: random_array((4, 64)) for name in "ab"})
    files = []
    for number, options in enumerate(
        [{}, {"format": "mxfp8"}, {"scale_layout": "swizzled_128x4"}, {"scale_search": "sweep"}]
    ):
        path = tmp_path / f"q{number}.safetensors"
        quantize_file(source, path, QuantizeOptions(Scheme(**options)))
        files.append(split(path))
    read = [0]
    path, target = tmp_path / "f.safetensors", tmp_path / "t.npz"

    def case(rng):
        header, data = files[rng.randrange(len(files))]
        facts = json.loads(header["__metadata__"][METADATA_KEY])
        text = as_text(rng, damage_values(rng, facts, rng.choice([0, 1, 1, 1, 2, 3])))
        text = damage_bytes(rng, text, rng.choice([0, 0, 0, 0, 1])).decode(errors="replace")
        metadata = {**header["__metadata__"], METADATA_KEY: text}
        tensors = {name: value for name, value in header.items() if name != "__metadata__"}
        if rng.random() < 0.2:
            tensors = damage_values(rng, tensors, 1)
            if not isinstance(tensors, dict):
                return
        path.write_bytes(file_bytes({"__metadata__": metadata, **tensors}, data))
        with open_source(path) as opened:
            entries = find_quantized(opened)
        for entry in entries:
            assert all(part.name in tensors for part in entry.parts)
        if rng.random() < 0.2:
            dequantize_file(path, target, "float32", force=True)
            with np.load(target) as loaded:
                assert {entry.name for entry in entries} <= set(loaded.files)
            read[0] += 1

    fuzz("metadata", 250 * times, case)
    assert read[0] > 5 * times


# ------------------------------------------------------------------------------------------------
# NumPy's containers
# ------------------------------------------------------------------------------------------------

DESCRS = ["<f4", ">f4", "<f2", "|u1", "|b1", "<i8", ">i2", "<c8", "<V2", "|V1", "=f4", "<f8", "|O",
          "<U3", "|S2", "<M8[s]", "<f16", "<c16", "=<f8", "<<f4", "f4", "<f1"]  # fmt: skip


#: What becomes of a header's text.
EDITS = [
    ("'descr'", "'shape'"), ("True", "1"), ("False", "None"), ("(", "(("), (")", ",)"),
    ("0", "0x0"), ("1", "-1"), ("2", "9" * 5000), ("3", "0x" + "f" * 5000), ("7", "2**3"),
    ("7", "True"), (":", ""), ("'<", "b'<"), ("4", "\\d"), (" ", "\0"), ("<", "<<"),
    ("}", ", 'x': 1}"), ("'", '"""'), ("7", "1_0"), ("7", "7L"), ("1", "1.0"),
]  # fmt: skip


def random_npy(rng, *, damaged):
    """A stored array in any order."""
    descr, order = rng.choice(DESCRS), rng.random() < 0.4
    shape = tuple(rng.choice([0, 1, 2, 3, 7]) for _ in range(rng.randrange(5)))
    if descr == "|O" and damaged:
        stream = io.BytesIO()
        np.save(stream, np.array([NeverUnpickled()], object), allow_pickle=True)
        return stream.getvalue()
    size = {"|O": 8, "<U3": 12, "<M8[s]": 8, "=<f8": 8, "<<f4": 4}.get(descr)
    size = int("".join(filter(str.isdigit, descr))) if size is None else size
    data = rng.randbytes(int(np.prod(shape, dtype=np.int64)) * size)
    text = repr({"descr": descr, "fortran_order": order, "shape": shape})
    major, more = 1, 0
    if damaged:
        for _ in range(rng.choice([0, 1, 2])):
            text = text.replace(*rng.choice(EDITS), 1)
        major, more = rng.choice([1, 1, 1, 2, 3, 0, 9]), rng.choice([0] * 12 + [1, -1, 60_000])
        data += rng.choice([b"", b"", b"x"])
    header = damage_bytes(rng, text.encode("latin-1"), rng.choice([0, 1, 2]) if damaged else 0)
    start = b"\x93NUMPY" + bytes([major, 0])
    length = max(len(header) + more, 0)
    return start + length.to_bytes(2 if major < 2 else 4, "little") + header + data


def check_against_numpy(opened, name, array):
    """Bytes as NumPy loads them, in C order and little-endian."""
    tensor = opened.tensors[name]
    if array.dtype.kind == "V":
        array = array.view(np.uint8) if array.dtype.itemsize == 1 else array
    little = array.astype(array.dtype.newbyteorder("<")) if array.dtype.kind != "V" else array
    assert tensor.spec.shape == array.shape
    assert read_one(opened, name) == little.tobytes()


def load(path):
    """What NumPy loads, None if it refuses; its header parser warns of escapes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return np.load(path, allow_pickle=False)
        except (ValueError, TypeError, EOFError, SyntaxError, KeyError, OSError, OverflowError):
            return None


@pytest.mark.parametrize("times", MORE)
def test_npy(times, tmp_path):
    path, read = tmp_path / "w.npy", [0]

    def case(rng):
        path.write_bytes(random_npy(rng, damaged=rng.random() < 0.7))
        with open_source(path, rng.choice([None, "bfloat16"])) as opened:
            array = load(path)
            if array is not None:
                check_against_numpy(opened, "w", array)
                read[0] += 1

    fuzz("npy", 600 * times, case)
    assert read[0] > 50 * times


MEMBERS = ["w.npy", "a/b.npy", "é.npy", "x", ".npy", "w.npy.npy", "../up.npy", "folder/", "1.npy",
           f"{RECORD_MEMBER}.npy", RECORD_MEMBER, "w\0.npy"]  # fmt: skip


def random_record(rng):
    """A record of element types, damaged."""
    entries = {"w": {"dtype": "bfloat16", "shape": [2, 3]}, "1": {"dtype": "uint8", "shape": [7]}}
    record = damage_values(rng, {"version": 1, "tensors": entries}, rng.choice([0, 1, 2]))
    stream = io.BytesIO()
    np.save(stream, np.array(as_text(rng, record).decode("utf-8", "replace")))
    return stream.getvalue()


@pytest.mark.parametrize("times", MORE)
def test_npz(times, tmp_path):
    path, read = tmp_path / "w.npz", [0]

    def case(rng):
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w") as archive:
            for name in rng.sample(MEMBERS, rng.randrange(1, 5)):
                method = rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
                content = random_npy(rng, damaged=rng.random() < 0.1)
                if name.startswith("__"):
                    content = random_record(rng)
                archive.writestr(zipfile.ZipInfo(name), content, method)
        path.write_bytes(damage_bytes(rng, stream.getvalue(), rng.choice([0, 0, 0, 1, 2])))
        with open_source(path) as opened:
            data = {
                name: read_one(opened, name)
                for name, tensor in opened.tensors.items()
                if tensor.readable
            }
            archive = load(path)
            if archive is None or f"{RECORD_MEMBER}.npy" in archive.zip.namelist():
                return
            with archive:
                for name in data:
                    check_against_numpy(opened, name, archive[f"{name}.npy"])
                    read[0] += 1

    fuzz("npz", 300 * times, case)
    assert read[0] > 20 * times


def test_the_fuzzers_find_what_they_look_for():
    """Errors that are not ours, long ones, floods of memory and of time do fail a case."""

    def leak(rng):
        return bytearray(1 << 24)

    for case, kind in ((lambda rng: 1 // 0, ZeroDivisionError), (leak, AssertionError)):
        with pytest.raises(kind):
            fuzz("itself", 1, case)
