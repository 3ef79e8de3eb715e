# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""NumPy's containers: every order and type read right, nothing unpickled, types recorded."""

import io
import json
import zipfile

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp4kit.errors import DtypeError, FileFormatError, OptionError
from fp4kit.io.containers import TensorSpec
from fp4kit.io.read import npy as npy_files
from fp4kit.io.read.npy import RECORD_MEMBER, parse_array_header
from fp4kit.io.read.open import open_source
from fp4kit.io.write.files import OutputError
from fp4kit.io.write.npy import NpyWriter
from fp4kit.io.write.npz import NpzWriter

STORABLE = (
    "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 float32 float64 complex64"
)


def read_all(source, name):
    data = bytearray(source.tensors[name].spec.nbytes)
    source.read(name, 0, memoryview(data))
    return bytes(data)


def read_rows(source, name, step):
    """The tensor's bytes, read a few rows at a time."""
    tensor = source.tensors[name]
    row, pieces = tensor.row_bytes, []
    for start in range(0, tensor.spec.nbytes, row * step):
        piece = bytearray(min(row * step, tensor.spec.nbytes - start))
        source.read(name, start, memoryview(piece))
        pieces.append(bytes(piece))
    return b"".join(pieces)


def sample(dtype, shape):
    return np.random.default_rng(0).integers(0, 100, shape).astype(dtype)


@pytest.mark.parametrize("suffix", [".npy", ".npz", "compressed"])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", [*STORABLE.split(), ">f4", ">f2", ">i8", ">c8"])
@pytest.mark.parametrize("shape", [(5, 6), (1, 7), (3, 4, 5), (7,), ()])
def test_every_order_and_type_is_read_as_c_order_little_endian(
    suffix, order, dtype, shape, tmp_path
):
    array = np.asarray(sample(dtype, shape), order=order)
    path = tmp_path / f"w{'.npz' if suffix == 'compressed' else suffix}"
    if suffix == ".npy":
        np.save(path, array)
    else:
        (np.savez_compressed if suffix == "compressed" else np.savez)(path, w=array)
    native = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<")))
    with open_source(path) as source:
        assert source.tensors["w"].spec.shape == shape
        assert source.tensors["w"].dtype == native.dtype.name
        assert read_all(source, "w") == native.tobytes()
        if len(shape) > 1:
            for step in (1, 2, 100):
                assert read_rows(source, "w", step) == native.tobytes()


@pytest.mark.parametrize("shape", [(0, 16), (4, 0), (0,)])
def test_empty_arrays_are_read(shape, tmp_path):
    np.savez(tmp_path / "f.npz", w=np.empty(shape, np.float32, order="F"))
    with open_source(tmp_path / "f.npz") as source:
        assert source.tensors["w"].spec.shape == shape
        assert read_all(source, "w") == b""


def test_members_that_are_no_tensors_are_listed_with_the_reason(tmp_path):
    path = tmp_path / "f.npz"
    np.savez(
        path,
        good=np.ones((2, 3), np.float32),
        config=np.array("a long text " * 50),
        names=np.array([b"x", b"y"]),
        when=np.array("2026-01-01", "M8[D]"),
        wide=np.ones(2, np.complex128),
        pairs=np.zeros(2, [("a", "f4"), ("b", "i4")]),
        pickled=np.array([{"a": 1}], object),
    )
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("README.txt", "hello")
    with open_source(path) as source:
        reasons = {name: tensor.note for name, tensor in source.tensors.items()}
        assert reasons.pop("good") == ""
        assert not any(source.tensors[name].readable for name in reasons)
        assert reasons["config"] == reasons["names"] == "text is not a tensor"
        assert "pickle" in reasons["pickled"]
        assert "no element type" in reasons["when"]
        assert "no element type" in reasons["wide"]
        assert "no element type" in reasons["pairs"]
        assert reasons["README.txt"] == "not an .npy array"
        assert read_all(source, "good") == np.ones((2, 3), np.float32).tobytes()


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("unpickled",))


def test_object_arrays_are_never_unpickled(tmp_path):
    # D22
    np.save(tmp_path / "f.npy", np.array([Bomb()], object), allow_pickle=True)
    with pytest.raises(DtypeError, match="only be read with pickle"):
        open_source(tmp_path / "f.npy")


def test_bfloat16_saved_by_numpy_must_be_asked_for(tmp_path):
    # D21
    array = np.linspace(-1, 1, 32).astype(ml_dtypes.bfloat16).reshape(2, 16)
    np.save(tmp_path / "f.npy", array)
    np.savez(tmp_path / "f.npz", w=array)
    with pytest.raises(DtypeError, match="--void-dtype bfloat16"):
        open_source(tmp_path / "f.npy")
    with open_source(tmp_path / "f.npz") as source:
        assert not source.tensors["w"].readable
        assert "--void-dtype bfloat16" in source.tensors["w"].note
    for suffix, name in ((".npy", "f"), (".npz", "w")):
        with open_source(tmp_path / f"f{suffix}", "bfloat16") as source:
            assert source.tensors[name].dtype == "bfloat16"
            assert read_all(source, name) == array.tobytes()
    with pytest.raises(OptionError, match="void_dtype='float16'"):
        open_source(tmp_path / "f.npy", "float16")


def test_fp8_saved_by_numpy_is_kept_as_bytes(tmp_path):
    array = np.arange(32, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).reshape(2, 16)
    np.save(tmp_path / "f.npy", array)
    with open_source(tmp_path / "f.npy") as source:
        assert source.tensors["f"].spec.dtype == "U8"
        assert "kept as bytes" in source.tensors["f"].note
        assert read_all(source, "f") == array.tobytes()


def test_float8_e5m2_saved_by_numpy_is_refused_with_the_fix(tmp_path):
    array = np.zeros((2, 16), ml_dtypes.float8_e5m2)
    np.save(tmp_path / "f.npy", array)
    try:
        np.load(tmp_path / "f.npy")
    except ValueError:
        with pytest.raises(DtypeError, match="uint8"):
            open_source(tmp_path / "f.npy")
    else:  # a later ml_dtypes may write it as void
        with open_source(tmp_path / "f.npy") as source:
            assert source.tensors["f"].spec.dtype == "U8"


def npy(descr="'<f4'", shape="(2, 3)", fortran="False", data=bytes(24), version=b"\x01\x00"):
    text = f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}}}".encode()
    width = 2 if version[0] == 1 else 4
    return b"\x93NUMPY" + version + len(text).to_bytes(width, "little") + text + data


MALFORMED = {
    "empty": (b"", "does not begin with"),
    "cut in the magic": (b"\x93NUM", "does not begin with"),
    "version 9": (npy(version=b"\x09\x00"), "version 9 is not known"),
    "header beyond the end": (npy()[:20], "truncated: its header would take"),
    "header is code": (npy(shape="__import__('os').getcwd()"), "damaged .npy header"),
    "unbalanced": (npy(shape="(2, 3"), "damaged .npy header"),
    "unhashable": (npy(shape="{[]: 1}"), "damaged .npy header"),
    "negative size": (npy(shape="(-2, 3)"), "shape or fortran_order"),
    "boolean size": (npy(shape="(True, 6)"), "shape or fortran_order"),
    "shape is a list": (npy(shape="[2, 3]"), "shape or fortran_order"),
    "overflow": (npy(shape=f"({2**62}, 8)"), "overflows 64 bits"),
    "fortran no boolean": (npy(fortran="1"), "shape or fortran_order"),
    "truncated": (npy(data=bytes(20)), "truncated: the header describes"),
    "trailing": (npy(data=bytes(26)), "trailing bytes: the header describes"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_npy_is_refused(case, tmp_path):
    content, fault = MALFORMED[case]
    path = tmp_path / "f.npy"
    path.write_bytes(content)
    with pytest.raises(FileFormatError) as caught:
        open_source(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert fault in str(caught.value)
    assert "\n" not in str(caught.value)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 80), st.binary(min_size=1, max_size=3))
def test_damaged_npy_headers_parse_or_are_refused(position, patch):
    content = npy()
    damaged = content[:position] + patch + content[position + len(patch) :]
    for data in (damaged, content[:position]):
        try:
            header = parse_array_header(data, "f.npy")
        except FileFormatError:
            continue
        assert isinstance(npy_files.element_type(header, None)[1], str)


def test_damaged_archives_are_refused(tmp_path):
    path = tmp_path / "f.npz"
    np.savez_compressed(path, w=np.random.default_rng(0).standard_normal((64, 64)))
    content = path.read_bytes()
    path.write_bytes(content[:-30])
    with pytest.raises(FileFormatError, match=r"not an \.npz archive"):
        open_source(path)
    damaged = bytearray(content)
    damaged[5000] ^= 0xFF
    path.write_bytes(damaged)
    with pytest.raises(FileFormatError, match=r"member 'w\.npy': damaged zip member"):
        open_source(path)
    np.savez(path, w=np.random.default_rng(0).standard_normal((128, 256)))
    damaged = bytearray(path.read_bytes())
    damaged[200_000] ^= 0xFF
    path.write_bytes(damaged)
    with open_source(path) as source, pytest.raises(FileFormatError, match="Bad CRC"):
        read_all(source, "w")


def test_a_member_of_another_length_is_refused(tmp_path):
    path = tmp_path / "f.npz"
    for data, fault in ((bytes(20), "truncated"), (bytes(30), "trailing bytes")):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("w.npy", npy(data=data))
        with pytest.raises(FileFormatError, match=rf"member 'w\.npy': {fault}"):
            open_source(path)


def test_torch_archives_under_npz_are_named(tmp_path):
    path = tmp_path / "f.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02.")
    with pytest.raises(FileFormatError, match="torch checkpoint"):
        open_source(path)


def write(writer, tensors):
    with writer:
        for spec, data in tensors:
            writer.write(spec.name, 0, data)
        writer.finish()


EXOTIC = [
    (TensorSpec("bf", "BF16", (2, 3)), bytes(range(12))),
    (TensorSpec("e4m3", "F8_E4M3", (4,)), b"abcd"),
    (TensorSpec("f4", "F4", (2, 4)), b"wxyz"),
    (TensorSpec("empty", "BF16", (0, 3)), b""),
]
PLAIN = [
    (TensorSpec("f", "F32", (2, 2)), np.eye(2, dtype=np.float32).tobytes()),
    (TensorSpec("dir/name", "I64", ()), (7).to_bytes(8, "little")),
]


def test_npz_round_trip_with_recorded_types(tmp_path):
    path = tmp_path / "f.npz"
    tensors = EXOTIC + PLAIN
    write(NpzWriter(path, [spec for spec, _ in tensors]), tensors)
    first = path.read_bytes()
    write(NpzWriter(path, [spec for spec, _ in tensors]), tensors)
    assert path.read_bytes() == first
    with np.load(path, allow_pickle=False) as loaded:
        assert loaded["f"].tolist() == [[1, 0], [0, 1]]
        assert loaded["dir/name"] == 7
        assert loaded["bf"].dtype == np.uint16
        assert loaded["bf"].shape == (2, 3)
        record = json.loads(loaded[RECORD_MEMBER].item())["tensors"]
        assert record["bf"] == {"dtype": "bfloat16", "shape": [2, 3]}
        assert "f" not in record
    with open_source(path) as source:
        assert list(source.tensors) == [spec.name for spec, _ in tensors]
        for spec, data in tensors:
            assert source.tensors[spec.name].spec == spec
            assert read_all(source, spec.name) == data


def test_npz_without_exotic_types_has_no_record(tmp_path):
    path = tmp_path / "f.npz"
    write(NpzWriter(path, [spec for spec, _ in PLAIN]), PLAIN)
    with np.load(path) as loaded:
        assert sorted(loaded.files) == ["dir/name", "f"]


@pytest.mark.parametrize(("spec", "data"), EXOTIC, ids=lambda value: getattr(value, "name", ""))
def test_npy_round_trip_with_its_sidecar(spec, data, tmp_path):
    path = tmp_path / "w.npy"
    write(NpyWriter(path, [spec]), [(spec, data)])
    assert np.load(path).tobytes() == data
    with open_source(path) as source:
        assert source.tensors["w"].spec == TensorSpec("w", spec.dtype, spec.shape)
        assert read_all(source, "w") == data
    # A plain array in its place must not be read by the old record.
    plain, values = PLAIN[0]
    write(NpyWriter(path, [plain]), [(plain, values)])
    assert [file.name for file in tmp_path.iterdir()] == ["w.npy"]
    assert np.load(path).tolist() == [[1, 0], [0, 1]]


def test_a_foreign_json_file_is_left_alone(tmp_path):
    side = tmp_path / "f.npy.json"
    side.write_text('{"mine": 1}')
    plain, values = PLAIN[0]
    write(NpyWriter(tmp_path / "f.npy", [plain]), [(plain, values)])
    assert side.read_text() == '{"mine": 1}'
    with open_source(tmp_path / "f.npy") as source:
        assert source.tensors["f"].dtype == "float32"
    with pytest.raises(OptionError, match="holds something else"):
        NpyWriter(tmp_path / "f.npy", [EXOTIC[0][0]])


def test_a_record_that_does_not_fit_is_not_used(tmp_path):
    np.save(tmp_path / "f.npy", np.ones((2, 2), np.float32))
    record = {"version": 1, "tensors": {"f": {"dtype": "bfloat16", "shape": [2, 2]}}}
    (tmp_path / "f.npy.json").write_text(json.dumps(record))
    with open_source(tmp_path / "f.npy") as source:
        assert source.tensors["f"].dtype == "float32"


@pytest.mark.parametrize(
    "record",
    [
        {"version": 2, "tensors": {}},
        {"version": 1, "tensors": {"f": {"dtype": "Q4", "shape": [1]}}},
        {"version": 1, "tensors": {"f": {"dtype": "bfloat16", "shape": [-1]}}},
        {"version": 1, "tensors": []},
    ],
)
def test_damaged_records_are_refused(record, tmp_path):
    np.savez(tmp_path / "f.npz", f=np.ones(1, np.uint16), **{RECORD_MEMBER: json.dumps(record)})
    with pytest.raises(FileFormatError, match="damaged record"):
        open_source(tmp_path / "f.npz")


def test_npy_holds_one_tensor(tmp_path):
    with pytest.raises(OptionError, match=r"write \.npz or \.safetensors"):
        NpyWriter(tmp_path / "f.npy", [PLAIN[0][0], PLAIN[1][0]])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", [NpyWriter, NpzWriter])
def test_failures_leave_nothing_behind(kind, tmp_path, monkeypatch):
    path = tmp_path / f"f.{kind.__name__[:3].lower()}"
    path.write_bytes(b"old")
    spec = TensorSpec("w", "BF16", (1 << 20,))
    writer = kind(path, [spec])

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(npy_files.np.lib.format, "write_array", fail)
    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OutputError, match="No space left"):
        write(writer, [(spec, bytes(spec.nbytes))])
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_headers_equal_those_of_numpy(tmp_path):
    buffer = io.BytesIO()
    np.save(buffer, np.eye(2, dtype=np.float32))
    plain, values = PLAIN[0]
    write(NpyWriter(tmp_path / "f.npy", [plain]), [(plain, values)])
    assert (tmp_path / "f.npy").read_bytes() == buffer.getvalue()
