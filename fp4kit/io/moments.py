# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Second moments of the inputs of layers, which say how much an error of a weight matters.

A layer multiplies column j of its weight by channel j of its input. So the error of its output is
about the sum of the squared errors of the weight, each times the mean square of its channel.

What the model makes of an error of row i depends on the row: `output_effect` is the mean square of
the derivative of the model's output by that channel of the layer's output. Errors of independent
elements add up, so that the model's output is off by about the sum of all of them, each times the
moment of its column, the effect of its row, and the rows of input that the layer was given.

The file is a .safetensors file with `MODULE.second_moment`, float32 (channels,), and perhaps
`MODULE.input_amax`, float32 (1,), `MODULE.input_rows`, float32 (1,), and `MODULE.output_effect`,
float32 (rows,), for each module, and `fp4kit_moments` in its header metadata.

What few texts were seen to do, others need not do. So numbers of n rows are shrunk towards what
holds without data, that all channels are alike:

    shrunk = (n * seen + PRIOR_ROWS * mean of all channels) / (n + PRIOR_ROWS)

the mean of the posterior of a variance whose prior is worth PRIOR_ROWS observations. Without a row
it is the mean: weighted with that, an error is the error of the weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
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
ROWS, EFFECT = ".input_rows", ".output_effect"
#: Rows of input that the prior counts as.
PRIOR_ROWS = 16.0
#: What names of tensors end in.
SUFFIXES = (MOMENT, AMAX, ROWS, EFFECT)
#: Names that a message shows.
SHOWN = 3


Floats = NDArray[np.float64]


def shrunk(seen: Floats, rows: float) -> Floats:
    """Numbers of channels that were seen in some rows, towards their mean."""
    if math.isinf(rows):
        return seen
    mixed: Floats = (rows * seen + PRIOR_ROWS * seen.mean()) / (rows + PRIOR_ROWS)
    return mixed


@dataclass(frozen=True)
class InputMoments:
    """What is known of the inputs of modules.

    Attributes:
        path: the file.
        second: module to the mean square of each channel.
        amax: module to the largest magnitude; those of some modules may be missing, as of all
            others.
        rows: module to the rows of input that were seen.
        effect: module to what an error of each channel of its output does to the model's.
    """

    path: Path
    second: Mapping[str, Floats]
    amax: Mapping[str, float] = field(default_factory=dict)
    rows: Mapping[str, float] = field(default_factory=dict)
    effect: Mapping[str, Floats] = field(default_factory=dict)

    def columns(self, module: str) -> Floats | None:
        """What an error of each column of a weight counts, None if nothing is known.

        Moments of a file that says nothing of rows are taken as they are.
        """
        seen = self.second.get(module)
        return None if seen is None else shrunk(seen, self.rows.get(module, math.inf))

    def effects(self, module: str) -> Floats | None:
        """What an error of each row of a weight counts, times the rows of input."""
        seen = self.effect.get(module)
        if seen is None:
            return None
        return shrunk(seen, self.rows[module]) * self.rows[module]

    def check(self, modules: Iterable[str], shapes: Mapping[str, tuple[int, int]]) -> list[str]:
        """Refuses the moments of another model.

        Args:
            modules: every module of the model that holds a weight.
            shapes: those that are surveyed, to the rows of their weights and the channels of
                their inputs.

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
        for name, (rows, width) in shapes.items():
            for what, table, wanted in (
                ("input", self.second, width),
                ("output", self.effect, rows),
            ):
                found = table.get(name)
                if found is not None and len(found) != wanted:
                    raise OptionError(
                        f"{self.path}: holds moments of another model: {name!r} has {len(found)} "
                        f"{what} channels there, {wanted} here"
                    )
        return [name for name in shapes if name not in self.second]


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
        found: dict[str, dict[str, Floats]] = {suffix: {} for suffix in SUFFIXES}
        for name in source.tensors:
            suffix = next((each for each in SUFFIXES if name.endswith(each)), None)
            if suffix is None:
                raise FileFormatError(
                    f"{path}: tensor {name!r} is none of MODULE{', MODULE'.join(SUFFIXES)}"
                )
            found[suffix][name.removesuffix(suffix)] = _values(source, name)
        lacking = next((name for name in found[EFFECT] if name not in found[ROWS]), None)
        if lacking is not None:
            raise FileFormatError(f"{path}: holds {lacking}{EFFECT} without {lacking}{ROWS}")
    amax, rows = (
        {name: float(values[0]) for name, values in found[suffix].items()}
        for suffix in (AMAX, ROWS)
    )
    return InputMoments(path, found[MOMENT], amax, rows, found[EFFECT])


def write_moments(output: Output, moments: InputMoments, metadata: Mapping[str, str]) -> None:
    """Writes moments, atomically.

    Args:
        output: where to.
        moments: what is known; their own path counts for nothing.
        metadata: strings for the header beside the mark.
    """
    arrays = {f"{name}{MOMENT}": values.astype("<f4") for name, values in moments.second.items()}
    for suffix, numbers in ((AMAX, moments.amax), (ROWS, moments.rows)):
        arrays |= {f"{name}{suffix}": np.array([value], "<f4") for name, value in numbers.items()}
    arrays |= {f"{name}{EFFECT}": values.astype("<f4") for name, values in moments.effect.items()}
    specs = [TensorSpec(name, "F32", array.shape) for name, array in arrays.items()]
    with SafetensorsWriter(output, specs, {"format": "pt", **metadata, METADATA_KEY: "1"}) as file:
        for name, array in arrays.items():
            file.write(name, 0, array.view(np.uint8))
        file.finish()
