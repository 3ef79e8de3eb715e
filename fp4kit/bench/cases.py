# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Operations that are measured, ready to be called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from fp4kit.api import quantize as api
from fp4kit.api import quantize_dequantize as fake
from fp4kit.api import scale_ops
from fp4kit.formats import ALL_FORMATS
from fp4kit.scheme import Scheme, as_scheme

from .machines import Gpu, Machine
from .results import SmallCall

SCALE_BYTES = 64 << 20
#: The call whose host time counts: small enough that the device is never the limit.
SMALL_SHAPE = (128, 4096)


@dataclass(frozen=True)
class Case:
    """One operation, ready to be called again and again.

    Attributes:
        name: operation, format and the like.
        nbytes: bytes that must move.
        call: runs it; on a GPU it only enqueues it.
    """

    name: str
    nbytes: int
    call: Callable[[], object]


def float_cases(machine: Machine, rows: int, columns: int, dtype: str) -> Iterator[Case]:
    """Every operation on floats; the arrays of a case may go when the next one is asked for."""
    x = machine.random(rows, columns, dtype)
    known = api.amax(x)
    yield Case("amax", x.nbytes, lambda: api.amax(x))
    back = machine.xp.empty_like(x)
    kinds = [(name, "linear") for name in ALL_FORMATS]
    kinds[1:1] = [("nvfp4", "swizzled_128x4")]
    for name, layout in kinds:
        given = {"amax": known} if ALL_FORMATS[name].has_second_level else {}
        scheme = as_scheme(name, {"scale_layout": layout})
        options: Any = {"nonfinite": "propagate", **given}
        q = api.quantize(x, scheme, **options)
        moved = x.nbytes + q.packed.nbytes + q.block_scale.nbytes

        def encode(scheme: Scheme = scheme, options: Any = options, q: Any = q) -> object:
            return api.quantize(x, scheme, out=q, **options)

        def decode(q: Any = q) -> object:
            return api.dequantize(q, dtype, out=back)

        title = name if layout == "linear" else f"{name} {layout}"
        yield Case(f"quantize {title}", moved, encode)
        yield Case(f"dequantize {title}", moved, decode)
        if given and layout == "linear":
            yield Case(
                f"quantize {name}, amax measured",
                moved + x.nbytes,
                partial(api.quantize, x, out=q, nonfinite="propagate"),
            )
    yield Case(
        "quantize_dequantize nvfp4",
        2 * x.nbytes,
        lambda: fake.quantize_dequantize(x, amax=known, nonfinite="propagate", out=back),
    )


def scale_cases(machine: Machine, nbytes: int = SCALE_BYTES) -> Iterator[Case]:
    """Swizzle and unswizzle of scales alone."""
    columns = min(512, nbytes)
    generator = machine.xp.random.default_rng(0)
    scales = generator.integers(0, 127, (nbytes // columns, columns), dtype=np.uint8)
    swizzled = scale_ops.swizzle(scales)
    yield Case("swizzle 128x4", 2 * nbytes, lambda: scale_ops.swizzle(scales))
    yield Case("unswizzle 128x4", 2 * nbytes, lambda: scale_ops.unswizzle(swizzled, scales.shape))


def small_calls(machine: Gpu) -> Iterator[SmallCall]:
    """What a small call costs, for formats with and without a second level."""
    x = machine.random(*SMALL_SHAPE, "bfloat16")
    known = api.amax(x)
    for name in ("nvfp4", "mxfp8"):
        given = {"amax": known} if ALL_FORMATS[name].has_second_level else {}
        options: Any = {"nonfinite": "propagate", **given}
        scheme = as_scheme(name, {})
        q = api.quantize(x, scheme, **options)

        def call(scheme: Scheme = scheme, options: Any = options, q: Any = q) -> object:
            return api.quantize(x, scheme, out=q, **options)

        shape = "x".join(map(str, SMALL_SHAPE))
        yield SmallCall(f"quantize {name} {shape}", machine.host_us(call), machine.graph_us(call))
