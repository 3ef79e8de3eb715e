# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""NumPy's containers written to do harm: one line, in bounded memory, and nothing lost."""

from __future__ import annotations

import contextlib
import io
import os
import threading
import time
import tracemalloc
import warnings
import zipfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from fp4kit.errors import DtypeError, FileFormatError, NonFiniteError
from fp4kit.io.containers import TensorSpec
from fp4kit.io.quantize import QuantizeOptions, quantize_file
from fp4kit.io.read import npy as npy_files
from fp4kit.io.read import npz
from fp4kit.io.read.npy import RECORD_MEMBER, parse_array_header
from fp4kit.io.read.open import open_source
from fp4kit.io.write.npy import NpyWriter
from fp4kit.io.write.npz import NpzWriter, name_fault
from tensor_files import read_one


def npy(descr="'<f4'", shape="(2, 3)", fortran="False", data=bytes(24)):
    text = f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}}}".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data


def refused(path, kind=FileFormatError):
    with pytest.raises(kind) as caught:
        open_source(path)
    text = str(caught.value)
    assert text.startswith(str(path))
    assert "\n" not in text
    assert len(text) < 400 + len(str(path))
    return text.removeprefix(f"{path}: ")


@contextlib.contextmanager
def memory_below(limit):
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


# ------------------------------------------------------------------------------------------------
# .npy headers
# ------------------------------------------------------------------------------------------------

TYPES = ["=<f8", "<<f4", ">|f4", "<>f4", "||u1", "<f04", "<f", "f", "", "<", "<f4 ", "<F4",
         "<f4\n", "<f" + "4" * 5000, "<c8 ", "V-1", "<V2<", "float32", "e", "<f4<f4", "<i16",
         "<f3"]  # fmt: skip


@pytest.mark.parametrize("descr", TYPES)
def test_type_strings_that_numpy_does_not_write(descr, tmp_path):
    path = tmp_path / "w.npy"
    path.write_bytes(npy(repr(descr)))
    assert "no element type" in refused(path, DtypeError)
    with zipfile.ZipFile(tmp_path / "w.npz", "w") as archive:
        archive.writestr("w.npy", npy(repr(descr)))
    with open_source(tmp_path / "w.npz") as opened:
        assert not opened.tensors["w"].readable


@pytest.mark.parametrize("prefix", ["<", "=", "|", ""])
def test_native_type_strings(prefix, tmp_path):
    path = tmp_path / "w.npy"
    path.write_bytes(npy(repr(f"{prefix}f4")))
    with open_source(path) as opened:
        assert opened.tensors["w"].spec == TensorSpec("w", "F32", (2, 3))


@pytest.mark.parametrize(
    "field",
    [
        {"shape": f"(0x{'f' * 20_000}, 3)"},
        {"shape": f"({'9' * 20_000}, 3)"},
        {"shape": f"({2**63}, 0)"},
        {"shape": f"(0, {2**64})"},
        {"shape": f"(0x{'f' * 20_000}, 0)"},
        {"shape": "(" + "1," * 65 + ")"},
        {"shape": "(" + "1," * 20_000 + ")"},
        {"shape": "(2.0, 3)"},
        {"shape": "(2, 3j)"},
        {"shape": "(2, None)"},
        {"shape": "{2, 3}"},
        {"shape": "2"},
        {"descr": f"0x{'f' * 20_000}"},
        {"descr": f"[0x{'f' * 20_000}]"},
        {"descr": "'\\d'", "shape": "(2,"},
        {"fortran": "None"},
        {"fortran": "0x" + "f" * 20_000},
        {"shape": "(" * 5_000 + ")" * 5_000},
        {"shape": "-" * 10_000 + "1"},
    ],
    ids=lambda field: str(field)[:40],
)
def test_hostile_headers_are_one_line(field, tmp_path):
    content = npy(**field)
    (tmp_path / "w.npy").write_bytes(content)
    refused(tmp_path / "w.npy")
    with zipfile.ZipFile(tmp_path / "w.npz", "w") as archive:
        archive.writestr("w.npy", content)
    assert "member 'w.npy'" in refused(tmp_path / "w.npz")


def test_escapes_in_headers_warn_nobody():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        header = parse_array_header(npy(descr="'\\d'"), "w")
    assert npy_files.element_type(header, None)[0] is None


@pytest.mark.parametrize("kind", ["pipe", "folder", "text", "dangling", "large", "other"])
def test_what_lies_beside_an_npy_is_only_read_if_it_is_a_record(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(npy_files, "MAX_SIDECAR", 1000)
    path, side = tmp_path / "w.npy", tmp_path / "w.npy.json"
    {
        "pipe": lambda: os.mkfifo(side),
        "folder": side.mkdir,
        "text": lambda: side.write_bytes(b"\xff\xfe"),
        "dangling": lambda: side.symlink_to("nothing"),
        "large": lambda: side.write_text('{"tensors": {}}' + " " * 1000),
        "other": lambda: side.write_text("{}"),
    }[kind]()
    spec = TensorSpec("w", "F32", (2, 3))
    with NpyWriter(path, [spec]) as writer:
        writer.write("w", 0, bytes(24))
        writer.finish()
    with open_source(path) as opened:
        assert opened.tensors["w"].spec == spec
    assert side.is_symlink() or side.exists()


# ------------------------------------------------------------------------------------------------
# Fortran order
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5, 7), (2, 300), (300, 2), (1, 9), (4, 3, 5), (2, 1, 3, 4)])
@pytest.mark.parametrize("dtype", ["<f4", ">i2", "u1", ">c8"])
@pytest.mark.parametrize("piece", [1, 16, 1 << 20])
def test_any_range_of_a_fortran_array_is_read(shape, dtype, piece, tmp_path, monkeypatch):
    monkeypatch.setattr(npy_files, "_PIECE", piece)
    array = np.random.default_rng(0).integers(0, 99, shape).astype(dtype)
    path = tmp_path / "w.npy"
    np.save(path, np.asfortranarray(array))
    plain = array.astype(array.dtype.newbyteorder("<")).tobytes()
    size = array.itemsize
    with open_source(path) as opened:
        count = array.size
        for first, last in (
            (0, count),
            (1, count),
            (0, count - 1),
            (3, count - 2),
            (count - 1, count),
        ):
            data = bytearray((last - first) * size)
            opened.read("w", first * size, memoryview(data))
            assert bytes(data) == plain[first * size : last * size]


@pytest.mark.parametrize(("shape", "npy_too"), [((4, 4), False), ((2, 2, 4), True)])
def test_large_fortran_arrays_are_refused_where_memory_is_not_bounded(
    shape, npy_too, tmp_path, monkeypatch
):
    monkeypatch.setattr(npy_files, "MAX_REORDERED", 63)
    array = np.asfortranarray(np.arange(16, dtype="f4").reshape(shape))
    np.savez_compressed(tmp_path / "w.npz", w=array)
    assert "member 'w.npy': takes 64 bytes in Fortran order" in refused(tmp_path / "w.npz")
    np.save(tmp_path / "w.npy", array)
    if npy_too:
        assert "numpy.ascontiguousarray(x)" in refused(tmp_path / "w.npy")
    else:
        with open_source(tmp_path / "w.npy") as opened:
            assert read_one(opened, "w") == np.ascontiguousarray(array).tobytes()
    monkeypatch.setattr(npy_files, "MAX_REORDERED", 64)
    for suffix in ("npy", "npz"):
        with open_source(tmp_path / f"w.{suffix}") as opened:
            assert read_one(opened, "w") == np.ascontiguousarray(array).tobytes()


def test_a_small_archive_of_a_large_fortran_array(tmp_path):
    path = tmp_path / "w.npz"
    rows = 1 << 15
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("w.npy", "w", force_zip64=True) as member,
    ):
        member.write(npy(shape=f"({rows}, {rows})", fortran="True", data=b""))
        member.write(bytes(16))
    with memory_below(4 << 20):
        assert "truncated" in refused(path)


# ------------------------------------------------------------------------------------------------
# Archives
# ------------------------------------------------------------------------------------------------


def archive_of(path, *members, **options):
    with zipfile.ZipFile(path, "w", **options) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return path


def patched(path, old, new, count=-1):
    path.write_bytes(path.read_bytes().replace(old, new, count))


def test_members_without_a_name(tmp_path):
    path = archive_of(tmp_path / "w.npz", ("w.npy", npy()), ("abcd", b"1"))
    patched(path, b"abcd", b"\0bcd")
    assert refused(path) == "damaged: a member has no name"


def test_local_names_that_are_not_utf8(tmp_path):
    path = archive_of(tmp_path / "w.npz", ("é.npy", npy()))
    patched(path, "é.npy".encode(), b"\xff\xff.npy", 1)
    assert "damaged zip member" in refused(path)
    patched(path, "é.npy".encode(), b"\xff\xff.npy")
    refused(path)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_methods_of_compression_that_numpy_does_not_use(method, tmp_path):
    path = archive_of(tmp_path / "w.npz", ("w.npy", npy()), compression=method)
    assert refused(path).startswith("compressed by a method that NumPy does not use")


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED])
@pytest.mark.parametrize("at", range(0, 200, 13))
def test_damaged_compressed_members(method, at, tmp_path):
    path = archive_of(tmp_path / "w.npz", ("w.npy", npy(shape="(1, 6)")), compression=method)
    content = bytearray(path.read_bytes())
    content[at % len(content)] ^= 0xFF
    path.write_bytes(content)
    with contextlib.suppress(FileFormatError), open_source(path) as opened:
        for name, tensor in opened.tensors.items():
            if tensor.readable:
                read_one(opened, name)


def test_a_large_record_of_few_arrays(tmp_path):
    path = tmp_path / "w.npz"
    record = io.BytesIO()
    np.save(record, np.array('{"version": 1, "tensors": {}}' + " " * 300_000))
    archive_of(
        path, ("w.npy", npy()), (f"{RECORD_MEMBER}.npy", record.getvalue()),
        compression=zipfile.ZIP_DEFLATED,
    )  # fmt: skip
    with memory_below(1 << 20):
        assert "bytes are too many for 2 members" in refused(path)


def test_records_of_the_longest_entries_are_read(tmp_path):
    path = tmp_path / "w.npz"
    specs = [TensorSpec("\x01é\U0001f600" * 50, "BF16", (*(1,) * 63, 3))]
    with NpzWriter(path, specs) as writer:
        writer.write(specs[0].name, 0, b"abcdef")
        writer.finish()
    with open_source(path) as opened:
        assert [tensor.spec for tensor in opened.tensors.values()] == specs


def test_directories_are_bounded(tmp_path, monkeypatch):
    path = archive_of(tmp_path / "w.npz", *((f"{n}.npy", npy()) for n in range(50)))
    monkeypatch.setattr(npz, "MAX_DIRECTORY", 1000)
    assert "directory of the archive takes" in refused(path)
    monkeypatch.setattr(npz, "MAX_DIRECTORY", 50 * 60)
    with open_source(path) as opened:
        assert len(opened.tensors) == 50


def test_zip64_directories_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 10)
    path = archive_of(tmp_path / "w.npz", *((f"{n}.npy", npy()) for n in range(50)))
    content = path.read_bytes()
    end = content.rfind(b"PK\x05\x06")
    path.write_bytes(content[: end + 12] + b"\xff" * 4 + content[end + 16 :])
    monkeypatch.setattr(npz, "MAX_DIRECTORY", 1000)
    assert "directory of the archive takes" in refused(path)


def test_not_a_number_in_one_of_several_members(tmp_path):
    """The search for it reads the archive while the next member is being read ahead."""
    path = tmp_path / "w.npz"
    bad = np.ones((64, 256), np.float32)
    bad[3, 5] = np.nan
    np.savez_compressed(path, a=bad, b=np.ones((64, 256), np.float32), c=bad)
    target = tmp_path / "w.safetensors"
    for _ in range(5):
        with pytest.raises(NonFiniteError, match=r"tensor 'a' holds 1 NaN .* index \(3, 5\)"):
            quantize_file(path, target, QuantizeOptions())
    assert not target.exists()


def test_members_that_are_read_by_two_threads_at_once(tmp_path, monkeypatch):
    path = tmp_path / "w.npz"
    content = {name: np.full(100, number) for number, name in enumerate("ab")}
    np.savez_compressed(path, **content)
    read, entered, released = zipfile.ZipExtFile.read, threading.Event(), threading.Event()

    def held_up(self, *args):
        entered.set()
        assert released.wait(5)
        return read(self, *args)

    with open_source(path) as opened, ThreadPoolExecutor(2) as pool:
        monkeypatch.setattr(zipfile.ZipExtFile, "read", held_up)
        first = pool.submit(read_one, opened, "b")
        assert entered.wait(5)
        second = pool.submit(read_one, opened, "a")
        time.sleep(0.02)
        released.set()
        assert first.result() == content["b"].tobytes()
        assert second.result() == content["a"].tobytes()


# ------------------------------------------------------------------------------------------------
# What is written can be read
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["\0", "\0x", "x\0y", "../x", "../../etc/x", "/x", "a/../../x", "..\\x", "\\x", "C:/x",
             "..", "é" * 40_000]
)  # fmt: skip
def test_names_that_an_archive_cannot_hold(name, tmp_path):
    spec = TensorSpec(name, "F32", (2,))
    with pytest.raises(FileFormatError, match=r"the tensor name .*; write \.safetensors") as caught:
        NpzWriter(tmp_path / "w.npz", [spec])
    assert len(str(caught.value)) < 400 + len(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["", "x", "a/b", "a..b/..c", "x.npy", "__metadata__", "é", "\n", " ", "a:b", "é" * 3000]
)
def test_names_that_an_archive_holds(name, tmp_path):
    assert name_fault(name) == ""
    spec = TensorSpec(name, "F32", (2,))
    with NpzWriter(tmp_path / "w.npz", [spec]) as writer:
        writer.write(name, 0, b"abcdefgh")
        writer.finish()
    with open_source(tmp_path / "w.npz") as opened:
        assert opened.tensors[name].spec == spec
        assert read_one(opened, name) == b"abcdefgh"
    with np.load(tmp_path / "w.npz") as loaded:
        assert loaded[name].tobytes() == b"abcdefgh"


@pytest.mark.parametrize("writer", [NpyWriter, NpzWriter])
@pytest.mark.parametrize("dtype", ["F32", "BF16", "F4"])
def test_more_dimensions_than_numpy_has_are_not_written(writer, dtype, tmp_path):
    path = tmp_path / f"w.{writer.__name__[:3].lower()}"
    with pytest.raises(FileFormatError, match="has 65 dimensions, NumPy's files hold at most 64"):
        writer(path, [TensorSpec("w", dtype, (*(1,) * 64, 2))])
    assert list(tmp_path.iterdir()) == []
    spec = TensorSpec("w", dtype, (*(1,) * 63, 2))
    with writer(path, [spec]) as opened:
        opened.write("w", 0, bytes(spec.nbytes))
        opened.finish()
    np.load(path)
    with open_source(path) as opened:
        assert opened.tensors["w"].spec == spec


def test_sources_close_while_a_thread_reads(tmp_path):
    np.savez(tmp_path / "w.npz", w=np.ones(10))
    opened = open_source(tmp_path / "w.npz")
    with opened._lock:
        closing = threading.Thread(target=opened.close)
        closing.start()
        closing.join(0.05)
        assert closing.is_alive()
    closing.join(5)
    assert not closing.is_alive()
