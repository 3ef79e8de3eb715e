# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime runs a linear layer from FP8 codes and scales on a CPU; for FP4 it has no kernel."""

from __future__ import annotations

import numpy as np
import pytest

import fp4kit

onnx = pytest.importorskip("onnx", reason="the engines are not installed")
runtime = pytest.importorskip("onnxruntime", reason="the engines are not installed")

ROWS, COLS = 256, 512
TYPES = onnx.TensorProto
OPSET = 21
#: For codes of 4 bits and for scales of powers of two.
LATER = 24


def model(nodes, constants, output, opset):
    """A model of one input x, (3, COLS), unless no node takes it."""
    helper = onnx.helper
    given = [helper.make_tensor_value_info("x", TYPES.FLOAT, [3, COLS])]
    used = any("x" in node.input for node in nodes)
    result = [helper.make_tensor_value_info("y", TYPES.FLOAT, output)]
    tensors = [
        helper.make_tensor(name, kind, shape, np.ascontiguousarray(data).tobytes(), raw=True)
        for name, (kind, shape, data) in constants.items()
    ]
    graph = helper.make_graph(nodes, "test", given if used else [], result, tensors)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=11)
    return runtime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])


def linear(decode):
    """x times the transpose of what a node decodes."""
    helper = onnx.helper
    return [
        decode,
        helper.make_node("Transpose", ["w"], ["t"], perm=[1, 0]),
        helper.make_node("MatMul", ["x", "t"], ["y"]),
    ]


def scales_of(q):
    """The shape of scales that the operator takes, the scales, and its attributes."""
    granularity = q.scheme.granularity
    if granularity == "tensor":
        return [], q.block_scale, {}
    if granularity == "channel":
        return [ROWS], q.block_scale, {"axis": 0}
    # Its blocks are of one row: those of 128 rows are repeated.
    spread = np.repeat(q.block_scale, 128, 0)
    return list(spread.shape), spread, {"axis": 1, "block_size": 128}


@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
def test_a_linear_layer_of_fp8(granularity):
    rng = np.random.default_rng(0)
    w = rng.standard_normal((ROWS, COLS), np.float32) * np.float32(0.02)
    x = rng.standard_normal((3, COLS), np.float32)
    q = fp4kit.quantize(w, "fp8", granularity=granularity)
    shape, scales, attributes = scales_of(q)
    decode = onnx.helper.make_node("DequantizeLinear", ["codes", "scales"], ["w"], **attributes)
    constants = {
        "codes": (TYPES.FLOAT8E4M3FN, [ROWS, COLS], q.packed),
        "scales": (TYPES.FLOAT, shape, scales),
    }
    (made,) = model(linear(decode), constants, [3, ROWS], OPSET).run(None, {"x": x})
    values = fp4kit.dequantize(q)
    exact = x.astype(np.float64) @ values.astype(np.float64).T
    assert (np.abs(made - exact) <= COLS * 2.0**-24 * (np.abs(x) @ np.abs(values).T)).all()


@pytest.mark.parametrize("scale", [TYPES.FLOAT, TYPES.FLOAT8E8M0])
def test_fp4_has_no_kernel(scale):
    """Where this fails there is one: test it as FP8 is above."""
    q = fp4kit.quantize(np.ones((ROWS, COLS), np.float32), "mxfp4")
    scales = q.block_scale if scale == TYPES.FLOAT8E8M0 else np.ones(q.block_scale.shape, "f4")
    attributes = {"axis": 1, "block_size": 32, "output_dtype": TYPES.FLOAT}
    decode = onnx.helper.make_node("DequantizeLinear", ["codes", "scales"], ["w"], **attributes)
    constants = {
        "codes": (TYPES.FLOAT4E2M1, [ROWS, COLS], q.packed),
        "scales": (scale, list(scales.shape), scales),
    }
    with pytest.raises(Exception, match="Could not find an implementation for DequantizeLinear"):
        model(linear(decode), constants, [3, ROWS], LATER)
    cast = [onnx.helper.make_node("Cast", ["codes"], ["y"], to=TYPES.FLOAT)]
    with pytest.raises(Exception, match="Could not find an implementation for Cast"):
        model(cast, {"codes": constants["codes"]}, [ROWS, COLS], LATER)
