# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Quantized tensors as objects: facts, NumPy's protocol, parts, comparison, copies, moves."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fp4kit
from fp4kit import DtypeError, OptionError
from fp4kit.arrays import devices
from fp4kit.formats import BLOCK_FORMATS, SCALE_LAYOUTS
from sample_arrays import F32, gaussian, quantized

LAYOUTS = st.sampled_from(SCALE_LAYOUTS)
DIRECTIONS = st.sampled_from(["rowwise", "columnwise"])
ORDERS = st.sampled_from(["low_first", "high_first"])
FORMATS = st.sampled_from(["nvfp4", "mxfp4", "mxfp8", "mxfp8_e5m2"])


@pytest.fixture
def q():
    return quantized(gaussian((4, 64)))


@pytest.fixture
def group():
    return fp4kit.quantize_grouped(gaussian((48, 32)), first_dims=[16, 0, 32], backend="reference")


@pytest.fixture
def residual():
    return fp4kit.quantize_residual(gaussian((4, 64)), 16, backend="reference")


@pytest.fixture(params=["plain", "group", "residual"])
def any_tensor(request, q, group, residual):
    return {"plain": q, "group": group, "residual": residual}[request.param]


# ------------------------------------------------------------------------------------------------
# Facts
# ------------------------------------------------------------------------------------------------


def test_facts(q, group, residual):
    assert (q.format, q.shape, q.ndim, q.size, len(q)) == ("nvfp4", (4, 64), 2, 256, 4)
    assert (q.source_dtype, q.device) == ("float32", "cpu")
    assert (q.nbytes, q.bits_per_element) == (4 * 32 + 16 + 4, 8 * 148 / 256)
    assert (group.shape, group.ndim, group.size, len(group)) == ((48, 32), 2, 1536, 3)
    # An empty member has a second-level value, too.
    assert (group.device, group.nbytes) == ("cpu", 48 * 16 + 48 * 2 + 3 * 4)
    assert (residual.shape, residual.size, len(residual)) == ((4, 64), 256, 4)
    assert (residual.format, group.format) == ("nvfp4", "nvfp4")
    assert residual.nbytes == 4 * 40 + 128 * 8 + 4
    assert residual.bits_per_element == 8 * residual.nbytes / 256


def test_empty_tensors_are_true():
    assert quantized(np.zeros((0, 32), F32))


def test_every_tensor_decodes_itself(any_tensor, assert_bits):
    functions = {
        fp4kit.QuantizedTensor: fp4kit.dequantize,
        fp4kit.ResidualTensor: fp4kit.dequantize,
        fp4kit.GroupedTensor: fp4kit.dequantize_grouped,
    }
    expected = functions[type(any_tensor)](any_tensor, "float16")
    assert_bits(any_tensor.dequantize(np.float16), expected)
    out = np.empty(any_tensor.shape, np.float16)
    assert any_tensor.dequantize("float16", backend="reference", out=out) is out
    assert_bits(out, expected)


def test_rotated_tensors_decode_themselves(assert_bits):
    rotated = quantized(gaussian((4, 64)), rht=True)
    for undo in (False, True):
        expected = fp4kit.dequantize(rotated, undo_rht=undo)
        assert_bits(rotated.dequantize(undo_rht=undo), expected)


def test_representations_show_what_is_not_default(q, group, residual):
    assert repr(q) == "QuantizedTensor('nvfp4', shape=(4, 64), 4.62 bits per element)"
    other = quantized(gaussian((4, 64)), recipe="torchao", scale_layout="swizzled_8x4")
    assert repr(other) == (
        "QuantizedTensor('nvfp4', recipe='torchao', scale_layout='swizzled_8x4', shape=(4, 64), "
        "5.12 bits per element)"
    )
    assert repr(quantized(gaussian((2, 32)), "mxfp8")).startswith("QuantizedTensor('mxfp8', shape")
    assert repr(group) == "GroupedTensor('nvfp4', 3 members, shape=(48, 32), 4.56 bits per element)"
    assert repr(residual) == (
        "ResidualTensor('nvfp4', residual_channels=16, shape=(4, 64), 37.1 bits per element)"
    )


# ------------------------------------------------------------------------------------------------
# NumPy's protocol
# ------------------------------------------------------------------------------------------------


def test_numpy_decodes(any_tensor, assert_bits):
    expected = any_tensor.dequantize()
    assert_bits(np.asarray(any_tensor), expected)
    assert_bits(np.array(any_tensor), expected)
    assert_bits(np.asarray(any_tensor, np.float64), expected.astype(np.float64))
    for dtype in (np.float16, ml_dtypes.bfloat16):
        assert_bits(np.asarray(any_tensor, dtype), any_tensor.dequantize(dtype))
    assert np.asarray(any_tensor, ">f4").tolist() == expected.tolist()
    assert np.asarray(any_tensor).flags.writeable
    assert (np.add(any_tensor, F32(1)) == expected + F32(1)).all()
    np.testing.assert_array_equal(np.stack([any_tensor, any_tensor])[1], expected)


def test_numpy_cannot_have_a_view(any_tensor):
    with pytest.raises(ValueError, match="copy=False"):
        np.array(any_tensor, copy=False)


class OnGpu:
    """What stands for an array of a GPU."""

    def __init__(self, array, number=0):
        self.shape, self.array, self.number = array.shape, array, number

    def __dlpack_device__(self):
        return 2, self.number

    def __dlpack__(self, **options):
        raise AssertionError("a device array was read")


def test_arrays_of_a_gpu_are_not_fetched_by_numpy(any_tensor):
    moved = {name: OnGpu(getattr(any_tensor, name), 1) for name in ("packed", "block_scale")}
    far = dataclasses.replace(any_tensor, **moved)
    assert far.device == "cuda:1"
    with pytest.raises(DtypeError, match=r"lies on cuda:1, NumPy's .* q\.to\('cpu'\)"):
        np.asarray(far)
    with pytest.raises(DtypeError, match=r"one tensor lies on cuda:1, the other on cpu"):
        assert far == any_tensor
    with pytest.raises(DtypeError, match=r"OnGpu cannot be moved from cuda:1 to cpu"):
        far.to("cpu")


# ------------------------------------------------------------------------------------------------
# Codes and scales one by one
# ------------------------------------------------------------------------------------------------


@given(
    FORMATS,
    st.lists(st.integers(0, 40), min_size=1, max_size=3),
    DIRECTIONS,
    LAYOUTS,
    ORDERS,
    st.sampled_from(["1d", "2d"]),
)
@settings(max_examples=60, deadline=None)
def test_codes_times_scales_are_the_values(format, shape, direction, layout, order, block):
    x = gaussian(tuple(shape))
    q = quantized(
        x, format, direction=direction, scale_layout=layout, nibble_order=order, block_shape=block,
        pad=True,
    )  # fmt: skip
    spec = BLOCK_FORMATS[format]
    codes, scales = q.codes(), q.block_scale_values()
    assert (codes.dtype, codes.shape) == (np.uint8, q.shape)
    assert scales.dtype == F32
    if spec.packs_nibbles:
        assert codes.size == 0 or codes.max() < 16
    size = spec.block_size
    if direction == "rowwise":
        assert scales.shape == (*q.shape[:-1], -(-q.shape[-1] // size))
        spread = np.repeat(scales, size, axis=-1)[..., : q.shape[-1]]
    else:
        rows = int(np.prod(q.shape[:-1], dtype=int))
        assert scales.shape == (-(-rows // size), q.shape[-1])
        spread = np.repeat(scales, size, axis=0)[:rows].reshape(q.shape)
    second = float(q.amax[0]) / 2688 if q.amax is not None else 1.0
    values = spec.element.values[codes].astype(np.float64) * spread * second
    np.testing.assert_allclose(q.dequantize(), values, rtol=1e-6)


@pytest.mark.gpu
def test_codes_and_scales_of_a_gpu(cupy, assert_bits):
    for format in BLOCK_FORMATS:
        for direction in ("rowwise", "columnwise"):
            for layout in SCALE_LAYOUTS:
                options = {"direction": direction, "scale_layout": layout}
                host = quantized(gaussian((64, 96)), format, **options)
                device = fp4kit.quantize(cupy.asarray(gaussian((64, 96))), format, **options)
                codes, scales = device.codes(), device.block_scale_values()
                assert isinstance(codes, cupy.ndarray)
                assert isinstance(scales, cupy.ndarray)
                assert_bits(codes.get(), host.codes())
                assert_bits(scales.get(), host.block_scale_values())


# ------------------------------------------------------------------------------------------------
# Members of groups
# ------------------------------------------------------------------------------------------------


def test_members_of_a_group(group, assert_tensors):
    members = list(group)
    assert [member.shape for member in members] == [(16, 32), (0, 32), (32, 32)]
    for number, member in enumerate(members):
        assert_tensors(member, group.member(number))
        assert_tensors(group[number], member)
    assert_tensors(group[-1], members[2])
    assert [member.shape for member in group[1:]] == [(0, 32), (32, 32)]
    np.testing.assert_array_equal(group.dequantize()[16:], members[2].dequantize())
    with pytest.raises(IndexError):
        group[3]
    with pytest.raises(OptionError, match="'a' is neither a member's number nor a range"):
        group["a"]


# ------------------------------------------------------------------------------------------------
# Comparison and copies
# ------------------------------------------------------------------------------------------------


def test_equal_tensors(any_tensor):
    assert copy.deepcopy(any_tensor) == any_tensor
    changed = dataclasses.replace(any_tensor, source_dtype="bfloat16")
    assert changed == any_tensor
    for name in ("packed", "block_scale"):
        bits = getattr(any_tensor, name).copy()
        bits.reshape(-1)[0] ^= 1
        assert dataclasses.replace(any_tensor, **{name: bits}) != any_tensor
    assert any_tensor != 3
    assert any_tensor != any_tensor.dequantize
    with pytest.raises(TypeError, match="unhashable"):
        hash(any_tensor)


def test_what_makes_tensors_unequal(q):
    x = gaussian((4, 64))
    assert quantized(x) == q
    for options in (
        {"recipe": "torchao"},
        {"scale_layout": "swizzled_8x4"},
        {"nibble_order": "high_first"},
        {"format": "mxfp4"},
        {"second_level": "row_scaled"},
        {"amax": 1.0},
    ):
        assert quantized(x, **options) != q
    assert quantized(x.reshape(2, 2, 64)) != q
    assert quantized(x, recipe="nvfuser") != quantized(x, recipe="nvfuser", second_level="none")


def test_strides_and_layout_of_arrays_do_not_count(q):
    room = np.zeros((4, 64), np.uint8)
    room[:, ::2] = q.packed
    assert dataclasses.replace(q, packed=room[:, ::2]) == q
    typed = dataclasses.replace(q, block_scale=q.block_scale.view(ml_dtypes.float8_e4m3fn))
    assert typed == q
    nan = dataclasses.replace(q, amax=np.full(1, np.nan, F32))
    assert nan == copy.copy(nan)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickles(any_tensor, protocol):
    any_tensor.dequantize()
    again = pickle.loads(pickle.dumps(any_tensor, protocol))
    assert again == any_tensor
    fields = {one.name for one in dataclasses.fields(any_tensor)}
    assert set(vars(again)) == fields
    assert again.source_dtype == any_tensor.source_dtype
    np.testing.assert_array_equal(again.dequantize(), any_tensor.dequantize())


def test_copies(any_tensor):
    shallow, deep = copy.copy(any_tensor), copy.deepcopy(any_tensor)
    assert shallow.packed is any_tensor.packed
    assert not np.shares_memory(deep.packed, any_tensor.packed)
    deep.packed.reshape(-1)[0] ^= 1
    assert deep != any_tensor == shallow


def test_pairs():
    pair = quantized(gaussian((32, 64)), direction="both")
    assert pair == copy.deepcopy(pair)
    assert pickle.loads(pickle.dumps(pair)) == pair
    assert pair.to("cpu") == pair
    assert isinstance(pair.to("numpy"), type(pair))
    both = fp4kit.quantize_grouped(
        gaussian((32, 64)), members=2, direction="both", backend="reference"
    )
    assert both == copy.deepcopy(both)
    assert pickle.loads(pickle.dumps(both)) == both
    assert both.to("cpu") == both


# ------------------------------------------------------------------------------------------------
# Devices
# ------------------------------------------------------------------------------------------------


def test_what_lies_there_already_is_not_copied(any_tensor):
    for device in ("cpu", "numpy"):
        assert any_tensor.to(device) is any_tensor


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "cuda:", "", 0, None, 3.5, ["cpu"], "cpu:0"])
def test_what_is_no_device(any_tensor, device):
    with pytest.raises(OptionError, match="choose cpu, cuda or cuda:N"):
        any_tensor.to(device)


def test_a_gpu_that_is_not_there(q, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    with pytest.raises(fp4kit.BackendUnavailableError, match="copy to cuda:1: numpy: "):
        q.to("cuda:1")


def test_device_objects(monkeypatch):
    kinds = {
        "cupy.cuda.device.Device": {"id": 3},
        "torch.device": {"__str__": lambda self: "cuda:3"},
        "jaxlib._jax.Device": {"platform": "gpu", "local_hardware_id": 3},
    }
    for name, members in kinds.items():
        module, _, kind = name.rpartition(".")
        device = type(kind, (), {**members, "__module__": module})()
        assert devices.device_name(device) == "cuda:3"


@pytest.mark.gpu
def test_there_and_back(any_tensor, cupy):
    far = any_tensor.to("cuda")
    assert far.device == f"cuda:{cupy.cuda.runtime.getDevice()}"
    assert isinstance(far.packed, cupy.ndarray)
    assert far.to("cuda") is far
    assert far.to(cupy.cuda.Device(far.packed.device.id)) is far
    np.testing.assert_array_equal(far.dequantize().get(), any_tensor.dequantize())
    for device in ("cpu", "numpy"):
        assert far.to(device) == any_tensor
    assert pickle.loads(pickle.dumps(far)) == far == copy.deepcopy(far)
    with pytest.raises(DtypeError, match=r"lies on cuda:\d, NumPy's"):
        np.asarray(far)


@pytest.mark.gpu
def test_parts_of_a_gpu(cupy):
    host = quantized(gaussian((256, 64)), scale_layout="swizzled_128x4")
    device = host.to("cuda")
    assert device[128:].to("cpu") == host[128:]
    assert device[128:].packed.base is not None


# ------------------------------------------------------------------------------------------------
# JAX
# ------------------------------------------------------------------------------------------------


def test_jax(assert_bits):
    jnp = pytest.importorskip("jax.numpy")
    import jax

    x = gaussian((4, 64))
    q, host = fp4kit.quantize(jnp.asarray(x)), quantized(x)
    assert q.device == "cpu"
    assert q == host
    assert q.to("cpu") is q
    assert q.to(jax.devices("cpu")[0]) is q
    assert isinstance(q.to("numpy").packed, np.ndarray)
    assert isinstance(q.codes(), jax.Array)
    assert_bits(np.asarray(q.codes()), host.codes())
    assert_bits(np.asarray(q), host.dequantize())
    assert np.asarray(q).flags.writeable
    assert q[1:3] == host[1:3]
    assert pickle.loads(pickle.dumps(q)) == q
    assert repr(q) == repr(host).replace(", 4.62", ", jax, 4.62")
