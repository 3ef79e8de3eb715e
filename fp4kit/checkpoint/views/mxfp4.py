# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""MXFP4 weights, decoded to float32, with their codes and scale bytes still at hand.

gpt-oss stores `X_blocks` U8 [.., O, I/32, 16] and `X_scales` U8 [.., O, I/32]; its experts are
fused, gate and up rows alternating. compressed-tensors stores `X.weight_packed` U8 [.., O, I/2] and
`X.weight_scale` U8 [.., O, I/32]. DeepSeek-V4 stores `X.weight` I8 [.., O, I/2] and `X.scale`
F8_E8M0 [.., O, I/32]; transformers calls the latter `X.weight_scale_inv`. All put the even element
into the low nibble, and an element is its E2M1 value times 2^(scale byte - 127), which binary32
holds exactly (or overflows to infinity).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fp4kit.backend.interface import Plan
from fp4kit.checkpoint.models.expert_types import interleaving, order_is_clear, transposes_floats
from fp4kit.checkpoint.models.experts import (
    Excluded,
    ExpertsLayout,
    FusedTensor,
    fused_weight,
    stay_fused,
)
from fp4kit.checkpoint.read.code_names import scale_names
from fp4kit.errors import FileFormatError
from fp4kit.formats import E8M0_NAN, MXFP4
from fp4kit.io.containers import TensorSpec
from fp4kit.io.read.source import Source, SourceTensor
from fp4kit.scheme import Scheme

from .base import (
    READ_BYTES,
    Bytes,
    RowView,
    TensorView,
    TransposedMatrices,
    ViewOptions,
    decode,
    described,
    fetch_rows,
    where,
)
from .experts import check_bias, fused_biases, split

CODE_BYTES = MXFP4.block_size // MXFP4.codes_per_byte
SCALE_DTYPES = ("U8", "F8_E8M0")


class Mxfp4View(RowView):
    """Rows of an MXFP4 tensor, as float32; the codes themselves can be read too."""

    def __init__(
        self,
        source: Source,
        parts: tuple[SourceTensor, SourceTensor],
        spec: TensorSpec,
        start: int = 0,
        step: int = 1,
    ) -> None:
        """Shows some of the stored rows.

        Args:
            source: the stored tensors.
            parts: codes and block scales.
            spec: logical name and shape (its element type is F32).
            start: the stored row that is the first logical one, leading dimensions flattened.
            step: distance between stored rows.
        """
        self._source = source
        self._codes, self._scales = parts
        self._start, self._step = start, step
        self._cols = spec.shape[-1]
        self.consumed = (self._codes.name, self._scales.name)
        size = spec.nbytes // 4
        rows = f", rows {start} and on, every {step}." if step > 1 else ""
        self.tensor = described(
            spec.name,
            "F32",
            spec.shape,
            size // MXFP4.codes_per_byte + size // MXFP4.block_size,
            f"MXFP4 of {self._codes.name}, decoded{rows}",
        )

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows, leading dimensions flattened, and columns."""
        cols = max(self._cols, 1)
        return self.tensor.spec.nbytes // 4 // cols, self._cols

    def codes(self, first: int, last: int) -> tuple[Bytes, Bytes]:
        """The stored bytes of some rows, verbatim.

        Returns:
            Codes, uint8 (last - first, cols / 2), even element low, and E8M0 bytes, uint8
            (last - first, cols / 32).
        """
        packed = np.empty((last - first, self._cols // MXFP4.codes_per_byte), np.uint8)
        scale = np.empty((last - first, self._cols // MXFP4.block_size), np.uint8)
        stored = self._start + first * self._step
        fetch_rows(self._source, self._codes.name, stored, self._step, packed)
        fetch_rows(self._source, self._scales.name, stored, self._step, scale)
        bad = np.argwhere(scale == E8M0_NAN)
        if len(bad):
            row, block = int(bad[0][0]) + first, int(bad[0][1])
            raise FileFormatError(
                f"{where(self._source, self._scales.name)} holds a NaN scale ({E8M0_NAN}): block "
                f"{block} of row {row} of {self.tensor.name!r}; the checkpoint is damaged"
            )
        return packed, scale

    def rows(self, first: int, last: int, out: Bytes) -> None:  # noqa: D102
        packed, scale = self.codes(first, last)
        _decode(packed, scale, out.view(np.float32))


class Mxfp4TransposedView(TransposedMatrices):
    """Stacked matrices [E, out, in] of MXFP4, as float32 [E, in, out].

    Attributes:
        stored: the same as it lies in the file.
    """

    def __init__(self, stored: Mxfp4View) -> None:
        super().__init__(stored, f"{stored.tensor.note}, transposed")
        self.stored = stored

    def chunks(  # noqa: D102
        self, matrix: int, begin: int, end: int
    ) -> Iterator[tuple[int, NDArray[np.float32], int]]:
        size = MXFP4.block_size
        blocks = slice(begin // size, -(-end // size))
        nibbles = slice(blocks.start * CODE_BYTES, blocks.stop * CODE_BYTES)
        width = (blocks.stop - blocks.start) * size
        count = max(READ_BYTES // (width * 4), 1)
        first = matrix * self._out
        for row in range(0, self._out, count):
            stop = min(row + count, self._out)
            packed, scale = self.stored.codes(first + row, first + stop)
            wide = np.empty((stop - row, width), np.float32)
            _decode(
                np.ascontiguousarray(packed[:, nibbles]),
                np.ascontiguousarray(scale[:, blocks]),
                wide,
            )
            yield row, wide, begin - blocks.start * size


def _decode(packed: Bytes, scale: Bytes, out: NDArray[np.float32]) -> None:
    """Decodes rows of MXFP4, even element in the low nibble."""
    decode(Plan(Scheme("mxfp4").parts[0], *out.shape), (packed, scale, None), out, "float32")


def _scale_of(source: Source, codes: SourceTensor, name: str) -> SourceTensor:
    scale = source.tensors.get(name)
    if scale is None:
        raise FileFormatError(
            f"{where(source, codes.name)} has no scale: {name!r} is not there. Complete the "
            "checkpoint (perhaps a shard is missing)"
        )
    if scale.spec.dtype not in SCALE_DTYPES:
        raise FileFormatError(
            f"{where(source, name)} is {scale.spec.dtype}; the scales of MXFP4 must be one of "
            f"{', '.join(SCALE_DTYPES)}"
        )
    return scale


def _check_shape(
    source: Source, codes: SourceTensor, scale: SourceTensor, expected: tuple[int, ...]
) -> None:
    if codes.spec.shape != expected or len(scale.spec.shape) < 2:
        raise FileFormatError(
            f"{where(source, codes.name)} has shape {list(codes.spec.shape)}, which does not fit "
            f"its scales {scale.name!r} of shape {list(scale.spec.shape)}: blocks of "
            f"{MXFP4.block_size} need {list(expected)}"
        )


def _packed_views(source: Source, name: str, base: str) -> list[TensorView]:
    """compressed-tensors: codes [.., O, I/2]."""
    codes = source.tensors[name]
    scale = _scale_of(source, codes, f"{base}_scale")
    *lead, blocks = scale.spec.shape or (0,)
    _check_shape(source, codes, scale, (*lead, blocks * CODE_BYTES))
    shape = (*lead, blocks * MXFP4.block_size)
    return [Mxfp4View(source, (codes, scale), TensorSpec(base, "F32", shape))]


def _byte_view(source: Source, name: str) -> Mxfp4View | None:
    """DeepSeek-V4: codes [.., O, I/2] under the name of the weight; None if they are no MXFP4."""
    codes = source.tensors[name]
    # U8 scales beside U8 codes belong to the layouts, whose block scales have the same names.
    dtypes = SCALE_DTYPES if codes.spec.dtype == "I8" else ("F8_E8M0",)
    found = [source.tensors[scale] for scale in scale_names(name) if scale in source.tensors]
    scales = [scale for scale in found if scale.spec.dtype in dtypes]
    if len(found) != 1 or not scales or len(scales[0].spec.shape) < 2:
        return None
    *lead, blocks = scales[0].spec.shape
    if codes.spec.shape != (*lead, blocks * CODE_BYTES) or 0 in codes.spec.shape:
        return None
    spec = TensorSpec(name, "F32", (*lead, blocks * MXFP4.block_size))
    return Mxfp4View(source, (codes, scales[0]), spec)


def byte_views(source: Source) -> list[TensorView]:
    """Views of every weight whose codes have the name of the weight and an E8M0 scale beside it."""
    coded = (name for name, tensor in source.tensors.items() if tensor.spec.dtype in ("U8", "I8"))
    return [view for name in coded if (view := _byte_view(source, name)) is not None]


def _block_views(
    source: Source, name: str, base: str, options: ViewOptions, separate: bool
) -> list[TensorView]:
    """gpt-oss: codes [.., O, I/32, 16], per expert where these are fused."""
    codes = source.tensors[name]
    scale = _scale_of(source, codes, f"{base}_scales")
    _check_shape(source, codes, scale, (*scale.spec.shape, CODE_BYTES))
    *lead, out, blocks = scale.spec.shape
    cols = blocks * MXFP4.block_size
    found = fused_weight(base)
    if found is None or len(lead) != 1 or not separate:
        whole = Mxfp4View(source, (codes, scale), TensorSpec(base, "F32", (*lead, out, cols)))
        if found is not None and len(lead) == 1 and transposes_floats(options.config):
            return [Mxfp4TransposedView(whole)]
        return [whole]
    prefix, role = found
    about = where(source, name)
    if role == "gate_up_proj" and out % 2:
        raise FileFormatError(f"{about} has {out} rows an expert, which is no gate and up")
    interleaved = interleaving(options.config, options.experts_layout, about, prefix)
    layout = ExpertsLayout(False, interleaved)
    blocks_as = fused_as = FusedTensor(base, (lead[0], out, cols), layout)
    if transposes_floats(options.config):  # as readers of the model type want plain numbers
        fused_as = FusedTensor(base, (lead[0], cols, out), ExpertsLayout(True, interleaved))
    views: list[TensorView] = []
    for part in blocks_as.parts():
        spec = TensorSpec(part.name, "F32", (part.rows, cols))
        view = Mxfp4View(source, (codes, scale), spec, part.expert * out + part.start, part.step)
        view.fused = fused_as
        views.append(view)
    bias = fused_biases(source).get(prefix, {}).get(role)
    if bias is not None:
        check_bias(source, bias, name, (lead[0], out))
        views += split(source, bias, layout)
    return views


def _whole(source: Source, excluded: Excluded) -> set[str]:
    """Modules of experts of which every fused weight is excluded."""
    fused: dict[str, dict[str, tuple[str, int]]] = {}
    for name, tensor in source.tensors.items():
        base = name.removesuffix("_blocks")
        found = fused_weight(base)
        if base != name and found is not None and tensor.spec.shape:
            fused.setdefault(found[0], {})[found[1]] = base, tensor.spec.shape[0]
    return {prefix for prefix, names in fused.items() if stay_fused(prefix, names, excluded)}


def find_views(source: Source, options: ViewOptions) -> list[TensorView]:
    """Views of every MXFP4 weight, and of the biases of fused experts, from headers alone."""
    # Those that are decoded are separated all the same, unless nobody knows how.
    clear = order_is_clear(options.config, options.experts_layout)
    whole = _whole(source, options.excluded) if options.fused and not clear else set()
    views = byte_views(source)
    for name, tensor in source.tensors.items():
        if tensor.spec.dtype != "U8":
            continue
        base = name.removesuffix("_blocks")
        if base != name:
            separate = options.fused and base.rpartition(".")[0] not in whole
            views += _block_views(source, name, base, options, separate)
        base = name.removesuffix("_packed")
        scale = source.tensors.get(f"{base}_scale")
        # NVFP4 has the same names, but scales of another type.
        if base != name and (scale is None or scale.spec.dtype in SCALE_DTYPES):
            views += _packed_views(source, name, base)
    return views
