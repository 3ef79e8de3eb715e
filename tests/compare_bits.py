# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Plugin of conftest.py: bit-exact comparison, and why it failed."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import fp4kit

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def _bits(array: np.ndarray) -> np.ndarray:
    """Bit patterns with all NaN made alike."""
    array = np.ascontiguousarray(array)
    bits = array.view(UNSIGNED[array.dtype.itemsize])
    if array.dtype.kind == "f" or array.dtype == ml_dtypes.bfloat16:
        bits = np.where(np.isnan(array), np.array(-1).astype(bits.dtype), bits)
    return bits


def describe_difference(actual: np.ndarray, expected: np.ndarray, block: int = 16) -> str:
    """The number of differing entries and the first differing block of both."""
    got, want = _bits(actual).ravel(), _bits(expected).ravel()
    where = np.flatnonzero(got != want)
    first = int(where[0])
    start = first // block * block
    index = np.unravel_index(first, np.shape(expected))
    rows = [
        f"{where.size} of {got.size} differ, the first at {tuple(int(i) for i in index)}",
        f"  got  {np.ravel(actual)[start : start + block]}",
        f"  want {np.ravel(expected)[start : start + block]}",
        f"  got  {' '.join(f'{v:x}' for v in got[start : start + block])}",
        f"  want {' '.join(f'{v:x}' for v in want[start : start + block])}",
    ]
    return "\n".join(rows)


def check_bits(actual: Any, expected: Any, what: str = "array", where: Any = None) -> None:
    """Fails unless both arrays hold the same bits; NaN payloads count as equal.

    Args:
        actual: NumPy array.
        expected: NumPy array of the same shape; bfloat16 may be given as uint16 bits on one side.
        what: name for the message.
        where: optional mask of the entries to compare.
    """
    actual, expected = np.asarray(actual), np.asarray(expected)
    for one, other in ((actual, expected), (expected, actual)):
        if one.dtype == ml_dtypes.bfloat16 and other.dtype == np.uint16:
            expected = expected.view(ml_dtypes.bfloat16)
            actual = actual.view(ml_dtypes.bfloat16)
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype} != {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: {actual.shape} != {expected.shape}"
    if where is not None:
        actual = np.where(where, actual, expected)
    if not np.array_equal(_bits(actual), _bits(expected)):
        pytest.fail(f"{what}: {describe_difference(actual, expected)}", pytrace=True)


def check_tensors(actual: fp4kit.QuantizedTensor, expected: fp4kit.QuantizedTensor) -> None:
    """Fails unless two quantized tensors are equal in every byte and every field."""
    for field in dataclasses.fields(expected):
        got, want = getattr(actual, field.name), getattr(expected, field.name)
        if isinstance(want, np.ndarray):
            check_bits(got, want, field.name)
        else:
            assert got == want, field.name


@pytest.fixture(scope="session")
def assert_bits() -> Any:
    return check_bits


@pytest.fixture(scope="session")
def assert_tensors() -> Any:
    return check_tensors
