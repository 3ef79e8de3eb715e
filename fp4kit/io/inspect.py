# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Listing the tensors of a file."""

from __future__ import annotations

import time
from pathlib import Path

from fp4kit.io.metadata import find_quantized, logical_tensors
from fp4kit.io.read.open import open_source
from fp4kit.io.report import FileReport, TensorReport
from fp4kit.io.storage import QuantizedEntry


def inspect_file(path: Path) -> FileReport:
    """Lists every logical tensor of a file; the parts of a quantized one are one entry.

    Args:
        path: .safetensors, .npy or .npz file.

    Returns:
        The tensors in file order: `action` is `quantized` (with `facts`) or `keep`; `bytes_before`
        and `bytes_after` both are the bytes in the file. `options["metadata"]` is the file's.

    Raises:
        FileFormatError: if the file is malformed.
    """
    started = time.perf_counter()
    with open_source(path) as source:
        tensors = [
            TensorReport.of(tensor, "quantized", facts=tensor.facts())
            if isinstance(tensor, QuantizedEntry)
            else TensorReport.of(tensor, "keep", tensor.note)
            for tensor in logical_tensors(source, find_quantized(source)).values()
        ]
        return FileReport(
            source=str(path),
            target=None,
            tensors=tensors,
            options={"metadata": source.metadata},
            seconds=time.perf_counter() - started,
        )
