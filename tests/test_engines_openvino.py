# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""OpenVINO runs a linear layer from the codes and scales of fp4kit, as constants of its own types.

Without the hint the CPU plugin computes in bfloat16 where it can.
"""

from __future__ import annotations

import numpy as np
import pytest

import fp4kit

ov = pytest.importorskip("openvino", reason="the engines are not installed")
op = pytest.importorskip("openvino.opset13", reason="the engines are not installed")

ROWS, COLS = 256, 512
ELEMENTS = {"e2m1": "f4e2m1", "e4m3": "f8e4m3", "e5m2": "f8e5m2"}
SCALES = {"e4m3": "f8e4m3", "e8m0": "f8e8m0", "float32": "f32"}
HINT = {"INFERENCE_PRECISION_HINT": "f32"}
CASES = [
    ("nvfp4", {}),
    ("nvfp4", {"recipe": "nvfuser", "second_level": "none"}),
    ("mxfp4", {}),
    ("mxfp8", {}),
    ("mxfp8_e5m2", {}),
    ("fp8", {"granularity": "tensor"}),
    ("fp8", {"granularity": "channel"}),
    ("fp8", {"granularity": "block"}),
]


def constant(data, shape, kind):
    """A constant of bytes as they are."""
    return ov.op.Constant(
        ov.Tensor(np.ascontiguousarray(data), ov.Shape(shape), getattr(ov.Type, kind))
    )


def blocks(q):
    """Shapes of codes and scales in which one is broadcast over the other."""
    scheme = q.scheme.parts[0]
    if not scheme.spec.has_scale_grid:
        count = COLS // scheme.spec.block_size
        return [ROWS, count, scheme.spec.block_size], [ROWS, count, 1]
    if scheme.granularity == "block":
        return [ROWS // 128, 128, COLS // 128, 128], [ROWS // 128, 1, COLS // 128, 1]
    return [ROWS, COLS], [ROWS, 1] if scheme.granularity == "channel" else [1, 1]


def second_level(q):
    """The factor of the whole tensor."""
    if q.second_level is None:
        return np.float32(1)
    assert q.second_level[0] == "amax"
    return np.float32(q.second_level[1][0]) / np.float32(2688)


def weight(q):
    """A node of the decoded weight."""
    codes_shape, scale_shape = blocks(q)
    spec = q.scheme.spec
    codes = constant(q.packed, codes_shape, ELEMENTS[spec.element.name])
    scales = constant(q.block_scale, scale_shape, SCALES[spec.scale_type])
    scales = op.multiply(op.convert(scales, "f32"), op.constant(second_level(q)))
    values = op.multiply(op.convert(codes, "f32"), scales)
    return op.reshape(values, np.array([ROWS, COLS]), False)


def run(result, inputs=()):
    """What a node gives on the CPU."""
    model = ov.Model([result], [node for node, _ in inputs], "test")
    compiled = ov.Core().compile_model(model, "CPU", HINT)
    return compiled([value for _, value in inputs])[0]


@pytest.mark.parametrize(("format", "fields"), CASES)
def test_a_linear_layer(format, fields):
    rng = np.random.default_rng(0)
    w = rng.standard_normal((ROWS, COLS), np.float32) * np.float32(0.02)
    x = rng.standard_normal((5, COLS), np.float32)
    q = fp4kit.quantize(w, format, **fields)
    values = fp4kit.dequantize(q)
    node = op.parameter([5, COLS], np.float32)
    made = run(op.matmul(node, weight(q), False, True), [(node, x)])
    exact = x.astype(np.float64) @ values.astype(np.float64).T
    # Every sum and every weight is rounded to binary32.
    bound = (COLS + 4) * 2.0**-24 * (np.abs(x) @ np.abs(values).T)
    assert (np.abs(made - exact) <= bound).all()


@pytest.mark.parametrize(("kind", "name"), [("e2m1", "f4e2m1"), ("e4m3", "f8e4m3")])
def test_every_code(kind, name):
    """The order of nibbles and the values, one by one."""
    from fp4kit.formats import ELEMENT_TYPES

    codes = np.arange(256, dtype=np.uint8)
    expected = ELEMENT_TYPES[kind].values
    if kind == "e2m1":
        expected = expected[np.stack([codes & 15, codes >> 4], 1).reshape(-1)]
    found = run(op.convert(constant(codes, [len(expected)], name), "f32"))
    np.testing.assert_array_equal(found, expected)
