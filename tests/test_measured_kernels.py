# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The kernel that measures and quantizes rows in one read, run on the host, equals the reference.

Not its speed or its hardware conversions, but every index, barrier and rest of a row.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest

import fp4kit
from fp4kit.backend.jobs import NO_SEED, Job
from fp4kit.cuda import measured as cuda_measured
from fp4kit.cuda.measured import is_measured, measured_kernel, team_for
from fp4kit.reference import codecs
from sample_plans import sample_plan


@dataclass(frozen=True)
class Case:
    """A call; `processors` are those of the device, of which `resident` blocks run at once."""

    rows: int
    cols: int
    dtype: str = "bfloat16"
    recipe: str = "te"
    layout: str = "linear"
    nibbles: str = "low_first"
    per_token: bool = False
    seed: tuple[int, int] | None = None
    processors: int = 1
    resident: int = 2

    @property
    def plan(self):
        rounding = "nearest" if self.seed is None else "stochastic"
        return sample_plan(
            self.rows,
            self.cols,
            recipe=self.recipe,
            scale_layout=self.layout,
            nibble_order=self.nibbles,
            second_level="per_token" if self.per_token else "row_scaled",
            rounding=rounding,
        )

    @property
    def team(self):
        return team_for(self.rows, self.cols, self.dtype, self.processors)

    @property
    def instance(self):
        return measured_kernel(self.plan, self.dtype, self.team)


CASES = [
    # Teams of every size, with all lanes and with some missing, also half a lane.
    Case(70, 16),
    Case(70, 48),
    Case(90, 96, "float16", seed=(77, 3), per_token=True),
    Case(40, 1000, layout="swizzled_128x4"),
    Case(133, 1024, layout="swizzled_8x4", resident=1),
    Case(31, 2048, per_token=True, nibbles="high_first"),
    Case(19, 2056, seed=(2**64 - 5, 2**32 - 1)),
    Case(19, 4096, per_token=True, layout="swizzled_128x4"),
    Case(19, 5120),
    Case(7, 7168, "float16", "nvfuser"),
    Case(9, 16384),
    Case(5, 14336, per_token=True, layout="swizzled_8x4"),
    Case(3, 32768, processors=132),
    Case(9, 4096, processors=132),
    Case(9, 2048, "float32", "comfy"),
    Case(7, 4100, "float32", "torchao"),
    Case(3, 12288, "float32", "compressed-tensors", processors=132),
    Case(8, 3072, recipe="modelopt"),
    Case(12, 3072, "float16", recipe="compressed-tensors"),
]
INSTANCES = list(dict.fromkeys(case.instance for case in CASES))


@pytest.fixture(scope="module", autouse=True)
def _built(kernels):
    kernels.build(INSTANCES)


def values(case):
    """Rows of many magnitudes; with zeros, NaN, infinity, subnormals and nothing else in some."""
    rng = np.random.default_rng(case.rows * case.cols)
    x = rng.standard_normal((case.rows, case.cols)).astype(np.float32)
    x *= np.ldexp(np.float32(1), rng.integers(-10, 10, (case.rows, 1)))
    for row, value in enumerate((0, np.nan, -0.0)):
        x[row % case.rows] = value
    x[-1, 5], x[2 % case.rows, -1] = np.nan, 1e-30
    if case.rows > 5:
        x[3, 7], x[3, 8] = np.inf, np.nan
        x[4] *= np.float32(1e-7 if case.dtype == "float16" else 1e-38)
    with np.errstate(over="ignore"):
        return codecs.from_float32(x, case.dtype)


def run(on_host, monkeypatch, case, x):
    """(second level, codes, scales) by the kernel."""
    plan = case.plan
    monkeypatch.setattr(cuda_measured, "multiprocessors", lambda _: case.processors)
    monkeypatch.setattr(cuda_measured, "resident_blocks", lambda *_: case.resident)
    packed, scale = (
        on_host.empty(shape, np.uint8) for shape in (plan.packed_shape, plan.scale_shape)
    )
    seed = case.seed or NO_SEED
    job = Job(plan, on_host.put(x), case.dtype, None, packed, scale, seed)
    second = on_host.engine.quantize_measured(job)
    assert on_host.launched == [case.instance]
    return second, packed, scale


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bytes_of_the_reference(on_host, monkeypatch, case):
    assert is_measured(case.plan, case.dtype)
    x = values(case)
    second, packed, scale = run(on_host, monkeypatch, case, x)
    more = {}
    if case.seed is not None:
        more = {"rounding": "stochastic", "seed": case.seed[0], "subsequence": case.seed[1]}
    wanted = fp4kit.quantize(
        x.view(ml_dtypes.bfloat16) if case.dtype == "bfloat16" else x,
        recipe=case.recipe,
        scale_layout=case.layout,
        nibble_order=case.nibbles,
        second_level="per_token" if case.per_token else "row_scaled",
        pad=True,
        nonfinite="propagate",
        backend="reference",
        **more,
    )
    np.testing.assert_array_equal(second.view(np.uint32), wanted.second_level[1].view(np.uint32))
    np.testing.assert_array_equal(packed, wanted.packed)
    np.testing.assert_array_equal(scale.ravel(), wanted.block_scale.ravel())


def test_every_team_size_runs_here():
    assert {case.team.size for case in CASES} == {8, 16, 32, 64, 128, 256}
