# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Fragments of mma.sync and ldmatrix lie where kernels_cu/common/mma.cuh says, on the host."""

from pathlib import Path

import numpy as np
import pytest

from fp4kit.cuda.compile import Instance
from fp4kit.reference import codecs

SOURCE = str(Path(__file__).parent / "mma_host.hpp")


@pytest.mark.parametrize(("dtype", "name"), [("bfloat16", "Bf16"), ("float16", "F16")])
def test_product_of_fragments(dtype, name, host_gpu, kernels):
    rng = np.random.default_rng(5)
    values = [rng.integers(-8, 9, shape).astype(np.float32) for shape in ((16, 16), (8, 16))]
    before = rng.integers(-8, 9, (16, 8)).astype(np.float32)
    raw = [codecs.from_float32(each, dtype).view(np.uint16) for each in values]
    d = host_gpu.put(before)
    instance = Instance(SOURCE, f"fp4kit::product_kernel<fp4kit::{name}>")
    kernels.launch(instance, (1,), (*map(host_gpu.put, raw), d), threads=32)
    # Small integers: sums are exact in any order.
    np.testing.assert_array_equal(np.asarray(d), before + values[0] @ values[1].T)
