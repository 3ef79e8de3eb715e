# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Opening an output: the writer for its suffix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fp4kit.io.containers import SUFFIXES, TensorSpec

from .files import Output, Writer, output_suffix
from .npy import NpyWriter
from .npz import NpzWriter
from .safetensors import SafetensorsWriter


def open_writer(
    output: Output, tensors: Sequence[TensorSpec], metadata: Mapping[str, str]
) -> Writer:
    """The writer of a file.

    Args:
        output: where it goes.
        tensors: everything that will be written.
        metadata: what a .safetensors file says of itself; NumPy's files have no place for it.
    """
    suffix = output_suffix(output.path, SUFFIXES)
    if suffix == ".safetensors":
        return SafetensorsWriter(output, tensors, metadata)
    return NpyWriter(output, tensors) if suffix == ".npy" else NpzWriter(output, tensors)
