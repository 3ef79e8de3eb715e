# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""File conversion: equal to the array API byte for byte, streaming, nothing left by failures."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from safetensors import safe_open

import fp4kit
from fp4kit.demo import demo_tensors, write_demo
from fp4kit.errors import FileFormatError, NonFiniteError, OptionError, ShapeError
from fp4kit.formats import ALL_FORMATS, ALL_RECIPES, NIBBLE_ORDERS, SCALE_LAYOUTS, SCALE_RULES
from fp4kit.io import slabs
from fp4kit.io.convert import (
    QuantizeOptions,
    compare_files,
    dequantize_file,
    inspect_file,
    plan_quantize_file,
    quantize_file,
)
from fp4kit.io.files import OutputError
from fp4kit.io.safetensors import SafetensorsWriter, TensorSpec
from fp4kit.io.source import open_source

NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def random_array(shape, dtype="bfloat16", seed=0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp(rng.standard_normal(shape))).astype(NUMPY[dtype])


def save(path, arrays, metadata=None):
    safetensors.numpy.save_file(arrays, path, metadata=metadata)
    return path


def read_all(path):
    """Every tensor of a file as (safetensors dtype, shape, bytes)."""
    with open_source(path) as source:
        result = {}
        for name, tensor in source.tensors.items():
            data = bytearray(tensor.spec.nbytes)
            source.read(name, 0, memoryview(data))
            result[name] = tensor.spec.dtype, tensor.spec.shape, bytes(data)
        return result


def metadata_of(path):
    with safe_open(path, "np") as file:
        return file.metadata()


def rules():
    for name, spec in ALL_FORMATS.items():
        if spec.has_second_level:
            yield from ({"format": name, "recipe": recipe} for recipe in ALL_RECIPES)
        else:
            yield from ({"format": name, "scale_rule": rule} for rule in SCALE_RULES)


ALL_RULES = list(rules())


def rule_id(rule):
    return "-".join(str(value) for value in rule.values())


@pytest.fixture
def small_slabs(monkeypatch):
    """Cuts everything above a few kilobytes into slabs."""
    monkeypatch.setattr(slabs, "WHOLE_BYTES", 8 << 10)
    monkeypatch.setattr(slabs, "SLAB_BYTES", 4 << 10)


# ------------------------------------------------------------------------------------------------
# Equal to the array API
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ALL_RULES, ids=rule_id)
@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
@pytest.mark.parametrize("order", NIBBLE_ORDERS)
def test_files_equal_the_array_api(rule, layout, order, tmp_path):
    options = {**rule, "scale_layout": layout, "nibble_order": order}
    arrays = {
        "a.weight": random_array((129, 96)),
        "half": random_array((2, 3, 64), "float16", 1),
        "single": random_array((7, 32), "float32", 2),
        "zero.weight": np.zeros((1, 32), np.float32),
        "tiny.weight": np.full((1, 32), 1e-36, np.float32),
    }
    source = save(tmp_path / "in.safetensors", arrays)
    quantized = tmp_path / "q.safetensors"
    report = quantize_file(source, quantized, QuantizeOptions(**options))
    stored = read_all(quantized)
    spec = ALL_FORMATS[rule["format"]]
    facts = json.loads(metadata_of(quantized)["fp4kit"])["tensors"]
    for name, array in arrays.items():
        q = fp4kit.quantize(array, **options)
        packed = name if spec.codes_per_byte == 1 else f"{name}_packed"
        assert stored[packed][1:] == (q.packed.shape, q.packed.tobytes())
        assert stored[f"{name}_scale"][1:] == (q.block_scale.shape, q.block_scale.tobytes())
        assert stored[f"{name}_scale"][0] == ("F8_E4M3" if spec.has_second_level else "U8")
        if spec.has_second_level:
            direction, value = q.second_level
            assert facts[name]["second_level"] == {
                "direction": direction,
                "bits": f"{int(value.view(np.uint32)[0]):08x}",
            }
            encode = np.frombuffer(stored[f"{name}_global_scale"][2], np.float32)
            assert encode == fp4kit.convert_second_level(q, "encode")
            assert np.isfinite(encode)
            assert encode > 0
        else:
            assert facts[name]["second_level"] is None
        entry = next(tensor for tensor in report.tensors if tensor.name == name)
        assert (entry.action, entry.format) == ("quantize", spec.name)
        assert entry.bytes_after == q.nbytes
        expected = fp4kit.error_stats(array, q)
        assert entry.stats.mse == pytest.approx(expected.mse, rel=1e-12)
        assert entry.stats.bits_per_element == expected.bits_per_element
    for dtype in NUMPY:
        target = tmp_path / f"{dtype}.safetensors"
        dequantize_file(quantized, target, dtype)
        decoded = read_all(target)
        assert sorted(decoded) == sorted(arrays)
        for name, array in arrays.items():
            q = fp4kit.quantize(array, **options)
            assert decoded[name][1] == array.shape
            assert decoded[name][2] == fp4kit.dequantize(q, dtype).tobytes()


@pytest.mark.parametrize("rule", ALL_RULES, ids=rule_id)
@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
def test_slabs_give_identical_files(rule, layout, tmp_path, monkeypatch):
    options = QuantizeOptions(**rule, scale_layout=layout, force=True)
    arrays = {
        "a": random_array((515, 64)),
        "b": random_array((3, 90, 64), "float32", 1),
        "row": random_array((1, 1 << 14), "float16", 2),
        "kept": np.arange(9000, dtype=np.int64),
        "kept.rows": random_array((999, 7), "float32", 3),
    }
    source = save(tmp_path / "in.safetensors", arrays)
    whole, cut = tmp_path / "whole.safetensors", tmp_path / "cut.safetensors"
    calls = []
    first = quantize_file(source, whole, options)
    monkeypatch.setattr(slabs, "WHOLE_BYTES", 8 << 10)
    monkeypatch.setattr(slabs, "SLAB_BYTES", 4 << 10)
    second = quantize_file(source, cut, options, lambda *done: calls.append(done))
    assert cut.read_bytes() == whole.read_bytes()
    assert calls[-1] == (sum(x.nbytes for x in arrays.values()),) * 2
    assert len(calls) > 20
    assert [n for n, _ in calls] == sorted(n for n, _ in calls)
    for one, other in zip(first.tensors, second.tensors, strict=True):
        if one.stats is not None:
            assert other.stats.saturated == one.stats.saturated
            assert other.stats.scale_underflow == one.stats.scale_underflow
            assert other.stats.mse == pytest.approx(one.stats.mse, rel=1e-12)
    # Back again, and compared, in slabs as well.
    dequantize_file(cut, tmp_path / "cut.npz", "float16")
    monkeypatch.undo()
    dequantize_file(cut, tmp_path / "whole.npz", "float16")
    assert (tmp_path / "cut.npz").read_bytes() == (tmp_path / "whole.npz").read_bytes()


@pytest.mark.parametrize("suffix", [".npy", ".npz", "compressed"])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f2"])
@pytest.mark.usefixtures("small_slabs")
def test_numpy_files_are_quantized(suffix, order, dtype, tmp_path):
    array = np.asarray(random_array((300, 32), "float32"), dtype, order=order)
    path = tmp_path / f"w{'.npz' if suffix == 'compressed' else suffix}"
    if suffix == ".npy":
        np.save(path, array)
    else:
        (np.savez_compressed if suffix == "compressed" else np.savez)(path, w=array)
    target = tmp_path / "q.safetensors"
    quantize_file(path, target, QuantizeOptions())
    dequantize_file(target, tmp_path / "back.npy", "float32")
    native = array.astype(array.dtype.newbyteorder("<"))
    expected = fp4kit.dequantize(fp4kit.quantize(native))
    assert np.array_equal(np.load(tmp_path / "back.npy"), expected)


@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ".npy"])
@pytest.mark.parametrize("dtype", NUMPY)
def test_outputs_of_dequantize_can_be_quantized_again(suffix, dtype, tmp_path):
    # A24 and D21: the round trip is idempotent, and bfloat16 survives NumPy's files.
    source = save(tmp_path / "in.safetensors", {"w": random_array((6, 64))})
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    quantize_file(source, first, QuantizeOptions())
    back = tmp_path / f"w{suffix}"
    dequantize_file(first, back, dtype)
    with open_source(back) as opened:
        assert opened.tensors["w"].dtype == dtype
    if dtype != "float16":  # small scales times large ones do not always fit
        quantize_file(back, second, QuantizeOptions())
        assert read_all(second)["w_packed"] == read_all(first)["w_packed"]


def test_void_dtype_reaches_the_reader(tmp_path):
    array = random_array((2, 32))
    np.savez(tmp_path / "f.npz", w=array, s=np.array("text"))
    report = plan_quantize_file(tmp_path / "f.npz", QuantizeOptions())
    assert all(tensor.reason.startswith("dropped: ") for tensor in report.tensors)
    assert all(tensor.bytes_before > 0 for tensor in report.tensors)
    assert [tensor.dtype for tensor in inspect_file(tmp_path / "f.npz").tensors][1:] == ["<U4"]
    target = tmp_path / "q.safetensors"
    report = quantize_file(tmp_path / "f.npz", target, QuantizeOptions(void_dtype="bfloat16"))
    assert [(t.action, t.bytes_after > 0) for t in report.tensors] == [
        ("quantize", True),
        ("keep", False),
    ]
    assert read_all(target)["w_packed"][2] == fp4kit.quantize(array).packed.tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("rule", ALL_RULES, ids=rule_id)
@pytest.mark.usefixtures("small_slabs")
def test_the_gpu_writes_the_same_bytes(rule, tmp_path):
    status = next(status for status in fp4kit.backend_status() if status.name == "cuda")
    if not status.available:
        pytest.skip(status.reason)
    arrays = {"a": random_array((300, 64)), "b": random_array((2, 9, 32), "float32")}
    source = save(tmp_path / "in.safetensors", arrays)
    files = {}
    for device in ("cpu", "cuda"):
        quantized, back = tmp_path / f"{device}.safetensors", tmp_path / f"{device}.npz"
        options = QuantizeOptions(**rule, scale_layout="swizzled_128x4", device=device)
        quantize_file(source, quantized, options)
        dequantize_file(quantized, back, "bfloat16", device=device)
        (one, _) = compare_files(source, quantized, device=device).tensors
        files[device] = quantized.read_bytes(), back.read_bytes(), one.stats.saturated
    assert files["cpu"] == files["cuda"]
    bad = save(tmp_path / "bad.safetensors", {"a": np.full((300, 32), np.nan, np.float32)})
    with pytest.raises(NonFiniteError, match="9600 NaN and 0 infinite"):
        quantize_file(bad, tmp_path / "q.safetensors", QuantizeOptions(device="cuda"))


# ------------------------------------------------------------------------------------------------
# What is kept, and names
# ------------------------------------------------------------------------------------------------


def test_other_tensors_are_carried_through_with_a_reason(tmp_path):
    arrays = {
        "norm.weight": random_array((64,)),
        "scalar": np.array(3.0, np.float32),
        "ids": np.arange(64, dtype=np.int64).reshape(2, 32),
        "mask": np.ones((2, 32), bool),
        "double": np.ones((2, 32)),
        "ragged": random_array((5, 24)),
        "odd": random_array((5, 3), "float32"),
        "no_rows": np.empty((0, 32), np.float32),
        "no_cols": np.empty((4, 0), np.float32),
        "lm_head.weight": random_array((4, 32), seed=4),
        "fp8": np.arange(64, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).reshape(2, 32),
        "layers.0.weight": random_array((4, 32), seed=5),
        "layers.1.weight": random_array((4, 32), seed=6),
    }
    source = save(tmp_path / "in.safetensors", arrays, {"format": "pt", "note": "ünïcode"})
    options = QuantizeOptions(exclude=("lm_head.*", r"re:layers\.1"))
    target = tmp_path / "q.safetensors"
    report = quantize_file(source, target, options)
    reasons = {tensor.name: tensor.reason for tensor in report.tensors}
    assert reasons == {
        "norm.weight": "1-D",
        "scalar": "0-D",
        "ids": "int64 is not quantized",
        "mask": "bool is not quantized",
        "double": "float64 is not quantized",
        "ragged": "last axis 24 is not a multiple of 16",
        "odd": "last axis 3 is not a multiple of 16",
        "no_rows": "empty",
        "no_cols": "empty",
        "lm_head.weight": "excluded by lm_head.*",
        "fp8": "float8_e4m3fn is not quantized",
        "layers.0.weight": "",
        "layers.1.weight": r"excluded by re:layers\.1",
    }
    before, after = read_all(source), read_all(target)
    for name, reason in reasons.items():
        if reason:
            assert after[name] == before[name]
    assert "layers.0.weight_packed" in after
    metadata = metadata_of(target)
    assert metadata["note"] == "ünïcode"
    assert metadata["format"] == "pt"
    back = tmp_path / "back.safetensors"
    report = dequantize_file(target, back, "bfloat16")
    assert [tensor.name for tensor in report.tensors if tensor.action == "dequantize"] == [
        "layers.0.weight"
    ]
    assert {name: tensor for name, tensor in read_all(back).items() if reasons[name]} == {
        name: tensor for name, tensor in before.items() if reasons[name]
    }
    assert metadata_of(back) == {"format": "pt", "note": "ünïcode"}


def test_the_dry_run_says_what_the_run_does(tmp_path):
    arrays = {"a": random_array((4, 32)), "b": random_array((32,)), "c": random_array((2, 2, 16))}
    source = save(tmp_path / "in.safetensors", arrays)
    options = QuantizeOptions(include=("a", "b"))
    plan = plan_quantize_file(source, options)
    report = quantize_file(source, tmp_path / "q.safetensors", options)
    keys = ("name", "shape", "dtype", "action", "reason", "format", "bytes_before", "bytes_after")
    for planned, done in zip(plan.tensors, report.tensors, strict=True):
        assert [getattr(planned, key) for key in keys] == [getattr(done, key) for key in keys]
        assert planned.stats is None
    assert plan.target is None
    assert [tensor.reason for tensor in report.tensors] == ["", "1-D", "not included"]
    sizes = sum(tensor.bytes_after for tensor in report.tensors)
    assert sizes == sum(len(data) for _, _, data in read_all(tmp_path / "q.safetensors").values())


def test_metadata_format_is_added(tmp_path):
    source = save(tmp_path / "in.safetensors", {"a": random_array((4, 32))})
    quantize_file(source, tmp_path / "q.safetensors", QuantizeOptions())
    assert metadata_of(tmp_path / "q.safetensors")["format"] == "pt"


def test_name_collisions_are_errors_before_work(tmp_path):
    arrays = {"a": random_array((4, 32)), "a_packed": np.zeros(3, np.float32)}
    source = save(tmp_path / "in.safetensors", arrays)
    for call in (
        lambda: plan_quantize_file(source, QuantizeOptions()),
        lambda: quantize_file(source, tmp_path / "q.safetensors", QuantizeOptions()),
    ):
        with pytest.raises(FileFormatError, match="'a_packed'; exclude one"):
            call()
    assert not (tmp_path / "q.safetensors").exists()
    plan_quantize_file(source, QuantizeOptions(exclude=("a",)))
    plan_quantize_file(source, QuantizeOptions(format="mxfp8"))


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"format": "nvfp8"}, "format='nvfp8' is not known"),
        ({"recipe": "mine"}, "recipe='mine' is not known"),
        ({"scale_rule": "floor"}, "nvfp4 takes a recipe"),
        ({"format": "mxfp4", "recipe": "torchao"}, "is for nvfp4"),
        ({"scale_layout": "zigzag"}, "scale_layout='zigzag'"),
        ({"nibble_order": "both"}, "nibble_order='both'"),
        ({"include": ("nothing*",)}, r"no tensor matches include='nothing\*'"),
        ({"exclude": ("re:(",)}, "bad regular expression"),
        ({"void_dtype": "fp8"}, "void_dtype='fp8'"),
    ],
)
def test_wrong_options_are_errors_before_work(changes, fault, tmp_path):
    source = save(tmp_path / "in.safetensors", {"norm": random_array((32,))})
    with pytest.raises(OptionError, match=fault):
        quantize_file(source, tmp_path / "q.safetensors", QuantizeOptions(**changes))
    assert not (tmp_path / "q.safetensors").exists()


def test_nothing_is_quantized_twice(tmp_path):
    # E15
    source = save(tmp_path / "in.safetensors", {"a": random_array((4, 32))})
    quantized = tmp_path / "q.safetensors"
    quantize_file(source, quantized, QuantizeOptions())
    with pytest.raises(FileFormatError, match="is quantized already"):
        quantize_file(quantized, tmp_path / "r.safetensors", QuantizeOptions())
    foreign = {"b_packed": np.zeros((4, 16), np.uint8), "b_scale": np.zeros((4, 1), np.uint8)}
    save(tmp_path / "foreign.safetensors", foreign)
    with pytest.raises(FileFormatError, match="is quantized already"):
        quantize_file(
            tmp_path / "foreign.safetensors", tmp_path / "r.safetensors", QuantizeOptions()
        )


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
    specs = [TensorSpec(name, dtype, shape) for name, (dtype, shape, _) in tensors.items()]
    with SafetensorsWriter(target, specs, entries) as writer:
        for name, (_, _, data) in tensors.items():
            writer.write(name, 0, data)
        writer.finish()


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        ({"drop": ["a_global_scale"]}, "'a_global_scale' is missing; without it every value"),
        ({"drop": ["a_global_scale"], "metadata": {}}, "missing; without it every value"),
        ({"drop": ["a_scale"]}, "part 'a_scale' is missing"),
        ({"drop": ["a_packed"]}, "part 'a_packed' is missing"),
        ({"drop": ["a_packed"], "metadata": {}}, "holds no quantized tensor"),
        ({"facts": {"shape": [4, 64]}}, "expected U8"),
        ({"facts": {"shape": [4, 33]}}, "multiple of 16"),
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
        QuantizeOptions(recipe="compressed-tensors", force=True),
        QuantizeOptions(format="mxfp4", force=True),
        QuantizeOptions(format="mxfp8", force=True),
        QuantizeOptions(format="mxfp8_e5m2", force=True),
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
    quantize_file(source, quantized, QuantizeOptions(nibble_order="high_first"))
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
    report = quantize_file(source, quantized, QuantizeOptions(scale_layout=layout))
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
    with pytest.raises(FileFormatError, match=r"a\.safetensors: 1 tensors are missing.*'extra'"):
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


# ------------------------------------------------------------------------------------------------
# Failures
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("form", ["nvfp4", "mxfp4"])
@pytest.mark.usefixtures("small_slabs")
def test_nonfinite_values_are_named_and_nothing_is_written(bad, form, tmp_path):
    array = random_array((2, 200, 64), "float32")
    array[1, 150, 3] = bad
    array[1, 199, 63] = bad
    source = save(tmp_path / "in.safetensors", {"ok": random_array((4, 32)), "w": array})
    counts = "2 NaN and 0 infinite" if np.isnan(bad) else "0 NaN and 2 infinite"
    with pytest.raises(NonFiniteError) as caught:
        quantize_file(source, tmp_path / "q.safetensors", QuantizeOptions(format=form))
    message = str(caught.value)
    assert message.startswith(f"{source}: tensor 'w' holds {counts} values")
    assert "at index (1, 150, 3)" in message
    assert list(tmp_path.iterdir()) == [source]
    quantize_file(source, tmp_path / "q.safetensors", QuantizeOptions(exclude=("w",)))


def test_truncated_inputs_leave_nothing(tmp_path):
    source = save(tmp_path / "in.safetensors", {"a": random_array((64, 64))})
    os.truncate(source, source.stat().st_size - 4)
    with pytest.raises(FileFormatError, match="truncated"):
        quantize_file(source, tmp_path / "q.safetensors", QuantizeOptions())
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("moment", [1, 2, 3, 4])
def test_a_full_disk_leaves_the_old_output(moment, tmp_path, monkeypatch):
    # D4
    source = save(tmp_path / "in.safetensors", {"a": random_array((64, 64)), "n": np.ones(3)})
    target = tmp_path / "q.safetensors"
    target.write_bytes(b"old")
    real, calls = os.pwrite, []

    def failing(fd, data, offset):
        calls.append(offset)
        if len(calls) == moment:
            raise OSError(28, "No space left on device")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", failing)
    with pytest.raises(OutputError, match=r"q\.safetensors: cannot be written: No space left"):
        quantize_file(source, target, QuantizeOptions(force=True))
    assert target.read_bytes() == b"old"
    assert sorted(tmp_path.iterdir()) == [source, target]


def test_an_interrupt_removes_the_temporary(tmp_path):
    source = save(tmp_path / "in.safetensors", {"a": random_array((64, 64))})

    def interrupt(_done, _total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_file(source, tmp_path / "q.safetensors", QuantizeOptions(), interrupt)
    assert list(tmp_path.iterdir()) == [source]


def test_outputs_are_checked_before_work(tmp_path):
    source = save(tmp_path / "in.safetensors", {"a": random_array((64, 64))})
    content = source.read_bytes()
    for force in (False, True):
        with pytest.raises(OptionError, match="is the input itself"):
            quantize_file(source, source, QuantizeOptions(force=force))
    assert source.read_bytes() == content
    with pytest.raises(OptionError, match=r"must end in \.safetensors"):
        quantize_file(source, tmp_path / "q.npz", QuantizeOptions())
    # A directory in which not even root can create files.
    with pytest.raises(OutputError, match=r"^/proc/q\.safetensors: cannot be written"):
        quantize_file(source, Path("/proc/q.safetensors"), QuantizeOptions())
    quantize_file(source, tmp_path / "q.safetensors", QuantizeOptions())
    with pytest.raises(OptionError, match="--force"):
        quantize_file(source, tmp_path / "q.safetensors", QuantizeOptions())
    with pytest.raises(OptionError, match="is the input itself"):
        dequantize_file(
            tmp_path / "q.safetensors", tmp_path / "q.safetensors", "float32", force=True
        )
    with pytest.raises(OptionError, match="dtype='int8'"):
        dequantize_file(tmp_path / "q.safetensors", tmp_path / "b.npz", "int8")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_directory_is_refused(tmp_path):
    source = save(tmp_path / "in.safetensors", {"a": random_array((64, 64))})
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o500)
    with pytest.raises(OutputError, match="Permission denied"):
        quantize_file(source, folder / "q.safetensors", QuantizeOptions())


KILLED = """
import sys
from pathlib import Path
from fp4kit.io.convert import QuantizeOptions, quantize_file

def stall(done, total):
    print("working", flush=True)
    sys.stdin.read()

quantize_file(Path("in.safetensors"), Path("q.safetensors"), QuantizeOptions(force=True), stall)
"""


def test_a_killed_run_leaves_nothing_that_looks_finished(tmp_path):
    source = save(tmp_path / "in.safetensors", {f"t{n}": random_array((64, 64)) for n in range(9)})
    target = tmp_path / "q.safetensors"
    target.write_bytes(b"old")
    content = source.read_bytes()
    with subprocess.Popen(
        [sys.executable, "-c", KILLED],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout.readline() == b"working\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert target.read_bytes() == b"old"
    assert source.read_bytes() == content
    (left,) = set(tmp_path.iterdir()) - {source, target}
    assert left.suffix == ".fp4kit-tmp"
    copy = left.rename(tmp_path / "left.safetensors")
    with pytest.raises(FileFormatError):
        open_source(copy)


# ------------------------------------------------------------------------------------------------
# The demo file
# ------------------------------------------------------------------------------------------------


def test_the_demo_is_the_same_everywhere(tmp_path):
    path = tmp_path / "demo.safetensors"
    write_demo(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert digest == "3bcafbc4412a8d1bd41644e21265e206dd7a65dd1480191b087c6398a9673d2b"
    assert 19e6 < sum(np.prod(spec.shape) for spec in demo_tensors()) < 22e6
    with pytest.raises(OptionError, match="--force"):
        write_demo(path)
    write_demo(path, force=True)
    with pytest.raises(OptionError, match=r"\.safetensors"):
        write_demo(tmp_path / "demo.bin")
    weights = safetensors.numpy.load_file(path)["model.layers.0.mlp.up_proj.weight"]
    weights = weights.astype(np.float64)
    rms = np.sqrt(np.mean(weights**2, axis=0))
    assert np.sum(rms > 4 * np.median(rms)) == 4  # outlier channels
    body = weights[:, rms < 4 * np.median(rms)].ravel()
    assert np.mean(body**4) / np.mean(body**2) ** 2 > 4  # heavier than a normal distribution's 3


MEASURED = """
import resource, sys, time
from pathlib import Path
from fp4kit.io.convert import QuantizeOptions, quantize_file
started = time.perf_counter()
quantize_file(Path(sys.argv[1]), Path(sys.argv[2]), QuantizeOptions())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter() - started)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("count", "shape"), [(1, (32768, 32768)), (18, (4096, 14336))])
def test_two_gigabytes_take_less_than_700_megabytes_of_memory(count, shape, tmp_path):
    specs = [TensorSpec(f"t{n}", "BF16", shape) for n in range(count)]
    piece = random_array(1 << 22).view(np.uint8)
    source = tmp_path / "in.safetensors"
    with SafetensorsWriter(source, specs, {}) as writer:
        for spec in specs:
            for start in range(0, spec.nbytes, piece.size):
                writer.write(spec.name, start, piece[: spec.nbytes - start])
        writer.finish()
    command = [sys.executable, "-c", MEASURED, str(source), str(tmp_path / "q.safetensors")]
    result = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    kilobytes, _ = result.stdout.split()
    assert int(kilobytes) < 700e3
