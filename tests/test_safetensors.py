# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The safetensors container: what is refused, what is kept, agreement with the common package."""

import json
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from fp4kit.errors import DtypeError, FileFormatError, OptionError
from fp4kit.io import files
from fp4kit.io import safetensors as container
from fp4kit.io.files import AtomicFile, InputFile, OutputError, check_output, sniff
from fp4kit.io.safetensors import (
    DTYPES,
    SafetensorsWriter,
    TensorSpec,
    build_header,
    parse_header,
    read_header,
)
from fp4kit.io.source import open_source


def file_bytes(header, data=b"", *, length=None):
    """A safetensors file from a header (object, or text as it is) and data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def tensor(dtype="U8", shape=(4,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


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
        file_bytes(b'{"a":%s,"a":%s}' % ((json.dumps(tensor()).encode(),) * 2), bytes(4)),
        "'a' appears twice",
    ),
    "no shape": (file_bytes({"a": {"dtype": "U8"}}), "needs dtype, shape and data_offsets"),
    "entry no object": (file_bytes({"a": 3}), "needs dtype, shape"),
    "unknown dtype (D15)": (
        file_bytes({"a": tensor("Q4", (8,), (2**63, 2**63 + 8))}),
        "unknown dtype 'Q4'",
    ),
    "dtype no string": (file_bytes({"a": tensor(["U8"])}, bytes(4)), "unknown dtype"),
    "negative size": (file_bytes({"a": tensor(shape=(-4,))}, bytes(4)), "not a list of sizes"),
    "fractional size": (file_bytes({"a": tensor(shape=(4.0,))}, bytes(4)), "not a list of sizes"),
    "boolean size": (
        file_bytes({"a": tensor(shape=(True,), offsets=(0, 1))}, bytes(1)),
        "not a list of sizes",
    ),
    "shape no list": (file_bytes({"a": {**tensor(), "shape": 4}}, bytes(4)), "not a list of sizes"),
    "overflow (D14)": (file_bytes({"a": tensor(shape=(2**62, 8))}, bytes(4)), "overflows 64 bits"),
    "overflow hidden by 0": (
        file_bytes({"a": tensor(shape=(2**62, 8, 0), offsets=(0, 0))}),
        "overflows 64 bits",
    ),
    "size beyond 64 bits": (file_bytes({"a": tensor(shape=(2**70,))}), "not a list of sizes"),
    "1000x1000 in 8 bytes (D14)": (
        file_bytes({"a": tensor(shape=(1000, 1000), offsets=(0, 8))}, bytes(8)),
        "takes 1000000 bytes, data_offsets [0, 8] hold 8",
    ),
    "odd F4 (D7)": (file_bytes({"a": tensor("F4", (3,), (0, 2))}, bytes(2)), "fill whole bytes"),
    "offsets backwards": (file_bytes({"a": tensor(offsets=(4, 0))}, bytes(4)), "[begin, end]"),
    "offsets negative": (file_bytes({"a": tensor(offsets=(-4, 0))}, bytes(4)), "[begin, end]"),
    "three offsets": (file_bytes({"a": tensor(offsets=(0, 4, 4))}, bytes(4)), "[begin, end]"),
    "two names on one range (D14)": (
        file_bytes({"a": tensor(), "b": tensor()}, bytes(4)),
        "'b': overlaps tensor 'a'",
    ),
    "overlap": (
        file_bytes({"a": tensor(), "b": tensor(offsets=(2, 6))}, bytes(6)),
        "'b': overlaps tensor 'a'",
    ),
    "hole (D14)": (
        file_bytes({"a": tensor(), "b": tensor(offsets=(6, 10))}, bytes(10)),
        "'b': leaves a hole of 2 bytes after tensor 'a'",
    ),
    "hole at the start": (
        file_bytes({"a": tensor(offsets=(8, 12))}, bytes(12)),
        "leaves a hole of 8 bytes after the header",
    ),
    "cut by 4 bytes (D14)": (file_bytes({"a": tensor()}), "truncated: the header describes"),
    "two trailing bytes (D16)": (file_bytes({"a": tensor()}, bytes(6)), "2 trailing bytes"),
    "metadata integer (D11)": (file_bytes({"__metadata__": {"steps": 3}}), "'steps' is int"),
    "metadata list": (file_bytes({"__metadata__": []}), "must be an object of strings"),
    "tensor named __metadata__ (D9)": (
        file_bytes({"__metadata__": tensor()}, bytes(4)),
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
    {"__metadata__": {"k": "v"}, "a": tensor(), "b": tensor("BF16", (2, 2), (4, 12))}, bytes(12)
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
    header = parse(file_bytes({"__metadata__": value, "a": tensor()}, bytes(4)))
    assert header.metadata == {}
    assert list(header.tensors) == ["a"]


def test_metadata_without_tensors_round_trips(tmp_path):
    path = tmp_path / "f.safetensors"
    with SafetensorsWriter(path, [], {"note": "nothing"}) as writer:
        writer.finish()
    with safe_open(path, "np") as file:
        assert file.metadata() == {"note": "nothing"}
        assert list(file.keys()) == []
    with open_source(path) as source:
        assert source.metadata == {"note": "nothing"}
        assert source.tensors == {}


def test_header_lengths_around_a_page_are_read_whole(tmp_path):
    # D17: exactly 8 + N bytes, also where N is near a round number.
    for wanted in range(99_992, 100_001, 4):
        content = file_bytes({"a": tensor()}, bytes(4))
        text = content[8:-4] + b" " * (wanted - len(content) + 12)
        path = tmp_path / "f.safetensors"
        path.write_bytes(len(text).to_bytes(8, "little") + text + b"abcd")
        with open_source(path) as source:
            assert read_all(source, "a") == b"abcd"


def read_all(source, name):
    data = bytearray(source.tensors[name].spec.nbytes)
    source.read(name, 0, memoryview(data))
    return bytes(data)


def test_unpadded_header_and_misaligned_data_are_read(tmp_path):
    # D18: F32 right behind three bytes.
    values = np.array([1.5, -2.0], np.float32)
    header = {"b": tensor("U8", (3,), (0, 3)), "a": tensor("F32", (2,), (3, 11))}
    path = tmp_path / "f.safetensors"
    path.write_bytes(file_bytes(header, b"xyz" + values.tobytes()))
    with open_source(path) as source:
        assert read_all(source, "a") == values.tobytes()
        assert read_all(source, "b") == b"xyz"


def write_file(path, tensors, metadata=()):
    """Writes (spec, bytes) pairs."""
    with SafetensorsWriter(path, [spec for spec, _ in tensors], dict(metadata)) as writer:
        for spec, data in tensors:
            writer.write(spec.name, 0, data)
        writer.finish()


def test_every_dtype_is_written_and_read_by_both(tmp_path):
    rng = np.random.default_rng(0)
    tensors = []
    for code in DTYPES:
        spec = TensorSpec(f"t.{code}", code, (3, 8))
        data = rng.integers(0, 2, spec.nbytes, np.uint8)
        tensors.append((spec, data.tobytes()))
    path = tmp_path / "f.safetensors"
    write_file(path, tensors, {"k": "v"})
    common = dict(safetensors.deserialize(path.read_bytes()))
    with open_source(path) as source:
        assert source.metadata == {"k": "v"}
        for spec, data in tensors:
            assert bytes(common[spec.name]["data"]) == data
            assert common[spec.name]["dtype"] == spec.dtype
            assert common[spec.name]["shape"] == [3, 8]
            assert read_all(source, spec.name) == data
            assert source.tensors[spec.name].spec == spec


def test_zero_size_and_scalar_tensors_round_trip(tmp_path):
    shapes = [(0, 16), (4, 0), (), (0,)]
    tensors = [(TensorSpec(f"t{n}", "F32", s), bytes(4 * (s == ()))) for n, s in enumerate(shapes)]
    path = tmp_path / "f.safetensors"
    write_file(path, tensors)
    loaded = safetensors.numpy.load_file(path)
    assert [loaded[f"t{n}"].shape for n in range(4)] == shapes
    with open_source(path) as source:
        assert [source.tensors[f"t{n}"].spec.shape for n in range(4)] == shapes


def test_files_of_the_common_package_are_read(tmp_path):
    rng = np.random.default_rng(1)
    arrays = {
        "bf16": rng.standard_normal((5, 7)).astype(ml_dtypes.bfloat16),
        "f64": rng.standard_normal(3),
        "bool": np.array([True, False]),
        "c64": np.array([1 + 2j], np.complex64),
        "i": np.arange(6, dtype=np.int16).reshape(2, 3),
    }
    path = tmp_path / "f.safetensors"
    safetensors.numpy.save_file(arrays, path, metadata={"format": "pt"})
    with open_source(path) as source:
        for name, array in arrays.items():
            assert read_all(source, name) == array.tobytes()
            assert source.tensors[name].dtype == array.dtype.name
            assert source.tensors[name].spec.shape == array.shape
        assert source.metadata == {"format": "pt"}


def test_written_data_is_aligned_and_the_header_padded():
    specs = [
        TensorSpec("a", "U8", (3,)),
        TensorSpec("b", "F32", (2,)),
        TensorSpec("c", "BF16", (1,)),
    ]
    header, offsets = build_header(specs, {}, "f")
    assert len(header) % 8 == 0
    assert offsets["b"] % 4 == 0
    assert offsets["c"] % 2 == 0
    assert offsets["b"] < offsets["c"] < offsets["a"]


def test_reserved_and_repeated_names_are_refused():
    spec = TensorSpec("a", "U8", (3,))
    with pytest.raises(FileFormatError, match="two tensors are named 'a'"):
        build_header([spec, spec], {}, "f")
    with pytest.raises(FileFormatError, match="cannot be named __metadata__"):
        build_header([TensorSpec("__metadata__", "U8", (3,))], {}, "f")
    with pytest.raises(DtypeError, match="safetensors has no Q4"):
        build_header([TensorSpec("a", "Q4", (3,))], {}, "f")


def test_long_headers_are_refused_with_advice(monkeypatch):
    monkeypatch.setattr(container, "MAX_HEADER_BYTES", 1000)
    specs = [TensorSpec(f"tensor.{n}", "U8", (3,)) for n in range(20)]
    with pytest.raises(FileFormatError, match="shards"):
        build_header(specs, {}, "f")


def test_metadata_of_equal_length_can_be_replaced_at_the_end(tmp_path):
    path = tmp_path / "f.safetensors"
    with SafetensorsWriter(path, [TensorSpec("a", "U8", (3,))], {"bits": "00000000"}) as writer:
        writer.write("a", 1, b"bc")
        writer.write("a", 0, b"a")
        writer.finish({"bits": "deadbeef"})
    with open_source(path) as source:
        assert source.metadata == {"bits": "deadbeef"}
        assert read_all(source, "a") == b"abc"


def test_an_unfinished_file_is_no_safetensors_file(tmp_path):
    # Even the temporary file must not look finished: its header comes last.
    path = tmp_path / "f.safetensors"
    with SafetensorsWriter(path, [TensorSpec("a", "U8", (3,))], {}) as writer:
        writer.write("a", 0, b"abc")
        (temp,) = tmp_path.iterdir()
        with InputFile(temp) as file, pytest.raises(FileFormatError, match="header of 0 bytes"):
            read_header(file)
    assert list(tmp_path.iterdir()) == []


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
        with pytest.raises(FileFormatError, match="truncated: ends at byte"):
            read_all(source, "a")


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
        (".npy", file_bytes({"a": tensor()}, bytes(4)), "rename it to .safetensors"),
        (".npz", file_bytes({"a": tensor()}, bytes(4)), "rename it to .safetensors"),
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
