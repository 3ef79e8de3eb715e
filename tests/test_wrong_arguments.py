# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments of every public function and method: one line that says what, or a result."""

from __future__ import annotations

import dataclasses
import inspect

import numpy as np
import pytest

import fp4kit
from fp4kit import Fp4kitError, Scheme
from sample_arrays import F32, gaussian

X = gaussian((32, 64))
Q = fp4kit.quantize(X, backend="reference")
PAIR = fp4kit.quantize(X, direction="both", backend="reference")
GROUP = fp4kit.quantize_grouped(X, members=2, backend="reference")
RESIDUAL = fp4kit.quantize_residual(X, 16, backend="reference")
FIELDS = [one.name for one in dataclasses.fields(Scheme)]
CPU = {"backend": "reference"}
#: Functions by a call of them that works; every argument is then replaced by others.
CALLS = {
    "quantize": (fp4kit.quantize, {"x": X, **CPU}),
    "quantize both": (fp4kit.quantize, {"x": X, "direction": "both", **CPU}),
    "quantize stochastic": (
        fp4kit.quantize,
        {"x": X, "rounding": "stochastic", "seed": 1, "subsequence": 2, **CPU},
    ),
    "quantize searched": (
        fp4kit.quantize,
        {"x": X, "scale_search": "sweep", "search_error": "mse", "e4m3_max": 256, **CPU},
    ),
    "quantize rotated": (
        fp4kit.quantize,
        {"x": X, "rht": True, "rht_rounding": "bf16", "rht_direction": "rowwise", **CPU},
    ),
    "quantize activated": (
        fp4kit.quantize,
        {"x": X, "activation": "dgelu", "activation_input": X, "dbias": None, **CPU},
    ),
    "quantize mx": (fp4kit.quantize, {"x": X, "scheme": "mxfp8", "scale_rule": "even", **CPU}),
    "quantize_dequantize": (fp4kit.quantize_dequantize, {"x": X, **CPU}),
    "dequantize": (fp4kit.dequantize, {"q": Q, **CPU}),
    "amax": (fp4kit.amax, {"x": X, **CPU}),
    "hadamard_transform": (fp4kit.hadamard_transform, {"x": X, **CPU}),
    "swizzle": (fp4kit.swizzle, {"scales": Q.block_scale, **CPU}),
    "unswizzle": (
        fp4kit.unswizzle,
        {"scales": Q.block_scale, "shape": Q.block_scale.shape, "layout": "linear", **CPU},
    ),
    "convert_second_level": (fp4kit.convert_second_level, {"q": Q, "target": "amax"}),
    "error_stats": (fp4kit.error_stats, {"x": X, "q_or_y": Q, **CPU}),
    "quantize_grouped": (fp4kit.quantize_grouped, {"x": X, "members": 2, **CPU}),
    "quantize_grouped rows": (fp4kit.quantize_grouped, {"x": X, "first_dims": [16, 16], **CPU}),
    "quantize_grouped columns": (fp4kit.quantize_grouped, {"x": X, "last_dims": [32, 32], **CPU}),
    "quantize_grouped offsets": (
        fp4kit.quantize_grouped,
        {"x": X, "first_dims": [16, 16], "offsets": [0, 1024, 2048], **CPU},
    ),
    "quantize_grouped row offsets": (
        fp4kit.quantize_grouped,
        {"x": X, "row_offsets": [0, 16, 32], **CPU},
    ),
    "dequantize_grouped": (fp4kit.dequantize_grouped, {"group": GROUP, **CPU}),
    "quantize_residual": (fp4kit.quantize_residual, {"x": X, "residual_channels": 16, **CPU}),
    "dequantize_residual": (fp4kit.dequantize_residual, {"q": RESIDUAL, **CPU}),
    "Scheme": (Scheme, {}),
    "Scheme.replace": (Scheme("nvfp4").replace, {}),
    "Scheme.from_metadata": (Scheme.from_metadata, {"metadata": {"format": "mxfp4"}}),
    "q.dequantize": (Q.dequantize, {**CPU}),
    "q.to": (Q.to, {"device": "cpu"}),
    "q[]": (Q.__getitem__, {"index": 1}),
    "group.member": (GROUP.member, {"number": 1}),
    "group[]": (GROUP.__getitem__, {"number": 1}),
    "group.to": (GROUP.to, {"device": "cpu"}),
    **{
        type(one).__name__: (
            type(one),
            {field.name: getattr(one, field.name) for field in dataclasses.fields(one)},
        )
        for one in (Q, GROUP, RESIDUAL)
    },
}
OTHERS = {
    "None": None,
    "True": True,
    "3": 3,
    "-1": -1,
    "2.5": 2.5,
    "nan": float("nan"),
    "text": "text",
    "no text": "",
    "bytes": b"text",
    "no list": [],
    "list": [1.0, 2.0],
    "texts": ["row", "column"],
    "tuple": (X, X),
    "dict": {"a": 1},
    "object": object(),
    "class": np.ndarray,
    "floats": np.ones(3, F32),
    "X": X,
    "text array": np.array(["a"]),
    "objects": np.array([None, 1]),
    "tensor": Q,
    "pair": PAIR,
    "group": GROUP,
    "residual": RESIDUAL,
    "function": len,
    "set": {1, 2},
    "large": 1 << 70,
}


def parameters():
    for name, (function, call) in CALLS.items():
        known = inspect.signature(function).parameters
        takes_fields = any(one.kind is one.VAR_KEYWORD for one in known.values())
        names = [one.name for one in known.values() if one.kind is not one.VAR_KEYWORD]
        names = dict.fromkeys([*names, *call, *(FIELDS if takes_fields else ()), "unknown"])
        yield from ((name, one) for one in names)


def fault_of(function, arguments, parameter):
    """What is wrong with what a call raises, or None."""
    try:
        result = function(**arguments)
        if isinstance(result, (fp4kit.QuantizedTensor, fp4kit.GroupedTensor)):
            result.dequantize(backend="reference")
    except Fp4kitError as error:
        return None if str(error) and "\n" not in str(error) else str(error)
    except IndexError as error:
        return None if parameter in ("index", "number") else repr(error)
    except TypeError as error:
        # Python's own word for an argument that there is not.
        mine = parameter == "unknown" and "unexpected keyword argument" in str(error)
        return None if mine else repr(error)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, ValueError) as error:
        return repr(error)
    return None


@pytest.mark.parametrize(("name", "parameter"), list(parameters()))
def test_one_line_or_a_result(name, parameter):
    function, call = CALLS[name]
    faults = {
        what: fault_of(function, {**call, parameter: other}, parameter)
        for what, other in OTHERS.items()
    }
    assert not {what: fault for what, fault in faults.items() if fault is not None}
