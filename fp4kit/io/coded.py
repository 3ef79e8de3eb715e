# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Quantized tensors that a container describes itself, as entries like those of other files."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fp4kit.errors import FileFormatError, brief
from fp4kit.formats import ALL_FORMATS
from fp4kit.io.read.source import Coded, Source
from fp4kit.io.storage import NamedStorage, PartNames, QuantizedEntry
from fp4kit.plan import Plan, plan_of
from fp4kit.scheme import as_scheme

#: The recipe that decodes as ggml does: code times block scale times second level, no negative 0.
DECODING_RECIPE = "modelopt"
#: What containers do not say: the element type that a tensor was quantized from.
SOURCE_DTYPE = "bfloat16"


def coded_plan(shape: tuple[int, ...], format: str, scales: int = 1) -> Plan:
    """The plan of a tensor of which nothing but its format is known.

    Args:
        shape: its logical shape.
        format: its block format.
        scales: second levels: one, or one for each index of the first axis.
    """
    recipe = DECODING_RECIPE if ALL_FORMATS[format].has_second_level else None
    return plan_of(shape, as_scheme(format, {"recipe": recipe}).parts[0], scales)


def coded_storage(coded: Coded, scales: int = 1) -> NamedStorage:
    """How the parts of such a tensor are called; its second level is that of ggml: decoding."""
    return NamedStorage(
        "gguf",
        second_shape=(scales,),
        keeps="decode_scale",
        parts=PartNames(coded.packed, coded.scale, coded.second),
    )


def coded_entries(source: Source) -> list[QuantizedEntry]:
    """The quantized tensors that a source describes, with their second levels.

    Raises:
        FileFormatError: if a second level is of another type or shape than its tensor needs.
    """
    return [_entry(source, name, coded) for name, coded in source.coded.items()]


def _entry(source: Source, name: str, coded: Coded) -> QuantizedEntry:
    second = None
    if ALL_FORMATS[coded.format].has_second_level:
        second = _second(source, name, coded)
    scales = 1 if second is None else len(second)
    plan = coded_plan(coded.shape, coded.format, scales)
    storage = coded_storage(coded, scales)
    return QuantizedEntry(name, coded.shape, SOURCE_DTYPE, plan, second, storage)


def _second(source: Source, name: str, coded: Coded) -> NDArray[np.float32]:
    """The second level of a tensor, 1 if it has none."""
    if coded.second is None:
        return np.ones(1, np.float32)
    spec = source.tensors[coded.second].spec
    allowed = {1, coded.shape[0]} if len(coded.shape) == 3 else {1}
    count = spec.nbytes // 4
    if spec.dtype != "F32" or count not in allowed:
        raise FileFormatError(
            f"{source.path}: tensor {brief(name)}: its second level {brief(coded.second)} is "
            f"{spec.dtype} {brief(list(spec.shape))}, expected F32 of "
            f"{' or '.join(map(str, sorted(allowed)))} values"
        )
    values = np.empty(count, np.float32)
    source.read(coded.second, 0, values.view(np.uint8).data)
    return values
