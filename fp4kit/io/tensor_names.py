# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What names of tensors tell: patterns that match, adapters, tensors that are not understood."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from fp4kit.errors import FileFormatError, OptionError
from fp4kit.io.report import grouped


class Patterns:
    """Name patterns: globs on the full name, or `re:` and a regular expression.

    A regular expression must match from the start of the name on (not to its end), as in
    compressed-tensors' ignore lists.
    """

    def __init__(self, patterns: Sequence[str], option: str) -> None:
        self._option = option
        self._patterns: list[tuple[str, re.Pattern[str]]] = []
        for pattern in patterns:
            text = pattern[3:] if pattern.startswith("re:") else fnmatch.translate(pattern)
            try:
                self._patterns.append((pattern, re.compile(text)))
            except re.error as error:
                raise OptionError(
                    f"{option}={pattern!r}: bad regular expression: {error}"
                ) from None

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def match(self, name: str) -> str | None:
        """The first pattern that matches a name, or None."""
        return next((pattern for pattern, regex in self._patterns if regex.match(name)), None)

    def check_used(self, names: Iterable[str], where: str = "") -> None:
        """Refuses patterns that match nothing: most likely they are misspelt.

        Args:
            names: everything that a pattern may match.
            where: what a message begins with, a file and a colon.

        Raises:
            OptionError: naming the pattern, and one that would match.
        """
        known = list(names)
        for pattern, regex in self._patterns:
            if any(regex.match(name) for name in known):
                continue
            meant = _meant(pattern, known)
            advice = f"; did you mean {meant!r}?" if meant else ""
            raise OptionError(
                f"{where}no tensor matches {self._option}={pattern!r}{advice or RULES_OF_PATTERNS}"
            )

    def idle(self, reasons: Mapping[str, str], suffix: str = "") -> list[str]:
        """What to say of patterns that were to quantize something and match only what is kept.

        Args:
            reasons: name of every tensor to the reason why it is kept, "" if it is not.
            suffix: what a name may end in; patterns may also match the name without it.
        """
        said = []
        for pattern, regex in self._patterns:
            found = [
                reason
                for name, reason in reasons.items()
                if regex.match(name) or regex.match(name.removesuffix(suffix))
            ]
            if found and all(found):
                said.append(
                    f"--{self._option} {pattern!r} has no effect, what it matches is never "
                    f"quantized: {grouped(found)}"
                )
        return said


#: What to know where no other pattern can be proposed.
RULES_OF_PATTERNS = "; a glob must match the whole name, re: from its start"


def _meant(pattern: str, names: Sequence[str]) -> str | None:
    """A glob that matches something and may be what a pattern was meant to be, or None."""
    word = pattern.removeprefix("re:").strip("*.^$")
    if not word:
        return None
    around = f"*{word}*"
    if any(fnmatch.fnmatchcase(name, around) for name in names):
        return around
    folded = next((name for name in names if word.lower() in name.lower()), None)
    if folded is not None:
        at = folded.lower().index(word.lower())
        return f"*{folded[at : at + len(word)]}*"
    parts = {part: None for name in names[:100_000] for part in name.split(".")}
    near = difflib.get_close_matches(word, list(parts)[:1000], 1, 0.7)
    return f"*{near[0]}*" if near else None


#: Parts of the names of low-rank factors: those of peft, kohya, diffusers and LyCORIS.
FACTOR = re.compile(
    r"(^|[._])(lora_(embedding_)?[AB]|lora_[ab]|lora_(up|down|mid)|lora\.(up|down)|"
    r"lora_linear_layer|lokr_(w[12](_[ab])?|t2)|hada_(w[12]_[ab]|t[12])|oft_(blocks|diag)|diff(_b)?|"
    r"vera_([AB]|lambda_[bd])|ia3_l|lora_magnitude_vector|dora_scale)([.]|$)"
)
#: ByteRange of the name of a weight that has its adapter beside it, in models that come with some.
BASE = ".base_layer."
ADVICE = (
    "quantizing it alone gives nothing that can be loaded: merge it into its base model first "
    "(merge_and_unload in peft, or the merge of the tool that made it), and give the merged model"
)


def refuse_adapter(path: object, names: Collection[str], *, said: bool = False) -> None:
    """Refuses what holds an adapter and no model.

    Args:
        path: file or directory, for the message.
        names: names of its tensors.
        said: whether its settings call it an adapter.

    Raises:
        FileFormatError: if more than half of the tensors are low-rank factors, and none is a weight
            that they belong to; or if `said`.
    """
    factors = sum(FACTOR.search(name) is not None for name in names)
    alone = 2 * factors > len(names) and not any(BASE in name for name in names)
    if said or alone:
        raise FileFormatError(f"{path}: is an adapter, no model; {ADVICE}")


WEIGHT = ".weight"
#: Tensors beside a weight that leave it what it is.
HARMLESS = frozenset((
    "weight", "bias", "input_scale", "input_global_scale", "output_scale", "activation_scale",
    "scale_input", "qscale_act", "q_scale", "k_scale", "v_scale", "kv_scale", "comfy_quant",
    "e_score_correction_bias",
))  # fmt: skip


def _owner(name: str, modules: Collection[str], whole: Collection[str]) -> tuple[str, str] | None:
    """The quantized module or weight that a tensor stands beside, and what is added to its name."""
    at = name.find(".")
    while at > 0:
        if name[:at] in modules:
            return name[:at], name[at + 1 :]
        at = name.find(".", at + 1)
    for match in re.finditer(r"[._]", name) if whole else ():
        if name[: match.start()] in whole:
            return name[: match.start()], name[match.end() :]
    return None


def _is_harmless(added: str) -> bool:
    return added in HARMLESS or "norm" in added.partition(".")[0]


def unknown_beside(
    names: Iterable[str], weights: Iterable[str], understood: Collection[str]
) -> dict[str, str]:
    """Tensors beside weights that are not understood.

    Args:
        names: every tensor.
        weights: quantized weights, by logical name.
        understood: tensors that are read.

    Returns:
        The tensor to the module (or the weight, if it is none of a module) that it stands beside.
    """
    listed = list(weights)
    modules = {name.removesuffix(WEIGHT) for name in listed if name.endswith(WEIGHT)}
    whole = {name for name in listed if not name.endswith(WEIGHT)}
    found = {}
    for name in names:
        if name in understood:
            continue
        owner = _owner(name, modules, whole)
        if owner is not None and not _is_harmless(owner[1]):
            found[name] = owner[0]
    return found
