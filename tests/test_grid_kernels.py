# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels of FP8 under float32 scales, run on the host, equal the reference.

Not their speed or their hardware conversions, but every index, barrier and rest of a row.
"""

import numpy as np
import pytest

from fp4kit.backend.interface import Job
from fp4kit.cuda.grid import CudaGridBackend
from fp4kit.formats import DTYPES
from fp4kit.plan import plan_of
from fp4kit.reference import codecs
from fp4kit.reference.grid import ReferenceGridBackend
from fp4kit.scheme import Scheme

REFERENCE = ReferenceGridBackend()
RAW = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
#: (rows, cols, elements from a 16-byte boundary): rows of teams of several sizes, of a thread
#: block, too long for one, of odd length, misaligned; blocks that are and are not whole.
SHAPES = [(3, 5, 0), (9, 64, 0), (9, 64, 1), (130, 272, 0), (5, 4112, 0), (2, 33024, 0)]
SCHEMES = {
    "tensor": Scheme("fp8"),
    "channel": Scheme("fp8", granularity="channel"),
    "columns": Scheme("fp8", granularity="channel", direction="columnwise"),
    "block": Scheme("fp8", granularity="block"),
    "e5m2": Scheme("fp8_e5m2", recipe="compressed-tensors", granularity="block"),
}


def values(dtype, shape):
    """Numbers of many magnitudes; one row of all kinds of bits, NaN and infinity among them."""
    rng = np.random.default_rng(shape[1])
    x = rng.standard_normal(shape).astype(np.float32)
    x *= np.ldexp(np.float32(1), rng.integers(-10, 10, (shape[0], 1)))
    raw = codecs.from_float32(x, dtype)
    bits = raw.view(np.uint32 if dtype == "float32" else np.uint16)
    bits[-1] = rng.integers(0, 1 << (8 * bits.itemsize), shape[1], dtype=bits.dtype)
    return raw


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name in ("channel", "block") for dtype in DTYPES]
    + [("tensor", "float16"), ("columns", "float32"), ("columns", "bfloat16")]
    + [("e5m2", "bfloat16")],
)
def test_kernels_equal_the_reference(name, dtype, on_host, monkeypatch, assert_bits):
    engine = CudaGridBackend()
    monkeypatch.setattr(
        engine, "plan_amax", lambda *args: on_host.put(REFERENCE.plan_amax(*args)), raising=False
    )
    for rows, cols, shift in SHAPES:
        if cols > 4112 and (name != "channel" or dtype != "bfloat16"):
            continue  # slow, and of interest for rows alone
        x = values(dtype, (rows, cols))
        plan = plan_of(x.shape, SCHEMES[name].parts[0])
        expected, found = (
            Job(
                plan,
                source,
                dtype,
                None,
                make((rows, cols), np.uint8),
                make(plan.scale_shape, np.float32),
            )
            for make, source in (
                (np.empty, x),
                (on_host.empty, on_host.put(x, shift * x.itemsize)),
            )
        )
        REFERENCE.quantize(expected)
        engine.quantize(found)
        assert_bits(np.asarray(found.block_scale), expected.block_scale)
        assert_bits(np.asarray(found.packed), expected.packed)
        for out_dtype in DTYPES:
            right = np.empty((rows, cols), RAW[out_dtype])
            decoded = on_host.empty((rows, cols), RAW[out_dtype])
            REFERENCE.dequantize(expected, right, out_dtype)
            engine.dequantize(found, decoded, out_dtype)
            assert_bits(np.asarray(decoded), right)
