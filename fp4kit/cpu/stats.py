# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Error sums on the CPU: what one range of blocks contributes, and how ranges add up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from fp4kit.backend.interface import ErrorSums, Plan
from fp4kit.reference import codecs

from .load import code_words, kernels, read_only


class Part(NamedTuple):
    """What one range of blocks contributes.

    Attributes:
        sums: float64 (5,): x^2, y^2, xy, (x - y)^2, largest |x - y|.
        scales: int64 (2,): blocks with a non-zero element under scale byte 0, blocks with scale
            bytes 1..7.
        codes: codes of the largest finite magnitude, codes of magnitude 0.
    """

    sums: np.ndarray
    scales: np.ndarray
    codes: tuple[int, int]


def measurer(
    plan: Plan, words: np.ndarray, packed: np.ndarray, byte: np.ndarray, second: np.ndarray
) -> Callable[[int, int], Part]:
    """A function that measures a range of whole blocks.

    Args:
        plan: how the codes were made.
        words: original elements, padded to whole blocks.
        packed: codes.
        byte: linear scale bytes, flat.
        second: second-level scales, empty if there are none.
    """
    _, kinds, _, decode = kernels()
    recipe, element, block = plan.recipe, plan.format.element, plan.format.block_size
    how = kinds.decoding(plan, "float32")
    kernel = kinds.error_measurer(how.factors, how.decode)
    keep_sign = recipe.decodes_negative_zero if recipe else True
    codes, flat = read_only(code_words(packed, plan)), read_only(packed.reshape(-1))
    words, byte, second = read_only(words), read_only(byte), read_only(second)
    block_bytes = block // plan.format.codes_per_byte

    def measure(begin: int, end: int) -> Part:
        sums, scales = np.zeros(5), np.zeros(2, np.int64)
        decoded = np.empty(decode.TILE * block // 2, np.uint64)
        kernel(
            words, codes, byte, begin, end, block // 2, how.rules, second,
            plan.rows_per_scale * plan.blocks, keep_sign, plan.nibble_order == "low_first",
            element.values, sums, scales, kinds.scratch()[0], decoded,
        )  # fmt: skip
        first, last = begin * block_bytes, end * block_bytes
        if plan.format.codes_per_byte == 2:
            return Part(sums, scales, decode.count_nibbles(flat, first, last))
        return Part(sums, scales, decode.count_codes(flat, first, last, element.max_code, 0x7F))

    return measure


def collect(sums: Iterable[np.ndarray], elements: int) -> ErrorSums:
    """Adds up the `sums` of parts, in order."""
    result = ErrorSums(elements=elements)
    for x2, y2, xy, d2, largest in sums:
        result += ErrorSums(0, float(x2), float(y2), float(xy), float(d2), float(largest))
    return result


def total(plan: Plan, parts: Sequence[Part]) -> ErrorSums:
    """The sums of all parts of a tensor."""
    result = collect([part.sums for part in parts], plan.rows * plan.cols)
    result.blocks = plan.rows * plan.blocks
    result.saturated = int(sum(part.codes[0] for part in parts))
    padding = plan.rows * (plan.blocks * plan.format.block_size - plan.cols)
    result.zero_codes = int(sum(part.codes[1] for part in parts)) - padding
    zero, small = (int(n) for n in np.sum([part.scales for part in parts], axis=0))
    if plan.format.scale_type == "e4m3":
        result.scale_underflow, result.scale_subnormal = zero, small
    else:
        result.scale_subnormal = zero
    return result


def without_padding(plan: Plan, packed: np.ndarray) -> np.ndarray:
    """A copy of the codes with zeros in the padding of each row."""
    codes = packed
    if plan.format.codes_per_byte == 2:
        codes = codecs.unpack_nibbles(packed, plan.nibble_order)
    codes = codes.copy()
    codes[:, plan.cols :] = 0
    if plan.format.codes_per_byte == 2:
        return codecs.pack_nibbles(codes, plan.nibble_order)
    return codes
