# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""How one quantized tensor is stored in a file: names, element types and shapes of its parts.

Codes, block scales and the second level of a tensor `X` are tensors of their own. What they are
called and how they are laid out is the :class:`Storage`; :data:`PLAIN` is that of fp4kit's own
files (`X_packed`, `X_scale`, `X_global_scale`), and each checkpoint layout has one.
"""

from __future__ import annotations

from dataclasses import dataclass

from fp4kit.formats import FormatSpec

#: safetensors' element type of codes stored one per byte; two codes per byte are U8.
ELEMENT_DTYPES = {"e4m3": "F8_E4M3", "e5m2": "F8_E5M2", "e2m1": "U8"}
#: safetensors' element type of block scales: engines expect E8M0 bytes as U8.
SCALE_DTYPES = {"e4m3": "F8_E4M3", "e8m0": "U8", "float32": "F32"}


@dataclass(frozen=True, slots=True)
class PartNames:
    """Names of the tensors that one quantized tensor is stored as.

    Attributes:
        packed: codes.
        scale: block scales.
        second: second-level scale, None without one; which one: `keeps` of the storage.
    """

    packed: str
    scale: str
    second: str | None

    def all(self) -> tuple[str, ...]:
        """Every name that exists."""
        names = (self.packed, self.scale, self.second)
        return tuple(name for name in names if name is not None)


@dataclass(frozen=True)
class Storage:
    """How the parts of a quantized tensor `X` are named, ordered and shaped.

    Attributes:
        name: what it is called.
        packed_suffix: what the name of 4-bit codes adds to `X`; codes of whole bytes are `X`.
        scale_suffix: what the name of the block scales adds to `X`.
        second_suffix: what the name of the second level adds to `X`.
        second_shape: shape of the second level, and of a scale of a whole tensor.
        keeps: its second level: `encode_scale` (2688/amax) or `decode_scale` (amax/2688).
        scale_layout: order of the block scales, None for whatever was asked for.
        nibble_order: nibble that the even element takes, None for whatever was asked for.
        row_multiple: codes have rows up to a multiple of this; those added are 0.
    """

    name: str
    packed_suffix: str = "_packed"
    scale_suffix: str = "_scale"
    second_suffix: str = "_global_scale"
    second_shape: tuple[int, ...] = (1,)
    keeps: str = "encode_scale"
    scale_layout: str | None = None
    nibble_order: str | None = None
    row_multiple: int = 1

    def part_names(self, name: str, spec: FormatSpec) -> PartNames:
        """The names that the parts of tensor `name` have in a format."""
        return PartNames(
            packed=name if spec.codes_per_byte == 1 else f"{name}{self.packed_suffix}",
            scale=f"{name}{self.scale_suffix}",
            second=f"{name}{self.second_suffix}" if spec.has_second_level else None,
        )

    def code_rows(self, rows: int) -> int:
        """Rows of codes that are stored for a tensor of `rows` rows."""
        return -(-rows // self.row_multiple) * self.row_multiple


#: fp4kit's own files; the names are those of compressed-tensors.
PLAIN = Storage("plain")
