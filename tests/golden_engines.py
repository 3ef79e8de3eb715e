# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of golden cases: nvFuser, flashinfer, vLLM."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

import fp4kit
from fp4kit.formats import E2M1, E4M3
from fp4kit.reference import codecs
from golden_codes import LAYOUTS, OUTPUTS, codes_of, one_level, packed_mask, per_element
from sample_arrays import F32, NUMPY

SMALLER_TIE = "the peer sends ties to the smaller magnitude and takes the sign from x < 0"
ZERO_BYTE = (
    "blocks of scale byte 0 or 255: the peer decodes them as 0 and infinity, not 2^-127, NaN"
)
ORDER = (
    "the peer multiplies by fl(1/6) where recipe nvfuser divides by 6: scale bytes are compared on "
    "inputs not made to show that, codes in blocks whose scale byte is equal and not 0"
)

#: (file, text in "case function params kind", array or *) -> why it cannot be compared at all.
EXCLUDED: dict[tuple[str, str, str], str] = {
    ("nvfuser_pyquant", "pytorch_nvfp4_quantize", "qdata"): (
        "elements are divided by the scale before it is rounded to E4M3; no recipe does that"
    ),
    ("flashinfer_trace_refs", "_mxfp4_quantize_reference", "*"): (
        "exponent is floor(log2(amax/6)), none of the four MX rules, and 127 for a zero block"
    ),
    ("flashinfer_trace_refs", "_mxfp8_quantize_reference", "*"): (
        "exponent is floor(log2(amax/448)), none of the four MX rules, and 127 for a zero block"
    ),
}

#: The same keys -> which entries are left out, and why.
PARTIAL: dict[tuple[str, str, str], str] = {
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
}


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
        q = backend.quantize(x, recipe="nvfuser", second_level="none")
    check("qdata", q.packed)
    check("scale", q.block_scale)


def check_nvfuser_pyquant(case: Any, backend: Any, check: Any) -> None:
    q = backend.quantize(case.input(), recipe="nvfuser", encode_scale=case.array("global_scale"))
    clamped = q.block_scale < 8
    check("scale", q.block_scale, where=~clamped)
    assert (case.array("scale")[clamped] == 8).all()


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
                check(f"out_{short}", out.astype(NUMPY[dtype]))


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
