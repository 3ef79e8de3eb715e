# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Every kind of torch tensor under every function: the right bytes, or one line. (F14)"""

from __future__ import annotations

import warnings

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
from fp4kit import DtypeError, Fp4kitError, OptionError
from sample_arrays import F32, gaussian

torch = pytest.importorskip("torch")

READ = {name: (function, value) for name, function, value in every_function()}
#: Functions that would lose a gradient: they refuse, and have twins in fp4kit.torch.
DIFFERENTIABLE = ("quantize_dequantize", "hadamard_transform")
FLOAT_TYPES = ("float32", "float16", "bfloat16")


class Sub(torch.Tensor):
    """A user's subclass."""


class Hostile(torch.Tensor):
    """One whose every operation fails: none is needed."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} was called")


class Wrapper(torch.Tensor):
    """One whose values lie elsewhere."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(str(function))


class PlainProducer:
    """A torch tensor that shows nothing but DLPack."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, stream=None):
        return self.tensor.__dlpack__()

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


def negative_view(x):
    """A view that stands for the negated values of memory."""
    view = torch.conj(torch.complex(torch.zeros_like(x), -x)).imag
    assert view.is_neg()
    return view


def tracked(x):
    return x.requires_grad_() * 1 if x.is_floating_point() else x


def inference(x):
    with torch.inference_mode():
        return x.clone()


KINDS = {
    "plain": lambda x: x,
    "Parameter": lambda x: torch.nn.Parameter(x, requires_grad=x.is_floating_point()),
    "Buffer": lambda x: torch.nn.Buffer(x),
    "tracked": tracked,
    "inference": inference,
    "subclass": lambda x: x.as_subclass(Sub),
    "strided subclass": lambda x: torch.repeat_interleave(x, 2, -1)[..., ::2].as_subclass(Sub),
    "transposed": lambda x: x.mT.contiguous().mT if x.ndim > 1 else x,
    "negative": lambda x: negative_view(x) if x.dtype == torch.float32 else x,
    "as_strided": lambda x: torch.cat([x.flatten(), x.flatten()]).as_strided(x.shape, x.stride()),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", READ)
def test_kinds_that_work(name, kind):
    function, value = READ[name]
    x = KINDS[kind](torch.from_numpy(value.copy()))
    if name in DIFFERENTIABLE and x.requires_grad:
        with pytest.raises(DtypeError, match=rf"use fp4kit\.torch\.{name}"):
            function(x)
        x = x.detach()
    result = function(x)
    assert flattened(result) == flattened(function(value))
    if isinstance(result, torch.Tensor):
        assert type(result) is torch.Tensor
        assert not result.requires_grad
    elif isinstance(result, fp4kit.QuantizedTensor) and name in FLOATS:
        assert type(result.packed) is torch.Tensor


def test_subclasses_are_not_asked():
    x = torch.from_numpy(SAMPLE.copy()).as_subclass(Hostile)
    q = fp4kit.quantize(x)
    assert type(q.packed) is torch.Tensor
    assert q.packed.numpy().tobytes() == QUANTIZED.packed.tobytes()


def sparse(layout):
    def make(x):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return x.to_sparse(layout=layout)

    return make


def fake(x):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        return mode.from_tensor(x)


def nested(layout):
    def make(x):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.nested.nested_tensor(list(x.unbind()), layout=layout)

    return make


def quantized(x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8)


def freed(size, start):
    def make(x):
        tensor = torch.zeros((x.numel() + start), dtype=x.dtype)[start:].reshape(x.shape)
        tensor.untyped_storage().resize_(size)
        return tensor

    return make


def blocks(layout):
    def make(x):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return x.to_sparse(layout=layout, blocksize=(1, 1))

    return make


def complex32(x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.zeros(x.shape, dtype=torch.complex32)


def mkldnn(x):
    return x.float().to_mkldnn()


REFUSED = {
    "COO": (sparse(torch.sparse_coo), r"of layout sparse_coo; pass x\.to_dense\(\)"),
    "CSR": (sparse(torch.sparse_csr), r"of layout sparse_csr; pass x\.to_dense\(\)"),
    "CSC": (sparse(torch.sparse_csc), r"of layout sparse_csc; pass x\.to_dense\(\)"),
    "BSR": (blocks(torch.sparse_bsr), r"of layout sparse_bsr; pass x\.to_dense\(\)"),
    "mkldnn": (mkldnn, r"of layout _mkldnn; pass x\.to_dense\(\)"),
    "nested": (nested(torch.strided), "nested"),
    "jagged": (nested(torch.jagged), "nested"),
    "quantized": (quantized, r"quantized \(qint8\); pass x\.dequantize\(\)"),
    "meta": (lambda x: x.to("meta"), "meta is not supported; move the tensor to cpu or cuda"),
    "fake": (fake, "values are not its own storage"),
    "wrapper": (Wrapper, "values are not its own storage"),
    "lazy": (lambda x: torch.nn.UninitializedParameter(), "it has no values yet"),
    "lazy buffer": (lambda x: torch.nn.UninitializedBuffer(), "it has no values yet"),
    "zero tensor": (lambda x: torch._efficientzerotensor(x.shape), "not hand|is float32"),
    "freed": (freed(0, 0), "storage was freed or shrunk"),
    "freed view": (freed(0, 8), "storage was freed or shrunk"),
    "shrunk": (freed(3, 0), "storage was freed or shrunk"),
    "double": (lambda x: x.double(), "float64"),
    "complex": (lambda x: x.to(torch.complex64), "complex64"),
    "conjugate": (lambda x: x.to(torch.complex64).conj(), "complex64"),
    "complex32": (complex32, "complex32"),
    "int64": (lambda x: x.to(torch.int64), "int64"),
    "a dtype": (lambda x: torch.float32, "is not an array"),
    "a storage": (lambda x: x.untyped_storage(), "is not an array"),
    "a module": (lambda x: torch.nn.Linear(2, 2), "is not an array"),
    "a size": (lambda x: x.shape, "is not an array"),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("name", READ)
def test_kinds_that_are_refused(name, kind):
    function, value = READ[name]
    make, message = REFUSED[kind]
    if value.ndim < 2 and kind in ("CSR", "CSC", "BSR", "jagged"):
        pytest.skip("needs two dimensions")
    if kind in ("jagged", "nested", "mkldnn") and value.dtype != F32:
        message = f"{message}|has shape|layout"
    tensor = make(torch.from_numpy(value.copy()))
    if name in ("packed", "block_scale", "second level"):
        message = None  # or its shape
    with pytest.raises(Fp4kitError, match=message) as caught:
        function(tensor)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize(
    "dtype",
    ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn_x2", "uint4", "bits8", "bool",
     "uint8", "uint16", "bits16"],
)  # fmt: skip
def test_other_element_types_are_named(name, dtype):
    size = getattr(torch, dtype).itemsize
    x = torch.zeros((4, 64 * size), dtype=torch.uint8).view(getattr(torch, dtype))
    with pytest.raises(DtypeError, match=f"x is {dtype}; fp4kit takes float32, float16, bfloat16"):
        FLOATS[name](x)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e8m0fnu", "float4_e2m1fn_x2", "bits8"])
def test_codes_and_scales_of_any_byte_type(dtype):
    scales = np.arange(1, 13, dtype=np.uint8).reshape(3, 4)
    typed = torch.from_numpy(scales).view(getattr(torch, dtype))
    assert fp4kit.swizzle(typed).numpy().tobytes() == fp4kit.swizzle(scales).tobytes()


TRANSFORMS = {
    "vmap": lambda f: torch.vmap(f),
    "grad": lambda f: torch.func.grad(lambda a: f(a) and a.sum()),
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (x,)),
    "functionalize": lambda f: torch.func.functionalize(f),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", FLOATS)
def test_function_transforms_are_refused(name, transform):
    message = r"inside of torch\.func .* call fp4kit outside"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(DtypeError, match=message) as caught:
            TRANSFORMS[transform](FLOATS[name])(torch.from_numpy(SAMPLE.copy()))
    assert "\n" not in str(caught.value)


def test_real_tensors_under_a_fake_mode_are_one_line():
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = torch.from_numpy(SAMPLE.copy())
    with FakeTensorMode(), pytest.raises(DtypeError, match="torch does not hand x over") as caught:
        fp4kit.quantize(x)
    assert "\n" not in str(caught.value)


def test_compiled_functions_break_the_graph_and_go_on():
    compiled = torch.compile(lambda a: fp4kit.quantize(a).packed, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        packed = compiled(torch.from_numpy(SAMPLE.copy()))
    assert packed.numpy().tobytes() == QUANTIZED.packed.tobytes()


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_dlpack_alone_comes_back_as_numpy(dtype, assert_bits):
    x = gaussian((4, 64), dtype)
    bits = torch.from_numpy(x.view(np.int16 if dtype == "bfloat16" else x.dtype).copy())
    tensor = bits.view(torch.bfloat16) if dtype == "bfloat16" else bits
    for view in (tensor, tensor[1:, :32], tensor.T[:16]):
        own = np.ascontiguousarray(
            x if view is tensor else x[1:, :32] if view.shape == (3, 32) else x.T[:16]
        )
        if own.shape[-1] % 16:
            continue
        q = fp4kit.quantize(PlainProducer(view))
        assert_bits(q.packed, fp4kit.quantize(own).packed)


@pytest.mark.parametrize("kind", ["negative", "sparse", "expanded", "meta", "double", "subclass"])
@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs(name, kind, assert_bits):
    shape = OUTPUT_SHAPES.get(name, SAMPLE.shape)
    store = torch.full(shape, 7.0)
    out = {
        "negative": lambda: negative_view(store),
        "sparse": lambda: store.to_sparse(),
        "expanded": lambda: store[..., :1].expand(shape),
        "meta": lambda: store.to("meta"),
        "double": lambda: store.double(),
        "subclass": lambda: store.as_subclass(Sub),
    }[kind]()
    if kind != "subclass":
        with pytest.raises(Fp4kitError) as caught:
            OUTPUTS[name](out)
        assert "\n" not in str(caught.value)
        assert (store == 7).all()
        return
    expected = np.zeros(shape, F32)
    OUTPUTS[name](expected)
    OUTPUTS[name](out)
    assert_bits(store.numpy(), expected)


def test_outputs_that_share_memory_are_refused():
    x = torch.from_numpy(gaussian((4, 64)))
    with pytest.raises(OptionError, match="share memory"):
        fp4kit.hadamard_transform(x, out=x)
    out = fp4kit.quantize(x)
    object.__setattr__(out, "packed", x.view(torch.uint8).flatten()[:128].view(4, 32))
    before = x.clone()
    with pytest.raises(OptionError, match=r"out\.packed and x share memory"):
        fp4kit.quantize(x, out=out)
    assert torch.equal(x, before)


# ------------------------------------------------------------------------------------------------
# CUDA devices
# ------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["Parameter", "subclass", "transposed", "negative", "as_strided"])
@pytest.mark.parametrize("name", [name for name in FLOATS if name != "error_stats"])
def test_kinds_that_work_on_a_device(name, kind, cupy):
    device = torch.from_numpy(SAMPLE.copy()).cuda()
    x = KINDS[kind](device)
    result = FLOATS[name](x.detach() if name in DIFFERENTIABLE else x)
    first = getattr(result, "rowwise", result)
    array = getattr(first, "packed", first)
    assert array.device.type == "cuda"
    expected = FLOATS[name](SAMPLE)
    expected = getattr(expected, "rowwise", expected)
    wanted = getattr(expected, "packed", expected)
    assert array.cpu().numpy().tobytes() == wanted.tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_dlpack_alone_on_a_device_comes_back_as_cupy(dtype, cupy):
    x = gaussian((4, 64), dtype)
    tensor = torch.from_numpy(x.view(np.int16 if dtype == "bfloat16" else x.dtype).copy()).cuda()
    tensor = tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor

    class Producer(PlainProducer):
        def __dlpack__(self, stream=None, **options):
            return self.tensor.__dlpack__(stream=stream)

    q = fp4kit.quantize(Producer(tensor))
    assert isinstance(q.packed, cupy.ndarray)
    assert cupy.asnumpy(q.packed).tobytes() == fp4kit.quantize(x).packed.tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["COO", "CSR", "nested", "freed", "shrunk", "conjugate", "double"])
def test_kinds_that_are_refused_on_a_device(kind, cupy):
    make, message = REFUSED[kind]
    tensor = make(torch.from_numpy(SAMPLE.copy()))
    if kind in ("freed", "shrunk"):
        tensor = torch.zeros(4, 64, device="cuda")
        tensor.untyped_storage().resize_(0 if kind == "freed" else 3)
    with pytest.raises(DtypeError, match=message):
        fp4kit.quantize(tensor.cuda())


@pytest.mark.gpu
def test_outputs_that_share_memory_on_a_device_are_refused(cupy):
    x = torch.from_numpy(gaussian((4, 64))).cuda()
    with pytest.raises(OptionError, match="share memory"):
        fp4kit.hadamard_transform(x, out=x)
    store = x.view(torch.uint8)
    with pytest.raises(OptionError, match="share memory"):
        fp4kit.swizzle(store[:, :4], out=store.view(-1)[:512].view(128, 4))
