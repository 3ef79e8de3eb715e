# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Products for tests: operands of any kind, where they go, and how far a result may be off."""

import numpy as np

from fp4kit.backend.matmul import FloatOperand, MatmulJob, QuantizedOperand
from fp4kit.formats import ALL_FORMATS, GRID_BLOCK
from fp4kit.layout import padded_scale_shape, scale_offsets
from fp4kit.reference import codecs
from fp4kit.reference import matmul as reference

RAW = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
#: Bits of a result's significand, and exponent of its smallest step.
PRECISION = {"float32": (24, -149), "float16": (11, -24), "bfloat16": (8, -133)}
#: What rounds to infinity.
TOO_LARGE = {"float32": 2.0**128, "float16": 65520.0, "bfloat16": 255.5 * 2.0**120}
#: Scale bytes of numbers around 1.
USUAL_SCALES = {"e4m3": (0x28, 0x48), "e8m0": (122, 132)}


def numbers(rng, rows, depth, dtype):
    """Numbers of several magnitudes."""
    x = rng.standard_normal((rows, depth)).astype(np.float32)
    x *= np.ldexp(np.float32(1), rng.integers(-4, 4, (rows, 1)))
    return FloatOperand(np.ascontiguousarray(codecs.from_float32(x, dtype)), dtype)


def finite_codes(rng, spec, shape):
    """Codes without NaN and infinity, with signs."""
    codes = rng.integers(0, spec.element.max_code + 1, shape)
    return (codes | rng.integers(0, 2, shape) << (spec.element.bits - 1)).astype(np.uint8)


def stored_scales(linear, layout, transposed):
    """Linear (rows, blocks) scale bytes in the order of a layout; padding is never zero."""
    if layout == "linear":
        return np.ascontiguousarray(linear.T if transposed else linear)
    stored = np.full(padded_scale_shape(*linear.shape, layout), 0x7F, np.uint8)
    stored.reshape(-1)[scale_offsets(*linear.shape, layout)] = linear
    return stored


def quantized(rng, name, rows, depth, *, codes=None, scales=None, level=None, **options):
    """A quantized operand.

    Args:
        rng: makes what is not given.
        name: its format.
        rows: rows.
        depth: elements that count.
        codes: (rows, padded depth), one in a byte.
        scales: bytes (rows, blocks), or float32 of 128 x 128.
        level: float32 (levels,).
        options: fields of the operand.
    """
    spec = ALL_FORMATS[name]
    options = {
        **{"scale_layout": "linear", "low_first": True, "transposed": False},
        **{"level_name": "amax", "level_range": 1.0},
        **options,
    }
    blocks, transposed = spec.num_blocks(depth), options["transposed"]
    if codes is None:
        codes = finite_codes(rng, spec, (rows, blocks * spec.block_size))
    packed = codes
    if spec.packs_nibbles:
        order = "low_first" if options["low_first"] else "high_first"
        packed = codecs.pack_nibbles(codes, order)
    block_scale = grid_scale = None
    if spec.has_scale_grid:
        if scales is not None:
            grid_scale = np.ascontiguousarray(scales.T if transposed else scales)
    else:
        if scales is None:
            scales = rng.integers(*USUAL_SCALES[spec.scale_type], (rows, blocks)).astype(np.uint8)
        block_scale = stored_scales(scales, options["scale_layout"], transposed)
    return QuantizedOperand(
        spec,
        rows,
        depth,
        np.ascontiguousarray(packed.T if transposed else packed),
        block_scale,
        grid_scale=grid_scale,
        level=None if level is None else np.asarray(level, np.float32),
        **options,
    )


def grid_scales(rng, rows, depth):
    """Scales of 128 x 128 elements."""
    shape = (-(-rows // GRID_BLOCK), -(-depth // GRID_BLOCK))
    return rng.uniform(0.01, 3, shape).astype(np.float32)


def job_of(a, b, out_dtype="float32", *, rng=None, bias=None, c=None, alpha=1.0):
    """A product; `bias` and `c` are element types of what is added."""
    shape = (a.rows, b.rows)
    added = [
        None
        if dtype is None
        else codecs.from_float32(rng.standard_normal(size).astype(np.float32) * 3, dtype)
        for dtype, size in ((bias, b.rows), (c, shape))
    ]
    out = np.full(shape, 77, RAW[out_dtype])
    return MatmulJob(
        *(a, b, out, out_dtype, alpha),
        *(added[0], bias or "float32", added[1], c or "float32"),
    )


def moved_operand(operand, put, shift=0):
    """An operand whose arrays are `put`, its data so many elements from a boundary."""
    if isinstance(operand, FloatOperand):
        data = operand.data
        return operand._replace(data=put(data, shift * data.itemsize))
    fields = {
        name: put(getattr(operand, name))
        for name in ("block_scale", "grid_scale", "level")
        if getattr(operand, name) is not None
    }
    return operand._replace(packed=put(operand.packed, shift), **fields)


def moved(job, put, empty, shift=0):
    """A job whose arrays are `put`, and a result that nobody has written."""
    fields = {
        name: put(getattr(job, name)) for name in ("bias", "c") if getattr(job, name) is not None
    }
    return job._replace(
        a=moved_operand(job.a, put, shift),
        b=moved_operand(job.b, put, shift),
        out=empty(job.out.shape, job.out.dtype),
        **fields,
    )


def _without_blas(a, b):
    """(rows, cols) sums of products: what BLAS does with NaN and infinity is its own."""
    return np.stack([(row * b).sum(axis=1) for row in a])


def expected(job):
    """(result, error that it may have before it is rounded, whether sums may overflow).

    The first two are float64. The order is that of the reference: scales multiply whole sums.
    """
    step = min(reference.step_of(job.a), reference.step_of(job.b))
    shape = (job.a.rows, job.b.rows)
    sums, sizes, finite = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    with np.errstate(all="ignore"):
        elements = [reference.elements_of(one, step).astype(np.float64) for one in (job.a, job.b)]
        scales = [reference.scales_of(one, step) for one in (job.a, job.b)]
        for block in range(elements[0].shape[1]):
            a, b = (each[:, block] for each in elements)
            scale_a, scale_b = (
                np.ones(1) if each is None else each[:, block].astype(np.float64) for each in scales
            )
            scale = scale_a[:, None] * scale_b
            sums += scale * _without_blas(a, b)
            size = np.abs(scale) * _without_blas(np.abs(a), np.abs(b))
            sizes += size
            # Of what is finite; an element times its scale may be infinite in float32.
            finite += np.where(np.isfinite(size), size, 0)
            for values, own, axis in ((a, scale_a, 1), (b, scale_b, 0)):
                largest = np.abs(np.where(np.isfinite(values), values, 0)).max(axis=1) * np.abs(own)
                infinite = np.expand_dims(largest >= TOO_LARGE["float32"], axis)
                finite += np.where(infinite, np.inf, 0)
        factors = reference.factors(job).astype(np.float64)
        result = factors * sums
        # Each step is rounded, to a multiple of the smallest number at least.
        steps, smallest = job.a.depth + 8, 2.0**-149
        error = steps * (2.0**-23 * sizes + smallest) * np.abs(factors) + 2 * smallest
        for added, dtype in ((job.bias, job.bias_dtype), (job.c, job.c_dtype)):
            if added is not None:
                result = result + codecs.to_float32(np.asarray(added), dtype)
                error = error + 2.0**-24 * np.abs(result)
        overflows = (finite >= 2.0**127) | (np.abs(factors) * finite >= 2.0**127)
    return result, error, overflows


def check(job, found):
    """Asserts that a result is as exact as float32 sums and one rounding allow."""
    result, error, overflows = expected(job)
    got = codecs.to_float32(np.asarray(found).astype(RAW[job.out_dtype]), job.out_dtype)
    got = got.astype(np.float64)
    # Sums that overflow on the way may be infinite or NaN, by the order of what is added.
    given_up = overflows & ~np.isfinite(got)
    np.testing.assert_array_equal(np.isnan(got) & ~given_up, np.isnan(result) & ~given_up)
    infinite = np.isinf(result) & ~given_up
    np.testing.assert_array_equal(got[infinite], result[infinite])
    # What is too large for the type, or may be.
    large = np.abs(result) + error >= TOO_LARGE[job.out_dtype]
    finite = (
        np.isfinite(result)
        & ~given_up
        & ~(large & np.isinf(got) & (np.sign(got) == np.sign(result)))
    )
    bits, smallest = PRECISION[job.out_dtype]
    with np.errstate(all="ignore"):
        size = np.abs(result) + error
        half = np.maximum(np.ldexp(size, -bits), np.ldexp(0.5, smallest))
        off = np.abs(got - result) - error - half
    assert (off[finite] <= 0).all(), f"off by {off[finite].max()} more than allowed"
    # One pattern of NaN.
    nan = np.asarray(found)[np.isnan(got)]
    right = codecs.from_float32(np.full(1, np.nan, np.float32), job.out_dtype)
    assert set(nan.view(np.uint8 if nan.itemsize == 1 else f"u{nan.itemsize}").tolist()) <= set(
        right.view(f"u{right.itemsize}").tolist()
    )
