# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Every golden case on every backend, through the public functions, byte for byte.

A check compares each array that the manifest calls exact. An array may be compared on a part of
its entries only if `PARTIAL` says which and why, and left out only if `EXCLUDED` does; the test
fails if an array is neither compared nor excluded, and if a table entry matches nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import fp4kit
from fp4kit import codecs
from fp4kit.formats import E2M1, E4M3, E5M2, FLT_MAX

F32 = np.float32
OUTPUTS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
MX_FORMATS = {"e2m1": "mxfp4", "e4m3": "mxfp8", "e5m2": "mxfp8_e5m2"}
LAYOUTS = {"linear": "linear", "128x4": "swizzled_128x4", "8x4": "swizzled_8x4"}

SMALLER_TIE = "the peer sends ties to the smaller magnitude and takes the sign from x < 0"
OTHER_E8M0 = "the cast rounds by another rule; scales are built from the bits instead"

#: (file, text in "case function params kind", array or *) -> why it cannot be compared at all.
EXCLUDED = {
    ("nvfuser_pyquant", "pytorch_nvfp4_quantize", "qdata"): (
        "elements are divided by the scale before it is rounded to E4M3; no recipe does that"
    ),
    ("flashinfer_trace_refs", "_mxfp4_quantize_reference", "*"): (
        "exponent is floor(log2(amax/6)), none of the four MX rules, and 127 for a zero block"
    ),
    ("flashinfer_trace_refs", "_mxfp8_quantize_reference", "*"): (
        "exponent is floor(log2(amax/448)), none of the four MX rules, and 127 for a zero block"
    ),
    ("formats_encode", "cudaRoundZero", "codes"): OTHER_E8M0,
    ("formats_encode", "ml_dtypes.float8_e8m0fnu", "codes"): OTHER_E8M0,
    ("formats_encode", "torch .to(float8_e8m0fnu)", "codes"): OTHER_E8M0,
}

ZERO_BYTE = (
    "blocks of scale byte 0 or 255: the peer decodes them as 0 and infinity, not 2^-127, NaN"
)
ORDER = (
    "the peer multiplies by fl(1/6) where recipe nvfuser divides by 6: scale bytes are compared on "
    "inputs not made to show that, codes in blocks whose scale byte is equal and not 0"
)
POLICY = "entries on which the peer's documented NaN or overflow policy is another"

#: The same keys -> which entries are left out, and why.
PARTIAL = {
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
    ("flashinfer_trace_refs", "_fp4_quantize_reference", "qdata"): SMALLER_TIE,
    ("flashinfer_nvfp4", ".ref_fp4_quant ", "qdata"): ORDER,
    ("flashinfer_nvfp4", ".ref_fp4_quant ", "scale"): ORDER,
    ("flashinfer_nvfp4", ".ref_fp4_quant ", "scale_f32"): ORDER + "; " + ZERO_BYTE,
    ("vllm_nvfp4", "", "values"): ORDER,
    ("vllm_nvfp4", "", "scale"): ORDER,
    ("vllm_nvfp4", "", "scale_f32"): ORDER,
    ("nvfuser_pyquant", "", "scale"): "scales below 2^-6, which this helper clamps",
    ("flashinfer_dequant", '"ufp8_type": 0', "out_fp32"): ZERO_BYTE,
    ("flashinfer_host_dequant", "UE8M0", "out_fp32"): ZERO_BYTE,
    ("formats_encode", "ml_dtypes", "codes"): POLICY,
    ("formats_encode", "gfloat", "codes"): POLICY,
    ("formats_encode", "torch .to", "codes"): POLICY,
    ("formats_encode", "torchao", "codes"): POLICY,
    ("formats_encode", "__NV_NOSAT", "codes"): POLICY,
    ("formats_encode", "own", "codes"): "e8m0: sign bit set, or not reachable as amax * fl(1/448)",
    ("formats_encode", "cudaRoundPosInf", "codes"): "as own",
}


def per_element(mask: np.ndarray, block: int) -> np.ndarray:
    """A mask of blocks as one of elements."""
    return np.repeat(mask, block, axis=-1)


def codes_of(packed: np.ndarray) -> np.ndarray:
    return codecs.unpack_nibbles(packed, "low_first")


def packed_mask(mask: np.ndarray) -> np.ndarray:
    """Bytes both of whose elements are in the mask."""
    return mask[..., 0::2] & mask[..., 1::2]


# ------------------------------------------------------------------------------------------------
# Transformer Engine
# ------------------------------------------------------------------------------------------------


def check_te_ref_1d(case: Any, backend: Any, check: Any) -> None:
    x = case.input()
    axis = "both" if "columnwise_data" in case else "row"
    q = backend.quantize(x, axis=axis)
    q, columnwise = q if axis == "both" else (q, None)
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
    q = backend.quantize(x, nonfinite="propagate", block=block, **options)
    check("rowwise_data", q.packed)
    check("rowwise_scale", q.block_scale)
    check("amax", q.amax)
    # The conversion takes the default backend of the arrays' device.
    encode = fp4kit.convert_second_level(backend.put(q), "encode")
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
        variant=fp4kit.Variant(scale_search="four_over_six", error="mse", e4m3_max=e4m3_max),
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
        axis="both",
        block="2d" if case.params["tile"] == "32x32" else "1d",
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
        options["second_level"] = False
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


# ------------------------------------------------------------------------------------------------
# nvFuser
# ------------------------------------------------------------------------------------------------


def check_nvfuser_model(case: Any, backend: Any, check: Any) -> None:
    x = case.input()
    if case.params["dtype"] == "Float8_e4m3fn":
        q = backend.quantize(x, "mxfp8")
    elif "global_scale" in case:
        q = backend.quantize(x, recipe="nvfuser", encode_scale=case.array("global_scale"))
    else:
        q = backend.quantize(x, recipe="nvfuser", second_level=False)
    check("qdata", q.packed)
    check("scale", q.block_scale)


def check_nvfuser_pyquant(case: Any, backend: Any, check: Any) -> None:
    q = backend.quantize(case.input(), recipe="nvfuser", encode_scale=case.array("global_scale"))
    clamped = q.block_scale < 8
    check("scale", q.block_scale, where=~clamped)
    assert (case.array("scale")[clamped] == 8).all()


def one_level(packed: np.ndarray, scale: np.ndarray, layout: str = "linear") -> Any:
    """Codes and E4M3 scales without a second level: they decode to value * scale exactly."""
    return fp4kit.QuantizedTensor(
        packed,
        scale,
        "nvfp4",
        (packed.shape[0], packed.shape[1] * 2),
        recipe="nvfuser",
        scale_layout=layout,
    )


def check_nvfuser_dequant(case: Any, backend: Any, check: Any) -> None:
    q = one_level(case.array("packed"), case.array("scale"))
    if "global_scale" in case:
        # amax is rebuilt as 2688 * (1/S), so amax/2688 is 1/S for these: recipe nvfuser's formula.
        encode = case.array("global_scale").reshape(1)
        q = dataclasses.replace(q, encode_scale=encode)
        check("out", backend.dequantize(q))
        swizzled = dataclasses.replace(
            q, block_scale=case.array("scale_swizzled"), scale_layout="swizzled_128x4"
        )
        check("out", backend.dequantize(swizzled))
        return
    check("out", backend.dequantize(q) * (case.array("amax") / F32(2688)))
    ones = dataclasses.replace(q, block_scale=np.full_like(q.block_scale, 0x38))
    check("unpacked", codecs.encode(backend.dequantize(ones), E2M1))


def check_nvfuser_swizzle(case: Any, backend: Any, check: Any) -> None:
    scales = case.array("scales")
    check("swizzled", backend.call(fp4kit.swizzle, scales))
    check("restored", backend.call(fp4kit.unswizzle, case.array("swizzled"), scales.shape))


# ------------------------------------------------------------------------------------------------
# flashinfer
# ------------------------------------------------------------------------------------------------


def check_flashinfer_nvfp4(case: Any, backend: Any, check: Any) -> None:
    x = case.input()
    if case.function.endswith("ref_fp4_quant_te"):
        for layout, name in (
            ("linear", "scale"),
            ("swizzled_128x4", "scale_128x4"),
            ("swizzled_8x4", "scale_8x4"),
        ):
            q = backend.quantize(x, amax=case.array("global_amax"), scale_layout=layout)
            check("qdata", q.packed)
            check(name, q.block_scale)
        return
    if case.params["sf_use_ue8m0"]:
        q = backend.quantize(x, "mxfp4", scale_rule="rceil")
        check("qdata", q.packed)
        not_zero = q.block_scale != 0
        check("scale_f32", codecs.decode_e8m0(q.block_scale), where=not_zero)
        assert not case.array("scale_f32")[~not_zero].any()
        return
    check_older_formula(case, backend, check)


def check_older_formula(case: Any, backend: Any, check: Any) -> Any:
    """Scale S * (amax * fl(1/6)), elements as recipe nvfuser; see ORDER."""
    q = backend.quantize(case.input(), recipe="nvfuser", encode_scale=case.array("global_scale"))
    same = np.ones(q.block_scale.shape, bool)
    if case.kind == "orderwit":
        same = q.block_scale == case.array("scale")
        assert same.mean() > 0.25
    check("scale", q.block_scale, where=same)
    check("scale_f32", E4M3.values[q.block_scale], where=same)
    alike = per_element(same & (q.block_scale != 0), 16)
    if "qdata" in case:
        check("qdata", q.packed, where=packed_mask(alike))
    else:
        check("values", E2M1.values[codes_of(q.packed)], where=alike)
    return q


def check_flashinfer_trace_refs(case: Any, backend: Any, check: Any) -> None:
    if not case.function.endswith("_fp4_quantize_reference") or "mxfp" in case.function:
        return
    x, encode = case.input(), case.array("global_scale")
    q = backend.quantize(x, recipe="nvfuser", encode_scale=encode)
    check("scale", q.block_scale)
    with np.errstate(divide="ignore"):
        factor = F32(1) / (E4M3.values[q.block_scale] * (F32(1) / encode))
    with np.errstate(invalid="ignore"):
        scaled = np.abs(x.astype(F32) * per_element(factor, 16))
    midpoints = (E2M1.magnitudes[1:] + E2M1.magnitudes[:-1]) / 2
    near = np.abs(scaled[..., None] - midpoints).min(axis=-1) <= F32(1e-5)
    check("qdata", q.packed, where=packed_mask(~near & (x != 0)))


def check_flashinfer_layouts(case: Any, backend: Any, check: Any) -> None:
    scales = case.array("scales")
    check("swizzled", backend.call(fp4kit.swizzle, scales))
    check("restored", backend.call(fp4kit.unswizzle, case.array("swizzled"), scales.shape))
    check("layout_8x4", backend.call(fp4kit.swizzle, scales, "swizzled_8x4"))


def check_flashinfer_host_layout(case: Any, backend: Any, check: Any) -> None:
    scales = case.array("scales")
    check("interleaved", backend.call(fp4kit.swizzle, scales))
    for name, layout in (("index_128x4", "swizzled_128x4"), ("index_8x4", "swizzled_8x4")):
        # Unswizzling the bytes of 0, 1, 2, ... gives the offsets, one byte at a time.
        size = backend.call(fp4kit.swizzle, scales, layout).size
        offsets = np.arange(size)
        low, high = (
            backend.call(fp4kit.unswizzle, part.astype(np.uint8), scales.shape, layout)
            for part in (offsets & 255, offsets >> 8)
        )
        check(name, low.astype(np.int32) + 256 * high.astype(np.int32))


def check_flashinfer_host_mxfp8(case: Any, backend: Any, check: Any) -> None:
    x = case.input()
    for short, layout in LAYOUTS.items():
        q = backend.quantize(x, "mxfp8", scale_layout=layout)
        check("qdata", q.packed)
        check("scale" if short == "linear" else f"scale_{short}", q.block_scale)
        check("dequant_fp32", backend.dequantize(q))


def plus_zero_at_code_8(out: np.ndarray, packed: np.ndarray) -> np.ndarray:
    """Some peers' tables hold an integer 0, so +0.0, at code 8."""
    return np.where(codes_of(packed) == 8, F32(0), out)


def check_e8m0_dequant(case: Any, backend: Any, check: Any, layout: str = "linear") -> None:
    packed, scale = case.array("packed"), case.array("scale")
    shape = (packed.shape[0], packed.shape[1] * 2)
    blocks = (shape[0], shape[1] // 32)
    if layout == "linear":
        scale = linear = scale.reshape(blocks)
    else:
        linear = backend.call(fp4kit.unswizzle, scale, blocks, layout)
        tile = {"swizzled_128x4": 128, "swizzled_8x4": 8}[layout]
        scale = scale.reshape(-(-blocks[0] // tile) * tile, -1)
    q = fp4kit.QuantizedTensor(packed, scale, "mxfp4", shape, scale_layout=layout)
    out = backend.dequantize(q)
    with np.errstate(over="ignore"):
        own = E2M1.values[codes_of(packed)] * per_element(codecs.decode_e8m0(linear), 32)
    check.assert_bits(out, own, "byte 0 is 2^-127, byte 255 NaN")
    if "_cpu" in case.function or "mxfp4_dequantize" in case.function:
        out = plus_zero_at_code_8(out, packed)
    if "_cpu" in case.function:
        out = out * case.array("global_scale")  # a power of two; ignored by the C++ function
    special = (linear == 0) | (linear == 255)
    check("out_fp32", out, where=~per_element(special, 32) if check.partial else None)


def check_flashinfer_dequant(case: Any, backend: Any, check: Any) -> None:
    if case.params.get("ufp8_type") == 0:
        check_e8m0_dequant(case, backend, check)
        return
    # (code * scale) * global: the first product is exact.
    exact = backend.dequantize(one_level(case.array("packed"), case.array("scale")))
    out = exact * case.array("global_scale")
    if "_cpu" in case.function:
        out = plus_zero_at_code_8(out, case.array("packed"))
    for short, dtype in OUTPUTS.items():
        if f"out_{short}" in case.exact:
            with np.errstate(over="ignore"):
                check(f"out_{short}", out.astype(dtype_of(dtype)))


def check_flashinfer_host_dequant(case: Any, backend: Any, check: Any) -> None:
    layout = LAYOUTS[case.params["layout"]]
    if case.params.get("sf_type") != "E4M3":
        check_e8m0_dequant(case, backend, check, layout)
        return
    check_decode_scale(case, backend, check, layout)


def check_decode_scale(case: Any, backend: Any, check: Any, layout: str) -> None:
    """code * fl(scale * global): recipe torchao's decoding."""
    packed = case.array("packed")
    shape = (packed.shape[0], packed.shape[1] * 2)
    tile = {"linear": 1, "swizzled_128x4": 128, "swizzled_8x4": 8}[layout]
    scale = case.array("scale").reshape(-(-shape[0] // tile) * tile, -1)
    q = fp4kit.QuantizedTensor(
        packed,
        scale,
        "nvfp4",
        shape,
        recipe="torchao",
        decode_scale=case.array("global_scale"),
        scale_layout=layout,
    )
    check.dequantized(q, backend, "out_")


# ------------------------------------------------------------------------------------------------
# vLLM
# ------------------------------------------------------------------------------------------------


def check_vllm_nvfp4(case: Any, backend: Any, check: Any) -> None:
    check_older_formula(case, backend, check)
    # What the peer quantized decodes to the peer's values: code * fl(scale / S).
    x = case.input()
    codes = codecs.encode(case.array("values"), E2M1)
    q = fp4kit.QuantizedTensor(
        codecs.pack_nibbles(codes, "low_first"),
        case.array("scale"),
        "nvfp4",
        x.shape,
        recipe="compressed-tensors",
        encode_scale=case.array("global_scale"),
    )
    check("qdq", backend.dequantize(q, x.dtype.name))


def check_vllm_dequant(case: Any, backend: Any, check: Any) -> None:
    layout = "swizzled_128x4" if case.params["swizzle"] else "linear"
    check_decode_scale(case, backend, check, layout)


def check_vllm_mxfp8(case: Any, backend: Any, check: Any) -> None:
    x = case.input()
    q = backend.quantize(x, "mxfp8")
    check("qdata", q.packed)
    check("scale", q.block_scale)
    check.dequantized(q, backend)
    swizzled = backend.quantize(x, "mxfp8", scale_layout="swizzled_128x4")
    check("scale_swizzled", swizzled.block_scale)


# ------------------------------------------------------------------------------------------------
# Element and scale types, through quantize and dequantize (test_codecs.py has the functions)
# ------------------------------------------------------------------------------------------------


def dtype_of(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def check_formats_decode(case: Any, backend: Any, check: Any) -> None:
    name = case.params["format"].removesuffix("fn")
    if name == "e2m1":
        packed = codecs.pack_nibbles(np.arange(16, dtype=np.uint8)[None], "low_first")
        q = one_level(packed, np.full((1, 1), 0x38, np.uint8))
        out = backend.dequantize(q)
    elif name == "e8m0":
        packed = np.full((256, 16), 0x22, np.uint8)
        scale = np.arange(256, dtype=np.uint8)[:, None]
        q = fp4kit.QuantizedTensor(packed, scale, "mxfp4", (256, 32))
        out = backend.dequantize(q)[:, 0]
    else:
        codes = np.arange(256, dtype=np.uint8)[None]
        q = fp4kit.QuantizedTensor(
            codes, np.full((1, 8), 127, np.uint8), MX_FORMATS[name], codes.shape
        )
        out = backend.dequantize(q)
        if name == "e4m3":
            scales = np.arange(256, dtype=np.uint8)[:, None]
            as_scale = backend.dequantize(one_level(np.full((256, 8), 0x22, np.uint8), scales))
            check.assert_bits(as_scale[:, 0], out.ravel(), "E4M3 as a scale")
    out = np.where(np.isnan(out), F32(np.nan), out)
    check("float32_bits", out.astype(F32).view(np.uint32))


def encode_by_quantizing(x: np.ndarray, name: str, backend: Any) -> tuple[np.ndarray, np.ndarray]:
    """(codes, mask of what could be encoded): blocks of 31 inputs and the type's largest value.

    The largest value makes the block's scale 1 (rule rceil), as long as no input exceeds it.
    """
    element = {"e2m1": E2M1, "e4m3": E4M3, "e5m2": E5M2}[name]
    with np.errstate(invalid="ignore"):
        usable = ~(np.abs(x.astype(F32)) > element.max)
    blocks = np.zeros((-(-x.size // 31), 32), x.dtype)
    blocks[:, 0] = element.max
    filled = np.where(usable, x, np.zeros(1, x.dtype))
    index = np.arange(x.size)
    blocks[index // 31, 1 + index % 31] = filled
    q = backend.quantize(blocks, MX_FORMATS[name], scale_rule="rceil", nonfinite="propagate")
    assert (q.block_scale == 127).all()
    codes = codes_of(q.packed) if name == "e2m1" else q.packed
    return codes[index // 31, 1 + index % 31], usable


def saturated_by_quantizing(x: np.ndarray, name: str, backend: Any) -> np.ndarray:
    """Codes of inputs of any size: rule floor keeps the scale 1 up to just below 2^(emax + 1)."""
    element = {"e2m1": E2M1, "e4m3": E4M3, "e5m2": E5M2}[name]
    blocks = np.repeat(x[:, None], 32, axis=1)
    q = backend.quantize(blocks, MX_FORMATS[name], scale_rule="floor")
    top = float(2.0**element.max_exponent)
    assert (q.block_scale == 127).all(), top
    codes = codes_of(q.packed) if name == "e2m1" else q.packed
    return codes[:, 0]


def check_formats_encode(case: Any, backend: Any, check: Any) -> None:
    if check.excluded:
        return
    name = case.params["format"].removesuffix("fn")
    x = case.array("x_bits").view(F32)
    if name == "e8m0":
        check_e8m0_round_up(case, backend, check, x)
        return
    codes, usable = encode_by_quantizing(x, name, backend)
    element = {"e2m1": E2M1, "e4m3": E4M3, "e5m2": E5M2}[name]
    with np.errstate(invalid="ignore"):
        magnitude = np.abs(x)
        too_large = (magnitude > element.max) & (magnitude < 2.0 ** (element.max_exponent + 1))
    codes[too_large] = saturated_by_quantizing(x[too_large], name, backend)
    # Beyond that a block with a 1.0 beside the input would change its scale: the codec saturates.
    beyond = ~usable & ~too_large
    codes[beyond] = codecs.encode(x[beyond], element)
    agreed = ~np.isnan(x)
    if case.function not in ("own",) and "SATFINITE" not in case.function:
        with np.errstate(invalid="ignore"):
            agreed &= (magnitude <= element.max) | (name == "e2m1")
    if case.function == "own" or "cuda" in case.function:
        nan_code = case.array("codes")[np.isnan(x)]
        agreed |= np.isnan(x) & ((nan_code == element.nan_code).all())
    check("codes", codes, where=None if agreed.all() else agreed)


def check_e8m0_round_up(case: Any, backend: Any, check: Any, x: np.ndarray) -> None:
    """Rule rceil rounds fl(amax * fl(1/max)) up: choose amax so that this is the input."""
    codes = np.zeros(x.size, np.uint8)
    reached = np.zeros(x.size, bool)
    for format, element in (("mxfp8", E4M3), ("mxfp4", E2M1), ("mxfp8_e5m2", E5M2)):
        largest = F32(element.max)
        with np.errstate(all="ignore"):
            amax = np.abs(x) * largest
            for candidate in (amax, np.nextafter(amax, F32(0)), np.nextafter(amax, F32(np.inf))):
                fits = (candidate * (F32(1) / largest)).view(np.uint32) == x.view(np.uint32)
                fits &= ~np.isnan(x)
                blocks = np.zeros((x.size, 32), F32)
                blocks[:, 5] = np.where(fits, candidate, F32(0))
                q = backend.quantize(blocks, format, scale_rule="rceil", nonfinite="propagate")
                codes = np.where(fits, q.block_scale.ravel(), codes)
                reached |= fits
    assert reached.sum() > 0.9 * (x.view(np.uint32) <= 0x7F800000).sum()
    check("codes", codes, where=reached)


def check_formats_encode16(case: Any, backend: Any, check: Any) -> None:
    bits = np.arange(65536, dtype=np.uint16)
    x = bits.view(ml_dtypes.bfloat16 if case.params["input"] == "bf16" else np.float16)
    name = case.params["format"].removesuffix("fn")
    expected = case.array("codes")
    if name == "e8m0":
        # The codes of amax themselves: rule ceil is round-up, less the element's exponent.
        positive = (bits < 0x8000) & np.isfinite(x.astype(F32))
        blocks = np.zeros((65536, 32), x.dtype)
        blocks[:, 31] = np.where(positive, x, np.zeros(1, x.dtype))
        got = backend.quantize(blocks, "mxfp4", scale_rule="ceil").block_scale.ravel()
        # The conversion saturates at 2^127, the rule still has room for the element's exponent.
        normal = positive & (x.astype(F32) >= np.finfo(F32).tiny) & (x.astype(F32) <= 2.0**127)
        wanted = np.clip(expected.astype(int) - 2, 0, None).astype(np.uint8)
        check.assert_bits(got, wanted, "rule ceil", where=normal)
        check.compared.add("codes")
        return
    codes, usable = encode_by_quantizing(x, name, backend)
    element = {"e2m1": E2M1, "e4m3": E4M3, "e5m2": E5M2}[name]
    saturated = np.where(bits < 0x8000, 0, 1 << (element.bits - 1)) | element.max_code
    codes = np.where(usable, codes, saturated.astype(np.uint8))
    check("codes", codes)


CHECKS = {
    name.removeprefix("check_"): function
    for name, function in globals().items()
    if name.startswith("check_")
    and Path(__file__).parent.joinpath("golden", name.removeprefix("check_") + ".npz").exists()
}


@pytest.mark.golden(*CHECKS)
def test_case(golden_case, backend, golden_check):
    golden_check(golden_case, CHECKS[golden_case.file], backend)


def test_no_table_entry_is_stale_and_few_arrays_are_left_out(golden_tables_are_fresh):
    total, left_out = golden_tables_are_fresh(set(CHECKS))
    assert total > 1800
    assert left_out / total < 0.05


def test_no_golden_file_is_forgotten(golden_manifest, golden_cases, golden_variant_files):
    stored = {path.stem for path in (Path(__file__).parent / "golden").glob("*.npz")}
    assert stored == {case.file for case in golden_cases}
    assert stored == set(CHECKS) | set(golden_variant_files)
    assert stored == {name.removesuffix(".npz") for name in golden_manifest["files"]}
    for name, described in golden_manifest["files"].items():
        cases = [case for case in golden_cases if case.entry["file"] == name]
        assert len(cases) == described["n_cases"], name


def test_golden_files_are_unchanged(golden_manifest):
    folder = Path(__file__).parent / "golden"
    for name, described in golden_manifest["files"].items():
        digest = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        assert digest == described["sha256"], name


@pytest.mark.golden("te_model_dequant")
def test_corrections_are_where_the_tables_say(golden_case):
    corrected = golden_case.entry["case"] in ("case010", "case011", "case012", "case013")
    assert any(text == golden_case.entry["case"] for _, text, _ in PARTIAL) == corrected
