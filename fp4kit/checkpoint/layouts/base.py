# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint layout is: names and orders of the parts, and the JSON that engines read.

The quantized form inside is the same for all; a layout says how it is stored. Adding one is one
module beside this one and one row of the table in :mod:`fp4kit.checkpoint.layouts`.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp4kit.errors import OptionError
from fp4kit.io.containers import TensorSpec
from fp4kit.io.metadata import entries_by_names, shared_plan
from fp4kit.io.read.source import Source
from fp4kit.io.storage import Constant, QuantizedEntry, Storage
from fp4kit.plan import Plan
from fp4kit.reference.grid import scales_of
from fp4kit.reference.scaling import convert_second_level, quiet
from fp4kit.scheme import Scheme

WEIGHT = ".weight"


def module_of(name: str) -> str:
    """The module that a weight belongs to."""
    return name.removesuffix(WEIGHT)


@dataclass(frozen=True)
class FormatGroup:
    """The weights of one format in a checkpoint of several.

    Attributes:
        format: their block format.
        granularity: what shares a scale of fp8.
        modules: the modules that they belong to, by stored names.
        targets: patterns that fit these modules, under all of their names, and no other module.
    """

    format: str
    granularity: str | None
    modules: tuple[str, ...]
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Summary:
    """What the JSON files say about a converted checkpoint.

    Attributes:
        format: block format of the quantized weights.
        ignore: modules of linear weights that were not quantized.
        activations: None for weights only, `uncalibrated` or `calibrated`.
        embeddings: modules of embeddings, which some layouts list as well.
        pre_scaled: some modules have the scales of AWQ beside them, for their inputs.
        granularity: what shares a scale of fp8.
        mixed: the weights of each format, if they have several; empty for one.
    """

    format: str
    ignore: tuple[str, ...]
    activations: str | None = None
    embeddings: tuple[str, ...] = ()
    pre_scaled: bool = False
    granularity: str | None = None
    mixed: tuple[FormatGroup, ...] = ()


class Layout(ABC):
    """One way to store a quantized checkpoint.

    Attributes:
        name: what it is called.
        formats: block formats that its readers know.
        granularities: what may share a scale of fp8, the default first.
        fp8_inputs: whether weights in fp8 have an activation scale beside them: always, or never.
        storage: how the parts of a weight are named and laid out.
        recipe: order of operations by which its readers decode NVFP4.
        activation_suffix: what the name of a module's activation scale adds to it.
        activation_shape: shape of that scale; it is kept as the weights' second level is.
        pre_scale_suffix: what the name of a module's AWQ scale adds to it, which readers multiply
            its input by; None if they do not know it.
        single_file: whether a file without a directory is complete.
        by_transformers: whether transformers reads it, which can leave heads away.
        matches_inside: whether a reader takes a listed name for every module whose name holds it,
            and names with wildcards as globs.
        in_hf_quant_config: whether its readers want hf_quant_config.json.
        decoded_dtype: the only element type that transformers decodes it to, None if that follows
            the model or it does not read it.
        read_as_views: whether its weights are found as views only, and not by their names.
        in_params: whether readers of Mistral's own format take it from params.json.
        diffusion: whether a reader of it loads diffusion models.
        mixes: whether its weights may have several formats.
    """

    name: str
    formats: tuple[str, ...]
    granularities: tuple[str, ...] = ()
    fp8_inputs: bool = False
    storage: Storage
    recipe: str
    activation_suffix: str
    activation_shape: tuple[int, ...]
    pre_scale_suffix: str | None = None
    single_file: bool = False
    by_transformers: bool = False
    matches_inside: bool = False
    in_hf_quant_config: bool = False
    decoded_dtype: str | None = None
    read_as_views: bool = False
    in_params: bool = False
    diffusion: bool = True
    mixes: bool = False

    @abstractmethod
    def quantization_config(self, summary: Summary) -> dict[str, Any] | None:
        """The `quantization_config` of config.json, None if there is none."""

    def tail_pattern(self, tail: str) -> str:
        """A pattern of the ignore list for the end of modules' names.

        Args:
            tail: whole parts of a name; "*" is any number.
        """
        return tail

    def hf_quant_config(self, summary: Summary) -> dict[str, Any] | None:
        """The content of hf_quant_config.json, None if there is no such file."""
        return None

    def header(self, entries: Sequence[QuantizedEntry]) -> dict[str, str]:
        """What the header metadata of a shard with these weights says beside the source's."""
        return {}

    def markers(self, name: str) -> tuple[Constant, ...]:
        """Tensors that mark a weight as quantized."""
        return ()

    def entry(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: str,
        scheme: Scheme,
        activation_amax: float | None = None,
    ) -> QuantizedEntry:
        """The quantized form of a weight in this layout.

        Args:
            name: name of the weight.
            shape: its logical shape (O, I).
            dtype: element type it is quantized from.
            scheme: what is wanted; how scales and nibbles lie is the layout's.
            activation_amax: largest magnitude of the module's input, None for weights only.
        """
        plan = shared_plan(shape, self.laid_out(scheme))
        constants = self.markers(name)
        scaled = plan.grid is None or self.fp8_inputs
        if activation_amax is not None and plan.needs_amax and scaled:
            constants += (self._activation(name, activation_amax, plan),)
        return QuantizedEntry(name, shape, dtype, plan, storage=self.storage, constants=constants)

    def check(self, scheme: Scheme, activations: str | None, *, mixed: bool = False) -> None:
        """Refuses what this layout does not hold.

        Args:
            scheme: what is wanted of some weights.
            activations: what is said of the inputs of all.
            mixed: there are weights of other formats, which the inputs may be meant for.

        Raises:
            OptionError: for another granularity, or activation scales where there are none.
        """
        granularity = self.laid_out(scheme).granularity
        if granularity is None:
            return
        if granularity not in self.granularities:
            raise OptionError(
                f"layout {self.name} holds fp8 with granularity {' or '.join(self.granularities)}, "
                f"not {granularity}; choose another --layout or --granularity"
            )
        if self.fp8_inputs and activations is None:
            raise OptionError(
                f"readers of fp8 in layout {self.name} take a scale of each module's input: pass "
                "--activations uncalibrated, or a file of amaxes"
            )
        if activations is not None and not self.fp8_inputs and not mixed:
            raise OptionError(
                f"readers of fp8 in layout {self.name} scale inputs as they come; leave "
                "--activations out"
            )

    def laid_out(self, scheme: Scheme) -> Scheme:
        """The scheme with scales and nibbles as this layout has them."""
        granularity = scheme.granularity
        if scheme.spec.has_scale_grid and scheme.recipe is None:
            granularity = granularity or self.granularities[0]  # type: ignore[assignment]
        return scheme.replace(
            granularity=granularity,
            scale_layout=self.storage.scale_layout or "linear",
            nibble_order=self.storage.nibble_order or "low_first",
        ).parts[0]

    def _activation(self, name: str, amax: float, plan: Plan) -> Constant:
        value = np.array([amax], np.float32)
        with quiet():
            if plan.grid is None:
                scale = convert_second_level(value, "amax", self.storage.keeps)
            else:
                scale = scales_of(value, plan.grid_recipe, plan.format.element, "float32")
        spec = TensorSpec(
            f"{module_of(name)}{self.activation_suffix}", "F32", self.activation_shape
        )
        return Constant(spec, struct.pack("<f", float(scale[0])))

    def find(
        self, source: Source, shapes: Mapping[str, tuple[int, ...]] | None = None
    ) -> list[QuantizedEntry]:
        """The quantized weights of a checkpoint in this layout, from its headers alone."""
        return entries_by_names(source, self.storage, self.recipe, shapes)
