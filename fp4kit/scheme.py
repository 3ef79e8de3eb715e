# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The one object that says how to quantize: its words, its checks, and the text that files store.

No arithmetic stands here. The formulas are in :mod:`fp4kit.reference.scaling` (recipes and scale
rules), :mod:`fp4kit.reference.scale_search`, :mod:`fp4kit.reference.rotation` and
:mod:`fp4kit.reference.philox`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from typing import Any

from .errors import OptionError, brief
from .formats import (
    ALL_FORMATS,
    GRID_RECIPES,
    FormatSpec,
    GridRecipe,
    Recipe,
    get_format,
    get_recipe,
    one_of,
)
from .options import (
    DIRECTIONS,
    WORDS,
    Activation,
    BlockShape,
    Directions,
    Format,
    Granularity,
    NibbleOrder,
    RecipeName,
    RhtRounding,
    Rounding,
    ScaleLayout,
    ScaleRule,
    ScaleSearch,
    SearchError,
    SecondLevel,
    sign_mask,
)
from .scheme_rules import check_fields


@dataclass(frozen=True, repr=False)
class Scheme:
    """What is wanted of a quantization: everything that decides bytes, except the arrays.

    Checked when it is made, frozen and hashable: make it once and pass it to every call. A field
    that is None is not set, and takes what the format, or the recipe, has by default.

    Attributes:
        format: `nvfp4`, `mxfp4`, `mxfp8` (E4M3 elements) or `mxfp8_e5m2`; `fp8` (E4M3) or
            `fp8_e5m2` under float32 scales.
        recipe: for nvfp4: `te` (the default), `nvfuser`, `torchao`, `modelopt`,
            `compressed-tensors` or `comfy`: whose order of operations, see
            :mod:`fp4kit.reference.scaling`. For fp8: `modelopt`, `compressed-tensors` or
            `deepseek`, by default the one for the granularity; see :mod:`fp4kit.reference.grid`.
        scale_rule: for MX formats: `floor`, `ceil`, `even` (the default of mxfp4) or `rceil` (of
            mxfp8), after the OCP Microscaling specification 1.0.
        granularity: for fp8: what shares a scale: `tensor` (the default), `channel` (a row, or a
            column of columnwise codes) or `block` (128 x 128).
        direction: `rowwise` (blocks along the last axis), `columnwise` (along the rows, all leading
            dimensions flattened to M of them) or `both`. Columnwise FP4 is the quantized
            transpose, codes (K, M/2); columnwise mxfp8 keeps the order of the data, codes (M, K).
        block_shape: `1d`, or `2d` for one scale per square tile (16x16, 32x32 for MX formats), so
            that both directions hold the same values.
        second_level: for nvfp4: `tensor` (the default: one scale), `none` (recipes nvfuser and
            torchao), `row_scaled` (one per row, per column for columnwise codes) or `per_token`
            (likewise, with Transformer Engine pull request 3045's formulas).
        scale_layout: `linear`, `swizzled_128x4` or `swizzled_8x4`; padding scales are 0. For
            groups also `grouped_128x4`.
        nibble_order: `low_first`, or `high_first` as ComfyUI stores it.
        pad: pad each vector with zeros to whole blocks; the logical K is kept.
        rounding: `nearest`, or `stochastic` for E2M1: up or down by the distance to either
            neighbour (see :mod:`fp4kit.reference.philox`); scales are the same.
        scale_search: for recipe te: `four_over_six` or `sweep` choose each block's scale by the
            error it leaves (see :mod:`fp4kit.reference.scale_search`).
        search_error: what a search compares: `mse` (the default), `mae`, or `mse_scaled` and
            `mae_scaled` before the second-level scale (Transformer Engine's fast path).
        e4m3_max: with a search: largest block scale, 448, or 256 to leave it room upwards. It
            changes the second-level scale, so decoding needs it.
        rht: rotate groups of 16 along the quantized axis first (random Hadamard transform): True
            for Transformer Engine's sign mask 0xD7E8, or a mask (0: no signs). See
            :func:`fp4kit.hadamard_transform`.
        rht_direction: which direction of `both` to rotate: `columnwise` (the default), `rowwise`
            or `both`.
        rht_rounding: `bf16` (the default) rounds rotated values to bfloat16, `none` does not.
        activation: quantize `gelu` (tanh form), `silu`, `relu` or `swiglu` of x (whose last axis
            holds what is activated, then the factors), computed in float32 and rounded to the type
            of x; or the gradient `dgelu`, `dsilu` or `drelu` at activation_input, times x.

    Raises:
        OptionError: for unknown or contradictory fields.

    Examples:
        >>> scheme = Scheme("nvfp4", recipe="torchao", scale_layout="swizzled_128x4")
        >>> scheme
        Scheme('nvfp4', recipe='torchao', scale_layout='swizzled_128x4')
    """

    format: Format = "nvfp4"
    recipe: RecipeName | None = field(default=None, kw_only=True)
    scale_rule: ScaleRule | None = field(default=None, kw_only=True)
    granularity: Granularity | None = field(default=None, kw_only=True)
    direction: Directions = field(default="rowwise", kw_only=True)
    block_shape: BlockShape = field(default="1d", kw_only=True)
    second_level: SecondLevel | None = field(default=None, kw_only=True)
    scale_layout: ScaleLayout = field(default="linear", kw_only=True)
    nibble_order: NibbleOrder = field(default="low_first", kw_only=True)
    pad: bool = field(default=False, kw_only=True)
    rounding: Rounding = field(default="nearest", kw_only=True)
    scale_search: ScaleSearch | None = field(default=None, kw_only=True)
    search_error: SearchError | None = field(default=None, kw_only=True)
    e4m3_max: int = field(default=448, kw_only=True)
    rht: bool | int | None = field(default=None, kw_only=True)
    rht_direction: Directions | None = field(default=None, kw_only=True)
    rht_rounding: RhtRounding | None = field(default=None, kw_only=True)
    activation: Activation | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "format", get_format(self.format).name)
        for name, words in WORDS.items():
            value = getattr(self, name)
            if value is not None or self.__dataclass_fields__[name].default is not None:
                one_of(name, value, words)
        check_fields(self)

    # Schemes are the keys of caches on the path of every call: what is derived is derived once.

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, one.name) for one in fields(self)))

    def __getstate__(self) -> dict[str, Any]:
        # Hashes of strings differ from process to process.
        return {one.name: getattr(self, one.name) for one in fields(self)}

    def __repr__(self) -> str:
        rest = "".join(f", {name}={value!r}" for name, value in self._given().items())
        return f"Scheme({self.format!r}{rest})"

    def _given(self) -> dict[str, Any]:
        """The fields beside the format that are not their default."""
        named = ((one.name, getattr(self, one.name), one.default) for one in fields(self)[1:])
        return {name: value for name, value, default in named if value != default}

    @cached_property
    def spec(self) -> FormatSpec:
        """The format's facts."""
        return ALL_FORMATS[self.format]

    @cached_property
    def recipe_spec(self) -> Recipe | None:
        """The recipe's facts, None where the format has none."""
        return get_recipe(self.recipe or "te") if self.spec.has_second_level else None

    @cached_property
    def _grid(self) -> tuple[GridRecipe, str]:
        """Order of operations and granularity of float32 scales: one follows from the other."""
        if self.recipe is not None:
            recipe = GRID_RECIPES[self.recipe]
            return recipe, self.granularity or recipe.granularities[0]
        granularity = self.granularity or "tensor"
        of = {recipe.granularities[0]: recipe for recipe in GRID_RECIPES.values()}
        return of[granularity], granularity

    @property
    def grid_granularity(self) -> str:
        """What shares a scale, for a format with float32 scales."""
        return self._grid[1]

    @cached_property
    def grid_recipe(self) -> GridRecipe | None:
        """The facts of the recipe of a format with float32 scales, None for others."""
        return self._grid[0] if self.spec.has_scale_grid else None

    @cached_property
    def parts(self) -> tuple[Scheme, ...]:
        """The scheme of each direction by itself, with nothing left unset that has a default.

        What concerns the call alone is left out: padding and activation.
        """
        names = DIRECTIONS if self.direction == "both" else (self.direction,)
        rotated: str | None = None
        if self.rht is not None and self.rht is not False:
            # As published: of both directions only the columnwise one is rotated.
            default = "columnwise" if self.direction == "both" else self.direction
            rotated = self.rht_direction or default
        return tuple(self._part(name, rotated in (name, "both")) for name in names)

    def _part(self, direction: Any, rotated: bool) -> Scheme:
        has_second = self.spec.has_second_level
        known = self.recipe_spec or self.grid_recipe
        error = "mse" if self.scale_search is not None else None
        return _interned(
            replace(
                self,
                recipe=known.name if known is not None else None,  # type: ignore[arg-type]
                granularity=self._grid[1] if self.spec.has_scale_grid else None,  # type: ignore[arg-type]
                scale_rule=self.scale_rule or self.spec.default_scale_rule,  # type: ignore[arg-type]
                direction=direction,
                second_level=(self.second_level or "tensor") if has_second else "none",
                pad=False,
                search_error=self.search_error or error,  # type: ignore[arg-type]
                rht=sign_mask(self.rht) if rotated else None,
                rht_direction=None,
                rht_rounding=(self.rht_rounding or "bf16") if rotated else None,
                activation=None,
            )
        )

    @cached_property
    def decoding(self) -> Scheme:
        """What decoding a part needs to know."""
        if self.e4m3_max != 448:
            return self
        return _interned(
            replace(
                self,
                block_shape="1d",
                second_level="none" if self.second_level == "none" else "tensor",
                rounding="nearest",
                scale_search=None,
                search_error=None,
                rht=None,
                rht_rounding=None,
            )
        )

    @cached_property
    def deviations(self) -> frozenset[str]:
        """The fields in which a part is not plain: what kernels of plain rows do not do."""
        facts = {
            "direction": self.direction == "columnwise",
            "block_shape": self.block_shape == "2d",
            "second_level": self.second_level == "per_token",
            "scale_search": self.scale_search is not None,
            "rounding": self.rounding == "stochastic",
            "rht": self.rht is not None,
        }
        return frozenset(name for name, deviates in facts.items() if deviates)

    @cached_property
    def is_plain(self) -> bool:
        """Whether a part is rowwise 1-D blocks, rounded to nearest, with the usual scales."""
        return not self.deviations

    def words(self) -> list[str]:
        """The fields of a part that are not the defaults of its format, as text."""
        usual = Scheme(self.format).parts[0]
        names = (one.name for one in fields(self)[1:])
        return [
            f"{name}={getattr(self, name)!r}"
            for name in names
            if getattr(self, name) != getattr(usual, name)
        ]

    def describe(self) -> str:
        """The scheme in words, for error messages; the usual second level goes without saying."""
        told = self._given().items()
        usual = ("tensor",) if self.spec.has_second_level else ("none",)
        rest = ", ".join(
            f"{name}={value!r}"
            for name, value in told
            if name != "second_level" or value not in usual
        )
        return f"{self.format} ({rest})" if rest else self.format

    def replace(self, **changes: Any) -> Scheme:
        """A scheme with other values of some fields, checked again."""
        known = {one.name for one in fields(self)}
        for name in changes:
            if name not in known:
                raise OptionError(f"{name!r} is no field of a Scheme; it has {', '.join(known)}")
        return replace(self, **changes)

    def to_metadata(self) -> dict[str, Any]:
        """The fields that are not their default, and the format, as JSON values."""
        return {"format": self.format, **self._given()}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Scheme:
        """The scheme that :meth:`to_metadata` wrote.

        Raises:
            OptionError: for unknown fields or values.
        """
        if not isinstance(metadata, Mapping):
            raise OptionError(f"{brief(metadata)} is no mapping of fields of a Scheme to values")
        unknown = sorted(map(str, set(metadata) - {one.name for one in fields(cls)}))
        if unknown:
            raise OptionError(f"a Scheme has no field {', '.join(map(repr, unknown))}")
        return cls(**metadata)


_schemes: dict[Scheme, Scheme] = {}


def _interned(scheme: Scheme) -> Scheme:
    """One object for equal schemes: caches then compare by identity."""
    return _schemes.setdefault(scheme, scheme)


@lru_cache(maxsize=1024)
def _scheme_of(format: str, options: tuple[tuple[str, Any], ...]) -> Scheme:
    return _interned(Scheme(format, **dict(options)))  # type: ignore[arg-type]


def as_scheme(scheme: Scheme | str, options: Mapping[str, Any]) -> Scheme:
    """The scheme of a call: an object, or a format's name and fields as keywords.

    Args:
        scheme: what the caller passed.
        options: further keyword arguments: fields of a Scheme.

    Raises:
        OptionError: for unknown fields, fields beside a Scheme, or something else than a scheme.
    """
    if isinstance(scheme, Scheme):
        if options:
            raise OptionError(
                f"{', '.join(options)} cannot be passed beside a Scheme; use "
                "scheme.replace(...) for other values"
            )
        return scheme
    for name in options:
        if name not in Scheme.__dataclass_fields__:
            raise OptionError(
                f"{name!r} is not an option here; fields of a Scheme are "
                f"{', '.join(Scheme.__dataclass_fields__)}"
            )
    if "format" in options and scheme != "nvfp4":
        given = f"{brief(scheme)} and format={brief(options['format'])}"
        raise OptionError(f"two formats were passed: {given}")
    format_name = options.get("format", scheme)
    rest = tuple((name, value) for name, value in options.items() if name != "format")
    try:
        return _scheme_of(format_name, rest)
    except TypeError:  # a value that cannot be hashed gets the message of its own check
        return Scheme(format_name, **dict(rest))
