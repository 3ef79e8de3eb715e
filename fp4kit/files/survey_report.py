# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What a survey found: plain data, for the table, `--json` and pictures.

A survey compares *candidates*: formats, perhaps with a scale search (`nvfp4+sweep`), and `bf16`,
which leaves a tensor as it is stored. Everything here is known once the data has been read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

#: The number of a layer, as a whole part of a name.
_LAYER = re.compile(r"(?:^|\.)(?:layers?|blocks?|h|block)\.(\d+)\.")
#: How many of the worst tensors are shown.
WORST = 10


@dataclass(frozen=True, slots=True)
class CandidateError:
    """What one candidate does to one tensor.

    Attributes:
        nbytes: bytes that the tensor takes: codes, scales, second level.
        noise: sum of squared errors over the sum of squares of the original; 0 without error,
            infinite where finite values decode to others.
        output_noise: the same of the layer's output: both sums weighted by the second moment of
            each input channel. None without moments of the layer.
    """

    nbytes: int
    noise: float
    output_noise: float | None = None

    @property
    def cost(self) -> float:
        """`output_noise`, and without moments `noise`."""
        return self.noise if self.output_noise is None else self.output_noise

    @property
    def sqnr(self) -> float:
        """Signal to quantization noise ratio of the weight in dB; infinite without error."""
        if self.noise == 0:
            return math.inf
        return -10 * math.log10(self.noise) if math.isfinite(self.noise) else -math.inf

    @property
    def relative_rms(self) -> float:
        """Root mean square of the weight's error in percent of that of the original."""
        return 100 * math.sqrt(self.noise)

    def to_json(self) -> dict[str, Any]:
        """Plain data; `sqnr` is null without error, and all is where that is not finite."""
        return {**asdict(self), "sqnr": self.sqnr, "relative_rms": self.relative_rms}


@dataclass(frozen=True, slots=True)
class SurveyedTensor:
    """A tensor that would be quantized.

    Attributes:
        name: its name, that of a weight.
        shape: its logical shape.
        dtype: element type in the source.
        nbytes: bytes in the source.
        group: key of the :class:`ChoiceGroup` that it belongs to.
        errors: what each candidate that can hold it does, by the candidate's name.
        sensitivity: how much of the model's output hangs on it, 1 on average, and 1 for all where
            that is not known.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    group: str
    errors: Mapping[str, CandidateError]
    sensitivity: float = 1.0

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    def harm(self, candidate: str) -> float:
        """What a budget makes small: what a candidate does to it, by what hangs on it."""
        return self.sensitivity * self.errors[candidate].cost

    @property
    def layer(self) -> int | None:
        """The number of its layer by its name, None if it has none."""
        found = _LAYER.search(self.name)
        return None if found is None else int(found.group(1))

    @property
    def kind(self) -> str:
        """What modules of its kind are called in every layer, for example `down_proj`."""
        parts = self.name.removesuffix(".weight").split(".")
        return next((part for part in reversed(parts) if not part.isdigit()), self.name)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "bytes": self.nbytes,
            "group": self.group,
            "layer": self.layer,
            "kind": self.kind,
            "sensitivity": self.sensitivity,
            "errors": {name: error.to_json() for name, error in self.errors.items()},
        }


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """A tensor that no candidate would touch.

    Attributes:
        name: its name.
        shape: its shape.
        dtype: its element type.
        nbytes: its bytes.
        reason: why it is kept.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class ChoiceGroup:
    """Tensors that share one choice, because an engine fuses them.

    Attributes:
        key: its name in a plan, for example `model.layers.0.self_attn.{q_proj,k_proj,v_proj}`; of
            a tensor alone its module.
        members: names of its tensors.
        choice: the candidate that a pin or the budget chose, None without either.
        pin: the pattern that fixed the choice, None without one.
    """

    key: str
    members: tuple[str, ...]
    choice: str | None = None
    pin: str | None = None


@dataclass(frozen=True, slots=True)
class Point:
    """One way to store all surveyed tensors: a point of size against error.

    Attributes:
        nbytes: bytes of the surveyed tensors.
        total_nbytes: those and all kept tensors.
        bits: bits a weight over the surveyed tensors.
        error: mean over the tensors of what a budget makes small (:meth:`SurveyedTensor.harm`),
            as relative root mean square in percent.
        weights: candidate to the share of weights that have it.
        label: `nvfp4` where all have one candidate, "" for a mixture.
    """

    nbytes: int
    total_nbytes: int
    bits: float
    error: float
    weights: Mapping[str, float]
    label: str = ""


@dataclass(frozen=True, slots=True)
class LayerError:
    """The error of one layer.

    Attributes:
        layer: its number.
        kind: what modules of one kind are called, "" for the whole layer.
        errors: candidate to relative root mean square of all errors together, in percent.
    """

    layer: int
    kind: str
    errors: Mapping[str, float]


@dataclass(frozen=True)
class SurveyReport:
    """What every candidate does to every tensor, and what a budget makes of it.

    Attributes:
        source: path that was read.
        candidates: names of the candidates, in the order they were given.
        tensors: one entry for each tensor that would be quantized, in stored order.
        kept: the others.
        groups: what shares a choice.
        uniform: a point for every candidate alone.
        frontier: points of mixtures, from the smallest to the most exact; empty without a budget.
        chosen: the point that the budget or plan chose, None without.
        moments: whether errors are those of the layers' outputs.
        recommendation: three lines for people.
        options: what was asked for, as plain data.
        versions: of fp4kit, Python and NumPy.
        seconds: wall time.
        warnings: what the user should know.
    """

    source: str
    candidates: list[str]
    tensors: list[SurveyedTensor]
    kept: list[KeptTensor]
    groups: list[ChoiceGroup]
    uniform: list[Point]
    frontier: list[Point] = field(default_factory=list)
    chosen: Point | None = None
    moments: bool = False
    recommendation: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    warnings: list[str] = field(default_factory=list)

    @property
    def plan(self) -> dict[str, str]:
        """Group to chosen candidate, as a plan has it; empty without a budget."""
        if self.chosen is None:
            return {}
        return {group.key: group.choice for group in self.groups if group.choice is not None}

    def by_layer(self, *, kinds: bool = False) -> list[LayerError]:
        """The error by layer, of tensors whose name has a layer's number.

        Args:
            kinds: an entry for each kind of module of each layer, and not one for the layer.
        """
        found: dict[tuple[int, str], list[SurveyedTensor]] = {}
        for tensor in self.tensors:
            if tensor.layer is not None:
                found.setdefault((tensor.layer, tensor.kind if kinds else ""), []).append(tensor)
        return [
            LayerError(layer, kind, self._errors(members))
            for (layer, kind), members in sorted(found.items())
        ]

    def _errors(self, tensors: Iterable[SurveyedTensor]) -> dict[str, float]:
        listed = list(tensors)
        return {
            name: mean_error(tensor.errors[name] for tensor in listed)
            for name in self.candidates
            if all(name in tensor.errors for tensor in listed)
        }

    def worst(self, candidate: str, count: int = WORST) -> list[SurveyedTensor]:
        """The tensors that a candidate does most harm to, the worst first."""
        held = [tensor for tensor in self.tensors if candidate in tensor.errors]
        return sorted(held, key=lambda tensor: -tensor.harm(candidate))[:count]

    def to_json(self) -> dict[str, Any]:
        """The whole tree as plain data, strict JSON: numbers that are not finite are null."""
        content = {
            "source": self.source,
            "candidates": list(self.candidates),
            "moments": self.moments,
            "recommendation": list(self.recommendation),
            "chosen": None if self.chosen is None else asdict(self.chosen),
            "uniform": [asdict(point) for point in self.uniform],
            "frontier": [asdict(point) for point in self.frontier],
            "layers": [asdict(entry) for entry in self.by_layer()],
            "groups": [asdict(group) for group in self.groups],
            "tensors": [tensor.to_json() for tensor in self.tensors],
            "kept": [asdict(tensor) for tensor in self.kept],
            "options": self.options,
            "versions": self.versions,
            "seconds": self.seconds,
            "warnings": list(self.warnings),
        }
        strict: dict[str, Any] = _finite(content)
        return strict


def _finite(value: Any) -> Any:
    """Plain data without infinity and NaN, which JSON does not hold."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def mean_error(errors: Iterable[CandidateError]) -> float:
    """The relative root mean square of errors of several tensors, each counting alike, percent."""
    costs = [error.cost for error in errors]
    return 100 * math.sqrt(sum(costs) / len(costs)) if costs else 0.0
