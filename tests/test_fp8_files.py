# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""FP8 under float32 scales in files: the bytes of the array API, in chunks, there and back."""

import numpy as np
import pytest

import fp4kit
from command_line import fail, succeed
from fp4kit.errors import OptionError
from fp4kit.io.dequantize import dequantize_file
from fp4kit.io.inspect import inspect_file
from fp4kit.io.quantize import quantize_file
from fp4kit.io.report import QuantizeOptions
from fp4kit.scheme import Scheme
from sample_arrays import NUMPY
from tensor_files import random_array, read_all, save

SCALE_SHAPES = {"tensor": (1,), "channel": (300, 1), "block": (3, 1)}


@pytest.mark.parametrize("granularity", SCALE_SHAPES)
@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("chunked", [False, True])
def test_files_hold_what_arrays_give(granularity, dtype, chunked, tmp_path, request):
    if chunked:
        request.getfixturevalue("small_slabs")
    x = random_array((300, 70), dtype)
    source = save(tmp_path / "in.safetensors", {"a.weight": x, "norm": x[0].copy()})
    target, back = tmp_path / "out.safetensors", tmp_path / "back.safetensors"
    report = quantize_file(source, target, QuantizeOptions(Scheme("fp8", granularity=granularity)))
    q = fp4kit.quantize(x, "fp8", granularity=granularity)
    stored = read_all(target)
    assert stored["a.weight"] == ("F8_E4M3", (300, 70), q.packed.tobytes())
    scales = ("F32", SCALE_SHAPES[granularity], q.block_scale.tobytes())
    assert stored["a.weight_scale"] == scales
    assert stored["norm"][2] == x[0].tobytes()
    measured = fp4kit.error_stats(x, q)
    assert report.tensors[0].stats.sqnr == pytest.approx(measured.sqnr, rel=1e-12)
    dequantize_file(target, back, dtype)
    assert read_all(back)["a.weight"][2] == fp4kit.dequantize(q, dtype).tobytes()
    (entry,) = [one for one in inspect_file(target).tensors if one.name == "a.weight"]
    assert (entry.format, entry.facts["granularity"]) == ("fp8", granularity)


def test_e5m2_and_recipes(tmp_path):
    x = random_array((40, 48))
    source, target = save(tmp_path / "in.safetensors", {"w": x}), tmp_path / "out.safetensors"
    quantize_file(source, target, QuantizeOptions(Scheme("fp8_e5m2", recipe="compressed-tensors")))
    q = fp4kit.quantize(x, "fp8_e5m2", recipe="compressed-tensors")
    assert read_all(target)["w"] == ("F8_E5M2", (40, 48), q.packed.tobytes())
    with pytest.raises(OptionError, match="recipe deepseek has granularity block"):
        fp4kit.quantize_file(source, target, "fp8", recipe="deepseek", granularity="tensor")


def test_a_file_of_both_kinds_of_formats(tmp_path):
    from fp4kit import open as open_file
    from fp4kit import save as save_file

    x = random_array((32, 64), "float32")
    tensors = {"a": fp4kit.quantize(x, "fp8"), "b": fp4kit.quantize(x, "nvfp4")}
    path = tmp_path / "both.safetensors"
    save_file(path, tensors)
    with open_file(path) as opened:
        for name, q in tensors.items():
            np.testing.assert_array_equal(fp4kit.dequantize(opened[name]), fp4kit.dequantize(q))
    back = tmp_path / "back.safetensors"
    dequantize_file(path, back, "float32")
    for name, q in tensors.items():
        assert read_all(back)[name][2] == fp4kit.dequantize(q).tobytes()


def test_command_line(tmp_path):
    source = save(tmp_path / "in.safetensors", {"w": random_array((40, 48))})
    target = tmp_path / "out.safetensors"
    succeed("quantize", source, "-o", target, "--format", "fp8", "--granularity", "channel")
    assert read_all(target)["w_scale"][1] == (40, 1)
    for options, flag in (
        (("--granularity", "block"), "--granularity is for fp8, not nvfp4"),
        (("--format", "fp8", "--scale-rule", "even"), "--scale-rule is not for fp8"),
    ):
        assert flag in fail("quantize", source, *options, code=2)
