# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Element types by name and by the dtype objects of every framework, wherever one is taken."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import fp4kit
from fp4kit import OptionError
from fp4kit.arrays.dtypes import dtype_name
from sample_arrays import F32, gaussian

OBJECTS = {
    "float32": ("float32", np.float32, np.dtype("float32"), np.dtype("<f4"), F32),
    "float16": ("float16", np.float16, np.dtype("float16"), np.half),
    "bfloat16": ("bfloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)),
}
PAIRS = [(name, dtype) for name, dtypes in OBJECTS.items() for dtype in dtypes]
X = gaussian((4, 64))
QUANTIZED = fp4kit.quantize(X, backend="reference")
GROUP = fp4kit.quantize_grouped(X, members=2, backend="reference")
RESIDUAL = fp4kit.quantize_residual(X, 16, backend="reference")
#: Every public function that takes a dtype.
FUNCTIONS = {
    "dequantize": lambda dtype: fp4kit.dequantize(QUANTIZED, dtype),
    "quantize_dequantize": lambda dtype: fp4kit.quantize_dequantize(X, dtype=dtype),
    "hadamard_transform": lambda dtype: fp4kit.hadamard_transform(X, dtype=dtype),
    "dequantize_grouped": lambda dtype: fp4kit.dequantize_grouped(GROUP, dtype),
    "dequantize_residual": lambda dtype: fp4kit.dequantize_residual(RESIDUAL, dtype),
    "method": QUANTIZED.dequantize,
    "method of a group": GROUP.dequantize,
    "method of residuals": RESIDUAL.dequantize,
}
every_function = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)


@pytest.mark.parametrize(("name", "dtype"), PAIRS)
def test_objects_have_names(name, dtype):
    assert dtype_name(dtype) == name


@every_function
@pytest.mark.parametrize(("name", "dtype"), PAIRS)
def test_every_function_takes_them(function, name, dtype, dtypes, assert_bits):
    result = function(dtype)
    assert result.dtype == dtypes[name]
    assert_bits(result, function(name))


@every_function
@pytest.mark.parametrize(
    ("value", "given"),
    [
        ("fp16", "'fp16'"),
        ("torch.float16", "'torch.float16'"),
        (np.float64, "(float64)"),
        (np.dtype("int8"), "(int8)"),
        (np.dtype(">f4"), "(float32 in the other byte order)"),
        (ml_dtypes.float8_e4m3fn, "(float8_e4m3fn)"),
        (float, "<class 'float'>"),
        (3, "3"),
        ([F32], "[<class 'numpy.float32'>]"),
        ((X,), "float32"),
        (X, "<ndarray of shape (4, 64)>"),
        (object(), "<object object"),
        (QUANTIZED, "<QuantizedTensor of shape (4, 64)>"),
    ],
)
def test_what_is_no_element_type(function, value, given):
    with pytest.raises(OptionError) as caught:
        function(value)
    message = str(caught.value)
    assert message.startswith("dtype=")
    assert given in message
    assert "choose one of float32, float16, bfloat16" in message
    assert "\n" not in message


def test_jax_dtypes():
    jnp = pytest.importorskip("jax.numpy")
    for name in OBJECTS:
        assert dtype_name(getattr(jnp, name)) == name
        assert dtype_name(jnp.dtype(name)) == name
    with pytest.raises(OptionError, match=r"\(int32\)"):
        dtype_name(jnp.int32)
