# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Every kind of host array under every function: the right bytes, or one line. (F14)"""

from __future__ import annotations

import array
import ctypes
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

import fp4kit
from array_functions import (
    FLOATS,
    OUTPUT_SHAPES,
    OUTPUTS,
    QUANTIZED,
    SAMPLE,
    every_function,
    flattened,
)
from fp4kit import DtypeError, Fp4kitError, OptionError, ShapeError
from sample_arrays import F32, gaussian

READ = {name: (function, value) for name, function, value in every_function()}


class OldProducer:
    """DLPack from before versions."""

    def __init__(self, data):
        self.data = data

    def __dlpack__(self, stream=None):
        return self.data.__dlpack__()

    def __dlpack_device__(self):
        return self.data.__dlpack_device__()


class NewProducer(OldProducer):
    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        return self.data.__dlpack__(max_version=max_version)


class Interface:
    def __init__(self, data):
        self.data = data
        self.__array_interface__ = data.__array_interface__


class Subclass(np.ndarray):
    pass


def read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


def unaligned(x):
    store = np.zeros(x.nbytes + 1, np.uint8)
    store[1:] = x.view(np.uint8).ravel()
    return store[1:].view(x.dtype).reshape(x.shape)


#: Kinds of arrays that work, from a NumPy array. Results are NumPy arrays.
KINDS = {
    "read-only": read_only,
    "unaligned": unaligned,
    "big-endian": lambda x: x.astype(x.dtype.newbyteorder(">")),
    "subclass": lambda x: x.view(Subclass),
    "matrix": lambda x: x.view(np.matrix) if x.ndim == 2 else x,
    "masked array without masked elements": np.ma.masked_array,
    "strided": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    "reversed": lambda x: x[..., ::-1].copy()[..., ::-1],
    "Fortran order": np.asfortranarray,
    "memoryview": lambda x: memoryview(x),
    "read-only memoryview": lambda x: memoryview(read_only(x)),
    "__array_interface__": Interface,
    "old DLPack": OldProducer,
    "new DLPack": NewProducer,
    "new read-only DLPack": lambda x: NewProducer(read_only(x)),
    "strided DLPack": lambda x: OldProducer(np.repeat(x, 2, axis=-1)[..., ::2]),
    "reversed DLPack": lambda x: NewProducer(x[..., ::-1].copy()[..., ::-1]),
}


#: A quantized tensor asks its arrays for their shapes.
SHAPELESS = (
    "__array_interface__",
    "old DLPack",
    "new DLPack",
    "new read-only DLPack",
    "strided DLPack",
    "reversed DLPack",
)
MEMBERS = ("packed", "block_scale", "second level")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", READ)
def test_kinds_that_work(name, kind):
    function, value = READ[name]
    expected = function(value)
    if kind in SHAPELESS and name in MEMBERS:
        with pytest.raises(DtypeError, match="is not an array with a shape"):
            function(KINDS[kind](value))
        return
    result = function(KINDS[kind](value))
    assert flattened(result) == flattened(expected)
    if isinstance(result, (np.ndarray, fp4kit.QuantizedTensor)):
        assert type(getattr(result, "packed", result)) is np.ndarray


#: Kinds that are refused whatever the function, and what the line says.
REFUSED = {
    "masked": (lambda x: np.ma.masked_array(x, mask=x == x.flat[0]), r"x\.filled\(value\)"),
    "list": (lambda x: x.tolist(), r"numpy\.asarray\(x, numpy\.float32\)"),
    "tuple": (lambda x: tuple(x.tolist()), "is not an array"),
    "capsule": (lambda x: x.__dlpack__(), "pass the object that made it"),
    "float64": (lambda x: x.astype(np.float64), "is float64"),
    "longdouble": (lambda x: x.astype(np.longdouble), "is float128|is longdouble|is float64"),
    "int32": (lambda x: x.astype(np.int32), "is int32"),
    "complex": (lambda x: x.astype(np.complex64), "is complex64"),
    "object": (lambda x: x.astype(object), "is object"),
    "fractions": (lambda x: np.full(x.shape, Fraction(1, 2)), "is object"),
    "text": (lambda x: x.astype("U8"), "is str256"),
    "dates": (lambda x: x.astype(np.int64).astype("M8[D]"), "is datetime64"),
    "structured": (lambda x: np.zeros(x.shape, "f4,f4"), "is void64"),
    "record": (lambda x: np.zeros(x.shape, "f4,f4").view(np.recarray), "is"),
    "raw bytes": (lambda x: np.zeros(x.shape, "V2"), "is void16"),
    "FP4 of ml_dtypes x 4": (lambda x: np.zeros(x.shape, "V4"), "is void32"),
    "memoryview of doubles": (lambda x: memoryview(x.astype(np.float64)), "is float64"),
    "bytes": (lambda x: x.tobytes(), "is not an array"),
    "array.array": (lambda x: array.array("f", x.ravel().tolist()), "is not an array"),
    "ctypes": (lambda x: (ctypes.c_float * x.size)(*x.ravel().tolist()), "is not an array"),
    "generator": (lambda x: (value for value in x), "is not an array"),
    "a class": (lambda x: np.ndarray, "is not an array"),
    "a dtype": (lambda x: x.dtype, "is not an array"),
    "old DLPack of doubles": (lambda x: OldProducer(x.astype(np.float64)), "is float64"),
    "DLPack of complex": (lambda x: NewProducer(x.astype(np.complex64)), "is complex64"),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("name", READ)
def test_kinds_that_are_refused(name, kind):
    function, value = READ[name]
    make, message = REFUSED[kind]
    message = (
        "packed|block_scale|second-level|second level|is not an array"
        if name in MEMBERS
        else message
    )
    with pytest.raises((DtypeError, ShapeError), match=message) as caught:
        function(make(value))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["masked", "float64", "big-endian", "read-only", "list", "old"])
@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_that_are_refused(name, kind):
    store = np.full(OUTPUT_SHAPES.get(name, SAMPLE.shape), 7, F32)
    out = {
        "masked": lambda: (
            np.ma.masked_array(store, mask=np.eye(*store.shape, 0)[: len(store)])
            if store.ndim == 2
            else np.ma.masked_array(store, mask=np.arange(store.size) == 1)
        ),
        "float64": lambda: store.astype(np.float64),
        "big-endian": lambda: Interface(store.view(">f4")),
        "read-only": lambda: read_only(store),
        "list": store.tolist,
        "old": lambda: NewProducer(read_only(store)),
    }[kind]()
    with pytest.raises((DtypeError, ShapeError)) as caught:
        OUTPUTS[name](out)
    assert "\n" not in str(caught.value)
    assert (store == 7).all()


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_that_are_plain_memory(name, assert_bits):
    expected = np.zeros(OUTPUT_SHAPES.get(name, SAMPLE.shape), F32)
    OUTPUTS[name](expected)
    for wrap in (memoryview, OldProducer, NewProducer, Interface, np.ma.masked_array):
        store = np.full(expected.shape, 7, F32)
        OUTPUTS[name](wrap(store))
        assert_bits(store, expected)


class Bits:
    """A DLPack producer of any element type: capsules of NumPy arrays, with another type code."""

    CODE, VERSIONED = 20, 32  # where the code stands in the tensor, and the tensor

    def __init__(self, bits, code, *, versioned):
        self.bits, self.code, self.versioned = bits, code, versioned

    def __dlpack__(self, max_version=None):
        capsule = self.bits.__dlpack__(max_version=(1, 0) if self.versioned else None)
        name = b"dltensor_versioned" if self.versioned else b"dltensor"
        pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
        pointer_of.restype, pointer_of.argtypes = (
            ctypes.c_void_p,
            [ctypes.py_object, ctypes.c_char_p],
        )
        at = pointer_of(capsule, name) + self.CODE + (self.VERSIONED if self.versioned else 0)
        ctypes.c_uint8.from_address(at).value = self.code
        return capsule

    def __dlpack_device__(self):
        return self.bits.__dlpack_device__()


@pytest.mark.parametrize("versioned", [False, True])
@pytest.mark.parametrize("name", FLOATS)
def test_dlpack_of_bfloat16(name, versioned):
    """NumPy itself cannot import it; it comes back as ml_dtypes' type."""
    x = gaussian(SAMPLE.shape, "bfloat16")
    result = FLOATS[name](Bits(x.view(np.uint16), 4, versioned=versioned))
    assert flattened(result) == flattened(FLOATS[name](x))
    if isinstance(result, np.ndarray) and name != "amax":
        assert result.dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("code", [3, 7, 10, 17, 255])
def test_dlpack_of_unknown_types_is_refused(code):
    for versioned in (False, True):
        with pytest.raises(DtypeError, match=f"DLPack type {code} of 16 bits"):
            fp4kit.quantize(Bits(np.ones((1, 16), np.uint16), code, versioned=versioned))


def test_dlpack_keeps_its_memory_alive(assert_bits):
    q = fp4kit.quantize(OldProducer(SAMPLE.copy()), backend="reference")
    assert_bits(q.packed, QUANTIZED.packed)
    raw = fp4kit.arrays.ingest(NewProducer(SAMPLE.copy())).data
    assert_bits(np.ascontiguousarray(raw), SAMPLE)
    empty = fp4kit.quantize(OldProducer(np.zeros((0, 64), F32)))
    assert empty.packed.shape == (0, 32)


@pytest.mark.parametrize(
    ("device", "message"),
    [((8, 0), "does not hand x over"), (None, "does not hand x over"), ("?", "does not hand")],
)
def test_dlpack_elsewhere_is_one_line(device, message):
    class Elsewhere(OldProducer):
        def __dlpack_device__(self):
            return device

    if device == (8, 0):
        pytest.importorskip("cupy")
    with pytest.raises(Fp4kitError, match=message) as caught:
        fp4kit.quantize(Elsewhere(SAMPLE))
    assert "\n" not in str(caught.value)


def test_producers_that_fail_are_one_line():
    class Fails(OldProducer):
        def __dlpack__(self, stream=None, max_version=None):
            raise RuntimeError("first line\nsecond line")

    with pytest.raises(DtypeError, match="Fails does not hand x over: first line; pass a plain"):
        fp4kit.quantize(Fails(SAMPLE))
    with pytest.raises(DtypeError, match="does not hand x over"):
        fp4kit.quantize(type("Broken", (), {"__array_interface__": {"shape": "?"}})())


@pytest.mark.parametrize("amax", [1e39, 10**30, np.float64(1e300), np.inf])
def test_amaxes_beyond_float32_are_infinite(amax):
    q = fp4kit.quantize(SAMPLE, amax=amax)
    expected = fp4kit.quantize(SAMPLE, amax=F32(np.inf) if amax > 3.5e38 else F32(amax))
    assert flattened(q) == flattened(expected)
    with pytest.raises(OptionError, match="amax is 1000"):
        fp4kit.quantize(SAMPLE, amax=10**400)


@pytest.mark.parametrize(
    "order",
    [[1.5] * 64, ["a"] * 64, [[1], [2, 3]], [2**70] * 64, [None], np.ones(64), np.ones(64, "U1")],
)
def test_orders_that_are_no_whole_numbers(order):
    with pytest.raises(DtypeError, match="whole numbers") as caught:
        fp4kit.quantize_residual(SAMPLE, 16, reorder=order)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [SAMPLE, None, [1], "x", (QUANTIZED, QUANTIZED), {}])
@pytest.mark.parametrize(
    "decode",
    [
        fp4kit.dequantize,
        fp4kit.dequantize_grouped,
        fp4kit.dequantize_residual,
        lambda q: fp4kit.convert_second_level(q, "decode_scale"),
    ],
)
def test_what_is_no_quantized_tensor_cannot_be_decoded(decode, value):
    with pytest.raises(OptionError, match=r"^a \w+ (cannot be decoded|is no group|has no resid)"):
        decode(value)


def test_quantized_tensors_of_another_kind_cannot_be_decoded():
    both = fp4kit.quantize(SAMPLE, direction="both", pad=True)
    with pytest.raises(
        OptionError, match="a DirectionPair cannot be decoded here; pass the Quantized"
    ):
        fp4kit.dequantize(both)
    group = fp4kit.quantize_grouped(SAMPLE, members=2)
    with pytest.raises(OptionError, match="dequantize_grouped takes groups"):
        fp4kit.dequantize(group)
    for out in (SAMPLE.copy(), [1], group):
        with pytest.raises(OptionError, match="out is a"):
            fp4kit.quantize(SAMPLE, out=out)
