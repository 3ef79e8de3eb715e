# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""float64 tensors taken as float32: NumPy makes float64 unless it is told otherwise."""

from __future__ import annotations

from dataclasses import replace as with_changes

import numpy as np

from fp4kit.errors import NonFiniteError
from fp4kit.formats import one_of
from fp4kit.io.containers import TensorSpec
from fp4kit.io.read.source import Source, SourceTensor
from fp4kit.reference.scaling import quiet

CASTS = ("float32",)
#: Elements that are cast at a time.
PIECE = 1 << 20


def _is_wide(tensor: SourceTensor) -> bool:
    return tensor.spec.dtype == "F64"


class CastSource(Source):
    """Another source whose float64 tensors are float32, as if they had been stored so."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.path = source.path
        self.metadata = source.metadata
        self.coded = source.coded
        self.concurrent = source.concurrent
        self._wide = {name for name, tensor in source.tensors.items() if _is_wide(tensor)}
        self.tensors = {
            name: with_changes(
                tensor, spec=TensorSpec(name, "F32", tensor.spec.shape), dtype="float32"
            )
            if name in self._wide
            else tensor
            for name, tensor in source.tensors.items()
        }

    def read(self, name: str, offset: int, out: memoryview) -> None:
        """As for every source; offsets and lengths are whole elements of cast tensors.

        Raises:
            NonFiniteError: if a finite value lies beyond float32.
        """
        if name not in self._wide:
            self._source.read(name, offset, out)
            return
        target = np.frombuffer(out, "<f4")
        for begin in range(0, len(target), PIECE):
            piece = target[begin : begin + PIECE]
            wide = np.empty(len(piece), "<f8")
            self._source.read(name, (offset // 4 + begin) * 8, wide.view(np.uint8).data)
            with quiet():
                piece[:] = wide
            lost = np.isinf(piece) & np.isfinite(wide)
            if lost.any():
                first = int(np.argmax(lost))
                raise NonFiniteError(
                    f"{self.path}: tensor {name!r}: {wide[first]:g} (element "
                    f"{offset // 4 + begin + first}) is beyond float32; scale it down first"
                )

    def divisible(self, name: str) -> bool:
        return self._source.divisible(name)

    def check_unchanged(self) -> None:
        self._source.check_unchanged()

    def close(self) -> None:
        self._source.close()


def check_cast(cast: str | None) -> None:
    """Refuses a cast that is not known.

    Raises:
        OptionError: naming those that are.
    """
    if cast is not None:
        one_of("cast", cast, CASTS)


def with_cast(source: Source, cast: str | None) -> Source:
    """A source with its float64 tensors cast, or itself.

    Args:
        source: what to read.
        cast: `float32`, or None to leave everything as it is.
    """
    wide = cast is not None and any(map(_is_wide, source.tensors.values()))
    return CastSource(source) if wide else source
