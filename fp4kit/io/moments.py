# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Second moments of the inputs of layers, which say how much an error of a weight matters.

A layer multiplies column j of its weight by channel j of its input. So the error of its output is
about the sum of the squared errors of the weight, each times the mean square of its channel.

The file is a .safetensors file with `MODULE.second_moment`, float32 (channels,), and perhaps
`MODULE.input_amax`, float32 (1,), for each module, and `fp4kit_moments` in its header metadata.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fp4kit.errors import FileFormatError, OptionError

from .containers import TensorSpec
from .read.open import open_source
from .read.source import Source
from .write.files import Output
from .write.safetensors import SafetensorsWriter

METADATA_KEY = "fp4kit_moments"
MOMENT, AMAX = ".second_moment", ".input_amax"
#: Names that a message shows.
SHOWN = 3


class InputMoments:
    """What is known of the inputs of modules.

    Attributes:
        path: the file.
        second: module to the mean square of each channel.
        amax: module to the largest magnitude; those of some modules may be missing.
    """

    def __init__(
        self, path: Path, second: dict[str, NDArray[np.float64]], amax: dict[str, float]
    ) -> None:
        self.path = path
        self.second = second
        self.amax = amax

    def check(self, modules: Iterable[str], widths: Mapping[str, int]) -> list[str]:
        """Refuses the moments of another model.

        Args:
            modules: every module of the model that holds a weight.
            widths: those that are surveyed, to the channels of their inputs.

        Returns:
            Surveyed modules without moments.

        Raises:
            OptionError: if it has modules that the model lacks, or of other widths.
        """
        known = set(modules)
        foreign = [name for name in self.second if name not in known]
        if foreign:
            raise OptionError(
                f"{self.path}: holds moments of another model: {len(foreign)} of its modules do "
                f"not exist here, the first: {', '.join(map(repr, foreign[:SHOWN]))}"
            )
        for name, width in widths.items():
            found = self.second.get(name)
            if found is not None and len(found) != width:
                raise OptionError(
                    f"{self.path}: holds moments of another model: {name!r} has {len(found)} "
                    f"input channels there, {width} here"
                )
        return [name for name in widths if name not in self.second]


def _values(source: Source, name: str) -> NDArray[np.float64]:
    spec = source.tensors[name].spec
    if spec.dtype != "F32" or len(spec.shape) != 1 or not spec.shape[0]:
        raise FileFormatError(
            f"{source.path}: tensor {name!r}: moments are float32 of one dimension, this is "
            f"{spec.dtype} {list(spec.shape)}"
        )
    data = np.empty(spec.shape, np.float32)
    source.read(name, 0, data.view(np.uint8).data)
    if not (np.isfinite(data) & (data >= 0)).all():
        raise FileFormatError(
            f"{source.path}: tensor {name!r}: holds a value that is not finite and at least 0"
        )
    return data.astype(np.float64)


def read_moments(path: Path) -> InputMoments:
    """The moments of a file.

    Raises:
        FileFormatError: if it is none, or malformed.
    """
    with open_source(path) as source:
        if METADATA_KEY not in source.metadata:
            raise FileFormatError(
                f"{path}: holds no moments: the header metadata lacks {METADATA_KEY!r}; make them "
                "with `fp4kit calibrate`"
            )
        second, amax = {}, {}
        for name in source.tensors:
            if name.endswith(MOMENT):
                second[name.removesuffix(MOMENT)] = _values(source, name)
            elif name.endswith(AMAX):
                amax[name.removesuffix(AMAX)] = float(_values(source, name)[0])
            else:
                raise FileFormatError(
                    f"{path}: tensor {name!r} is neither MODULE{MOMENT} nor MODULE{AMAX}"
                )
    return InputMoments(path, second, amax)


def write_moments(
    output: Output,
    second: Mapping[str, NDArray[np.float64]],
    amax: Mapping[str, float],
    metadata: Mapping[str, str],
) -> None:
    """Writes moments, atomically.

    Args:
        output: where to.
        second: module to the mean square of each channel.
        amax: module to the largest magnitude.
        metadata: strings for the header beside the mark.
    """
    arrays = {f"{name}{MOMENT}": values.astype("<f4") for name, values in second.items()}
    arrays |= {f"{name}{AMAX}": np.array([value], "<f4") for name, value in amax.items()}
    specs = [TensorSpec(name, "F32", array.shape) for name, array in arrays.items()]
    with SafetensorsWriter(output, specs, {"format": "pt", **metadata, METADATA_KEY: "1"}) as file:
        for name, array in arrays.items():
            file.write(name, 0, array.view(np.uint8))
        file.finish()
