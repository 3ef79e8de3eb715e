# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The kernel that measures and quantizes rows in one read, run on the host, equals the reference.

Not its speed or its hardware conversions, but every index, barrier and rest of a row.
"""

import ctypes
import shutil
import subprocess
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import fp4kit
from fp4kit import codecs
from fp4kit.backends.cuda_launch import seed_arguments
from fp4kit.backends.cuda_measured import is_measured, measured_kernel, measured_launch, team_for
from fp4kit.backends.cuda_module import kernel_directory, options
from fp4kit.backends.cuda_variants import is_padded
from fp4kit.backends.plan import NO_SEED, Plan
from fp4kit.formats import ALL_RECIPES, NVFP4
from fp4kit.variant import PLAIN

COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ to build the kernel with")
BARRIER = 'asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "n"(kSize) : "memory");'
#: What surrounds every result, and must stay.
GUARD, MARK = 64, 0xEE


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
        variant = replace(PLAIN, per_token=self.per_token, rounding=rounding)
        return Plan(
            NVFP4,
            ALL_RECIPES[self.recipe],
            None,
            self.rows,
            self.cols,
            scale_layout=self.layout,
            nibble_order=self.nibbles,
            variant=None if variant.is_plain else variant,
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


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    build = tmp_path_factory.mktemp("host")
    text = (kernel_directory() / "quantize_measured.cu").read_text(encoding="utf-8")
    assert text.count(BARRIER) == 1
    text = text.replace(BARRIER, "named_barrier(1 + team, kSize);")
    (build / "quantize_measured_host.cu").write_text(text, encoding="utf-8")
    expressions = "".join(f"&enter<&{instance.expression}>,\n" for instance in INSTANCES)
    (build / "instances.inc").write_text(expressions, encoding="utf-8")
    defines = [option for option in options(9, 0) if option.startswith("-D")]
    source = Path(__file__).parent / "measured_host.cpp"
    command = [
        *(COMPILER, "-std=c++17", "-O1", "-w", "-ffp-contract=off", "-fno-strict-aliasing"),
        *("-shared", "-fPIC", f"-I{kernel_directory()}", f"-I{build}", *defines),
        *(str(source), "-o", str(build / "measured.so")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(build / "measured.so"))


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


def guarded(size):
    """(all bytes, those in the middle, which start on 16 bytes), marked."""
    data = np.full(size + 2 * GUARD, MARK, np.uint8)
    start = GUARD - (data.ctypes.data % 16)
    return data, data[start : start + size]


def run(library, case, x):
    """(second level, codes, scales) by the kernel."""
    plan = case.plan
    launch = measured_launch(plan, case.dtype, case.team, case.resident)
    sizes = 4 * case.rows, prod(plan.packed_shape), prod(plan.scale_shape)
    arrays = [guarded(size) for size in sizes]
    _, source = guarded(x.nbytes)
    source[:] = x.reshape(-1).view(np.uint8)
    if is_padded(plan):
        arrays[2][1][:] = 0
    scalars = np.array([*seed_arguments(plan, case.seed or NO_SEED), *launch.scalars], np.int64)
    pointers = [ctypes.c_void_p(part.ctypes.data) for _, part in arrays]
    library.quantize_measured(
        ctypes.c_int(INSTANCES.index(launch.instance)),
        ctypes.c_uint(*launch.grid),
        ctypes.c_void_p(source.ctypes.data),
        ctypes.c_longlong(source.nbytes),
        *pointers,
        ctypes.c_void_p(scalars.ctypes.data),
    )
    for whole, part in arrays:
        assert np.count_nonzero(whole == MARK) - np.count_nonzero(part == MARK) == 2 * GUARD
    second, packed, scale = (part for _, part in arrays)
    return (
        second.view(np.float32),
        packed.reshape(plan.packed_shape),
        scale.reshape(plan.scale_shape),
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bytes_of_the_reference(library, case):
    assert is_measured(case.plan, case.dtype)
    x = values(case)
    second, packed, scale = run(library, case, x)
    more = {}
    if case.seed is not None:
        more = {"rounding": "stochastic", "seed": case.seed[0], "stream": case.seed[1]}
    wanted = fp4kit.quantize(
        x.view(ml_dtypes.bfloat16) if case.dtype == "bfloat16" else x,
        recipe=case.recipe,
        scale_layout=case.layout,
        nibble_order=case.nibbles,
        amax="per_token" if case.per_token else "row_scaled",
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
