# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The variants of fp4kit as cases for `fp4kit.bench`, each with the bytes that it must move.

Nothing here knows the device: on a GPU every call only enqueues work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import fp4kit
from fp4kit import arrays, bench
from fp4kit.api.backends import get_backend
from fp4kit.api.buffers import decoding_arrays
from fp4kit.backend.jobs import Job
from fp4kit.formats import BLOCK_FORMATS

DTYPE = "bfloat16"
ITEM = 2
MEMBERS = 64
RESIDUAL_CHANNELS = 1024
#: An E2M1 group, and what numbers of rows of columnwise members are multiples of.
GROUP = 16
#: Rows of a tile of swizzled scales: members of so many have no padding, and whole 64-byte pieces
#: of columnwise codes.
WHOLE_TILES = 128

Options = dict[str, Any]
Builder = Callable[[], bench.Case]
"""Allocates and returns a case; raises BackendUnavailableError if the backend refuses it."""


# ------------------------------------------------------------------------------------------------
# Bytes that must move
# ------------------------------------------------------------------------------------------------


def encoded_bytes(elements: int, format: str = "nvfp4") -> int:
    """Codes and linear scales of so many elements."""
    spec = BLOCK_FORMATS[format]
    return elements * spec.element.bits // 8 + elements // spec.block_size


def quantize_bytes(
    elements: int, format: str = "nvfp4", *, reads: int = 1, results: int = 1, shrinks: int = 1
) -> int:
    """Of quantizing bfloat16.

    Args:
        elements: of the input.
        format: block format.
        reads: passes over inputs of that size: one more for the amax, one for a second input.
        results: directions that are written.
        shrinks: elements of the input for each that is quantized.
    """
    return elements * ITEM * reads + encoded_bytes(elements // shrinks, format) * results


def residual_bytes(rows: int, columns: int, channels: int) -> int:
    """Of quantizing bfloat16 with residual channels."""
    return rows * columns * ITEM + encoded_bytes(rows * (columns + channels))


def residual_channels(columns: int) -> int:
    """1024, or a quarter of the columns if that is less."""
    return min(RESIDUAL_CHANNELS, columns // 4 // GROUP * GROUP)


def member_rows(rows: int, members: int = MEMBERS, multiple: int = GROUP) -> list[int]:
    """Unequal random numbers of rows, multiples of a number, some of them 0 if there are few."""
    generator = np.random.default_rng(0)
    cuts = np.sort(generator.integers(0, rows // multiple + 1, members - 1)) * multiple
    return [int(size) for size in np.diff([0, *cuts, rows])]


# ------------------------------------------------------------------------------------------------
# Cases
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    """What all cases read.

    Attributes:
        machine: the device.
        x: bfloat16 (rows, columns), N(0, 1).
    """

    machine: bench.Machine
    x: Any

    @property
    def elements(self) -> int:
        """Number of elements."""
        return int(self.x.size)


def given_amax(q: Any) -> Any:
    """A measured amax as an argument that gives the same bytes."""
    if isinstance(q, fp4kit.DirectionPair):
        return tuple(direction.amax.copy() for direction in q)
    return q.amax.copy()


def quantize_case(
    inputs: Inputs, name: str, options: Options, nbytes: int, *, measured: bool, x: Any = None
) -> bench.Case:
    """Quantization into buffers that exist already; the amax is given unless `measured`."""
    x = inputs.x if x is None else x
    options = {"nonfinite": "propagate", **options}
    out = fp4kit.quantize(x, **options)
    if not measured and BLOCK_FORMATS[options.get("format", "nvfp4")].has_second_level:
        options["amax"] = given_amax(out)
        if options.get("second_level") == "row_scaled":  # what an amax for each row says as well
            del options["second_level"]
            out = fp4kit.quantize(x, **options)
    return bench.Case(name, nbytes, partial(fp4kit.quantize, x, out=out, **options))


def per_token_case(inputs: Inputs, name: str) -> bench.Case:
    """Quantization alone: the public function has no amax to be given, so the backend's method."""
    q = fp4kit.quantize(inputs.x, second_level="per_token", nonfinite="propagate")
    plan, _, packed, block_scale, second, _ = decoding_arrays(q)
    raw = arrays.ingest(inputs.x)
    # Decoding forgets what it does not need.
    job = Job(
        dataclasses.replace(plan, scheme=q.scheme), raw.data, DTYPE, second, packed, block_scale
    )
    backend = get_backend(inputs.machine.device)
    call = partial(backend.quantize, job)
    return bench.Case(name, quantize_bytes(inputs.elements), call)


def dequantize_case(inputs: Inputs, name: str, options: Options) -> bench.Case:
    """Decoding to bfloat16."""
    q = fp4kit.quantize(inputs.x, nonfinite="propagate", **options)
    nbytes = quantize_bytes(inputs.elements, options.get("format", "nvfp4"))
    out = inputs.machine.xp.empty_like(inputs.x)
    return bench.Case(name, nbytes, partial(fp4kit.dequantize, q, DTYPE, out=out))


def fp8_case(inputs: Inputs, name: str, granularity: str, reads: int) -> bench.Case:
    """FP8 with float32 scales; a scale for the whole tensor needs a read of its own."""
    out = fp4kit.quantize(inputs.x, "fp8", granularity=granularity, nonfinite="propagate")
    nbytes = inputs.x.nbytes * reads + out.packed.nbytes + out.block_scale.nbytes
    call = partial(fp4kit.quantize, inputs.x, out.scheme, nonfinite="propagate", out=out)
    return bench.Case(name, nbytes, call)


def fp8_decode_case(inputs: Inputs, name: str, granularity: str) -> bench.Case:
    """Decoding FP8 with float32 scales to bfloat16."""
    q = fp4kit.quantize(inputs.x, "fp8", granularity=granularity, nonfinite="propagate")
    nbytes = q.packed.nbytes + q.block_scale.nbytes + inputs.x.nbytes
    out = inputs.machine.xp.empty_like(inputs.x)
    return bench.Case(name, nbytes, partial(fp4kit.dequantize, q, DTYPE, out=out))


def rotate_case(inputs: Inputs, name: str, direction: str) -> bench.Case:
    """The Hadamard transform alone."""
    out = inputs.machine.xp.empty_like(inputs.x)
    call = partial(
        fp4kit.hadamard_transform, inputs.x, direction=direction, rounding="bf16", out=out
    )
    return bench.Case(name, 2 * inputs.elements * ITEM, call)


def residual_case(inputs: Inputs, name: str, *, ordered: bool) -> bench.Case:
    """Residual channels; the result has no `out`."""
    rows, columns = inputs.x.shape
    channels = residual_channels(columns)
    options: Options = {"amax": fp4kit.amax(inputs.x), "nonfinite": "propagate"}
    if ordered:
        order = np.random.default_rng(0).permutation(columns)
        options["reorder"] = inputs.machine.xp.asarray(order)
    call = partial(fp4kit.quantize_residual, inputs.x, channels, **options)
    call()
    return bench.Case(name, residual_bytes(rows, columns, channels), call)


def residual_decode_case(inputs: Inputs, name: str) -> bench.Case:
    """Decoding residual channels to bfloat16."""
    rows, columns = inputs.x.shape
    channels = residual_channels(columns)
    q = fp4kit.quantize_residual(inputs.x, channels, nonfinite="propagate")
    out = inputs.machine.xp.empty_like(inputs.x)
    call = partial(fp4kit.dequantize, q, DTYPE, out=out)
    return bench.Case(name, residual_bytes(rows, columns, channels), call)


def grouped_case(
    inputs: Inputs,
    name: str,
    options: Options,
    multiple: int = GROUP,
    *,
    measured: bool,
    sums: bool = False,
) -> bench.Case:
    """Members of unequal sizes in one buffer; the result has no `out`."""
    dims = member_rows(inputs.x.shape[0], multiple=multiple)
    options = {"first_dims": dims, "nonfinite": "propagate", **options}
    derivative = options.get("activation", "").startswith("d")
    if derivative:
        options["activation_input"] = inputs.x
    nbytes = quantize_bytes(inputs.elements, reads=1 + derivative + measured)
    if sums:
        options["dbias"] = inputs.machine.xp.empty((MEMBERS, inputs.x.shape[1]), np.float32)
        nbytes += 4 * options["dbias"].size
    group = fp4kit.quantize_grouped(inputs.x, **options)
    if not measured:
        options["amax"] = group.amax.copy()
    return bench.Case(name, nbytes, partial(fp4kit.quantize_grouped, inputs.x, **options))


def grouped_decode_case(inputs: Inputs, name: str) -> bench.Case:
    """Decoding of such a group to bfloat16."""
    dims = member_rows(inputs.x.shape[0])
    group = fp4kit.quantize_grouped(inputs.x, first_dims=dims, nonfinite="propagate")
    out = inputs.machine.xp.empty_like(inputs.x)
    call = partial(fp4kit.dequantize_grouped, group, DTYPE, out=out)
    return bench.Case(name, quantize_bytes(inputs.elements), call)


def activation_case(
    inputs: Inputs,
    name: str,
    activation: str | None,
    options: Options,
    *,
    sums: bool,
    measured: bool = False,
) -> bench.Case:
    """Quantization of an activation or a gradient, with its column sums or without."""
    options = dict(options)
    shrinks = 2 if activation == "swiglu" else 1
    derivative = activation is not None and activation.startswith("d")
    if activation is not None:
        options["activation"] = activation
    if derivative:
        options["activation_input"] = inputs.x
    nbytes = quantize_bytes(
        inputs.elements,
        options.get("format", "nvfp4"),
        reads=1 + derivative + measured,
        results=2 if options.get("direction") == "both" else 1,
        shrinks=shrinks,
    )
    if sums:
        columns = inputs.x.shape[1] // shrinks
        options["dbias"] = inputs.machine.xp.empty(columns, np.float32)
        nbytes += 4 * columns
    return quantize_case(inputs, name, options, nbytes, measured=measured)


SWIZZLED: Options = {"scale_layout": "swizzled_128x4"}
#: Quantizations that differ by their options only: name, options, directions written, and whether
#: there is a line with the amax measured too.
QUANTIZATIONS: tuple[tuple[str, Options, int, bool], ...] = (
    ("rows", {}, 1, True),
    ("rows, swizzled", SWIZZLED, 1, False),
    ("columns", {"direction": "columnwise"}, 1, False),
    ("columns, swizzled", {"direction": "columnwise", **SWIZZLED}, 1, False),
    (
        "columns, stochastic",
        {"direction": "columnwise", "rounding": "stochastic", "seed": 1},
        1,
        False,
    ),
    ("both directions", {"direction": "both"}, 2, True),
    ("both directions, swizzled", {"direction": "both", **SWIZZLED}, 2, True),
    ("tiles, rows", {"block_shape": "2d"}, 1, False),
    ("tiles, both directions", {"block_shape": "2d", "direction": "both"}, 2, False),
    (
        "tiles, both directions, swizzled",
        {"block_shape": "2d", "direction": "both", **SWIZZLED},
        2,
        False,
    ),
    ("row_scaled", {"second_level": "row_scaled"}, 1, True),
    ("rotated columns", {"direction": "columnwise", "rht": True}, 1, True),
    ("rows and rotated columns", {"direction": "both", "rht": True}, 2, True),
    (
        "rows and rotated columns, swizzled",
        {"direction": "both", "rht": True, **SWIZZLED},
        2,
        False,
    ),
    ("stochastic", {"rounding": "stochastic", "seed": 1}, 1, False),
    (
        "rotated columns, stochastic",
        {"direction": "columnwise", "rht": True, "rounding": "stochastic", "seed": 1},
        1,
        False,
    ),
    ("four_over_six", {"scale_search": "four_over_six", "e4m3_max": 256}, 1, False),
    ("four_over_six, tiles", {"scale_search": "four_over_six", "block_shape": "2d"}, 1, False),
    ("sweep", {"scale_search": "sweep"}, 1, False),
    ("mxfp8 rows", {"format": "mxfp8"}, 1, False),
    ("mxfp8 columns", {"format": "mxfp8", "direction": "columnwise"}, 1, False),
    ("mxfp8 both directions", {"format": "mxfp8", "direction": "both"}, 2, False),
)
DEQUANTIZATIONS: tuple[tuple[str, Options], ...] = (
    ("rows", {}),
    ("columns", {"direction": "columnwise"}),
    ("columns, swizzled", {"direction": "columnwise", **SWIZZLED}),
    ("rows, e4m3_max=256", {"scale_search": "four_over_six", "e4m3_max": 256}),
    ("mxfp8 columns", {"format": "mxfp8", "direction": "columnwise"}),
)
#: Granularity of FP8 -> passes over the input: a scale for the whole tensor needs one before.
FP8_READS = {"tensor": 2, "channel": 1, "block": 1}
#: Title, function, options, and whether there are column sums.
ACTIVATIONS: tuple[tuple[str, str | None, Options, bool], ...] = (
    ("relu", "relu", {}, False),
    ("silu", "silu", {}, False),
    ("swiglu", "swiglu", {}, False),
    ("dgelu", "dgelu", {}, False),
    ("dsilu and sums", "dsilu", {}, True),
    ("sums", None, {}, True),
    ("mxfp8 dsilu and sums", "dsilu", {"format": "mxfp8"}, True),
    ("silu, columns", "silu", {"direction": "columnwise"}, False),
    ("swiglu, columns", "swiglu", {"direction": "columnwise"}, False),
    ("silu, both directions", "silu", {"direction": "both"}, False),
    ("dsilu, both directions", "dsilu", {"direction": "both"}, False),
    ("mxfp8 silu, both directions", "silu", {"direction": "both", "format": "mxfp8"}, False),
)


def builders(inputs: Inputs) -> Iterator[tuple[str, Builder]]:
    """Every case by name, not built yet."""

    def named(name: str, build: Callable[..., bench.Case], *args: Any, **more: Any) -> Any:
        return name, partial(build, inputs, name, *args, **more)

    for name, options, results, also_measured in QUANTIZATIONS:
        format = options.get("format", "nvfp4")
        for measured in (False, True)[: 1 + also_measured]:
            nbytes = quantize_bytes(inputs.elements, format, reads=1 + measured, results=results)
            title = f"quantize {name}{', amax measured' if measured else ''}"
            yield named(title, quantize_case, options, nbytes, measured=measured)
    yield named("quantize per_token", per_token_case)
    for granularity, reads in FP8_READS.items():
        title = f"quantize fp8 {granularity}{', amax measured' * (reads - 1)}"
        yield named(title, fp8_case, granularity, reads)
        yield named(f"dequantize fp8 {granularity}", fp8_decode_case, granularity)
    yield named(
        "quantize per_token, amax measured",
        quantize_case,
        {"second_level": "per_token"},
        quantize_bytes(inputs.elements, reads=2),
        measured=True,
    )
    for name, options in DEQUANTIZATIONS:
        yield named(f"dequantize {name}", dequantize_case, options)
    for direction in ("rowwise", "columnwise"):
        yield named(f"hadamard_transform {direction}", rotate_case, direction)
    for ordered in (False, True):
        title = f"quantize residual channels{', ordered' if ordered else ''}"
        yield named(title, residual_case, ordered=ordered)
    yield named("dequantize residual channels", residual_decode_case)
    for name, options in (
        ("rows", {}),
        ("rows, swizzled", SWIZZLED),
        ("columns", {"direction": "columnwise"}),
    ):
        title = f"quantize {MEMBERS} members, {name}"
        yield named(title, grouped_case, options, measured=False)
        whole = f"{title}, whole tiles"
        yield named(whole, grouped_case, options, WHOLE_TILES, measured=False)
    yield named(f"quantize {MEMBERS} members, rows, amax measured", grouped_case, {}, measured=True)
    for name, options in (
        ("rows", {}),
        ("rows, swizzled", SWIZZLED),
        ("columns", {"direction": "columnwise"}),
    ):
        title = f"quantize {MEMBERS} members, {name}, silu"
        options = {**options, "activation": "silu"}
        yield named(title, grouped_case, options, measured=False)
    for name, options, measured in (
        ("sums", {}, False),
        ("sums, amax measured", {}, True),
        ("dsilu and sums, amax measured", {"activation": "dsilu"}, True),
    ):
        title = f"quantize {MEMBERS} members, rows, {name}"
        yield named(title, grouped_case, options, measured=measured, sums=True)
    yield named(f"dequantize {MEMBERS} members, rows", grouped_decode_case)
    for title, activation, options, sums in ACTIVATIONS:
        yield named(f"quantize {title}", activation_case, activation, options, sums=sums)
    for title, activation, sums in (("silu", "silu", False), ("sums", None, True)):
        name = f"quantize {title}, amax measured"
        yield named(name, activation_case, activation, {}, sums=sums, measured=True)
