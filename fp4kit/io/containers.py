# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What the containers (.safetensors, .npy, .npz, .gguf) share: suffixes, element types, limits."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

#: The common readers refuse longer headers.
MAX_HEADER_BYTES = 100_000_000
METADATA = "__metadata__"
#: Tensors of one file: each takes about a kilobyte of memory before any work.
MAX_TENSORS = 1 << 19


@dataclass(frozen=True)
class Dtype:
    """An element type of the format: the field's name for it, and its width."""

    name: str
    bits: int


#: Every element type of safetensors 0.8.
DTYPES = {
    "BOOL": Dtype("bool", 8),
    "U8": Dtype("uint8", 8),
    "I8": Dtype("int8", 8),
    "U16": Dtype("uint16", 16),
    "I16": Dtype("int16", 16),
    "U32": Dtype("uint32", 32),
    "I32": Dtype("int32", 32),
    "U64": Dtype("uint64", 64),
    "I64": Dtype("int64", 64),
    "F16": Dtype("float16", 16),
    "BF16": Dtype("bfloat16", 16),
    "F32": Dtype("float32", 32),
    "F64": Dtype("float64", 64),
    "C64": Dtype("complex64", 64),
    "F8_E4M3": Dtype("float8_e4m3fn", 8),
    "F8_E5M2": Dtype("float8_e5m2", 8),
    "F8_E8M0": Dtype("float8_e8m0fnu", 8),
    "F8_E4M3FNUZ": Dtype("float8_e4m3fnuz", 8),
    "F8_E5M2FNUZ": Dtype("float8_e5m2fnuz", 8),
    "F6_E2M3": Dtype("float6_e2m3fn", 6),
    "F6_E3M2": Dtype("float6_e3m2fn", 6),
    "F4": Dtype("float4_e2m1fn", 4),
}
#: From the field's name back to the format's.
DTYPE_CODES = {dtype.name: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, element type (safetensors' name for it) and logical shape of a tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's data."""
        return prod(self.shape) * DTYPES[self.dtype].bits // 8


#: Files of tensors that are written.
SUFFIXES = (".safetensors", ".npy", ".npz")
GGUF = ".gguf"
#: Files that are read.
INPUT_SUFFIXES = (*SUFFIXES, GGUF)
