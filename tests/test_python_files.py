# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Files from Python: fp4kit.open and fp4kit.save, for every kind of file and layout."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

import fp4kit
from command_line import succeed
from file_kinds import KINDS, LAYOUTS

PLAIN = ("npy", "npy bfloat16", "npz", "safetensors of every type", "directory", "shards")
PLAIN += ("fused experts", "golden llama-tiny", "golden llama-tiny-sharded", "golden qwen3moe-tiny")
#: What stands beside weights, and `fp4kit dequantize` leaves out.
ACTIVATION_SCALES = ("input_scale", "input_global_scale", "k_scale", "v_scale")
#: gpt-oss's models want plain weights transposed, and Python gives what is stored.
TRANSPOSED = ("gpt-oss",)


@pytest.fixture(scope="module", params=KINDS)
def kind(request, tmp_path_factory):
    """(name of the kind, a file or directory of it)."""
    return request.param, KINDS[request.param](tmp_path_factory.mktemp("kind"))


def same(a, b):
    """Whether two values are equal to the bit: arrays, or quantized tensors field by field."""
    if isinstance(a, fp4kit.QuantizedTensor):
        return type(b) is type(a) and all(
            same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a)
        )
    if not isinstance(a, np.ndarray):
        return a == b
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def assert_same(a, b):
    assert a.keys() == b.keys()  # the widest elements come first in a file
    for name in a:
        assert same(a[name], b[name]), name


def dequantized(path, folder, dtype):
    """What `fp4kit dequantize` writes, by name."""
    target = folder / ("back" if path.is_dir() else "back.safetensors")
    single = ("--experts-layout", "single") if path.is_dir() else ()
    succeed("dequantize", path, "-o", target, "--dtype", dtype, "--device", "cpu", *single)
    with fp4kit.open(target, raw=True) as file:
        return dict(file)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_are_those_of_the_command_line(kind, tmp_path, dtype):
    name, path = kind
    with fp4kit.open(path, decode=dtype) as file, fp4kit.open(path) as coded:
        assert list(file) == list(coded)
        if name in PLAIN:
            assert file.layout is None
            assert not any(isinstance(x, fp4kit.QuantizedTensor) for x in coded.values())
            expected = dict(fp4kit.open(path, raw=True))
            assert_same(dict(file), expected)
            return
        expected = dequantized(path, tmp_path, dtype)
        assert expected.keys() <= set(file)
        for extra in file.keys() - expected.keys():
            assert extra.rpartition(".")[2] in (
                "input_scale",
                "input_global_scale",
                "k_scale",
                "v_scale",
            )
        for tensor, value in expected.items():
            own, stored = file[tensor], coded[tensor]
            if name in TRANSPOSED and own.ndim == 3:
                value = np.ascontiguousarray(value.transpose(0, 2, 1))
            assert same(own, value), tensor
            if isinstance(stored, fp4kit.QuantizedTensor):
                assert same(fp4kit.dequantize(stored, dtype), value)
                assert coded.info(tensor).format == stored.format
            assert coded.info(tensor).shape == stored.shape == own.shape


def test_codes_are_verbatim(kind):
    """A quantized tensor holds the bytes of the file; other tensors are stored as they are."""
    _, path = kind
    with fp4kit.open(path, raw=True) as raw, fp4kit.open(path) as file:
        stored = {name: np.asarray(x).tobytes() for name, x in raw.items()}
        for name, value in file.items():
            if isinstance(value, fp4kit.QuantizedTensor):
                (codes,) = {
                    f"{name}{end}" for end in ("", "_packed", "_blocks") if f"{name}{end}" in stored
                }
                assert stored[codes].startswith(np.asarray(value.packed).tobytes())
            elif name in raw and raw[name].dtype == value.dtype:
                assert stored[name] == value.tobytes()


def test_facts_cost_no_data(kind, monkeypatch):
    """Everything but indexing comes from headers."""
    _, path = kind
    with fp4kit.open(path) as file:
        names = list(file)
        for source in file._sources:
            monkeypatch.setattr(type(source), "read", None)
        assert len(file) == len(names) > 0
        assert all(name in file for name in names)
        assert "no such tensor" not in file
        for name in names:
            info = file.info(name)
            assert info.name == name
            assert info.nbytes >= 0
        assert f"{len(names)} tensors" in repr(file)


#: Kinds that no directory holds as they are, and why.
UNSAVABLE = {
    "gpt-oss": "engines have quantized layers of 2-D weights, this has shape",
    "golden llama-tiny--modelopt-MXFP4_DEFAULT_CFG": "it holds nvfp4 or fp8, this is mxfp4",
    "golden llama-tiny--modelopt-MXFP8_DEFAULT_CFG": "this is mxfp8",
    "golden qwen3moe-tiny--llmcompressor-NVFP4A16": "use one second-level scale for them",
}


def test_what_is_saved_is_opened_equal(kind, tmp_path):
    """In the layout that it has, and as the command line reads it."""
    name, path = kind
    with fp4kit.open(path) as file:
        layout = file.layout if file.layout in LAYOUTS else None
        target = tmp_path / (path.name if path.is_file() else "again")
        config = file.config if path.is_dir() else None
        if name in UNSAVABLE:
            with pytest.raises(fp4kit.OptionError, match=UNSAVABLE[name]):
                fp4kit.save(target, file, layout=layout, config=config)
            assert list(tmp_path.iterdir()) == []
            return
        fp4kit.save(target, file, layout=layout, config=config)
        with fp4kit.open(target) as again:
            assert_same(dict(file), dict(again))
            coded = any(isinstance(x, fp4kit.QuantizedTensor) for x in file.values())
            default = "fp4kit" if path.is_file() else "compressed-tensors"
            assert again.layout == (layout or default if coded else None)
        if coded:
            assert fp4kit.verify(target).faults == []
            succeed("verify", target)
        succeed("inspect", target)


def test_any_kind_becomes_an_own_file(kind, tmp_path):
    """Everything that can be opened fits a .safetensors file of fp4kit's own, tensor for tensor."""
    _, path = kind
    with fp4kit.open(path) as file:
        fp4kit.save(tmp_path / "all.safetensors", file)
        with fp4kit.open(tmp_path / "all.safetensors") as again:
            assert_same(dict(file), dict(again))
