# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of golden cases: element and scale types, through quantize and dequantize.

test_codecs.py has the functions.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

import fp4kit
from fp4kit.formats import E2M1, E4M3, E5M2
from fp4kit.reference import codecs
from golden_codes import MX_FORMATS, codes_of, one_level
from sample_arrays import F32

OTHER_E8M0 = "the cast rounds by another rule; scales are built from the bits instead"
POLICY = "entries on which the peer's documented NaN or overflow policy is another"

#: (file, text in "case function params kind", array or *) -> why it cannot be compared at all.
EXCLUDED: dict[tuple[str, str, str], str] = {
    ("formats_encode", "cudaRoundZero", "codes"): OTHER_E8M0,
    ("formats_encode", "ml_dtypes.float8_e8m0fnu", "codes"): OTHER_E8M0,
    ("formats_encode", "torch .to(float8_e8m0fnu)", "codes"): OTHER_E8M0,
}

#: The same keys -> which entries are left out, and why.
PARTIAL: dict[tuple[str, str, str], str] = {
    ("formats_encode", "ml_dtypes", "codes"): POLICY,
    ("formats_encode", "gfloat", "codes"): POLICY,
    ("formats_encode", "torch .to", "codes"): POLICY,
    ("formats_encode", "torchao", "codes"): POLICY,
    ("formats_encode", "__NV_NOSAT", "codes"): POLICY,
    ("formats_encode", "own", "codes"): "e8m0: sign bit set, or not reachable as amax * fl(1/448)",
    ("formats_encode", "cudaRoundPosInf", "codes"): "as own",
}


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
