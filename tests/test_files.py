# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Files: written whole or not at all, checked before work, known by their content."""

import os
from pathlib import Path

import pytest

from fp4kit.errors import FileFormatError, OptionError
from fp4kit.io.containers import TensorSpec
from fp4kit.io.read.files import InputFile
from fp4kit.io.read.kinds import sniff
from fp4kit.io.read.open import open_source
from fp4kit.io.write import files
from fp4kit.io.write.files import AtomicFile, OutputError, check_output
from fp4kit.io.write.safetensors import SafetensorsWriter
from tensor_files import entry, file_bytes, read_one, write_file


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_failure_removes_the_temporary_and_keeps_the_old_file(error, tmp_path, monkeypatch):
    path = tmp_path / "f.safetensors"
    path.write_bytes(b"old")

    def fail(*_):
        raise error

    monkeypatch.setattr(os, "pwrite", fail)
    expected = OutputError if isinstance(error, OSError) else KeyboardInterrupt
    with (
        pytest.raises(expected) as caught,
        SafetensorsWriter(path, [TensorSpec("a", "U8", (3,))], {}) as writer,
    ):
        writer.write("a", 0, b"abc")
    if expected is OutputError:
        assert str(caught.value) == f"{path}: cannot be written: No space left on device"
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_failing_fsync_does_not_replace(tmp_path, monkeypatch):
    path = tmp_path / "f.bin"
    path.write_bytes(b"old")

    def fail(_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)

    def replace_it():
        with AtomicFile(path) as file:
            file.write_at(0, b"new")
            file.commit()

    with pytest.raises(OutputError, match="Input/output error"):
        replace_it()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_is_written_through_and_the_mode_kept(tmp_path):
    real = tmp_path / "real.bin"
    real.write_bytes(b"old")
    real.chmod(0o640)
    link = tmp_path / "link.bin"
    link.symlink_to(real)
    with AtomicFile(link) as file:
        file.write_at(0, b"new")
        file.commit()
    assert link.is_symlink()
    assert real.read_bytes() == b"new"
    assert real.stat().st_mode & 0o777 == 0o640


def test_large_writes_start_writeback_early(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "WRITEBACK_BYTES", 8)
    path = tmp_path / "f.bin"
    with AtomicFile(path) as file:
        for n in range(4):
            file.write_at(4 * n, b"abcd")
        file.commit()
    assert path.read_bytes() == b"abcd" * 4


def test_output_checks(tmp_path, monkeypatch):
    source = tmp_path / "in.safetensors"
    source.write_bytes(b"x")
    other = tmp_path / "out.safetensors"
    check_output(source, other, force=False, nbytes=10)
    hard, soft = tmp_path / "hard.safetensors", tmp_path / "soft.safetensors"
    os.link(source, hard)
    soft.symlink_to(source)
    for same in (source, hard, soft, tmp_path / "." / "in.safetensors"):
        with pytest.raises(OptionError, match="is the input itself"):
            check_output(source, same, force=True, nbytes=10)
    other.write_bytes(b"y")
    with pytest.raises(OptionError, match="--force"):
        check_output(source, other, force=False, nbytes=10)
    check_output(source, other, force=True, nbytes=10)
    with pytest.raises(OptionError, match="not a regular file"):
        check_output(source, tmp_path, force=True, nbytes=10)
    with pytest.raises(OutputError, match="no directory"):
        check_output(source, tmp_path / "nowhere" / "o.safetensors", force=True, nbytes=10)
    with pytest.raises(OutputError, match="are free in"):
        check_output(source, other, force=True, nbytes=1 << 62)
    monkeypatch.chdir(tmp_path)
    check_output(source, Path("bare.safetensors"), force=False, nbytes=10)


def test_inputs_that_are_no_files(tmp_path):
    with pytest.raises(FileFormatError, match="a directory"):
        InputFile(tmp_path)
    with pytest.raises(FileFormatError, match=r"nowhere\.npy: cannot be read: No such file"):
        InputFile(tmp_path / "nowhere.npy")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(FileFormatError, match="not a regular file"):
        InputFile(tmp_path / "fifo")


def test_a_file_cut_while_open_is_noticed(tmp_path):
    path = tmp_path / "f.safetensors"
    write_file(path, [(TensorSpec("a", "U8", (100,)), bytes(100))])
    with open_source(path) as source:
        os.truncate(path, path.stat().st_size - 4)
        with pytest.raises(FileFormatError, match="has changed while it was read"):
            read_one(source, "a")


def test_a_read_past_the_end_says_truncated(tmp_path):
    path = tmp_path / "f.bin"
    path.write_bytes(bytes(100))
    message = "truncated: ends at byte 100, 4 more were expected"
    with InputFile(path) as file, pytest.raises(FileFormatError, match=message):
        file.read_into(96, memoryview(bytearray(8)))


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b"\x93NUMPY\x01\x00", "npy"),
        (b"PK\x03\x04....", "zip"),
        (b"\x80\x02}q\x00.", "pickle"),
        (b"GGUF\x03", "GGUF"),
        (b"\x89HDF\r\n\x1a\n", "HDF5"),
        (b"version https://git-lfs.github.com/spec/v1", "Git LFS pointer"),
        # A header of 640 bytes begins like a pickle.
        (b"\x80\x02\x00\x00\x00\x00\x00\x00{", "safetensors"),
        (b"hello", None),
        (b"", None),
    ],
)
def test_sniffing(head, kind):
    assert sniff(head) == kind


@pytest.mark.parametrize(
    ("suffix", "content", "advice"),
    [
        (".safetensors", b"\x80\x04\x95" + bytes(100), "pickled data can run code"),
        (".safetensors", b"PK\x03\x04" + bytes(100), "torch .pt"),
        (".safetensors", b"\x93NUMPY\x01\x00" + bytes(100), "rename it to .npy"),
        (".npy", file_bytes({"a": entry()}, bytes(4)), "rename it to .safetensors"),
        (".npz", file_bytes({"a": entry()}, bytes(4)), "rename it to .safetensors"),
        (".npz", b"\x93NUMPY\x01\x00" + bytes(100), "rename it to .npy"),
        (".npy", b"\x80\x04\x95" + bytes(100), "pickled data can run code"),
    ],
)
def test_content_under_the_wrong_suffix_is_named(suffix, content, advice, tmp_path):
    # G5
    path = tmp_path / f"f{suffix}"
    path.write_bytes(content)
    with pytest.raises(FileFormatError, match=advice) as caught:
        open_source(path)
    assert str(caught.value).startswith(str(path))


def test_unknown_suffixes_are_refused(tmp_path):
    with pytest.raises(OptionError, match=r"\.safetensors, \.npy, \.npz"):
        open_source(tmp_path / "model.bin")
