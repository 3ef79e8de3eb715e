# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Which modules an ignore list must name: what is stored unquantized, under all of its names.

An engine builds a quantized layer for every linear module that the list does not name, and then
misses its parts. vLLM and SGLang look for stored names, transformers for those of the model that it
builds (`models/architectures.py`). Names that also fit a quantized module are left out.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from fp4kit.checkpoint.layouts import Layout, module_of
from fp4kit.checkpoint.layouts.ignore_list import IgnoreList
from fp4kit.checkpoint.models import architectures
from fp4kit.checkpoint.models.architectures import Model, head_names
from fp4kit.checkpoint.models.fusion import absent_siblings
from fp4kit.checkpoint.read.directory import Checkpoint
from fp4kit.io.quantize_plan import TensorPlan

from .rules import WRAPPERS, is_linear_weight, setting

#: A number of a layer or expert, as a whole part of a name.
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")
#: The number of an expert in the name of its module.
EXPERT = re.compile(r"(?<=experts\.)\d+(?=\.)")
#: Convolutions along the tokens, which engines build as linear layers.
SHORT_CONVOLUTIONS = ("conv", "short_conv")
# Output heads that are not stored, as they share the weight of the embedding, for model types that
# the table of models/architectures.py does not have.
#: What such a head is called, by a module that is stored before it.
BY_NEIGHBOUR = {
    "cls.predictions.transform": "cls.predictions.decoder",
    "lm_head.dense": "lm_head.decoder",
    "predictions.dense": "predictions.decoder",
    "vocab_transform": "vocab_projector",
}
#: The same by model type, where nothing is stored before it.
BY_TYPE = dict.fromkeys(("whisper", "moonshine", "moonshine_streaming"), "proj_out")
USUAL = "lm_head"
#: Ends of names of architectures that have such a head; most tie it unless config.json says no.
ARCHITECTURES = ("ForCausalLM", "ForConditionalGeneration", "ForMaskedLM", "LMHeadModel")
#: Last parts of the names of stacked projections, whatever their module is called.
STACKED_PROJECTIONS = frozenset(
    ("gate_up_proj", "gate_proj", "up_proj", "down_proj", "input_linear", "output_linear")
)
EXPERTS = "experts"
SHARED = ("shared_experts", "shared_expert", "share_expert")

Shapes = Mapping[str, tuple[int, ...]]


def is_built_linear(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is, or may be, the weight of what engines build as a linear layer."""
    if is_linear_weight(name, shape):
        return True
    parts = module_of(name).split(".")
    if len(shape) != 3 or not name.endswith(".weight"):
        return False
    inside = len(parts) > 1 and parts[-1] == "conv" and parts[-2] in SHORT_CONVOLUTIONS
    return inside or parts[-1].endswith("conv1d")


class Unquantized:
    """What a checkpoint holds unquantized, in both namespaces.

    Attributes:
        stored: modules of linear layers, and of what engines build as some, by stored names.
        built: the same by the names in the model, layers that are tied to another one included.
        unknown: model types that the table does not have, so that `built` may lack names.
    """

    def __init__(self, kept: Shapes, quantized: Collection[str], config: dict[str, Any]) -> None:
        """Looks names up."""
        self._kept, self._config = kept, config
        self._quantized = {module_of(name) for name in quantized}
        self._names = [*kept, *quantized]
        self._models = architectures.models(config, self._names)
        self.stored = [module_of(n) for n, shape in kept.items() if is_built_linear(n, shape)]
        self.built = self._built(self._models[0]) if self._models else []
        self.unknown = architectures.unknown_types(config, self._models)

    def _built(self, model: Model) -> list[str]:
        """Modules by their names in a model."""
        found = []
        for name, shape in self._kept.items():
            for text in model.built(name) if len(shape) in (2, 3) else ():
                if is_built_linear(text, shape):
                    found.append(module_of(text))
        return list(dict.fromkeys([*found, *self._tied(model)]))

    def _tied(self, model: Model) -> Iterator[str]:
        """Layers that are not stored, as they share the weight of another one."""
        heads = {path: partner for path, partner in model.tied.items() if "*" not in path}
        if not heads or not may_be_tied(self._config):
            return
        present = {module_of(text) for name in self._names for text in model.built(name)}
        taken = self._taken_in(model) if any(heads.values()) else set()
        for path, partner in heads.items():
            if path not in present and partner not in taken:
                yield path

    @property
    def _taken(self) -> set[str]:
        """Quantized modules under every name that they have."""
        return self._quantized.union(*(self._taken_in(model) for model in self._models))

    def _taken_in(self, model: Model) -> set[str]:
        """Quantized modules by their names in a model."""
        weights = (f"{module}.weight" for module in self._quantized)
        return {module_of(text) for name in weights for text in model.built(name)}

    def _added(self, models: list[Model]) -> Iterator[str]:
        """Names beside the stored ones: those in models, of fused experts, of siblings."""
        weights = [f"{module}.weight" for module in self.stored]
        siblings = [name for name in absent_siblings(weights) if name not in self._names]
        experts = stacked_modules(self._kept, [f"{module}.weight" for module in self._quantized])
        yield from experts
        yield from map(module_of, siblings)
        for model in models:
            yield from self._built(model)
            for module in (*map(module_of, siblings), *experts):
                yield from (module_of(text) for text in model.built(f"{module}.weight"))
        if not models:
            head = absent_head(self._names, self._config)
            yield from () if head is None else (head,)

    def ignored(self, layout: Layout, *, patterns: bool = True) -> tuple[str, ...]:
        """The ignore list.

        Returns:
            Names of modules, and patterns where the model type is not known; sorted. None of what
            was added to the stored names fits a quantized module.
        """
        taken = self._taken
        alike = "\n".join({EXPERT.sub("0", module) for module in taken})
        models = self._models if layout.by_transformers else self._models[:1]
        added = set(self._added(models)) - set(self.stored) - taken
        if layout.matches_inside:
            added = {name for name in added if name not in alike}
        added.update(self._numbered(models, layout, taken))
        if patterns and self.unknown:
            added.update(self._patterns(layout, taken))
        return tuple(sorted({*self.stored, *added}))

    @staticmethod
    def _numbered(models: list[Model], layout: Layout, taken: Collection[str]) -> Iterator[str]:
        """Patterns of tied layers of every number, where none of them is quantized."""
        fits = _Fits(layout, taken)
        for path, partner in {k: v for model in models for k, v in model.tied.items()}.items():
            pattern = layout.tail_pattern(path)
            shared = bool(partner) and fits.any(layout.tail_pattern(partner))
            if "*" in path and not shared and not fits.any(pattern):
                yield pattern

    def _patterns(self, layout: Layout, taken: Collection[str]) -> Iterator[str]:
        """Patterns of the ends of names, for engines that name modules in a way of their own."""
        fits = _Fits(layout, taken)
        tails = [module_tail(module) for module in self.stored]
        for tail in dict.fromkeys([*tails, *self._heads(layout)]):
            for text in (NUMBER.sub("*", tail), tail):
                pattern = layout.tail_pattern(text)
                if not fits.any(pattern):
                    yield pattern
                    break

    def _heads(self, layout: Layout) -> Iterator[str]:
        """What heads are called anywhere; a reader that matches inside of names takes few."""
        if may_be_tied(self._config):
            for name in head_names():
                if "lm_head" in name or not layout.matches_inside:
                    yield name


class _Fits:
    """Whether patterns fit a quantized module; each is tried once."""

    def __init__(self, layout: Layout, taken: Collection[str]) -> None:
        self._layout = layout
        self._modules = {EXPERT.sub("0", module) for module in taken}
        self._known: dict[str, bool] = {}

    def any(self, pattern: str) -> bool:
        if pattern not in self._known:
            listed = IgnoreList([pattern], self._layout.name)
            self._known[pattern] = any(listed.matches(module) for module in self._modules)
        return self._known[pattern]


def module_tail(module: str) -> str:
    """A name without what only wraps a model, which differs between engines."""
    parts = module.split(".")
    while len(parts) > 1 and parts[0] in WRAPPERS:
        del parts[0]
    return ".".join(parts)


def ignored_modules(
    works: Mapping[str, TensorPlan], checkpoint: Checkpoint, layout: Layout
) -> tuple[str, ...]:
    """The ignore list of a plan."""
    kept = {name: work.tensor.spec.shape for name, work in works.items() if work.entry is None}
    quantized = [name for name, work in works.items() if work.entry is not None]
    # Mistral's own format has names of its own for the second namespace, whatever the model type.
    return Unquantized(kept, quantized, checkpoint.config).ignored(
        layout, patterns=not checkpoint.native
    )


def unknown_type_warnings(checkpoint: Checkpoint, layout: Layout | None) -> list[str]:
    """What a user should know where the names that an engine uses are not known."""
    config = checkpoint.config
    unknown = architectures.unknown_types(config, architectures.models(config, ()))
    if layout is None or layout.single_file or checkpoint.native or checkpoint.is_diffusion:
        return []
    return [
        f"model type {name!r} is not one of transformers {architectures.version()}: an engine may "
        "call modules otherwise than the file does, so that the ignore list holds stored names and "
        "patterns of their ends; check that the engine reports no missing weight"
        for name in unknown
    ]


def may_be_tied(config: dict[str, Any]) -> bool:
    """Whether a head may share the weight of the embedding: not if all that is said is no."""
    said = list(_said_tied(config))
    return not said or any(said)


def _said_tied(config: dict[str, Any]) -> Iterator[bool]:
    """What a config.json says about tying, for the whole and for its parts."""
    if config.get("tie_word_embeddings") is not None:
        yield bool(config["tie_word_embeddings"])
    for value in config.values():
        if isinstance(value, dict):
            yield from _said_tied(value)


def absent_head(names: Iterable[str], config: dict[str, Any]) -> str | None:
    """The head that an engine ties to the embedding, None if there is none or it is stored."""
    tied = setting(config, "tie_word_embeddings")
    said = config.get("architectures")
    architectures = said if isinstance(said, list) else []
    built = any(str(name).endswith(ARCHITECTURES) for name in architectures)
    if tied is False or not (tied or built):
        return None
    stored = list(names)
    head = BY_TYPE.get(str(config.get("model_type")), USUAL)
    for neighbour, name in BY_NEIGHBOUR.items():
        if any(tensor.startswith(f"{neighbour}.") for tensor in stored):
            head = name
    found = any(tensor.removesuffix(".weight").endswith(head) for tensor in stored)
    return None if found else head


def _stacked_names(name: str, shape: tuple[int, ...]) -> Iterator[str]:
    """Names that engines may build for a tensor, if it holds stacked experts.

    What is stored as one tensor of three axes (or as DBRX does, of two that hold all experts) is no
    linear layer by itself. An engine builds one layer of experts for it, under the name of their
    module, or linear layers where the experts are shared: all these belong in an ignore list.
    """
    module = module_of(name)
    parts = module.split(".")
    parent = ".".join(parts[:-1])
    if EXPERTS in parts:
        at = parts.index(EXPERTS) + 1
        stacked = len(shape) == 3 or (len(shape) == 2 and module == name)
        if stacked and not "".join(parts[at : at + 1]).isdigit() and "bias" not in parts[-1]:
            yield ".".join(parts[:at])
    if len(shape) != 3 or not parent or parts[-1] not in STACKED_PROJECTIONS:
        return
    yield module
    if parts[-2] in SHARED:
        yield parent
        yield f"{parent}.gate_up_proj"
    elif EXPERTS not in parts:
        yield f"{parent}.{EXPERTS}"


def stacked_modules(
    kept: Mapping[str, tuple[int, ...]], quantized: Collection[str]
) -> tuple[str, ...]:
    """What an ignore list names for stacked experts: nothing that holds a quantized weight."""
    taken: set[str] = set()
    for name in quantized:
        parts = name.split(".")
        taken.update(".".join(parts[:count]) for count in range(1, len(parts)))
    found = dict.fromkeys(
        module for name, shape in kept.items() for module in _stacked_names(name, shape)
    )
    return tuple(module for module in found if module not in taken)
