# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Products with quantized weights, beside the same products with float ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from fp4kit.api import matmul as api
from fp4kit.api import quantize as quantizing
from fp4kit.scheme import as_scheme

from .cases import Case
from .machines import Machine

#: Rows of activations: one token, a small batch, a prompt.
ROWS = (1, 16, 512)
FORMATS = ("nvfp4", "mxfp4", "mxfp8")
#: Weights are taken in turn from as many copies: more than any cache holds, if they are large.
COLD_BYTES = 400 << 20
MOST_COPIES = 16


def _in_turn(call: Callable[[Any], object], weights: list[Any]) -> Callable[[], object]:
    """A call with the next of several weights each time."""
    turn = itertools.cycle(weights)
    return lambda: call(next(turn))


def _copies(nbytes: int) -> int:
    return min(max(1, -(-COLD_BYTES // nbytes)), MOST_COPIES)


def product_cases(machine: Machine, rows: int, columns: int, dtype: str) -> Iterator[Case]:
    """X w^T for w (rows, columns), whose bytes are what must move: weights, x and the result.

    The product of floats is that of NumPy in float32, or of CuPy in the element type.
    """
    xp = machine.xp
    w = machine.random(rows, columns, dtype)
    # NumPy has no product of bfloat16, CuPy none of ml_dtypes' arrays.
    kind = "float32" if machine.device == "cpu" or dtype == "bfloat16" else dtype
    for count in ROWS:
        x = machine.random(count, columns, dtype)
        out = xp.empty((count, rows), x.dtype)
        moved = x.nbytes + out.nbytes
        for name in FORMATS:
            scheme = as_scheme(name, {})
            first = quantizing.quantize(w, scheme)
            copies = _copies(first.nbytes)
            weights = [first, *(quantizing.quantize(w, scheme) for _ in range(copies - 1))]

            def multiply(q: Any, x: Any = x, out: Any = out) -> object:
                return api.matmul(x, q, out=out)

            title = f"matmul {name}, {count} rows"
            yield Case(title, moved + first.nbytes, _in_turn(multiply, weights))
        floats, y = w.astype(kind), x.astype(kind)
        into = xp.empty((count, rows), kind)
        plain = [floats, *(floats.copy() for _ in range(_copies(floats.nbytes) - 1))]

        def float_product(one: Any, y: Any = y, into: Any = into) -> object:
            return xp.matmul(y, one.T, out=into)

        nbytes = y.nbytes + into.nbytes + floats.nbytes
        yield Case(f"matmul of {kind}, {count} rows", nbytes, _in_turn(float_product, plain))
