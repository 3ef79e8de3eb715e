# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Rows that make their own second level: which calls use one read, its launches, and a GPU's bytes.

tests/test_measured_kernels.py runs the kernel itself without a GPU.
"""

import itertools

import ml_dtypes
import numpy as np
import pytest

import fp4kit
from fp4kit.api.backends import get_backend
from fp4kit.cuda import measured as cuda_measured
from fp4kit.cuda.measured import LIGHT_LANES, MOST_LANES, is_measured, team_for
from fp4kit.formats import ALL_RECIPES, DTYPES, NIBBLE_ORDERS, SCALE_LAYOUTS
from fp4kit.reference import codecs
from fp4kit.reference.scaling import PER_TOKEN_SMALLEST
from sample_plans import sample_plan

PROCESSORS = 132


def make_plan(rows=64, cols=2048, **options):
    """A plan from fields of its own and of its scheme."""
    return sample_plan(rows, cols, **options)


# ------------------------------------------------------------------------------------------------
# Which calls ask for it
# ------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch):
    """The plans that a backend was asked to measure and quantize at once; it declined."""
    plans = []
    engine = get_backend("cpu")
    monkeypatch.setattr(engine, "quantize_measured", lambda job: plans.append(job.plan))
    return plans


@pytest.mark.parametrize("word", ["row_scaled", "per_token"])
@pytest.mark.parametrize("nonfinite", ["raise", "propagate"])
def test_rows_with_their_own_scales_ask(asked, word, nonfinite):
    x = np.random.default_rng(0).standard_normal((6, 32)).astype(np.float32)
    q = fp4kit.quantize(x, second_level=word, nonfinite=nonfinite, backend="cpu")
    assert [plan.scales for plan in asked] == [6]
    wanted = fp4kit.quantize(x, second_level=word, backend="reference")
    np.testing.assert_array_equal(q.packed, wanted.packed)
    np.testing.assert_array_equal(q.amax, wanted.amax)


@pytest.mark.parametrize(
    "options",
    [
        {"second_level": "row_scaled", "direction": "columnwise"},
        {"second_level": "per_token", "direction": "both"},
        {"second_level": "row_scaled", "rht": True},
        {"amax": np.arange(1, 17, dtype=np.float32), "scale_search": "sweep"},
        {"scale_search": "four_over_six"},
        {"rounding": "stochastic", "seed": 1},
        {"block_shape": "2d"},
        {"format": "mxfp4", "rounding": "stochastic", "seed": 1},
    ],
    ids=str,
)
def test_other_calls_do_not(asked, options):
    x = np.random.default_rng(0).standard_normal((16, 32)).astype(np.float32)
    fp4kit.quantize(x, backend="cpu", **options)
    assert asked == []


def test_an_empty_array_does_not(asked):
    assert fp4kit.quantize(
        np.empty((0, 32), np.float32), second_level="row_scaled"
    ).packed.shape == (0, 16)
    assert asked == []


def test_a_backend_that_can_is_believed(monkeypatch):
    """Its second level is what the result keeps, also in arrays that are passed."""
    x = np.ones((3, 16), np.float32)
    out = fp4kit.quantize(x, second_level="row_scaled", backend="cpu")
    engine = get_backend("cpu")

    def measured(job):
        job.packed[...], job.block_scale[...] = 1, 2
        return np.arange(job.plan.scales, dtype=np.float32)

    monkeypatch.setattr(engine, "quantize_measured", measured)
    assert fp4kit.quantize(x, second_level="row_scaled", backend="cpu", out=out) is out
    assert (out.packed == 1).all()
    assert (out.block_scale == 2).all()
    np.testing.assert_array_equal(out.amax, [0, 1, 2])


# ------------------------------------------------------------------------------------------------
# Launches
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_team_holds_its_row(dtype):
    size = 4 if dtype == "float32" else 2
    longest = cuda_measured.THREADS * MOST_LANES[size] * 16
    lengths = itertools.chain(range(1, 4000, 3), range(4000, longest, 997), [longest])
    for cols, rows in itertools.product(lengths, (1, PROCESSORS, 10**5)):
        team = team_for(rows, cols, dtype, PROCESSORS)
        held = team.size * team.lanes * 16
        # Only the last lane of a thread may be missing.
        assert held - team.size * 16 < cols <= held
        assert team.size in (8, 16, 32, 64, 128, 256)
        assert team.lanes <= (MOST_LANES if team.size == 256 else LIGHT_LANES)[size]
    assert team_for(1, longest + 1, dtype, PROCESSORS) is None


@pytest.mark.parametrize(
    ("rows", "cols", "team"),
    [
        (10**5, 2048, (32, 4)),
        (10**5, 4096, (64, 4)),
        (10**5, 5120, (128, 3)),
        (10**5, 16384, (256, 4)),
        (10**5, 64, (8, 1)),
        (PROCESSORS, 4096, (256, 1)),
        (4 * PROCESSORS, 4096, (256, 1)),
        (4 * PROCESSORS + 1, 4096, (64, 4)),
        (2, 128, (8, 1)),
    ],
)
def test_teams(rows, cols, team):
    assert team_for(rows, cols, "bfloat16", PROCESSORS) == team


def test_what_is_measured():
    assert is_measured(make_plan(), "bfloat16")
    assert is_measured(make_plan(second_level="per_token", rounding="stochastic"), "float32")
    assert is_measured(make_plan(cols=8), "float16")
    search = {"scale_search": "sweep", "search_error": "mse"}
    for plan in (
        make_plan(**search),
        make_plan(direction="columnwise"),
        make_plan(rht=1, rht_rounding="bf16"),
        make_plan(rows_per_scale=2),
        make_plan(cols=12),
        make_plan(rows=2**31, cols=16),
        make_plan(recipe="torchao", second_level="none"),
        sample_plan(64, 64, "mxfp4"),
    ):
        assert not is_measured(plan, "bfloat16")
    # Counted with their padding, 4 stored scales a row are too many.
    assert not is_measured(make_plan(rows=2**29, cols=16, scale_layout="swizzled_8x4"), "bfloat16")


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 10**6])
def test_the_grid_covers_all_rows(rows):
    plan = make_plan(rows, 4096, second_level="per_token", nibble_order="high_first")
    team = cuda_measured.Team(64, 4)
    launch = cuda_measured.measured_launch(plan, "bfloat16", team, resident=528)
    assert launch.grid == (min(-(-rows // 4), 528),)
    bits = int(PER_TOKEN_SMALLEST.view(np.uint32))
    assert launch.scalars == (rows, 512, 256, 256, 1, bits)
    assert launch.instance.expression.endswith("Team<64, 4>>")


# ------------------------------------------------------------------------------------------------
# On a GPU
# ------------------------------------------------------------------------------------------------

gpu = pytest.mark.gpu


@pytest.fixture
def cuda(real_gpu, monkeypatch):
    """The CUDA backend, and how often it measured and quantized at once."""
    engine = get_backend("cuda")
    kept, engine.times = engine.quantize_measured, 0

    def counted(*arguments):
        second = kept(*arguments)
        engine.times += second is not None
        return second

    monkeypatch.setattr(engine, "quantize_measured", counted)
    yield engine
    del engine.times


def values(rows, cols, dtype, seed=0):
    """Rows of many magnitudes; some with NaN or infinity, some with nothing but zeros or NaN."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, cols)).astype(np.float32)
    x *= np.ldexp(np.float32(1), rng.integers(-10, 10, (rows, 1)))
    if rows > 1:
        x[1], x[1, -1] = 0, -0.0
    if rows > 7:
        x[2], x[3, 5], x[4, cols // 2] = np.nan, -np.nan, np.inf
        x[5], x[6, -1] = -0.0, np.nan
        x[7] *= np.float32(1e-7 if dtype == "float16" else 1e-38)
    with np.errstate(over="ignore"):
        raw = codecs.from_float32(x, dtype)
    return raw.view(ml_dtypes.bfloat16) if dtype == "bfloat16" else raw


def on_device(x):
    import cupy

    if x.dtype == ml_dtypes.bfloat16:
        return cupy.asarray(x.view(np.uint16)).view(ml_dtypes.bfloat16)
    return cupy.asarray(x)


def check(q, wanted):
    np.testing.assert_array_equal(q.packed.get(), wanted.packed)
    np.testing.assert_array_equal(q.block_scale.get(), wanted.block_scale)
    second, expected = q.second_level[1].get(), wanted.second_level[1]
    np.testing.assert_array_equal(second.view(np.uint32), expected.view(np.uint32))


def two_passes(monkeypatch, x, **options):
    """What separate kernels make of it."""
    with monkeypatch.context() as patch:
        patch.setattr(get_backend("cuda"), "quantize_measured", lambda *arguments: None)
        return fp4kit.quantize(x, **options)


SHAPES = [
    (1, 4096),
    (9, 16),
    (201, 64),
    (77, 512),
    (77, 520),
    (1001, 2048),
    (333, 3072),
    (333, 5120),
    (2049, 4096),
    (77, 7168),
    (35, 11008),
    (600, 16384),
    (9, 24576),
    (300, 32768),
]
# Each length is a kernel of its own to compile: other types get fewer.
CALLS = [(shape, "bfloat16") for shape in SHAPES]
CALLS += [(shape, dtype) for shape in SHAPES[4::4] for dtype in ("float16", "float32")]


@gpu
@pytest.mark.parametrize("word", ["row_scaled", "per_token"])
@pytest.mark.parametrize(("shape", "dtype"), CALLS, ids=str)
def test_shapes(cuda, monkeypatch, shape, dtype, word):
    x = values(*shape, dtype, seed=sum(shape))
    options = {"second_level": word, "nonfinite": "propagate", "pad": True}
    device = on_device(x)
    q = fp4kit.quantize(device, **options)
    fits = shape[1] <= cuda_measured.THREADS * MOST_LANES[x.itemsize] * 16
    assert cuda.times == fits
    wanted = fp4kit.quantize(x, backend="cpu", **options)
    check(q, wanted)
    check(two_passes(monkeypatch, device, **options), wanted)


@gpu
@pytest.mark.parametrize("number", range(len(DTYPES)))
@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_recipes_and_layouts(cuda, recipe, number):
    """Every recipe with every element type, and with every layout."""
    turn = number + ALL_RECIPES[recipe].index
    layout, nibbles = SCALE_LAYOUTS[turn % len(SCALE_LAYOUTS)], NIBBLE_ORDERS[turn % 2]
    options = {"recipe": recipe, "scale_layout": layout, "nibble_order": nibbles}
    options |= {"second_level": "row_scaled", "nonfinite": "propagate", "pad": True}
    for shape in ((133, 1040), (40, 72)):
        x = values(*shape, DTYPES[number], seed=turn)
        check(
            fp4kit.quantize(on_device(x), **options),
            fp4kit.quantize(x, backend="reference", **options),
        )
    assert cuda.times == 2


@gpu
@pytest.mark.parametrize("nibbles", NIBBLE_ORDERS)
@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
def test_layouts_of_short_and_long_rows(cuda, layout, nibbles):
    options = {"scale_layout": layout, "nibble_order": nibbles}
    options |= {"second_level": "per_token", "nonfinite": "propagate", "pad": True}
    for shape in ((261, 208), (133, 7200)):
        x = values(*shape, "bfloat16")
        check(
            fp4kit.quantize(on_device(x), **options),
            fp4kit.quantize(x, backend="cpu", **options),
        )
    assert cuda.times == 2


@gpu
@pytest.mark.parametrize("word", ["row_scaled", "per_token"])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((33, 96), "float16"), ((65, 2048), "float32"), ((7, 7168), "bfloat16")],
    ids=str,
)
def test_stochastic_rounding(cuda, shape, dtype, word):
    x = values(*shape, dtype)
    options = {"rounding": "stochastic", "seed": 2**64 - 3, "subsequence": 2**32 - 1}
    options |= {"second_level": word, "nonfinite": "propagate"}
    check(
        fp4kit.quantize(on_device(x), **options),
        fp4kit.quantize(x, backend="reference", **options),
    )
    assert cuda.times == 1


@gpu
def test_what_the_kernel_leaves_to_others(cuda, monkeypatch):
    """Unaligned rows, odd lengths, rows that are too long, and searches: the same bytes."""
    import cupy

    base = on_device(values(9, 4097, "float16"))
    for x, more in (
        (base.reshape(-1)[1 : 1 + 8 * 4096].reshape(8, 4096), {}),
        (base, {"pad": True}),
        (cupy.ones((2, 2**16), np.float16), {}),
        (base[:, :4096], {"scale_search": "four_over_six"}),
    ):
        options = {"second_level": "row_scaled", "nonfinite": "propagate", **more}
        host = cupy.asnumpy(cupy.ascontiguousarray(x))
        check(fp4kit.quantize(x, **options), fp4kit.quantize(host, backend="cpu", **options))
    assert cuda.times == 0


@gpu
@pytest.mark.parametrize("word", ["row_scaled", "per_token"])
def test_graph_capture(cuda, word):
    import cupy

    first, second = (values(77, 4096, "bfloat16", seed) for seed in (1, 2))
    options = {"second_level": word, "nonfinite": "propagate", "scale_layout": "swizzled_128x4"}
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x = on_device(first)
        out = fp4kit.quantize(x, **options)
        fp4kit.quantize(x, out=out, **options)
        stream.begin_capture()
        fp4kit.quantize(x, out=out, **options)
        graph = stream.end_capture()
        noise = [cupy.full(77, 1e30, np.float32) for _ in range(64)]
        for data in (second, first, second):
            x.view(np.uint16).set(data.view(np.uint16), stream=stream)
            graph.launch(stream)
        stream.synchronize()
    assert cuda.times == 3
    assert all(bool((part == np.float32(1e30)).all()) for part in noise)
    check(out, fp4kit.quantize(second, backend="cpu", **options))


@gpu
@pytest.mark.parametrize(
    "options",
    [
        {"second_level": "row_scaled"},
        {},
        {"scale_layout": "swizzled_128x4"},
        {"direction": "columnwise"},
    ],
    ids=str,
)
@pytest.mark.parametrize("recipe", ["torchao", "modelopt", "comfy", "te"])
def test_second_levels_that_are_subnormal(cuda, recipe, options):
    """Their inverses overflow, and products with them keep few bits."""
    rng = np.random.default_rng(3)
    for size in (1e-36, 1e-38, 1e-40, 3e-42):
        x = (rng.standard_normal((64, 1024)) * size).astype(np.float32)
        check(
            fp4kit.quantize(on_device(x), recipe=recipe, **options),
            fp4kit.quantize(x, backend="reference", recipe=recipe, **options),
        )
