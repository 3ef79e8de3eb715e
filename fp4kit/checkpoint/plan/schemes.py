# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Which scheme each weight of a checkpoint gets: one for all, or what a plan chose for each."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping

from fp4kit.checkpoint.layouts import FormatGroup, Layout, get_layout, module_of
from fp4kit.checkpoint.models import architectures
from fp4kit.checkpoint.options import CheckpointOptions
from fp4kit.checkpoint.read.directory import Checkpoint
from fp4kit.errors import OptionError
from fp4kit.io.candidates import candidate
from fp4kit.io.quantize_plan import TensorPlan
from fp4kit.scheme import Scheme

from .ignored import EXPERT, NUMBER, module_tail

#: Why a weight is kept that could be quantized.
LEFT = "left as it is by the plan"


class Schemes:
    """The scheme of each weight.

    Attributes:
        distinct: every scheme that some weight has.
        block: a size of blocks that rows must be whole multiples of to be quantized at all.
    """

    def __init__(self, options: CheckpointOptions) -> None:
        """Looks the choices up.

        Raises:
            OptionError: for an unknown candidate, or a plan that leaves everything as it is.
        """
        self._choices = options.choices
        self._default = options.scheme
        names = dict.fromkeys((options.choices or {}).values())
        self._known = {name: candidate(name).scheme for name in names}
        chosen = [scheme for scheme in self._known.values() if scheme is not None]
        self.distinct = [self._default] if options.choices is None else chosen
        if not self.distinct:
            raise OptionError("the plan leaves every tensor as it is; name a format for some")
        self.block = min(scheme.spec.block_size for scheme in self.distinct)

    def of(self, name: str) -> Scheme | None:
        """That of a weight which may be quantized, None to leave it as it is."""
        if self._choices is None:
            return self._default
        if name not in self._choices:
            raise OptionError(f"{name}: the plan says nothing of it; name a format, or bf16")
        return self._known[self._choices[name]]

    def reason_to_keep(self, name: str, shape: tuple[int, ...]) -> str:
        """Why the plan leaves a weight alone that may be quantized; "" if it does not.

        Raises:
            OptionError: if its format has no blocks for it.
        """
        scheme = self.of(name)
        if scheme is None:
            return LEFT
        block = scheme.spec.block_size
        if shape[-1] % block:
            raise OptionError(
                f"{name}: its last axis, {shape[-1]}, is not a multiple of {block}, so that it "
                f"cannot be {scheme.format}; choose another format for it"
            )
        return ""


def check_layout(options: CheckpointOptions, schemes: Schemes) -> Layout:
    """The layout that options name.

    Raises:
        OptionError: if it does not hold what is wanted.
    """
    layout = get_layout(options.layout)
    for scheme in schemes.distinct:
        if scheme.format not in layout.formats:
            raise OptionError(
                f"layout {layout.name} holds {' or '.join(layout.formats)}, not {scheme.format}; "
                "choose another --layout or --format"
            )
    formats = {scheme.format for scheme in schemes.distinct}
    if len(formats) > 1 and not layout.mixes:
        raise OptionError(
            f"layout {layout.name} has no form for several formats "
            f"({', '.join(sorted(formats))}); choose --layout compressed-tensors or modelopt"
        )
    for scheme in schemes.distinct:
        layout.check(scheme, options.activations, mixed=len(formats) > 1)
    return layout


def format_groups(
    works: Mapping[str, TensorPlan], checkpoint: Checkpoint, layout: Layout
) -> tuple[FormatGroup, ...]:
    """The quantized weights by format, if they have several; empty for one."""
    found: dict[tuple[str, str | None], list[str]] = {}
    for name, work in works.items():
        if work.entry is not None:
            scheme = work.entry.plan.scheme
            found.setdefault((scheme.format, scheme.granularity), []).append(module_of(name))
    if len(found) < 2:
        return ()
    models = architectures.models(checkpoint.config, list(works))
    return tuple(
        FormatGroup(*key, tuple(modules), _targets(modules, models, layout))
        for key, modules in found.items()
    )


def _targets(
    modules: Collection[str], models: list[architectures.Model], layout: Layout
) -> tuple[str, ...]:
    """What fits some modules.

    Names as they are stored, and in the model that config.json names: engines translate these to
    their own. A layer has one format for all its experts and may have hundreds of them, so that
    they are one pattern; so are names in the other models that the checkpoint may be loaded as.
    """
    names: dict[str, None] = {}
    others: dict[tuple[str, str], list[str]] = {}
    for module in modules:
        for name in (module, *_built(models[:1], module)):
            numbered = EXPERT.sub("*", name)
            names[name if numbered == name else layout.tail_pattern(module_tail(numbered))] = None
    for module in modules:
        for name in _built(models[1:], module):
            before, number, after = _cut(EXPERT.sub("*", name))
            if name not in names:
                others.setdefault((before, after), []).append(number)
    patterns = [_pattern(*ends, numbers) for ends, numbers in others.items()]
    return tuple(sorted([*names, *patterns]))


def _built(models: Iterable[architectures.Model], module: str) -> Iterator[str]:
    """Names of a module in models."""
    return (module_of(text) for model in models for text in model.built(f"{module}.weight"))


def _cut(name: str) -> tuple[str, str, str]:
    """A name before its first number, that, and the rest; without one, all before it."""
    found = NUMBER.search(name)
    return (
        (name, "", "") if found is None else (name[: found.start()], found[0], name[found.end() :])
    )


def _pattern(before: str, after: str, numbers: Iterable[str]) -> str:
    """A regular expression for names that differ in a number; "*" is any number."""
    ends = [re.escape(text).replace(r"\*", r"\d+") for text in (before, after)]
    choice = "|".join(sorted(set(numbers), key=int)) if after else ""
    return f"re:{ends[0]}(?:{choice}){ends[1]}$" if after else f"re:{ends[0]}$"
