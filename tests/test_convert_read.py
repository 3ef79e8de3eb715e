# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Quantized files: read, refused where damaged, inspected, compared."""

import json
from pathlib import Path

import numpy as np
import pytest

import fp4kit
from fp4kit.errors import FileFormatError, ShapeError
from fp4kit.formats import SCALE_LAYOUTS
from fp4kit.io.compare import compare_files
from fp4kit.io.containers import TensorSpec
from fp4kit.io.dequantize import dequantize_file
from fp4kit.io.inspect import inspect_file
from fp4kit.io.quantize import quantize_file
from fp4kit.io.report import QuantizeOptions
from fp4kit.scheme import Scheme
from tensor_files import metadata_of, random_array, read_all, save, write_file

# ------------------------------------------------------------------------------------------------
# Reading quantized files
# ------------------------------------------------------------------------------------------------


def test_golden_checkpoints_of_compressed_tensors_are_decoded(golden_checkpoint, tmp_path):
    """Files without our metadata, by their names alone."""
    path, form, recipe = golden_checkpoint
    report = dequantize_file(path, tmp_path / "d.safetensors", "float32")
    decoded, stored = read_all(tmp_path / "d.safetensors"), read_all(path)
    names = [tensor.name for tensor in report.tensors if tensor.action == "dequantize"]
    assert names
    for name in names:
        packed, scale = stored[f"{name}_packed"], stored[f"{name}_scale"]
        level = stored.get(f"{name}_global_scale")
        q = fp4kit.QuantizedTensor(
            packed=np.frombuffer(packed[2], np.uint8).reshape(packed[1]),
            block_scale=np.frombuffer(scale[2], np.uint8).reshape(scale[1]),
            format=form,
            shape=(*packed[1][:-1], 2 * packed[1][-1]),
            recipe=recipe,
            encode_scale=np.frombuffer(level[2], np.float32) if level else None,
        )
        assert decoded[name][2] == fp4kit.dequantize(q).tobytes()


@pytest.fixture(params=["NVFP4A16", "MXFP4A16"])
def golden_checkpoint(request):
    folder = Path(__file__).parent / "golden" / "checkpoints"
    path = folder / f"llama-tiny--llmcompressor-{request.param}" / "model.safetensors"
    if not path.exists():
        pytest.skip(f"the golden checkpoint {path.parent.name} is not part of this tree")
    nvfp4 = request.param == "NVFP4A16"
    return path, "nvfp4" if nvfp4 else "mxfp4", "compressed-tensors" if nvfp4 else None


def rewrite(path, target, *, drop=(), facts=None, metadata=None, change=None):
    """Copies a quantized file with some damage."""
    tensors = {name: t for name, t in read_all(path).items() if name not in drop}
    tensors.update(change or {})
    entries = dict(metadata_of(path))
    if facts is not None:
        content = json.loads(entries["fp4kit"])
        content["tensors"]["a"].update(facts)
        entries["fp4kit"] = json.dumps(content)
    if metadata is not None:
        entries = metadata
    pairs = [
        (TensorSpec(name, dtype, shape), data) for name, (dtype, shape, data) in tensors.items()
    ]
    write_file(target, pairs, entries)


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        ({"drop": ["a_global_scale"]}, "'a_global_scale' is missing; without it every value"),
        ({"drop": ["a_global_scale"], "metadata": {}}, "missing; without it every value"),
        ({"drop": ["a_scale"]}, "part 'a_scale' is missing"),
        ({"drop": ["a_packed"]}, "part 'a_packed' is missing"),
        ({"drop": ["a_packed"], "metadata": {}}, "holds no quantized tensor"),
        ({"facts": {"shape": [4, 64]}}, "expected U8"),
        ({"facts": {"shape": [4, 33]}}, r"is U8 \[4, 16\], expected U8 \[4, 24\]"),
        ({"facts": {"shape": [-4, 32]}}, "damaged"),
        ({"facts": {"shape": None}}, "damaged"),
        ({"facts": {"format": "nvfp5"}}, "format='nvfp5'"),
        ({"facts": {"format": "mxfp4", "recipe": None}}, "expected U8"),
        ({"facts": {"recipe": "torchao"}}, "does not belong to recipe torchao"),
        ({"facts": {"scale_layout": "swizzled_128x4"}}, r"expected F8_E4M3 \[128, 4\]"),
        ({"facts": {"dtype": "int8"}}, "dtype='int8'"),
        ({"facts": {"second_level": None}}, "damaged"),
        ({"facts": {"second_level": {"direction": "amax", "bits": "xyz"}}}, "does not belong"),
        ({"facts": {"second_level": {"direction": "amax", "bits": "zzzzzzzz"}}}, "damaged"),
        ({"facts": {"second_level": {"direction": "amax", "bits": "40c00000"}}}, "disagree"),
        ({"metadata": {"fp4kit": "{"}}, "damaged"),
        ({"metadata": {"fp4kit": "[]"}}, "damaged"),
        ({"metadata": {"fp4kit": '{"version": 3, "tensors": {}}'}}, "update fp4kit"),
        ({"metadata": {"fp4kit": '{"version": 1, "tensors": {"a": 3}}'}}, "damaged"),
        ({"metadata": {}, "change": {"a_scale": ("U8", (4, 2), bytes(8))}}, "look quantized"),
        ({"change": {"a": ("F32", (1,), b"abcd")}}, "both 'a' and a quantized 'a' exist"),
    ],
)
def test_damaged_quantized_files_are_refused(damage, fault, tmp_path):
    source = save(tmp_path / "in.safetensors", {"a": random_array((4, 32))})
    quantized, damaged = tmp_path / "q.safetensors", tmp_path / "damaged.safetensors"
    quantize_file(source, quantized, QuantizeOptions())
    rewrite(quantized, damaged, **damage)
    with pytest.raises(FileFormatError, match=fault) as caught:
        dequantize_file(damaged, tmp_path / "out.safetensors", "float32")
    assert str(caught.value).startswith(f"{damaged}: ")
    assert not (tmp_path / "out.safetensors").exists()


def test_plain_files_are_not_dequantized(tmp_path):
    source = save(tmp_path / "in.safetensors", {"a": random_array((4, 32))})
    with pytest.raises(FileFormatError, match="holds no quantized tensor"):
        dequantize_file(source, tmp_path / "out.safetensors", "float32")
    np.save(tmp_path / "in.npy", np.ones((4, 32), np.float32))
    with pytest.raises(FileFormatError, match="holds no quantized tensor"):
        dequantize_file(tmp_path / "in.npy", tmp_path / "out.safetensors", "float32")


def test_a_file_without_our_metadata_decodes_as_compressed_tensors(tmp_path):
    source = save(tmp_path / "in.safetensors", {"a.weight": random_array((4, 32))})
    quantized, bare = tmp_path / "q.safetensors", tmp_path / "bare.safetensors"
    for options in (
        QuantizeOptions(Scheme(recipe="compressed-tensors"), force=True),
        QuantizeOptions(Scheme("mxfp4"), force=True),
        QuantizeOptions(Scheme("mxfp8"), force=True),
        QuantizeOptions(Scheme("mxfp8_e5m2"), force=True),
    ):
        quantize_file(source, quantized, options)
        rewrite(quantized, bare, metadata={})
        results = []
        for path in (quantized, bare):
            dequantize_file(path, tmp_path / "d.safetensors", "float32", force=True)
            results.append(read_all(tmp_path / "d.safetensors"))
        assert results[0] == results[1]


def test_inspect_folds_quantized_tensors(tmp_path):
    arrays = {"a.weight": random_array((4, 32)), "norm": random_array((32,))}
    source = save(tmp_path / "in.safetensors", arrays, {"note": "x"})
    quantized = tmp_path / "q.safetensors"
    quantize_file(source, quantized, QuantizeOptions(Scheme(nibble_order="high_first")))
    report = inspect_file(quantized)
    listed = {tensor.name: tensor for tensor in report.tensors}
    assert sorted(listed) == sorted(arrays)
    assert listed["a.weight"].action == "quantized"
    assert listed["a.weight"].facts["nibble_order"] == "high_first"
    assert listed["a.weight"].shape == (4, 32)
    assert listed["a.weight"].bytes_before == 64 + 8 + 4
    assert listed["norm"].action == "keep"
    assert report.options["metadata"]["note"] == "x"
    assert [tensor.action for tensor in inspect_file(source).tensors] == ["keep", "keep"]


# ------------------------------------------------------------------------------------------------
# Comparing
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
@pytest.mark.usefixtures("small_slabs")
def test_comparing_quantized_and_dequantized_files_agrees(layout, tmp_path):
    arrays = {
        "a": random_array((300, 64)),
        "b": random_array((64,), "float32"),
        "ids": np.arange(5000),
    }
    source = save(tmp_path / "in.safetensors", arrays)
    quantized, back = tmp_path / "q.safetensors", tmp_path / "back.npz"
    report = quantize_file(source, quantized, QuantizeOptions(Scheme(scale_layout=layout)))
    dequantize_file(quantized, back, "float32")
    coded, plain = compare_files(source, quantized), compare_files(source, back)
    by_name = {tensor.name: tensor for tensor in report.tensors}
    for one, other in zip(coded.tensors, plain.tensors, strict=True):
        if one.name == "a":
            assert one.stats.mse == pytest.approx(by_name["a"].stats.mse, rel=1e-12)
            assert one.stats.saturated == by_name["a"].stats.saturated
            assert other.stats.mse == pytest.approx(by_name["a"].stats.mse, rel=1e-12)
            assert other.stats.saturated is None
        elif one.name == "b":
            assert one.stats.mse == other.stats.mse == 0
        else:
            assert (one.action, one.reason, other.reason) == ("keep", "equal", "equal")


def test_integers_are_compared_for_equality(tmp_path):
    a = save(tmp_path / "a.safetensors", {"ids": np.arange(9), "x": np.zeros(2)})
    b = save(tmp_path / "b.safetensors", {"ids": np.arange(9) // 8 * 8, "x": np.zeros(2)})
    reasons = {tensor.name: tensor.reason for tensor in compare_files(a, b).tensors}
    assert reasons == {"ids": "7 of 9 elements differ", "x": "equal"}


def test_missing_tensors_are_counted_and_named(tmp_path):
    # G6
    many = {f"layer.{n:03}": np.zeros((2, 2), np.float32) for n in range(200)}
    a = save(tmp_path / "a.safetensors", many)
    b = save(tmp_path / "b.safetensors", {"layer.000": many["layer.000"], "extra": np.zeros(2)})
    with pytest.raises(FileFormatError) as caught:
        compare_files(a, b)
    assert str(caught.value).startswith(f"{b}: 199 tensors are missing, the first: 'layer.001'")
    assert len(str(caught.value)) < 300
    c = save(tmp_path / "c.safetensors", {**many, "extra": np.zeros(2)})
    with pytest.raises(FileFormatError, match=r"a\.safetensors: 1 tensor is missing.*'extra'"):
        compare_files(a, c)


def test_files_that_do_not_belong_together_are_refused(tmp_path):
    a = save(tmp_path / "a.safetensors", {"x": np.zeros((2, 32), np.float32)})
    b = save(tmp_path / "b.safetensors", {"x": np.zeros((32, 2), np.float32)})
    c = save(tmp_path / "c.safetensors", {"x": np.zeros((2, 32), np.int32)})
    q = tmp_path / "q.safetensors"
    quantize_file(a, q, QuantizeOptions())
    with pytest.raises(ShapeError, match=r"tensor 'x' has shape \[32, 2\]"):
        compare_files(a, b)
    with pytest.raises(FileFormatError, match="tensor 'x' is int32"):
        compare_files(a, c)
    with pytest.raises(FileFormatError, match="swap them"):
        compare_files(q, a)


def test_single_tensors_need_no_common_name(tmp_path):
    np.save(tmp_path / "one.npy", np.ones((2, 32), np.float32))
    quantize_file(tmp_path / "one.npy", tmp_path / "q.safetensors", QuantizeOptions())
    dequantize_file(tmp_path / "q.safetensors", tmp_path / "two.npy", "float32")
    (tensor,) = compare_files(tmp_path / "one.npy", tmp_path / "two.npy").tensors
    assert (tensor.name, tensor.stats.mse) == ("one", 0)
