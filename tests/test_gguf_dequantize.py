# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""GGUF models in FP4 back into numbers, and what inspect, compare and verify say of them."""

import json
import os

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

import fp4kit
from command_line import fail, succeed
from fp4kit.errors import FileFormatError, OptionError
from fp4kit.io import quantize_gguf
from fp4kit.io.ggml import BLOCK_LAYOUTS
from fp4kit.io.write.files import OutputError
from gguf_models import fields, opened, values, weights, write_model

DTYPES = {"float32": Kind.F32, "float16": Kind.F16, "bfloat16": Kind.BF16}


def quantized(tmp_path, architecture="llama", *, form="nvfp4", shards=1, **more):
    path = write_model(tmp_path / "m.gguf", weights(**more), architecture, shards=shards)
    fp4kit.quantize_file(path, scheme=form)
    suffix = "" if shards == 1 else f"-00001-of-{shards:05d}"
    return path, tmp_path / f"m-{form}{suffix}.gguf"


def raw(tensor):
    return np.ascontiguousarray(tensor.data).view(np.uint8).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", BLOCK_LAYOUTS)
def test_values_names_and_metadata(form, dtype, tmp_path):
    _, path = quantized(tmp_path, "qwen3moe", form=form, experts=3)
    target = tmp_path / "back.gguf"
    succeed("dequantize", path, "-o", target, "--dtype", dtype)
    before, after = opened(path), opened(target)
    with fp4kit.open(path, decode=dtype) as tensors:
        assert list(after) == [name for name in before if not name.endswith(".scale")]
        for name, tensor in after.items():
            if before[name].tensor_type == Kind(BLOCK_LAYOUTS[form].type.number):
                assert tensor.tensor_type == DTYPES[dtype]
                assert raw(tensor) == np.asarray(tensors[name]).tobytes()
            else:
                assert tensor.tensor_type == before[name].tensor_type
                assert raw(tensor) == raw(before[name])
    said, kept = fields(target), fields(path)
    assert said.pop("general.file_type")[1] == {"float32": 0, "float16": 1, "bfloat16": 32}[dtype]
    kept.pop("general.file_type")
    assert said == kept
    succeed("compare", target, path)
    again = tmp_path / "again.gguf"
    fp4kit.quantize_file(target, again, form)
    assert set(opened(again)) == set(before)


@pytest.mark.usefixtures("small_slabs")
def test_in_small_pieces(tmp_path):
    _, path = quantized(tmp_path, "qwen3moe", experts=3)
    fp4kit.dequantize_file(path, tmp_path / "back.gguf")
    back = opened(tmp_path / "back.gguf")
    with fp4kit.open(path, decode="float32") as tensors:
        for name, tensor in back.items():
            assert np.array_equal(np.asarray(tensors[name], np.float32), values(tensor))


def test_into_shards(tmp_path):
    path, made = quantized(tmp_path, shards=3)
    target = tmp_path / "back-00001-of-00003.gguf"
    succeed("dequantize", made, "-o", target, "--dtype", "bfloat16")
    with fp4kit.open(target) as tensors, fp4kit.open(path) as originals:
        assert set(tensors) == set(originals)
    assert fields(target)["split.tensors.count"][1] == len(weights())
    text = fail("dequantize", made, "-o", tmp_path / "x.gguf")
    assert "ends in -00001-of-00003.gguf" in text


def test_into_safetensors(tmp_path):
    _, path = quantized(tmp_path)
    target = tmp_path / "back.safetensors"
    succeed("dequantize", path, "-o", target)
    with fp4kit.open(path, decode="float32") as ours, fp4kit.open(target) as theirs:
        assert list(ours) == sorted(theirs, key=list(ours).index)
        for name in ours:
            assert np.array_equal(np.asarray(ours[name]), theirs[name])
        assert theirs.metadata["general.architecture"] == "llama"


def test_what_another_container_cannot_hold(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("a.weight", np.zeros((4, 144), np.uint8), raw_dtype=Kind.Q4_K)
    writer.add_tensor("b.weight", np.zeros((4, 17), np.uint8), raw_dtype=Kind.MXFP4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        FileFormatError, match=r"'a.weight': q4_k is not decoded here.* write .gguf"
    ):
        fp4kit.dequantize_file(tmp_path / "m.gguf", tmp_path / "x.safetensors")
    fp4kit.dequantize_file(tmp_path / "m.gguf", tmp_path / "x.gguf")
    assert opened(tmp_path / "x.gguf")["a.weight"].tensor_type == Kind.Q4_K
    fp4kit.save(tmp_path / "q.safetensors", {"w": fp4kit.quantize(np.eye(32, dtype=np.float32))})
    with pytest.raises(OptionError, match=r"a \.gguf file is made from another alone"):
        fp4kit.dequantize_file(tmp_path / "q.safetensors", tmp_path / "y.gguf")


@pytest.mark.parametrize("moment", [1, 3, 12])
def test_a_full_disk(moment, tmp_path, monkeypatch):
    _, path = quantized(tmp_path)
    target = tmp_path / "back.gguf"
    target.write_bytes(b"old")
    before = set(tmp_path.iterdir())
    real, calls = os.pwrite, []

    def failing(fd, data, offset):
        calls.append(offset)
        if len(calls) == moment:
            raise OSError(28, "No space left on device")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", failing)
    with pytest.raises(OutputError, match=r"back\.gguf: cannot be written: No space left"):
        fp4kit.dequantize_file(path, target, force=True)
    assert target.read_bytes() == b"old"
    assert set(tmp_path.iterdir()) == before


def test_inspect(tmp_path):
    _, path = quantized(tmp_path, "qwen3moe", experts=3)
    report = json.loads(succeed("inspect", path, "--json").stdout)
    found = {tensor["name"]: tensor for tensor in report["tensors"]}
    assert set(found) == set(weights(experts=3))
    assert found["blk.0.attn_q.weight"]["format"] == "nvfp4"
    assert found["blk.0.ffn_up_exps.weight"]["shape"] == [3, 192, 128]
    assert report["options"]["metadata"]["general.file_type"] == "39"
    assert "4.5" in succeed("inspect", path).stdout


def test_compare_and_verify(tmp_path):
    path, made = quantized(tmp_path)
    report = json.loads(succeed("compare", path, made, "--json").stdout)
    quantizing = fp4kit.quantize_file(path, force=True)
    assert report["total"]["stats"]["sqnr"] == pytest.approx(quantizing.total_stats.sqnr, abs=1e-3)
    assert "no fault found" in succeed("verify", made, "--against", path).stderr
    other = write_model(tmp_path / "other.gguf", weights(seed=1))
    assert fp4kit.verify(made, other).faults
    assert "holds no quantized tensor" in fp4kit.verify(path).faults[0]


def damaged(path, name, array, *, rename=None):
    """A file with one tensor of other values, or of another name."""
    content = bytearray(path.read_bytes())
    tensor = opened(path)[name]
    at = int(tensor.data_offset)
    content[at : at + array.nbytes] = array.tobytes()
    if rename:
        content = content.replace(name.encode(), rename.encode())
    path.write_bytes(content)


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf])
def test_a_second_level_that_cannot_be_is_a_fault(value, tmp_path):
    _, path = quantized(tmp_path)
    damaged(path, "blk.1.ffn_up.scale", np.array([value], np.float32))
    (fault,) = fp4kit.verify(path).faults
    assert fault == f"blk.1.ffn_up.scale: is {value}; a second-level scale is finite and above 0"


def test_a_scale_byte_that_e4m3_does_not_have_is_a_fault(tmp_path):
    _, path = quantized(tmp_path)
    damaged(path, "blk.1.ffn_up.weight", np.array([0xFF, 0x7F], np.uint8))
    (fault,) = fp4kit.verify(path).faults
    assert fault == "blk.1.ffn_up.weight_scale: 1 of 1536 block scales are NaN"


def test_scales_that_llama_cpp_loses_are_faults(tmp_path, monkeypatch):
    monkeypatch.setattr(quantize_gguf, "why_one_level", lambda *_: "")
    _, path = quantized(tmp_path, "qwen2", layers=1)
    faults = fp4kit.verify(path).faults
    assert len(faults) == 3
    assert faults[0].startswith("blk.0.ffn_gate.scale: is not 1, and llama.cpp applies no .scale")
    result = fail_with_output("verify", path)
    assert "3 faults found" in result


def fail_with_output(*args):
    from command_line import invoke

    result = invoke(*args)
    assert result.exit_code == 1
    return result.output


def test_another_spelling_and_file_type_are_faults(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_MXFP4_MOE)
    writer.add_tensor("blk.0.ffn_up.weight", np.zeros((4, 36), np.uint8), raw_dtype=Kind.NVFP4)
    writer.add_tensor("blk.0.ffn_up.weight.scale", np.ones(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    first, second = fp4kit.verify(tmp_path / "m.gguf").faults
    assert "llama.cpp knows it as blk.0.ffn_up.scale alone" in first
    assert second.startswith("general.file_type: is 38")
