# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The safetensors container: what is written is read, by the common package too."""

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from safetensors import safe_open

from fp4kit.errors import DtypeError, FileFormatError
from fp4kit.io.containers import DTYPES, TensorSpec
from fp4kit.io.read.files import InputFile
from fp4kit.io.read.open import open_source
from fp4kit.io.read.safetensors import read_header
from fp4kit.io.write import safetensors as container
from fp4kit.io.write.safetensors import SafetensorsWriter, build_header
from tensor_files import entry, file_bytes, read_one, write_file


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
        content = file_bytes({"a": entry()}, bytes(4))
        text = content[8:-4] + b" " * (wanted - len(content) + 12)
        path = tmp_path / "f.safetensors"
        path.write_bytes(len(text).to_bytes(8, "little") + text + b"abcd")
        with open_source(path) as source:
            assert read_one(source, "a") == b"abcd"


def test_unpadded_header_and_misaligned_data_are_read(tmp_path):
    # D18: F32 right behind three bytes.
    values = np.array([1.5, -2.0], np.float32)
    header = {"b": entry("U8", (3,), (0, 3)), "a": entry("F32", (2,), (3, 11))}
    path = tmp_path / "f.safetensors"
    path.write_bytes(file_bytes(header, b"xyz" + values.tobytes()))
    with open_source(path) as source:
        assert read_one(source, "a") == values.tobytes()
        assert read_one(source, "b") == b"xyz"


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
            assert read_one(source, spec.name) == data
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
            assert read_one(source, name) == array.tobytes()
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
        assert read_one(source, "a") == b"abc"


def test_an_unfinished_file_is_no_safetensors_file(tmp_path):
    # Even the temporary file must not look finished: its header comes last.
    path = tmp_path / "f.safetensors"
    with SafetensorsWriter(path, [TensorSpec("a", "U8", (3,))], {}) as writer:
        writer.write("a", 0, b"abc")
        (temp,) = tmp_path.iterdir()
        with InputFile(temp) as file, pytest.raises(FileFormatError, match="header of 0 bytes"):
            read_header(file)
    assert list(tmp_path.iterdir()) == []
