# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of golden cases: what torch programs quantize with.

Transformer Engine, torchao, ModelOpt, compressed-tensors, comfy-kitchen.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

import fp4kit
from fp4kit.formats import E2M1, E4M3, E5M2, FLT_MAX
from fp4kit.reference import codecs
from golden_codes import MX_FORMATS, OUTPUTS, codes_of, packed_mask, per_element
from sample_arrays import F32

#: (file, text in "case function params kind", array or *) -> why it cannot be compared at all.
EXCLUDED: dict[tuple[str, str, str], str] = {}

#: The same keys -> which entries are left out, and why.
PARTIAL: dict[tuple[str, str, str], str] = {
    ("te_model_dequant", "case010", "out_fp32"): (
        "zero codes under an overflowed scale * amax: NaN by the formula, 0 here"
    ),
    ("te_model_dequant", "case010", "out_bf16"): "as out_fp32",
    ("te_model_dequant", "case012", "out_fp32"): (
        "rows whose encode scale was clamped: the amax formula decodes too small, corrected here"
    ),
    ("te_model_dequant", "case012", "out_bf16"): "as out_fp32",
    ("te_model_dequant", "case012", "out_fp16"): "as out_fp32",
    ("te_model_dequant", "case011", "out_fp32"): "as case010",
    ("te_model_dequant", "case011", "out_bf16"): "as case010",
    ("te_model_dequant", "case013", "out_fp32"): "as case012",
    ("te_model_dequant", "case013", "out_bf16"): "as case012",
    ("te_model_dequant", "case013", "out_fp16"): "as case012",
    ("torchao_mx", "kind=subn", "data"): (
        "blocks of byte 0: the peer divides by at least 2^-126 where 2^-127 is the scale"
    ),
    (
        "torchao_mx",
        "kind=special",
        "data",
    ): "blocks with NaN: all NaN there, only that element here",
    ("torchao_mx", "kind=special", "scale"): (
        "blocks with NaN: byte 255 there, NaN is ignored in amax here"
    ),
    ("modelopt_mxfp4", "", "qdata"): (
        "ties and exact zeros: the peer rounds ties down and gives every zero a sign bit"
    ),
}


# ------------------------------------------------------------------------------------------------
# Transformer Engine
# ------------------------------------------------------------------------------------------------


def check_te_ref_1d(case: Any, backend: Any, check: Any) -> None:
    x = case.input()
    direction = "both" if "columnwise_data" in case else "rowwise"
    q = backend.quantize(x, direction=direction)
    q, columnwise = q if direction == "both" else (q, None)
    check("rowwise_data", q.packed)
    check("rowwise_scale", q.block_scale)
    check("amax_rowwise", q.amax)
    if columnwise is not None:
        check("columnwise_data", columnwise.packed)
        check("columnwise_scale", columnwise.block_scale)
        check("amax_columnwise", columnwise.amax)


def check_te_model_edges(case: Any, backend: Any, check: Any) -> None:
    x = case.input()
    options = {}
    if "given_amax" in case:
        options["amax"] = case.array("given_amax")
    elif case.params["row_scaled"]:
        rows = [backend.call(fp4kit.amax, row) for row in x]
        check("amax", np.concatenate(rows))
        options["amax"] = np.concatenate(rows)
    block = "1d" if case.params["tile"] == [1, 16] else "2d"
    q = backend.quantize(x, nonfinite="propagate", block_shape=block, **options)
    check("rowwise_data", q.packed)
    check("rowwise_scale", q.block_scale)
    check("amax", q.amax)
    # The conversion takes the default backend of the arrays' device.
    encode = fp4kit.convert_second_level(backend.put(q), "encode_scale")
    check("s_enc", backend.get(encode))


def check_te_model_dequant(case: Any, backend: Any, check: Any) -> None:
    e4m3_max = case.params["e4m3_max"]
    packed, scale, amax = (case.array(name) for name in ("rowwise_data", "rowwise_scale", "amax"))
    q = fp4kit.QuantizedTensor(
        packed,
        scale,
        "nvfp4",
        (packed.shape[0], packed.shape[1] * 2),
        amax=amax,
        scale_search="four_over_six",
        e4m3_max=e4m3_max,
    )
    values = E2M1.values[codes_of(packed)]
    decoded_scale = E4M3.values[scale]
    with np.errstate(all="ignore"):
        amax_column = np.broadcast_to(amax, len(packed))[:, None]
        overflowed = np.isinf(decoded_scale * amax_column)
        clamped = (F32(6 * e4m3_max) / amax_column > FLT_MAX) & (amax_column != 0)
        clamped_values = values * per_element(decoded_scale / FLT_MAX, 16)
    zeroed = per_element(overflowed & ~clamped, 16) & (values == 0)
    own = np.where(zeroed, values, clamped_values)
    corrected = zeroed | clamped
    for short, dtype in OUTPUTS.items():
        name = f"out_{short}"
        out = backend.dequantize(q, dtype)
        peer_differs = corrected.any() and name in check.partial
        check(name, out, where=~corrected if peer_differs else None)
        with np.errstate(all="ignore"):
            check.assert_bits(out, own.astype(out.dtype), f"{name}, corrected", where=corrected)


def check_te_model_mxfp8(case: Any, backend: Any, check: Any) -> None:
    x = case.input()
    rows, cols = x.shape
    format = MX_FORMATS[case.params["fmt"]]
    q, columnwise = backend.quantize(
        x,
        format,
        direction="both",
        block_shape="2d" if case.params["tile"] == "32x32" else "1d",
        pad=True,
        nonfinite="propagate",
    )
    check("rowwise_data", q.packed[:, :cols])
    check("rowwise_scale", q.block_scale)
    # Columnwise: blocks of 32 rows, neither data nor scales transposed.
    check("columnwise_data", columnwise.packed[:rows])
    check("columnwise_scale", columnwise.block_scale)


def check_te_model_mxfp8_dequant(case: Any, backend: Any, check: Any) -> None:
    data = case.array("data")
    q = fp4kit.QuantizedTensor(
        data, case.array("scale"), MX_FORMATS[case.params["fmt"]], data.shape
    )
    check.dequantized(q, backend, "out_")


# ------------------------------------------------------------------------------------------------
# torchao
# ------------------------------------------------------------------------------------------------


def check_torchao_nvfp4(case: Any, backend: Any, check: Any) -> None:
    x = case.input()
    options: dict[str, Any] = {"recipe": "torchao"}
    if "per_tensor_scale" not in case:
        options["second_level"] = "none"
    elif case.params["per_tensor_scale"] == "per expert":
        amaxes = [backend.call(fp4kit.amax, expert) for expert in x]
        options["amax"] = np.concatenate(amaxes)
    linear = backend.quantize(x, **options)
    check("qdata", linear.packed)
    check("scale", linear.block_scale)
    if "per_tensor_scale" in case:
        check("per_tensor_scale", linear.decode_scale)
    check.dequantized(linear, backend)
    if "scale_swizzled" in case:
        swizzled = backend.quantize(x, scale_layout="swizzled_128x4", **options)
        check("qdata", swizzled.packed)
        check("scale_swizzled", swizzled.block_scale)
        check.dequantized(swizzled, backend)


def check_torchao_mx(case: Any, backend: Any, check: Any) -> None:
    x = case.input()
    format = MX_FORMATS[case.params["elem"]]
    options = {"scale_rule": case.params["scaling_mode"].lower(), "nonfinite": "propagate"}
    q = backend.quantize(x, format, **options)
    blocks = x.astype(F32).reshape(*q.block_scale.shape, 32)
    has_nan = np.isnan(blocks).any(axis=-1)
    alike = ~has_nan & (q.block_scale != 0)
    zero = ~blocks.any(axis=-1)
    of_data = per_element(alike | zero, 32)
    check("scale", q.block_scale, where=~has_nan)
    check("data", q.packed, where=packed_mask(of_data) if format == "mxfp4" else of_data)
    if has_nan.any():
        # NaN takes no part in the scale and becomes the NaN code; the rest is as without it.
        clean = backend.quantize(
            np.nan_to_num(x, nan=0.0, posinf=np.inf, neginf=-np.inf), format, **options
        )
        check.assert_bits(q.block_scale, clean.block_scale, "scale of blocks with NaN")
        got, want = q.packed, clean.packed
        if format == "mxfp4":
            got, want = codes_of(got), codes_of(want)
        element = {"mxfp4": E2M1, "mxfp8": E4M3, "mxfp8_e5m2": E5M2}[format]
        want = np.where(np.isnan(x), np.uint8(element.nan_code), want)
        check.assert_bits(got, want, "codes of blocks with NaN")
    if "scale_swizzled" in case:
        swizzled = backend.quantize(x, format, scale_layout="swizzled_128x4", **options)
        check("scale_swizzled", swizzled.block_scale)
    # The peer's own bytes decode to the peer's own values.
    peer = dataclasses.replace(
        q, packed=case.array("data"), block_scale=case.array("scale").reshape(q.block_scale.shape)
    )
    check.dequantized(peer, backend)


def check_torchao_swizzle(case: Any, backend: Any, check: Any) -> None:
    scales = case.array("scales")
    check("blocked", backend.call(fp4kit.swizzle, scales))
    check("restored", backend.call(fp4kit.unswizzle, case.array("blocked"), scales.shape))


# ------------------------------------------------------------------------------------------------
# ModelOpt, compressed-tensors, comfy-kitchen
# ------------------------------------------------------------------------------------------------


def check_modelopt_nvfp4(case: Any, backend: Any, check: Any) -> None:
    options = {}
    if "given_scale_2" in case:
        options["decode_scale"] = case.array("given_scale_2")
    q = backend.quantize(case.input(), recipe="modelopt", pad=True, **options)
    check("qdata", q.packed)
    check("scale", q.block_scale)
    check("scale_2", q.decode_scale)
    check.dequantized(q, backend)


def check_modelopt_mxfp4(case: Any, backend: Any, check: Any) -> None:
    x = case.input()
    q = backend.quantize(x, "mxfp4", scale_rule="rceil")
    check("scale", q.block_scale)
    scaled = np.abs(x.astype(F32)) * per_element(F32(1) / codecs.decode_e8m0(q.block_scale), 32)
    midpoints = (E2M1.magnitudes[1:] + E2M1.magnitudes[:-1]) / 2
    check("qdata", q.packed, where=packed_mask(~np.isin(scaled, midpoints) & (x != 0)))
    peer = dataclasses.replace(q, packed=case.array("qdata"))
    check.dequantized(peer, backend)


def check_modelopt_mxfp8(case: Any, backend: Any, check: Any) -> None:
    x = case.input()
    q = backend.quantize(x, "mxfp8", pad=True)
    check("qdata", q.packed[..., : x.shape[-1]])
    check("scale", q.block_scale)
    check.dequantized(q, backend)


def check_ct_nvfp4(case: Any, backend: Any, check: Any) -> None:
    options = {}
    if "fused_global_scale" in case.params:
        options["encode_scale"] = case.array("weight_global_scale")
    q = backend.quantize(case.input(), recipe="compressed-tensors", **options)
    check("weight_packed", q.packed)
    check("weight_scale", q.block_scale)
    check("weight_global_scale", q.encode_scale)
    check("weight_decompressed", backend.dequantize(q, "bfloat16"))


def check_ct_mxfp4(case: Any, backend: Any, check: Any) -> None:
    # Recipe-free formats keep the sign of zero; the peer gives -0.0 code 0. Adding +0.0 drops it.
    x = case.input()
    q = backend.quantize(x + np.zeros(1, x.dtype), "mxfp4", scale_rule="even")
    check("weight_packed", q.packed)
    check("weight_scale", q.block_scale)
    check("weight_decompressed", backend.dequantize(q, "bfloat16"))
    # scale_values is the power of two itself: what a code of 1.0 decodes to.
    ones = dataclasses.replace(q, packed=np.full_like(q.packed, 0x22))
    check("scale_values", backend.dequantize(ones)[:, ::32])


def check_comfy_nvfp4(case: Any, backend: Any, check: Any) -> None:
    x = case.input()
    if case.params["pad_16x"]:
        x = np.pad(x, [(0, -size % 16) for size in x.shape])
    q = backend.quantize(
        x,
        recipe="comfy",
        decode_scale=case.array("per_tensor_scale"),
        scale_layout="swizzled_128x4",
        nibble_order="high_first" if case.params["hi_first"] else "low_first",
    )
    check("qdata", q.packed)
    check("block_scale", q.block_scale)
    check.dequantized(q, backend)


def check_comfy_mxfp8(case: Any, backend: Any, check: Any) -> None:
    x = case.input()
    if case.params["pad_32x"]:
        x = np.pad(x, [(0, -size % 32) for size in x.shape])
    q = backend.quantize(x, "mxfp8", scale_layout="swizzled_128x4")
    check("qdata", q.packed)
    check("block_scale", q.block_scale)
    check.dequantized(q, backend)
