# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Facts of ggml and GGUF: element types and their blocks, types of metadata, numbers of files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4kit.formats import E4M3, MXFP4, NVFP4, FormatSpec

MAGIC = b"GGUF"
#: The version that is written, and those that are read.
VERSION, VERSIONS = 3, (2, 3)
DEFAULT_ALIGNMENT = 32
#: ggml refuses longer names (with the NUL that ends them) and more dimensions.
MAX_NAME, MAX_DIMENSIONS = 64, 4
#: What `general.quantization_version` says of files with quantized tensors.
QUANTIZATION_VERSION = 2
ALIGNMENT_KEY, FILE_TYPE_KEY = "general.alignment", "general.file_type"
QUANTIZATION_VERSION_KEY, ARCHITECTURE_KEY = (
    "general.quantization_version",
    "general.architecture",
)
SPLIT_NUMBER, SPLIT_COUNT, SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"
#: Shards of a model, counted from one.
SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf")


@dataclass(frozen=True)
class GgmlType:
    """An element type of ggml.

    Attributes:
        number: what files call it.
        name: what people call it.
        elements: elements of a block.
        nbytes: bytes of a block.
        dtype: safetensors' name of the same element type, "" where there is none.
    """

    number: int
    name: str
    elements: int
    nbytes: int
    dtype: str = ""


_FACTS: dict[int, tuple[Any, ...]] = {
    0: ("F32", 1, 4, "F32"), 1: ("F16", 1, 2, "F16"), 2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1, "I8"), 25: ("I16", 1, 2, "I16"), 26: ("I32", 1, 4, "I32"),
    27: ("I64", 1, 8, "I64"), 28: ("F64", 1, 8, "F64"), 29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2, "BF16"), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
    42: ("Q2_0", 64, 18),
}  # fmt: skip
GGML_TYPES = {number: GgmlType(number, *facts) for number, facts in _FACTS.items()}
TYPES_BY_NAME = {one.name: one for one in GGML_TYPES.values()}
#: From safetensors' names of element types.
TYPES_BY_DTYPE = {one.dtype: one for one in GGML_TYPES.values() if one.dtype}
Q8_0 = TYPES_BY_NAME["Q8_0"]


@dataclass(frozen=True)
class BlockLayout:
    """How ggml stores a block format of ours.

    Attributes:
        format: the block format.
        type: ggml's type of it.
        file_type: what `general.file_type` says of a model that is mostly of it.
        scales: block scales in a block of ggml.
        scale_bytes: what a block scale of a file means, as a scale byte of the format.
    """

    format: FormatSpec
    type: GgmlType
    file_type: int
    scales: int
    scale_bytes: NDArray[np.uint8]

    @property
    def half(self) -> int:
        """Bytes of codes under one scale."""
        return self.format.block_size // self.format.codes_per_byte

    @property
    def code_bytes(self) -> int:
        """Bytes of codes in a block of ggml."""
        return self.scales * self.half


def _unsigned_e4m3() -> NDArray[np.uint8]:
    """Scale bytes of NVFP4 as ggml decodes them: without the sign, NaN as 0.

    It takes 0xFF for 480, which E4M3 does not have: NaN here, so that nothing passes it by.
    """
    table = np.arange(256, dtype=np.uint8) & np.uint8(0x7F)
    table[E4M3.nan_code] = 0
    return table


BLOCK_LAYOUTS = {
    one.format.name: one
    for one in (
        BlockLayout(NVFP4, TYPES_BY_NAME["NVFP4"], 39, 4, _unsigned_e4m3()),
        # MOSTLY_MXFP4_MOE: there is no other.
        BlockLayout(MXFP4, TYPES_BY_NAME["MXFP4"], 38, 1, np.arange(256, dtype=np.uint8)),
    )
}
LAYOUTS_BY_TYPE = {one.type.number: one for one in BLOCK_LAYOUTS.values()}
#: `general.file_type` of a model of plain numbers.
FLOAT_FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32}


@dataclass(frozen=True)
class ValueType:
    """A type of metadata of one size.

    Attributes:
        name: what people call it.
        code: how :mod:`struct` reads it.
        nbytes: its size.
    """

    name: str
    code: str
    nbytes: int


VALUE_TYPES = {
    0: ValueType("uint8", "<B", 1), 1: ValueType("int8", "<b", 1),
    2: ValueType("uint16", "<H", 2), 3: ValueType("int16", "<h", 2),
    4: ValueType("uint32", "<I", 4), 5: ValueType("int32", "<i", 4),
    6: ValueType("float32", "<f", 4), 7: ValueType("bool", "<?", 1),
    10: ValueType("uint64", "<Q", 8), 11: ValueType("int64", "<q", 8),
    12: ValueType("float64", "<d", 8),
}  # fmt: skip
UINT32, STRING, ARRAY = 4, 8, 9


def padded(count: int, alignment: int) -> int:
    """Bytes up to the next multiple of an alignment."""
    return -(-count // alignment) * alignment
