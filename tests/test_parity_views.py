# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Every backend equals the reference on views, and at any address. See test_parity.py."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import fp4kit
from fp4kit.api.metrics import error_sums
from fp4kit.formats import DTYPES
from parity_cases import OPTIONS, OUTPUT_OF, assert_sums, generator, values
from sample_arrays import F32


def in_fortran_order(xp: Any, array: Any) -> Any:
    """Copies in column-major order; `cupy.asfortranarray` would need cuBLAS, which is optional."""
    copy = xp.empty(array.shape, array.dtype, order="F")
    copy[...] = array
    return copy


#: Views that NumPy and CuPy can both make: name -> function of (module, base of shape (8, 256)).
VIEWS: dict[str, Any] = {
    "column slice": lambda xp, a: a[:, 16:112],
    "row slice": lambda xp, a: a[3:7],
    "column step": lambda xp, a: a[:, ::2],
    "row step": lambda xp, a: a[::3],
    "transposed": lambda xp, a: a.reshape(64, 32).T,
    "rows reversed": lambda xp, a: a[::-1],
    "columns reversed": lambda xp, a: a[:, ::-1],
    "both reversed, stepped": lambda xp, a: a[::-2, ::-2],
    "row broadcast": lambda xp, a: xp.broadcast_to(a[1], (5, 256)),
    "scalar broadcast": lambda xp, a: xp.broadcast_to(a[:1, :1], (2, 64)),
    "axes moved": lambda xp, a: a.reshape(4, 16, 32).transpose(1, 0, 2),
    "middle slice": lambda xp, a: a.reshape(2, 8, 128)[:, 3:, :],
    "misaligned start": lambda xp, a: a.reshape(-1)[1:257].reshape(1, 256),
    "odd start": lambda xp, a: a.reshape(-1)[3 : 3 + 96].reshape(3, 32),
    "column of rows": lambda xp, a: a[:, 5:37][::2],
    "one row": lambda xp, a: a[2],
    "fortran": in_fortran_order,
    "empty": lambda xp, a: a[2:2],
}
VIEW_OPTIONS = ("nvfp4-te", "nvfp4-modelopt", "mxfp4-even", "mxfp8-rceil")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("view", VIEWS)
def test_views_equal_their_copies(view, dtype, backend, reference, assert_tensors, assert_bits):
    base = values((8, 256), dtype, "views")
    xp, device_base = np, base
    if backend.on_gpu:
        import cupy as xp

        device_base = backend.put(base)
    x, copied = VIEWS[view](xp, device_base), np.array(VIEWS[view](np, base), order="C")
    assert_bits(backend.call(fp4kit.amax, x), reference.call(fp4kit.amax, copied))
    for option in VIEW_OPTIONS:
        expected = reference.quantize(copied, **OPTIONS[option])
        got = backend.quantize(x, **OPTIONS[option])
        assert_tensors(got, expected)
        out = OUTPUT_OF[dtype]
        fake = backend.call(fp4kit.quantize_dequantize, x, dtype=out, **OPTIONS[option])
        assert_bits(fake, reference.dequantize(expected, out))
        assert_sums(backend.call(error_sums, x, got), reference.call(error_sums, copied, expected))


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_quantized_arrays(view, backend, reference, assert_bits):
    base = generator(view).integers(0, 127, (8, 256)).astype(np.uint8)
    xp, device_base = np, base
    if backend.on_gpu:
        import cupy as xp

        device_base = backend.put(base)
    packed, copied = VIEWS[view](xp, device_base), np.array(VIEWS[view](np, base), order="C")
    shape = (*copied.shape[:-1], copied.shape[-1] * 2)
    scale = np.array(VIEWS[view](np, base)[..., ::8], order="C")
    q = fp4kit.QuantizedTensor(
        packed, VIEWS[view](xp, device_base)[..., ::8], "nvfp4", shape, amax=np.array([3], F32)
    )
    expected = dataclasses.replace(q, packed=copied, block_scale=scale)
    assert_bits(backend.dequantize(q), reference.dequantize(expected))
    assert_bits(
        backend.call(fp4kit.swizzle, packed), reference.call(fp4kit.swizzle, copied), "swizzle"
    )


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_big_endian_host_arrays(dtype, fast_backend, reference, assert_tensors):
    if fast_backend.on_gpu:
        pytest.skip("device arrays are never big-endian")
    x = values((7, 96), dtype, "endian")
    swapped = x.astype(x.dtype.newbyteorder(">"))
    assert swapped.tobytes() != x.tobytes()
    for option in VIEW_OPTIONS:
        expected = reference.quantize(x, **OPTIONS[option])
        assert_tensors(fast_backend.quantize(swapped, **OPTIONS[option]), expected)
        assert_tensors(reference.quantize(swapped, **OPTIONS[option]), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_host_arrays_at_any_address(
    offset, dtype, fast_backend, reference, assert_tensors, assert_bits
):
    if fast_backend.on_gpu:
        pytest.skip("a device array is aligned to its element size")
    x = values((3, 96), dtype, "address")
    buffer = np.zeros(x.nbytes + offset, np.uint8)
    buffer[offset:] = np.frombuffer(x.tobytes(), np.uint8)
    misaligned = buffer[offset:].view(x.dtype).reshape(x.shape)
    for option in VIEW_OPTIONS:
        q = reference.quantize(x, **OPTIONS[option])
        assert_tensors(fast_backend.quantize(misaligned, **OPTIONS[option]), q)
        # Results written to such an address arrive there.
        name = OUTPUT_OF[dtype]
        expected = reference.dequantize(q, name)
        out = np.zeros(expected.nbytes + offset, np.uint8)[offset:].view(expected.dtype)
        out = out.reshape(x.shape)
        assert fast_backend.dequantize(q, name, out=out) is out
        assert_bits(out, expected, "dequantize into a misaligned array")
        out[...] = 0
        options = {**OPTIONS[option], "dtype": name, "out": out}
        fast_backend.call(fp4kit.quantize_dequantize, misaligned, **options)
        assert_bits(out, expected, "quantize_dequantize into a misaligned array")


def test_read_only_inputs(backend, assert_tensors):
    x = values((4, 64), "float32", "readonly")
    expected = backend.quantize(x)
    x.flags.writeable = False
    assert_tensors(backend.quantize(x), expected)
