# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The kernels of groups, run on the host, give the bytes of the CPU backend; tables of members."""

from math import prod
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from fp4kit.api.backends import get_backend
from fp4kit.api.grouped_tensor import grouped_plan
from fp4kit.backend.jobs import Job
from fp4kit.cuda import device as cuda_device
from fp4kit.cuda import member_tables as cuda_member_tables
from fp4kit.cuda import run as cuda_run
from fp4kit.cuda.member_tables import MEMBER_WORDS, sides_of
from fp4kit.reference import codecs
from fp4kit.scheme import as_scheme

F32 = np.float32
NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
#: Members of equal widths, whose rows are whole 16-byte pieces and whole blocks; some are empty.
EVEN = [(0, 64), (130, 64), (0, 64), (0, 64), (16, 64), (257, 64), (1, 64), (0, 64)]
#: Members of any sizes.
ODD = [(3, 7), (0, 5), (129, 65), (5, 0), (1, 1), (70, 200), (0, 0), (33, 31)]
#: Members that can be rotated.
SIXTEENS = [(16, 16), (0, 32), (144, 80), (16, 128)]


def values(size, dtype, seed=0):
    """Numbers of many magnitudes, as raw elements; some are not finite."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(size) * 2.0 ** rng.integers(-20, 6, size)
    x[:: max(size // 50, 1)] = 0
    if size > 100:
        x[rng.integers(0, size, 3)] = [np.nan, np.inf, -np.inf]
    return codecs.from_float32(x.astype(F32), dtype)


def layout_of(dims, gap=0, start=0):
    """Elements where members begin, and the size of the buffer."""
    starts, end = [], start
    for shape in dims:
        starts.append(end)
        end += prod(shape) + gap
    return tuple(starts), end + 40


def plans_of(dims, starts, direction, *, per_vector=False, format="nvfp4", recipe="te", **options):
    if format != "nvfp4":
        recipe = None
    if per_vector and "second_level" not in options:
        options["second_level"] = "row_scaled"
    scheme = as_scheme(format, {"recipe": recipe, "direction": direction, **options})
    return tuple(grouped_plan(tuple(dims), starts, part, pad=True) for part in scheme.parts)


def run(on, plans, x, dtype, seed):
    """Everything that a backend makes of a group."""
    engine, empty, put = on.engine, on.empty, on.put
    x = put(x)
    seconds, packeds, scales = [], [], []
    for plan in plans:
        first = plan.members[0]
        second = None
        if first.has_second_level:
            second = empty(plan.second_offsets[-1], F32)
            engine.grouped_amax(plan, x, dtype, second)
            if first.scheme.second_level == "per_token":
                second = put(np.maximum(np.asarray(second), F32(1e-12)))
        seconds.append(second)
        packeds.append(empty(plan.packed_offsets[-1], np.uint8))
        scales.append(empty(plan.scale_offsets[-1], np.uint8))
    jobs = tuple(
        Job(plan, x, dtype, *arrays, seed)
        for plan, *arrays in zip(plans, seconds, packeds, scales, strict=True)
    )
    engine.quantize_grouped(jobs)
    back = []
    for job in jobs:
        out = put(np.full(x.size, 7, x.dtype))
        engine.dequantize_grouped(job, out, dtype)
        back.append(out)
    return [*seconds, *packeds, *scales, *back]


def assert_as_cpu(on_host, plans, x, dtype, assert_bits, seed=(0, 0)):
    cpu = SimpleNamespace(engine=get_backend("cpu"), empty=np.empty, put=np.array)
    got = run(on_host, plans, x, dtype, seed)
    want = run(cpu, plans, x, dtype, seed)
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        if other is not None:
            one = np.asarray(one)
            if one.dtype == np.uint16 and dtype == "bfloat16":
                one, other = one.view(ml_dtypes.bfloat16), other.view(ml_dtypes.bfloat16)
            assert_bits(one, other, f"array {number}")


@pytest.mark.parametrize(("format", "direction", "dims"), [
    ("nvfp4", "rowwise", ODD), ("nvfp4", "columnwise", EVEN), ("nvfp4", "both", ODD),
    ("nvfp4", "both", EVEN), ("mxfp4", "both", ODD), ("mxfp8", "rowwise", EVEN),
    ("mxfp8", "columnwise", ODD), ("mxfp8", "both", EVEN), ("mxfp8_e5m2", "both", ODD),
])  # fmt: skip
def test_formats(on_host, assert_bits, format, direction, dims):
    starts, size = layout_of(dims)
    layout = {"rowwise": "swizzled_128x4", "columnwise": "linear", "both": "swizzled_8x4"}[
        direction
    ]
    plans = plans_of(dims, starts, direction, format=format, scale_layout=layout)
    assert_as_cpu(on_host, plans, values(size, "bfloat16"), "bfloat16", assert_bits)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["linear", "swizzled_128x4"])
def test_plain_rows_take_the_flat_loops(on_host, kernels, tables, assert_bits, layout, dtype):
    # Thread blocks begin within members and go on to the next; tiles have all kinds of rows.
    dims = [(5, 64), (600, 128), (1, 64), (0, 64), (129, 192), (48, 64), (127, 64), (256, 64)]
    starts, size = layout_of(dims)
    for nibble_order in ("low_first", "high_first"):
        plans = plans_of(dims, starts, "rowwise", scale_layout=layout, nibble_order=nibble_order)
        assert_as_cpu(on_host, plans, values(size, dtype), dtype, assert_bits)
    name = "grouped_quantize_rowwise" + ("" if layout == "linear" else "_swizzled")
    launched = {instance.kernel for instance in kernels.launched}
    assert {kernel for kernel in launched if "_quantize" in kernel} == {name}
    assert all(instance.expression.endswith(f"{tables}>") for instance in kernels.launched)


@pytest.mark.parametrize("rows", [1, 7, 8, 16, 31, 32, 33, 40, 64, 72, 96, 112, 127, 128, 130, 250])
def test_tiles_without_all_rows(on_host, assert_bits, rows):
    dims = [(rows, 64), (rows, 576)]
    starts, size = layout_of(dims)
    plans = plans_of(dims, starts, "rowwise", scale_layout="swizzled_128x4")
    assert_as_cpu(on_host, plans, values(size, "bfloat16"), "bfloat16", assert_bits)


@pytest.mark.parametrize("options", [
    {"recipe": "modelopt"},
    {"recipe": "nvfuser", "second_level": "none"},
    {"block_shape": "2d", "nibble_order": "high_first"},
    {"block_shape": "2d", "format": "mxfp8"},
    {"rounding": "stochastic"},
    {"rounding": "stochastic", "block_shape": "2d"},
    {"per_vector": True},
    {"per_vector": True, "second_level": "per_token"},
], ids=str)  # fmt: skip
def test_options(on_host, width, assert_bits, options):
    starts, size = layout_of(ODD, gap=3)
    plans = plans_of(ODD, starts, "both", scale_layout="swizzled_128x4", **options)
    seed = (2**64 - 5, 2**32 - 2)
    assert_as_cpu(on_host, plans, values(size, "float32"), "float32", assert_bits, seed)


@pytest.mark.parametrize("per_vector", [False, True])
@pytest.mark.parametrize("rounding", ["bf16", "none"])
@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
def test_rotation(on_host, assert_bits, direction, rounding, per_vector):
    starts, size = layout_of(SIXTEENS)
    options = {"rht": 0xD7E8, "rht_rounding": rounding, "per_vector": per_vector}
    plans = plans_of(SIXTEENS, starts, direction, **options)
    assert_as_cpu(on_host, plans, values(size, "bfloat16"), "bfloat16", assert_bits)


#: Members whose last rows of tiles are 1 to 16 blocks high, or none; with columns that fill tiles
#: of strips and that do not.
FOLDED = [
    *((16 * height, 72) for height in range(1, 17)), (256, 128), (0, 64), (304, 64), (1, 1040),
    (131, 8), (560, 520), (250, 200), (273, 136), (16, 1024),
]  # fmt: skip


@pytest.mark.parametrize(("format", "layout", "options"), [
    ("nvfp4", "linear", {}),
    ("nvfp4", "swizzled_128x4", {"nibble_order": "high_first"}),
    ("nvfp4", "swizzled_8x4", {"rounding": "stochastic"}),
    ("mxfp4", "linear", {}),
    ("mxfp4", "swizzled_128x4", {}),
], ids=str)  # fmt: skip
def test_columns_of_few_rows_are_folded(
    on_host, kernels, tables, width, assert_bits, format, layout, options
):
    starts, size = layout_of(FOLDED)
    plans = plans_of(FOLDED, starts, "columnwise", format=format, scale_layout=layout, **options)
    assert_as_cpu(on_host, plans, values(size, "bfloat16"), "bfloat16", assert_bits, (3, 4))
    (kernel,) = {own for own in kernels.launched if own.kernel == "grouped_quantize_tiles"}
    assert ("Tall" in kernel.expression) == (width == "wide")


def test_rotated_columns_are_folded(on_host, kernels, assert_bits):
    dims = [(rows // 16 * 16, cols) for rows, cols in FOLDED]
    starts, size = layout_of(dims)
    plans = plans_of(dims, starts, "columnwise", rht=0xD7E8, rht_rounding="bf16")
    assert_as_cpu(on_host, plans, values(size, "bfloat16"), "bfloat16", assert_bits)
    assert any("Tall" in own.expression for own in kernels.launched)


@pytest.mark.parametrize(("direction", "options"), [
    ("columnwise", {"per_vector": True}), ("columnwise", {"block_shape": "2d"}),
    ("columnwise", {"format": "mxfp8"}), ("both", {}),
], ids=str)  # fmt: skip
def test_what_is_not_folded(on_host, kernels, assert_bits, direction, options):
    starts, size = layout_of(EVEN)
    plans = plans_of(EVEN, starts, direction, **options)
    assert_as_cpu(on_host, plans, values(size, "bfloat16"), "bfloat16", assert_bits)
    assert not any("Tall" in own.expression for own in kernels.launched)


@pytest.mark.parametrize("start", [0, 1, 8])
def test_alignment_is_looked_at(on_host, kernels, assert_bits, start):
    """Members that begin or end off a 16-byte boundary take single accesses."""
    for cols, whole in ((64, start % 8 == 0), (68, False)):
        dims = [(20, cols), (30, cols)]
        starts, size = layout_of(dims, start=start)
        plans = plans_of(dims, starts, "both")
        kernels.launched.clear()
        assert_as_cpu(on_host, plans, values(size, "bfloat16"), "bfloat16", assert_bits)
        (kernel,) = {own for own in kernels.launched if own.kernel == "grouped_quantize_tiles"}
        ending = "true, fp4kit::kWide>" if whole else "false, fp4kit::kNarrow>"
        assert kernel.expression.endswith(f"{ending}, fp4kit::FewMembers<951>>")


@pytest.mark.parametrize("per_vector", [False, True])
def test_tables_of_both_kinds(on_host, kernels, tables, assert_bits, per_vector):
    starts, size = layout_of(ODD, gap=1)
    plans = plans_of(ODD, starts, "both", per_vector=per_vector)
    assert_as_cpu(on_host, plans, values(size, "float16"), "float16", assert_bits)
    assert all(instance.expression.endswith(f"{tables}>") for instance in kernels.launched)


@pytest.mark.parametrize(("members", "table"), [
    (150, "FewMembers<2999>"), (600, "FewMembers<8047>"), (1200, "ManyMembers"),
])  # fmt: skip
def test_many_members(on_host, kernels, assert_bits, members, table):
    """More than one round of the search takes in; still one launch for each step."""
    rng = np.random.default_rng(3)
    dims = [(int(rows), 16) for rows in rng.integers(0, 3, members)]
    starts, size = layout_of(dims)
    plans = plans_of(dims, starts, "rowwise", per_vector=True)
    assert_as_cpu(on_host, plans, values(size, "float16"), "float16", assert_bits)
    names = [instance.kernel.removeprefix("grouped_") for instance in kernels.launched]
    assert names == ["row_column_amax", "quantize_tiles", "dequantize_rowwise"]
    assert all(f", fp4kit::{table}" in instance.expression for instance in kernels.launched)


@pytest.mark.parametrize("direction", ["rowwise", "columnwise", "both"])
def test_a_table_is_not_given_back_ahead_of_its_launch(
    on_host, host_gpu, kernels, monkeypatch, direction
):
    """What is allocated in between could get its memory."""
    launch, launched = cuda_run.launch, []

    def checked(instance, grid, arguments, *others):
        assert "ManyMembers" in instance.expression
        (table,) = (each for each in arguments if isinstance(each, np.ndarray))
        address, members, _ = table.view(np.int64)
        end = host_gpu.end_of_array(address)
        assert end is not None
        assert address < members < end
        launched.append(instance)
        launch(instance, grid, arguments, *others)

    monkeypatch.setattr(cuda_run, "launch", checked)
    dims = [(1 + number % 3, 16) for number in range(1200)]
    starts, size = layout_of(dims)
    run(on_host, plans_of(dims, starts, direction), values(size, "bfloat16"), "bfloat16", (0, 0))
    assert len(launched) > 2


def test_no_elements(on_host, kernels):
    for dims in ([], [(0, 16), (5, 0)]):
        plans = plans_of(dims, (0,) * len(dims), "rowwise")
        second = on_host.empty(plans[0].second_offsets[-1], F32)
        x = on_host.empty(4, F32)
        on_host.engine.grouped_amax(plans[0], x, "float32", second)
        assert not np.asarray(second).any()
        nothing = on_host.empty(0, np.uint8)
        job = Job(plans[0], x, "float32", second, nothing, nothing)
        on_host.engine.quantize_grouped((job,))
        on_host.engine.dequantize_grouped(job, x, "float32")
    assert not kernels.launched


# ------------------------------------------------------------------------------------------------
# Tables
# ------------------------------------------------------------------------------------------------


def test_a_table_holds_the_members_with_elements():
    starts, _ = layout_of(ODD, gap=1)
    row, column = plans_of(ODD, starts, "both", format="mxfp8")
    sides = sides_of((row, column))
    assert (sides.row, sides.column) == (row, column)
    table = cuda_member_tables.tile_table(sides)
    assert cuda_member_tables.tile_table(sides_of((row, column))) is table
    filled = [number for number, shape in enumerate(ODD) if prod(shape)]
    assert table.count == len(filled)
    assert table.records % 2 == 0
    first, members = table.words[: table.records], table.words[table.records :]
    assert first[: len(filled) + 1].tolist() == [0, 1, 5, 6, 10, 11]
    assert table.grid == (table.pieces,) == (11,)
    for number, own in zip(filled, members.reshape(-1, MEMBER_WORDS), strict=True):
        places = [
            offsets[number]
            for plan in (row, column)
            for offsets in (plan.packed_offsets, plan.scale_offsets, plan.second_offsets)
        ]
        assert own.tolist() == [starts[number], *ODD[number], number, *places]


@pytest.mark.parametrize(("format", "block"), [("nvfp4", 16), ("mxfp4", 32)])
def test_folded_tiles_have_rows_for_all_strips(format, block):
    starts, _ = layout_of(FOLDED)
    sides = sides_of(plans_of(FOLDED, starts, "columnwise", format=format))
    table = cuda_member_tables.folded_table(sides)
    want = []
    for rows, cols in FOLDED:
        if rows:
            across = -(-cols // 64)
            strips = -(-(rows % 256) // block) * across * block
            want.append(rows // 256 * across + -(-strips // 256))
    assert np.diff(table.words[: len(want) + 1]).tolist() == want
    assert cuda_member_tables.folded_table(sides) is table


def test_few_members_are_the_same_in_32_bits():
    starts, _ = layout_of(ODD, gap=1)
    table = cuda_member_tables.tile_table(sides_of(plans_of(ODD, starts, "both")))
    image = table.few.view(np.uint32)
    ends = 1 + table.count * MEMBER_WORDS
    assert image[0] == table.count
    assert image[1:ends].tolist() == table.words[table.records :].tolist()
    assert image[ends : ends + table.count + 1].tolist() == table.words[: table.count + 1].tolist()
    assert table.kind == "FewMembers<951>"


@pytest.mark.parametrize(("members", "first", "large", "kind"), [
    (86, 0, False, "FewMembers<951>"), (87, 0, False, "ManyMembers"),
    (87, 0, True, "FewMembers<2999>"), (272, 0, True, "FewMembers<2999>"),
    (731, 0, True, "FewMembers<8047>"), (732, 0, True, "ManyMembers"),
    (1, 2**32 - 1, False, "FewMembers<951>"), (1, 2**32, True, "ManyMembers"),
])  # fmt: skip
def test_what_does_not_fit_parameters(monkeypatch, members, first, large, kind):
    monkeypatch.setattr(cuda_device, "has_large_parameters", lambda: large)
    dims = [(1, 16)] * members
    starts = tuple(first + 16 * number for number in range(members))
    sides = sides_of(plans_of(dims, starts, "rowwise"))
    table = cuda_member_tables.lane_table.__wrapped__(sides)
    assert table.kind == kind
    assert (table.few is None) == (kind == "ManyMembers")


def test_stretches_hold_all_pieces():
    dims = [(rows, 4096) for rows in (1, 100, 17)]
    starts, _ = layout_of(dims)
    table = cuda_member_tables.lane_table(sides_of(plans_of(dims, starts, "rowwise")))
    assert table.pieces == 118
    for blocks, want in ((1, (10, 12)), (7, (4, 30)), (50, (3, 40)), (200, (1, 118))):
        stretch, (grid,) = table.stretches(blocks)
        assert (stretch, grid) == want


def test_grids_have_an_end():
    huge = [(1 << 30, 1 << 21)]
    (plan,) = plans_of(huge, (0,), "rowwise")
    table = cuda_member_tables.tile_table(sides_of((plan,)))
    with pytest.raises(OverflowError, match="do not fit a CUDA grid"):
        _ = table.grid
    with pytest.raises(OverflowError, match="do not fit a CUDA grid"):
        table.stretches(5)


def test_equal_groups_share_a_plan():
    starts, _ = layout_of(EVEN)
    assert plans_of(EVEN, starts, "rowwise")[0] is plans_of(EVEN, starts, "rowwise")[0]
    assert plans_of(EVEN, starts, "rowwise")[0] is not plans_of(EVEN, starts, "columnwise")[0]
