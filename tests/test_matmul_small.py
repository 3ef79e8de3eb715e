# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The kernels of small products, run on the host, against exact arithmetic."""

import numpy as np
import pytest

from fp4kit.backend.matmul import FloatOperand, MatmulJob
from fp4kit.cuda import device as cuda_device
from fp4kit.cuda import matmul_small
from fp4kit.cuda.matmul_small import PREPARED, ROWS, Shape
from fp4kit.formats import get_format
from fp4kit.reference import codecs
from matmul_samples import check_product, prepared, weights

#: Small shapes of every kind: sliced, all activations at first, step by step; copies of both kinds.
SHAPES = {
    PREPARED: (
        Shape(1, 2, 3, 1, 3, 1, False),
        Shape(1, 2, 3, 1, 2, 2, False),
        Shape(1, 2, 2, 1, 2, 8, False),
        Shape(2, 1, 2, 1, 3, 8, True),
        Shape(3, 1, 1, 1, 3, 16, True, False),
        Shape(1, 2, 2, 1, 2, 32, True),
    ),
    ROWS: (
        Shape(1, 2, 2, 2, 2, 1, False),
        Shape(1, 1, 2, 2, 2, 2, False),
        Shape(1, 2, 2, 2, 3, 4, False),
        Shape(2, 1, 1, 2, 2, 8, True),
        Shape(1, 2, 2, 1, 2, 16, True),
    ),
}
FORMATS = ("nvfp4", "mxfp4")
CASES = [
    (name, form, shape)
    for name in FORMATS
    for form, shapes in SHAPES.items()
    for shape in shapes
    if matmul_small.takes(get_format(name), shape, 1)
]


@pytest.fixture(scope="module", autouse=True)
def _built(kernels):
    flags = ("-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas")
    kernels.build(
        [
            matmul_small.multiply_small_kernel(get_format(name), form, shape)
            for name, form, shape in CASES
        ],
        flags,
    )


@pytest.fixture
def multiply(on_host, kernels, monkeypatch):
    """Launches a product on the host by a kernel of a shape."""
    monkeypatch.setattr(matmul_small, "_ready", matmul_small._ready.__wrapped__)
    monkeypatch.setattr(cuda_device, "capability", lambda _: (9, 0))

    def run(job, shape):
        monkeypatch.setattr(matmul_small, "choose", lambda *_: shape)
        placed = {}
        for name in ("a", "b"):
            operand = getattr(job, name)
            arrays = {
                field: on_host.put(value)
                for field, value in operand._asdict().items()
                if isinstance(value, np.ndarray)
            }
            placed[name] = operand._replace(**arrays)
        for name in ("bias", "c"):
            value = getattr(job, name)
            placed[name] = None if value is None else on_host.put(value)
        out = on_host.empty(job.out.shape, job.out.dtype)
        assert matmul_small.launch(job._replace(**placed, out=out))
        return out

    return run


def activations(tokens, depth, seed=1):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, depth)).astype(np.float32)
    x *= np.ldexp(np.float32(1), rng.integers(-8, 8, (tokens, 1)))
    return FloatOperand(codecs.from_float32(x, "bfloat16"), "bfloat16")


def job_of(x, operand, dtype="float32", **fields):
    stored = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[dtype]
    out = np.zeros((x.rows, operand.rows), stored)
    return MatmulJob(x, operand, out, dtype, **fields)


@pytest.mark.parametrize(("name", "form", "shape"), CASES)
def test_shapes(name, form, shape, multiply):
    tokens = shape.tokens
    for rows, depth, count in (
        (144, 768, tokens),
        (16, 128, max(tokens - 1, 1)),
        (80, 896, tokens),
    ):
        operand = weights(name, rows, depth)
        operand = prepared(operand) if form == PREPARED else operand
        job = job_of(activations(count, depth), operand)
        check_product(job, multiply(job, shape))
