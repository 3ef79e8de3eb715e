# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The layout of MLX: read by mlx-lm.

Codes lie in words of 32 bits, the first element in the lowest ones, which on a disk are the bytes
of the other layouts. Which modules are quantized is not listed: those with scales are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fp4kit.errors import FileFormatError, OptionError
from fp4kit.formats import ALL_FORMATS, FormatSpec
from fp4kit.io.storage import Storage
from fp4kit.scheme import Scheme

from .base import Layout, Summary

METHOD = "mlx"
#: Our formats, by MLX's names of its modes.
MODES = {name: ALL_FORMATS[name] for name in ("mxfp4", "mxfp8", "nvfp4")}
#: The mode of a config that names none: integers with a scale and a bias.
AFFINE = "affine"
#: Keys of config.json that hold the same; mlx-lm reads the first, the hub the second.
KEYS = ("quantization", "quantization_config")


#: Model types whose classes in mlx-lm put the codes and scales of single experts together; others
#: do so with plain weights only, or take experts in a form of their own.
STACKED = frozenset((
    "afmoe", "bailing_moe", "bailing_moe_linear", "deepseek", "deepseek_v2", "deepseek_v3",
    "deepseek_v32", "dots1", "exaone_moe", "glm4_moe", "glm4_moe_lite", "hunyuan", "jamba",
    "laguna", "longcat_flash", "mimo_v2_flash", "mixtral", "olmoe", "phimoe", "phixtral",
    "qwen2_moe",
))  # fmt: skip
#: Those that take quantized experts only as one tensor a projection, `switch_mlp`.
SWITCHED = ("ernie4_5_moe", "mellum", "qwen3_moe")
#: Those whose weights mlx-lm multiplies as it loads them, words of codes too.
MULTIPLIED = ("falcon_h1",)
#: Weights that mlx-lm takes apart as it loads them, of integers or plain numbers only.
SPLIT = (".kv_b_proj.weight",)
_EXPERT = re.compile(r".*\.experts\.\d+\..*")
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_SINGLE = re.compile(r"(.*\.mlp)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_STACK = re.compile(r"(.*\.mlp)\.switch_mlp\.(gate_proj|up_proj|down_proj)\.weight")


def is_said(config: Mapping[str, Any]) -> bool:
    """Whether config.json describes a quantization of MLX, whatever its mode."""
    said = config.get(KEYS[0])
    return isinstance(said, dict) and {"group_size", "bits"} <= said.keys()


def parameters(spec: FormatSpec) -> dict[str, Any]:
    """What MLX calls a format."""
    return {"group_size": spec.block_size, "bits": spec.element.bits, "mode": spec.name}


def described(said: Mapping[str, Any], where: str) -> Iterator[tuple[str, str]]:
    """(where, mode) of the whole and of each module that has parameters of its own.

    Raises:
        FileFormatError: for what is not understood.
    """
    inner = {key: value for key, value in said.items() if key not in ("group_size", "bits", "mode")}
    yield where, str(said.get("mode", AFFINE))[:80]
    for module, facts in inner.items():
        if isinstance(facts, bool):
            continue  # whether it is quantized at all
        if not isinstance(facts, dict) or facts.keys() - {"group_size", "bits", "mode"}:
            raise FileFormatError(
                f"{where} has {module[:80]!r}: {str(facts)[:80]}, which is not understood here: it "
                "may change what the stored weights mean. Give the original checkpoint"
            )
        yield f"{where}.{module}", str(facts.get("mode", AFFINE))[:80]


class Mlx(Layout):
    """`X.weight` U32, `X.scales` U8, no second level."""

    name = METHOD
    formats = tuple(MODES)
    storage = Storage(
        METHOD,
        packed_suffix="",
        scale_place=".scales",
        second_suffix=None,
        word_bytes=4,
        plain_scales=True,
    )
    # Its scales without a second level are those of MLX's own encoder, amax / 6.
    recipe = "nvfuser"
    activation_suffix = None
    config_keys = KEYS
    lists_ignored = False
    diffusion = False

    def check(self, scheme: Scheme, activations: str | None) -> None:
        """Refuses what needs a second level, and activation scales.

        Raises:
            OptionError: with the reason.
        """
        if activations is not None:
            raise OptionError(
                f"readers of layout {self.name} scale inputs as they come; leave --activations out"
            )
        if scheme.second_level == "none":
            return
        for name, value in (("recipe", scheme.recipe), ("scale_search", scheme.scale_search)):
            if value not in (None, self.recipe):
                raise OptionError(
                    f"layout {self.name} stores nvfp4 without a second level, for which only "
                    f"recipe {self.recipe} is defined; leave --{name.replace('_', '-')} {value} out"
                )

    def reason_to_keep(self, name: str) -> str:
        """Why its readers cannot take a weight quantized, "" if they can."""
        return "taken apart by mlx-lm as it loads" if name.endswith(SPLIT) else ""

    def stacks(self, quantized: Iterable[str], config: Mapping[str, Any]) -> dict[str, list[str]]:
        """Experts of model types that mlx-lm takes as one tensor a projection."""
        if config.get("model_type") not in SWITCHED:
            return {}
        layers: dict[str, dict[str, dict[int, str]]] = {}
        for name in quantized:
            match = _SINGLE.fullmatch(name)
            if match is not None:
                stacks = layers.setdefault(match[1], {each: {} for each in _PROJECTIONS})
                stacks[match[3]][int(match[2])] = name
        found = {}
        for parent, stacks in layers.items():
            count = max(len(members) for members in stacks.values())
            for projection, members in stacks.items():
                if sorted(members) != list(range(count)):
                    raise OptionError(
                        f"layout {self.name}: mlx-lm takes the experts of {parent!r} as one tensor "
                        f"a projection, and of {projection} only {len(members)} of {count} are "
                        "quantized; quantize or exclude all experts of a layer"
                    )
                ordered = [members[number] for number in range(count)]
                found[f"{parent}.switch_mlp.{projection}.weight"] = ordered
        return found

    def single_names(self, name: str, shape: tuple[int, ...]) -> list[str]:
        """The names of single experts that a `switch_mlp` holds."""
        match = _STACK.fullmatch(name)
        if match is None or len(shape) != 3:
            return []
        return [f"{match[1]}.experts.{number}.{match[2]}.weight" for number in range(shape[0])]

    def unfound(self, quantized: Iterable[str], config: Mapping[str, Any]) -> str:
        """Experts that mlx-lm does not put together, and models that it changes."""
        kind = config.get("model_type")
        if kind in MULTIPLIED:
            return (
                f"mlx-lm multiplies the weights of model type {kind!r} as it loads them, which "
                "codes do not survive; choose another --layout"
            )
        experts = [name for name in quantized if _EXPERT.fullmatch(name)]
        if kind in SWITCHED:
            experts = [name for name in experts if not _SINGLE.fullmatch(name)]
        if not experts or kind in STACKED:
            return ""
        return (
            f"mlx-lm does not put {len(experts)} quantized experts of model type "
            f"{str(kind)[:80]!r} together (the first is {experts[0]!r}); leave them plain with "
            "--exclude '*experts.*', or choose another --layout"
        )

    def laid_out(self, scheme: Scheme) -> Scheme:
        """The scheme without a second level."""
        if scheme.spec.has_second_level:
            scheme = scheme.replace(recipe=self.recipe, second_level="none")
        return super().laid_out(scheme)

    def quantization_config(self, summary: Summary) -> dict[str, Any]:
        """The value of both keys of config.json."""
        return parameters(MODES[summary.format])
