# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Blocks as ggml stores them, from and to codes and linear block scales.

A block of ggml is some scale bytes and then the codes of as many blocks of the format. Within those
of one scale, byte i holds element i in its low nibble and element i + half in its high one, where
half is half of the block; here, a byte holds neighbours, the even element in its low nibble.
numba is imported with :mod:`fp4kit.cpu.ggml_kernels`, when a function is first called.
"""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from .buffers import read_only
from .threads import run

#: Bytes of a block of Q8_0: a float16 scale, then 32 elements of int8.
Q8_0_BYTES, Q8_0_ELEMENTS = 34, 32


@cache
def _kernels() -> ModuleType:
    return importlib.import_module("fp4kit.cpu.ggml_kernels")


def join_blocks(packed: np.ndarray, scales: np.ndarray, count: int, out: np.ndarray) -> None:
    """Makes blocks of codes and scales, all of them flat bytes.

    Args:
        packed: codes, the even element in the low nibble.
        scales: linear block scales.
        count: scales in a block of ggml.
        out: the blocks.
    """
    kernel, half = _kernels().join_range, len(packed) // len(scales)
    source, factors = read_only(packed), read_only(scales)
    run(
        lambda begin, end: kernel(source, factors, count, half, begin, end, out),
        len(scales) // count,
        count * half * 2,
    )


def codes_of_blocks(blocks: np.ndarray, count: int, half: int, out: np.ndarray) -> None:
    """The codes of blocks.

    Args:
        blocks: the blocks, flat bytes.
        count: scales in each.
        half: bytes of codes of each scale: half a block of the format.
        out: the codes, the even element in the low nibble.
    """
    kernel, source = _kernels().codes_range, read_only(blocks)
    run(
        lambda begin, end: kernel(source, count, half, begin, end, out),
        len(out) // (count * half),
        count * half * 2,
    )


def scales_of_blocks(
    blocks: np.ndarray, count: int, half: int, table: np.ndarray, out: np.ndarray
) -> None:
    """The block scales of blocks, each byte as a table of 256 says; see :func:`codes_of_blocks`."""
    kernel, source, known = _kernels().scales_range, read_only(blocks), read_only(table)
    run(
        lambda begin, end: kernel(source, count, half, known, begin, end, out),
        len(out) // count,
        count * half * 2,
    )


def decode_q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """The elements of blocks of Q8_0.

    Args:
        blocks: the blocks, flat bytes.
        out: float32, flat.
    """
    _run_q8_0(_kernels().q8_0_range, blocks, out)


def amaxes_of_q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """The largest magnitude in each of some blocks of Q8_0; see :func:`decode_q8_0`."""
    _run_q8_0(_kernels().q8_0_amax_range, blocks, out)


def _run_q8_0(kernel: Any, blocks: np.ndarray, out: np.ndarray) -> None:
    source = read_only(blocks)
    codes, halves = source.view(np.int8), source.view(np.int16)
    count = len(blocks) // Q8_0_BYTES
    run(lambda begin, end: kernel(codes, halves, begin, end, out), count, Q8_0_ELEMENTS)
