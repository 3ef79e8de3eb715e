# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""File conversion: equal to the array API byte for byte, streaming, what is kept."""

import json
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import fp4kit
from fp4kit.errors import FileFormatError, NonFiniteError, OptionError
from fp4kit.formats import ALL_RECIPES, BLOCK_FORMATS, NIBBLE_ORDERS, SCALE_LAYOUTS, SCALE_RULES
from fp4kit.io.compare import compare_files
from fp4kit.io.containers import TensorSpec
from fp4kit.io.dequantize import dequantize_file
from fp4kit.io.inspect import inspect_file
from fp4kit.io.quantize import quantize_file
from fp4kit.io.read.open import open_source
from fp4kit.io.report import QuantizeOptions
from fp4kit.io.storage import FILE_FIELDS
from fp4kit.io.stream import chunks
from fp4kit.io.write.safetensors import SafetensorsWriter
from fp4kit.scheme import Scheme
from sample_arrays import NUMPY
from tensor_files import metadata_of, random_array, read_all, save


def rules():
    for name, spec in BLOCK_FORMATS.items():
        if spec.has_second_level:
            yield from ({"format": name, "recipe": recipe} for recipe in ALL_RECIPES)
        else:
            yield from ({"format": name, "scale_rule": rule} for rule in SCALE_RULES)


ALL_RULES = list(rules())


def rule_id(rule):
    return "-".join(str(value) for value in rule.values())


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
    report = quantize_file(source, quantized, QuantizeOptions(Scheme(**options)))
    stored = read_all(quantized)
    spec = BLOCK_FORMATS[rule["format"]]
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
                "direction": direction.removesuffix("_scale"),
                "bits": f"{int(value.view(np.uint32)[0]):08x}",
            }
            encode = np.frombuffer(stored[f"{name}_global_scale"][2], np.float32)
            assert encode == fp4kit.convert_second_level(q, "encode_scale")
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
    options = QuantizeOptions(Scheme(**rule, scale_layout=layout), force=True)
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
    monkeypatch.setattr(chunks, "WHOLE_BYTES", 8 << 10)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 4 << 10)
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
    # Back again, and compared, in chunks as well.
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
    report = quantize_file(tmp_path / "f.npz", None, QuantizeOptions())
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
        options = QuantizeOptions(Scheme(**rule, scale_layout="swizzled_128x4"), device=device)
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
    plan = quantize_file(source, None, options)
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
        lambda: quantize_file(source, None, QuantizeOptions()),
        lambda: quantize_file(source, tmp_path / "q.safetensors", QuantizeOptions()),
    ):
        with pytest.raises(FileFormatError, match="'a_packed'; exclude one"):
            call()
    assert not (tmp_path / "q.safetensors").exists()
    quantize_file(source, None, QuantizeOptions(exclude=("a",)))
    quantize_file(source, None, QuantizeOptions(Scheme("mxfp8")))


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"format": "nvfp8"}, "format='nvfp8' is not known"),
        ({"recipe": "mine"}, "recipe='mine' is not known"),
        ({"scale_rule": "floor"}, "nvfp4 takes a recipe"),
        ({"format": "mxfp4", "recipe": "torchao"}, "is for nvfp4"),
        ({"scale_layout": "zigzag"}, "scale_layout='zigzag'"),
        ({"nibble_order": "both"}, "nibble_order='both'"),
        ({"scale_layout": "grouped_128x4"}, "is for groups"),
        ({"include": ("nothing*",)}, r"no tensor matches include='nothing\*'"),
        ({"exclude": ("re:(",)}, "bad regular expression"),
        ({"void_dtype": "fp8"}, "void_dtype='fp8'"),
    ],
)
def test_wrong_options_are_errors_before_work(changes, fault, tmp_path):
    source = save(tmp_path / "in.safetensors", {"norm": random_array((32,))})
    schemes = {name: changes[name] for name in FILE_FIELDS if name in changes}
    rest = {name: value for name, value in changes.items() if name not in schemes}
    target = tmp_path / "q.safetensors"
    with pytest.raises(OptionError, match=fault):
        quantize_file(source, target, QuantizeOptions(Scheme(**schemes), **rest))
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
# Memory
# ------------------------------------------------------------------------------------------------


MEASURED = """
import resource, sys, time
from pathlib import Path
from fp4kit.io.quantize import QuantizeOptions, quantize_file
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


def test_a_scheme_is_what_its_fields_are(tmp_path):
    source = save(tmp_path / "in.safetensors", {"a": random_array((64, 64))})
    scheme = Scheme("nvfp4", recipe="torchao", scale_layout="swizzled_128x4")
    one, other = tmp_path / "one.safetensors", tmp_path / "other.safetensors"
    fp4kit.quantize_file(source, one, scheme, device="cpu")
    fields = {"recipe": "torchao", "scale_layout": "swizzled_128x4"}
    fp4kit.quantize_file(source, other, "nvfp4", device="cpu", **fields)
    assert one.read_bytes() == other.read_bytes()
    with pytest.raises(OptionError, match="cannot be passed beside a Scheme"):
        fp4kit.quantize_file(source, tmp_path / "q.safetensors", scheme, recipe="te")
