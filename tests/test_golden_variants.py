# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Golden cases of the variants: tiles, rotation, per token, scale searches. See test_golden.py."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import fp4kit
from fp4kit.formats import E2M1, E4M3
from fp4kit.reference import codecs, scale_search, scaling

F32 = np.float32

STATIC_4 = "rule static_4 maps every block onto 4, which no recipe does"
ABS_MAX = "the largest error of a block is not among the errors that are compared"
NEAR_TIES = "blocks whose two errors differ by rounding only: the peer decodes in another order"
FAKE = (
    "fake quantization in floats: ties toward minus infinity, its own E4M3 below 2^-6, and a scale "
    "from max(x) instead of max|x|; no bytes"
)
FAST_MATH = "the kernel's bfloat16 multiplier; approximate by design"

#: (file, text in "case function params kind", array or *) -> why it cannot be compared at all.
EXCLUDED: dict[tuple[str, str, str], str] = {
    ("te_model_variants", '"fast_math": true', "rowwise_data"): FAST_MATH,
    ("te_model_variants", '"fast_math": true', "inv"): FAST_MATH,
    ("fouroversix", '"scale_rule": "static_4"', "*"): STATIC_4,
    ("arcquant_fake", "", "*"): FAKE,
    ("fouroversix", '"scale_rule": "abs_max"', "*"): ABS_MAX,
}

#: The same keys -> which entries are left out, and why.
PARTIAL: dict[tuple[str, str, str], str] = {
    ("flashinfer_4over6", "case030", "qdata"): NEAR_TIES,
    ("flashinfer_4over6", "case030", "scale"): NEAR_TIES,
    ("flashinfer_4over6", "case030", "pick_four"): NEAR_TIES,
}


def check_directions(check: Any, q: Any, columnwise: Any) -> None:
    check("rowwise_data", q.packed)
    check("rowwise_scale", q.block_scale)
    check("amax_rowwise", q.amax)
    if columnwise is not None:
        check("columnwise_data", columnwise.packed)
        check("columnwise_scale", columnwise.block_scale)
        check("amax_columnwise", columnwise.amax)


def quantize_as_told(case: Any, backend: Any, **options: Any) -> tuple[Any, Any]:
    """(rowwise, columnwise or None) of a case of Transformer Engine's reference."""
    if case.params["columnwise"]:
        return tuple(backend.quantize(case.input(), direction="both", **options))
    return backend.quantize(case.input(), **options), None


def check_te_ref_2d(case: Any, backend: Any, check: Any) -> None:
    check_directions(check, *quantize_as_told(case, backend, block_shape="2d"))


def check_te_ref_rht(case: Any, backend: Any, check: Any) -> None:
    mask = True if case.params["with_random_sign_mask"] else 0
    check_directions(check, *quantize_as_told(case, backend, rht=mask))
    x = case.input()
    x = x.reshape(-1, x.shape[-1])
    rotated = backend.call(
        fp4kit.hadamard_transform, x, mask, direction="columnwise", rounding="bf16"
    )
    check("rht", rotated.T)


def check_te_ref_rowscaled(case: Any, backend: Any, check: Any) -> None:
    check_directions(check, *quantize_as_told(case, backend, second_level="row_scaled"))


def check_te_ref_gemm(case: Any, backend: Any, check: Any) -> None:
    second_level = "row_scaled" if case.params["row_scaled_a"] else "tensor"
    stored = case.array("b_input")
    other = stored if stored.dtype == F32 else stored.view(ml_dtypes.bfloat16)
    a = backend.quantize(case.input(), second_level=second_level)
    b = backend.quantize(other)
    for name, q in (("a", a), ("b", b)):
        check(f"{name}_data", q.packed)
        check(f"{name}_scale", q.block_scale)
        check(f"{name}_amax", q.amax)
    dtype = case.params["out_dtype"].removeprefix("torch.")
    y = backend.call(fp4kit.matmul, a, b, out_dtype=dtype)
    if backend.name == "reference":
        check("out", y.view(case.array("out").dtype))
    else:  # another order of the sums
        expected = case.array("out")
        if dtype == "bfloat16":
            expected = expected.view(ml_dtypes.bfloat16).astype(F32)
        largest = np.abs(expected).max()
        assert np.all(
            np.abs(y.astype(F32) - expected) <= np.maximum(np.abs(expected), largest / 256) / 128
        )
        check.compared.add("out")


def check_te_ref_4over6(case: Any, backend: Any, check: Any) -> None:
    params = case.params
    error = params["nvfp4_4over6_err_mode"].lower()
    options = {
        "scale_search": "four_over_six",
        "e4m3_max": params["nvfp4_e4m3_max"],
        "search_error": error + ("_scaled" if params["nvfp4_4over6_err_use_fast_math"] else ""),
        "block_shape": "2d" if params["quant_tile_shape"] == [16, 16] else "1d",
    }
    if params["row_scaled_nvfp4"]:
        options["second_level"] = "row_scaled"
    check_directions(check, *quantize_as_told(case, backend, **options))


def check_te_model_variants(case: Any, backend: Any, check: Any) -> None:
    x = case.input()
    if "fast_math" in case.params:
        q = backend.quantize(x)
        check("amax", q.amax)
        check("rowwise_scale", q.block_scale)
        check("s_enc", scaling.te_encode_scale(q.amax))
        return
    q = backend.quantize(x, second_level="per_token")
    check("rowwise_data", q.packed)
    check("rowwise_scale", q.block_scale)
    check("amax", q.amax)
    encode = scaling.te_encode_scale(np.maximum(q.amax, scaling.PER_TOKEN_SMALLEST))
    check("s_enc", encode)
    with np.errstate(divide="ignore"):
        raised = np.maximum(q.amax, scaling.PER_TOKEN_SMALLEST)[:, None]
        check("inv", scaling.per_token_factor(q.block_scale, raised))


def check_flashinfer_4over6(case: Any, backend: Any, check: Any) -> None:
    params = case.params
    q = backend.quantize(
        case.input(),
        amax=case.array("global_amax"),
        scale_search="four_over_six",
        e4m3_max=params["e4m3_max"],
        search_error=params["err_mode"].lower()
        + ("_scaled" if params["err_use_fast_math"] else ""),
    )
    x, amax = case.input().astype(F32), q.amax.reshape(-1, 1)
    scheme = q.scheme
    values = x.reshape(*q.block_scale.shape, 16)
    own_errors = []
    with np.errstate(all="ignore"):
        block_amax = np.abs(values).max(axis=-1)
        six, four = scale_search.four_over_six_candidates(block_amax, amax, scheme)
        for byte in (six, four):
            choice = scale_search.Choice(byte, scale_search.factor_of(byte, amax, scheme))
            own_errors.append(scale_search.total_error(values, choice, amax, scheme))
        encode = scaling.te_encode_scale(q.amax, params["e4m3_max"])
    near = np.isclose(*own_errors, rtol=1e-6)
    check("qdata", q.packed, where=np.repeat(~near, 8, axis=-1) if check.partial else None)
    check("scale", q.block_scale, where=~near if check.partial else None)
    picked = ((q.block_scale == four) & (four != six)).astype(np.uint8)
    check("pick_four", picked, where=~near if check.partial else None)
    zero = (q.amax == 0) & params["per_token_rowwise"]
    check("decode_scale", np.where(zero, F32(0), F32(1) / encode))


def check_fouroversix(case: Any, backend: Any, check: Any) -> None:
    if check.excluded or not case.exact:
        return  # without saturation the peer's codes above 7 spill into the sign: see the notes
    params = case.params
    # The peer's signs come from sign(x): -0.0 becomes code 0. Adding +0.0 does the same.
    x = case.input() + np.zeros(1, case.input().dtype)
    direction = "columnwise" if params.get("transpose") else "rowwise"
    if params["had"] is not None:
        mask = True if params["had"] == "random sign mask" else 0
        x = backend.call(fp4kit.hadamard_transform, x, mask, direction=direction, rounding="bf16")
    amax = backend.call(fp4kit.amax, x)
    block = "2d" if params.get("block_scale_2d") else "1d"
    if params["fp4_format"] == "mxfp4":
        q = backend.quantize(x, "mxfp4", scale_rule="rceil", direction=direction, block_shape=block)
        amax = np.ones(1, F32)
    elif params["scale_rule"] == "static_6":
        # The order of operations of recipe nvfuser, with 2688 / amax as its scale.
        encode = scaling.te_encode_scale(amax)
        q = backend.quantize(
            x, recipe="nvfuser", encode_scale=encode, direction=direction, block_shape=block
        )
    else:
        q = backend.quantize(
            x,
            amax=amax,
            direction=direction,
            block_shape=block,
            scale_search="four_over_six",
            e4m3_max=256,
            search_error=params["scale_rule"],
        )
    check("qdata", q.packed)
    check("scale", q.block_scale)
    check("amax", amax)
    if "scale_blocked" in case:
        check("scale_blocked", backend.call(fp4kit.swizzle, q.block_scale))
    if "unpacked" in case:
        values = E2M1.values[codecs.unpack_nibbles(q.packed, "low_first")]
        check("unpacked", codecs.encode(values, E4M3))


def check_arcquant_model(case: Any, backend: Any, check: Any) -> None:
    params = case.params
    # FP8 input is what it decodes to: every E4M3 value is exact in float32.
    x = E4M3.values[case.array("x_e4m3")] if "x_e4m3" in case else case.input()
    options: dict[str, Any] = {
        "mode": "activation" if params["is_act"] else "weight",
        "encode_scale": case.array("input_scale"),
    }
    if params["reorder_bf16"]:
        options["reorder"] = case.array("reorder_index")
    for layout, codes, scales in (
        ("interleaved", "qx", {"linear": "sf_linear", "swizzled_128x4": "sf_swizzled"}),
        ("appended", "qx_appended", {"linear": "sf_appended"}),
    ):
        for scale_layout, name in scales.items():
            q = backend.call(
                fp4kit.quantize_residual, x, params["KE"], layout=layout,
                scale_layout=scale_layout, **options,
            )  # fmt: skip
            check(codes, q.packed)
            check(name, q.block_scale)


def check_arcquant_fake(case: Any, backend: Any, check: Any) -> None:
    """Nothing to compare: the paper's code holds no bytes and rounds its own way."""
    assert check.excluded


CHECKS = {
    name.removeprefix("check_"): function
    for name, function in list(globals().items())
    if name.startswith("check_") and name != "check_directions"
}


@pytest.mark.golden(*CHECKS)
def test_case(golden_case, backend, golden_check):
    golden_check(golden_case, CHECKS[golden_case.file], backend)


def test_tables(golden_tables_are_fresh, golden_variant_files):
    assert set(CHECKS) == set(golden_variant_files)
    total, left_out = golden_tables_are_fresh(set(CHECKS))
    assert total > 800
    assert left_out / total < 0.12
