# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""MLX and OpenVINO read codes and scales of fp4kit as they are: `make engines`."""

import ml_dtypes
import numpy as np
import pytest

import fp4kit

#: Format to what MLX calls it, its block size, and the bits of an element.
IN_MLX = {
    "nvfp4": ("nvfp4", 16, 4),
    "mxfp4": ("mxfp4", 32, 4),
    "mxfp8": ("mxfp8", 32, 8),
}


def coded(form, rows=48, cols=256):
    """A weight with block scales alone, and its decoded values."""
    weight = np.random.default_rng(0).standard_normal((rows, cols), np.float32)
    more = {"recipe": "torchao", "second_level": "none"} if form == "nvfp4" else {}
    found = fp4kit.quantize(weight, form, **more)
    return found, np.asarray(fp4kit.dequantize(found, "float32"))


@pytest.mark.parametrize("form", IN_MLX)
def test_mlx_decodes_and_multiplies(form):
    mx = pytest.importorskip("mlx.core", reason="mlx is not installed")
    found, decoded = coded(form)
    mode, block, bits = IN_MLX[form]
    codes = mx.array(np.ascontiguousarray(found.packed).view(np.uint32))
    scales = mx.array(np.asarray(found.block_scale).view(np.uint8))
    settings = {"group_size": block, "bits": bits, "mode": mode}
    values = np.array(mx.dequantize(codes, scales, **settings, dtype=mx.float32))
    assert np.array_equal(values, decoded)
    x = np.random.default_rng(1).standard_normal((5, decoded.shape[1]), np.float32)
    y = np.array(mx.quantized_matmul(mx.array(x), codes, scales, transpose=True, **settings))
    np.testing.assert_allclose(y, x @ decoded.T, rtol=2e-5, atol=2e-4)


def test_openvino_runs_a_linear():
    openvino = pytest.importorskip("openvino", reason="openvino is not installed")
    from openvino import opset13 as ops

    found, decoded = coded("nvfp4")
    rows, cols = decoded.shape
    codes = openvino.Tensor(
        np.ascontiguousarray(found.packed), openvino.Shape([rows, cols // 16, 16]),
        openvino.Type.f4e2m1,
    )  # fmt: skip
    scales = np.asarray(found.block_scale).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    weight = ops.multiply(
        ops.convert(ops.constant(codes), np.float32), ops.constant(scales[:, :, None])
    )
    matrix = ops.reshape(weight, ops.constant(np.array([rows, cols], np.int64)), False)
    x = ops.parameter([5, cols], np.float32)
    model = openvino.Model([ops.matmul(x, matrix, False, True)], [x])
    hint = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(model, "CPU", hint)
    inputs = np.random.default_rng(1).standard_normal((5, cols), np.float32)
    np.testing.assert_allclose(compiled([inputs])[0], inputs @ decoded.T, rtol=2e-5, atol=2e-4)
