# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Prepared weights: the documented bytes on every backend, and back."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fp4kit
from fp4kit import OptionError, PreparedTensor, ShapeError, prepare, quantize
from fp4kit.api.backends import get_backend
from fp4kit.backend.matmul import FloatOperand, MatmulJob
from fp4kit.backend.prepared import TILE_CODES, WeightsJob, tile_shape
from fp4kit.formats import NIBBLE_ORDERS, SCALE_LAYOUTS, get_format
from fp4kit.layout import padded_scale_shape
from matmul_samples import prepared, weights

FORMATS = ("nvfp4", "mxfp4")
SHAPES = ((16, 128), (1, 16), (50, 160), (130, 1000), (3, 32, 96), (32, 896))
#: Where each bit of a half of a word comes from: (code of four, its bit), the highest first.
WORD = "s0 3.1 3.0 s1 s3 3.2 s2 0.2 0.1 0.0 1.2 1.1 1.0 2.2 2.1 2.0".split()  # noqa: SIM905


def linear_of(q):
    """The tensor with linear scales."""
    plan = q.plan()
    scales = q.block_scale
    if plan.scale_layout != "linear":
        scales = fp4kit.unswizzle(scales, (plan.vectors, plan.blocks), plan.scale_layout)
    if plan.is_columnwise:
        return q.packed, scales
    return q.packed, scales.reshape(*q.shape[:-1], plan.blocks)


def read_tiles(spec, tiles, rows, depth):
    """Codes (rows, depth) and scales (rows, blocks), element by element as the layout says."""
    codes = np.zeros((rows, depth), np.uint8)
    scales = np.zeros((rows, spec.num_blocks(depth)), np.uint8)
    lane_blocks = 32 // spec.block_size
    for row in range(rows):
        r = row % 16
        for k in range(depth):
            tile = tiles[row // 16, k // 128]
            i = k % 128 // 8
            place = (r % 2 * 32 + r // 2 * 4 + i // 4) * 16 + i % 4 * 4
            half = tile[place : place + 4].view("<u2")[k % 2]
            own = k % 8 // 2
            code = 0
            for bit, name in enumerate(reversed(WORD)):
                if name == f"s{own}":
                    code |= int(half >> bit & 1) << 3
                elif name.startswith(f"{own}."):
                    code |= int(half >> bit & 1) << int(name[2:])
            codes[row, k] = code
            b = k % 128 // spec.block_size
            place = ((r // 2 * 4 + b // lane_blocks) * 2 + r % 2) * lane_blocks + b % lane_blocks
            scales[row, k // spec.block_size] = tile[TILE_CODES + place]
    return codes, scales


@pytest.mark.parametrize("name", FORMATS)
def test_the_documented_layout(name):
    rng = np.random.default_rng(3)
    q = quantize(rng.standard_normal((20, 192)).astype(np.float32), name)
    codes, scales = read_tiles(get_format(name), prepare(q).tiles, 20, 192)
    np.testing.assert_array_equal(codes, q.codes())
    np.testing.assert_array_equal(scales, q.block_scale)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("nibble_order", NIBBLE_ORDERS)
@pytest.mark.parametrize("scale_layout", SCALE_LAYOUTS)
@pytest.mark.parametrize("name", FORMATS)
def test_restored_bytes(name, scale_layout, nibble_order, backend):
    rng = np.random.default_rng(4)
    options = {"scale_layout": scale_layout, "nibble_order": nibble_order, "pad": True}
    for shape in SHAPES:
        x = rng.standard_normal(shape).astype(np.float32)
        for direction in ("rowwise", "columnwise"):
            q = quantize(x, name, direction=direction, **options)
            w = prepare(q, backend=backend)
            restored = w.restore(backend=backend)
            for given_bytes, wanted in zip(
                (restored.packed, restored.block_scale), linear_of(q), strict=True
            ):
                np.testing.assert_array_equal(given_bytes, wanted)
            assert w.shape == q.shape
            assert w.is_plain
            np.testing.assert_array_equal(w.dequantize(), q.dequantize())


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(FORMATS),
    rows=st.integers(1, 70),
    depth=st.integers(1, 400),
    layout=st.sampled_from(SCALE_LAYOUTS),
    low_first=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_bytes(name, rows, depth, layout, low_first, seed):
    """Of any codes and scales, which need not come from numbers."""
    rng = np.random.default_rng(seed)
    operand = weights(name, rows, depth, layout=layout, low_first=low_first, seed=seed)
    operand = operand._replace(
        block_scale=rng.integers(0, 256, operand.block_scale.shape, dtype=np.uint8)
    )
    tiles = prepared(operand).tiles
    spec = operand.format
    packed = np.zeros_like(operand.packed)
    scales = np.zeros((rows, spec.num_blocks(depth)), np.uint8)
    job = WeightsJob(spec, rows, depth, packed, scales, "linear", low_first, tiles)
    get_backend("cpu").restore_weights(job)
    np.testing.assert_array_equal(packed, operand.packed)
    again = np.empty_like(tiles)
    assert get_backend("cpu").prepare_weights(job._replace(tiles=again)) == bool(
        (scales <= (0x7E if name == "nvfp4" else 135)).all()
    )
    np.testing.assert_array_equal(again, tiles)


@pytest.mark.parametrize("low_first", [True, False])
@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
@pytest.mark.parametrize("name", FORMATS)
def test_kernels(name, layout, low_first, on_host):
    for rows, depth in ((16, 128), (21, 200), (48, 256), (3, 17)):
        operand = weights(name, rows, depth, layout=layout, low_first=low_first)
        spec, wanted = operand.format, prepared(operand)
        arrays = [on_host.put(each) for each in (operand.packed, operand.block_scale)]
        tiles = on_host.empty(wanted.tiles.shape, np.uint8)
        job = WeightsJob(spec, rows, depth, *arrays, layout, low_first, tiles)
        assert on_host.engine.prepare_weights(job)
        np.testing.assert_array_equal(tiles, wanted.tiles)
        packed = on_host.empty(operand.packed.shape, np.uint8)
        scales = on_host.empty((rows, spec.num_blocks(depth)), np.uint8)
        restored = job._replace(packed=packed, block_scale=scales, scale_layout="linear")
        on_host.engine.restore_weights(restored)
        np.testing.assert_array_equal(packed, operand.packed)
        back = np.empty(padded_scale_shape(rows, spec.num_blocks(depth), layout), np.uint8)
        get_backend("reference").swizzle(np.asarray(scales), layout, back)
        np.testing.assert_array_equal(back, operand.block_scale)
    assert {each.kernel for each in on_host.launched} == {"prepare_weights", "restore_weights"}


@pytest.mark.parametrize(
    ("name", "byte"), [("nvfp4", 0x7F), ("nvfp4", 0x80), ("mxfp4", 136), ("mxfp4", 0), ("mxfp4", 1)]
)
def test_scales_that_are_not_plain(name, byte, on_host):
    operand = weights(name, 32, 256)
    operand.block_scale[17, 1] = byte
    assert not prepared(operand).is_plain
    arrays = [on_host.put(each) for each in (operand.packed, operand.block_scale)]
    tiles = on_host.empty(tile_shape(operand.format, 32, 256), np.uint8)
    assert not on_host.engine.prepare_weights(
        WeightsJob(operand.format, 32, 256, *arrays, "linear", True, tiles)
    )


def test_a_block_of_zeros_is_plain_whatever_its_scale_is(on_host):
    operand = weights("mxfp4", 32, 256)
    operand.block_scale[17, 1] = 0
    operand.packed[17, 16:32] = 0x80
    assert prepared(operand).is_plain
    arrays = [on_host.put(each) for each in (operand.packed, operand.block_scale)]
    tiles = on_host.empty(tile_shape(operand.format, 32, 256), np.uint8)
    assert on_host.engine.prepare_weights(
        WeightsJob(operand.format, 32, 256, *arrays, "linear", True, tiles)
    )


@pytest.mark.parametrize("name", FORMATS)
def test_the_reference_multiplies_it_as_the_rows(name):
    operand = weights(name, 24, 160, level=np.float32([0.5, 3.0]), level_name="decode_scale")
    x = FloatOperand(np.random.default_rng(1).standard_normal((3, 160)).astype("f4"), "float32")
    results = []
    for each in (operand, prepared(operand)):
        out = np.empty((3, 24), np.float32)
        get_backend("reference").matmul(MatmulJob(x, each, out, "float32"))
        results.append(out)
    np.testing.assert_array_equal(*results)


def test_a_tensor_behaves():
    x = np.random.default_rng(2).standard_normal((4, 32, 64)).astype(np.float32)
    q = quantize(x)
    w = prepare(q)
    assert repr(w) == "PreparedTensor('nvfp4', shape=(4, 32, 64), 9 bits per element)"
    assert (w.format, w.size, w.device, len(w)) == ("nvfp4", 8192, "cpu", 4)
    assert pickle.loads(pickle.dumps(w)) == w
    assert w == prepare(q, backend="reference")
    assert w != prepare(quantize(-x))
    assert prepare(w) is w
    assert w.to("cpu") is w
    np.testing.assert_array_equal(w[2].dequantize(), q[2].dequantize())
    np.testing.assert_array_equal(w[1, 16:].dequantize(), q[1, 16:].dequantize())
    assert isinstance(w[1:3], PreparedTensor)
    with pytest.raises(OptionError, match="multiples of 16"):
        w[0, 8:]
    with pytest.raises(OptionError, match="multiples of 16"):
        w[:, :, :32]
    with pytest.raises(ShapeError, match="tiles have shape"):
        PreparedTensor(w.tiles[:1], w.scheme, w.shape, True, amax=w.amax)


def test_parts_with_levels_of_rows():
    x = np.random.default_rng(2).standard_normal((64, 32)).astype(np.float32)
    q = quantize(x, second_level="row_scaled")
    w = prepare(q)
    np.testing.assert_array_equal(w[16:48].dequantize(), q[16:48].dequantize())
    both = quantize(x, direction="columnwise")
    np.testing.assert_array_equal(prepare(both)[:, 16:32].dequantize(), both[:, 16:32].dequantize())


def test_what_cannot_be_prepared():
    x = np.ones((32, 32), np.float32)
    for given_tensor, message in ((quantize(x, "mxfp8"), "mxfp8"), (x, "a ndarray")):
        with pytest.raises(OptionError, match=f"only QuantizedTensors of nvfp4 and.*{message}"):
            prepare(given_tensor)


def test_empty_tensors():
    q = quantize(np.ones((0, 32), np.float32))
    w = prepare(q)
    assert w.tiles.shape == (0, 1, 1152)
    assert w.restore() == q


@pytest.mark.parametrize("name", FORMATS)
def test_products_with_it(name):
    rng = np.random.default_rng(8)
    w = quantize(rng.standard_normal((48, 160)).astype(np.float32), name)
    x = rng.standard_normal((2, 3, 160)).astype(np.float32)
    wanted = fp4kit.matmul(x, w, backend="reference")
    np.testing.assert_array_equal(fp4kit.matmul(x, prepare(w), backend="reference"), wanted)
    both = quantize(rng.standard_normal((160, 48)).astype(np.float32), name, direction="columnwise")
    np.testing.assert_array_equal(
        fp4kit.matmul(x, prepare(both), backend="reference"),
        fp4kit.matmul(x, both, backend="reference"),
    )
