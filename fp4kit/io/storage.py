# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""How one quantized tensor is stored in a file: names, element types and shapes of its parts.

Codes, block scales and the second level of a tensor `X` are tensors of their own. What they are
called and how they are laid out is the :class:`Storage`; :data:`PLAIN` is that of fp4kit's own
files (`X_packed`, `X_scale`, `X_global_scale`), and each checkpoint layout has one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4kit.backend.interface import Plan
from fp4kit.formats import FormatSpec, Recipe
from fp4kit.io.containers import TensorSpec
from fp4kit.io.read.source import SourceTensor
from fp4kit.reference.scaling import convert_second_level, quiet
from fp4kit.scheme import Scheme

#: safetensors' element type of codes stored one per byte; two codes per byte are U8.
ELEMENT_DTYPES = {"e4m3": "F8_E4M3", "e5m2": "F8_E5M2", "e2m1": "U8"}
#: safetensors' element type of block scales: engines expect E8M0 bytes as U8.
SCALE_DTYPES = {"e4m3": "F8_E4M3", "e8m0": "U8", "float32": "F32"}
#: What the name of a weight ends in.
WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class PartNames:
    """Names of the tensors that one quantized tensor is stored as.

    Attributes:
        packed: codes.
        scale: block scales.
        second: second-level scale, None without one; which one: `keeps` of the storage.
    """

    packed: str
    scale: str
    second: str | None

    def all(self) -> tuple[str, ...]:
        """Every name that exists."""
        names = (self.packed, self.scale, self.second)
        return tuple(name for name in names if name is not None)


@dataclass(frozen=True)
class Storage:
    """How the parts of a quantized tensor `X` are named, ordered and shaped.

    Attributes:
        name: what it is called.
        packed_suffix: what the name of 4-bit codes adds to `X`; codes of whole bytes are `X`.
        scale_suffix: what the name of the block scales adds to `X`.
        scale_place: what their name has in the place of `.weight` instead, None if it only adds.
        second_suffix: what the name of the second level adds to `X`, None if there is none.
        second_shape: shape of the second level, and of a scale of a whole tensor.
        keeps: its second level: `encode_scale` (2688/amax) or `decode_scale` (amax/2688).
        scale_layout: order of the block scales, None for whatever was asked for.
        nibble_order: nibble that the even element takes, None for whatever was asked for.
        row_multiple: codes have rows up to a multiple of this; those added are 0.
        word_bytes: size of the unsigned integers that codes are stored as; 1 for bytes, and FP8.
        plain_scales: block scales are unsigned bytes, whatever their type.
    """

    name: str
    packed_suffix: str = "_packed"
    scale_suffix: str = "_scale"
    scale_place: str | None = None
    second_suffix: str | None = "_global_scale"
    second_shape: tuple[int, ...] = (1,)
    keeps: str = "encode_scale"
    scale_layout: str | None = None
    nibble_order: str | None = None
    row_multiple: int = 1
    word_bytes: int = 1
    plain_scales: bool = False

    def part_names(self, name: str, spec: FormatSpec) -> PartNames:
        """The names that the parts of tensor `name` have in a format."""
        scale = f"{name}{self.scale_suffix}"
        if self.scale_place is not None:
            scale = f"{name.removesuffix(WEIGHT)}{self.scale_place}"
        has_second = spec.has_second_level and self.second_suffix is not None
        return PartNames(
            packed=name if spec.codes_per_byte == 1 else f"{name}{self.packed_suffix}",
            scale=scale,
            second=f"{name}{self.second_suffix}" if has_second else None,
        )

    def scaled_name(self, scale: str) -> str | None:
        """The tensor that block scales of a name belong to, None if it is no such name."""
        suffix = self.scale_suffix if self.scale_place is None else self.scale_place
        name = scale.removesuffix(suffix)
        if name == scale:
            return None
        return name if self.scale_place is None else f"{name}{WEIGHT}"

    def code_spec(self, name: str, shape: tuple[int, ...], spec: FormatSpec) -> TensorSpec:
        """What codes are stored as; `shape` is that of their bytes."""
        if self.word_bytes == 1:
            return TensorSpec(name, ELEMENT_DTYPES[spec.element.name], shape)
        words = (*shape[:-1], shape[-1] // self.word_bytes)
        return TensorSpec(name, f"U{8 * self.word_bytes}", words)

    def scale_dtype(self, spec: FormatSpec) -> str:
        """The element type of block scales."""
        return "U8" if self.plain_scales else SCALE_DTYPES[spec.scale_type]

    def code_rows(self, rows: int) -> int:
        """Rows of codes that are stored for a tensor of `rows` rows."""
        return -(-rows // self.row_multiple) * self.row_multiple


@dataclass(frozen=True)
class NamedStorage(Storage):
    """A storage of one tensor whose parts have names that do not follow from its own.

    Attributes:
        parts: what they are called.
    """

    parts: PartNames = PartNames("", "", None)

    def part_names(self, name: str, spec: FormatSpec) -> PartNames:
        """The names that its parts have."""
        return self.parts


#: fp4kit's own files; the names are those of compressed-tensors.
PLAIN = Storage("plain")


#: The fields of a Scheme that files store.
FILE_FIELDS = (
    "format",
    "recipe",
    "scale_rule",
    "granularity",
    "scale_layout",
    "nibble_order",
    "pad",
    "scale_search",
    "search_error",
    "e4m3_max",
)


@dataclass(frozen=True, slots=True)
class Constant:
    """A small tensor whose bytes are known before any work: an activation scale, a marker."""

    spec: TensorSpec
    data: bytes


@dataclass(frozen=True, slots=True)
class QuantizedEntry:
    """One quantized tensor of a file.

    Attributes:
        name: name of the logical tensor.
        shape: its logical shape.
        dtype: element type it was quantized from.
        plan: how it is encoded.
        second: second-level scale, float32 (1,) as the recipe keeps it, None without one or
            while it is not known yet.
        storage: what its parts are called and how they are laid out.
        constants: tensors that stand beside it for the engine that reads it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    plan: Plan
    second: NDArray[np.float32] | None = None
    storage: Storage = PLAIN
    constants: tuple[Constant, ...] = ()

    @property
    def names(self) -> PartNames:
        """Names of its parts in the file."""
        return self.storage.part_names(self.name, self.plan.format)

    @property
    def parts(self) -> list[TensorSpec]:
        """The tensors it is stored as: codes, block scales, and perhaps the second level."""
        spec, plan, lead, names = self.plan.format, self.plan, self.shape[:-1], self.names
        if self.storage.row_multiple > 1:
            lead = (self.storage.code_rows(plan.rows),)
        parts = [
            self.storage.code_spec(names.packed, (*lead, plan.packed_shape[1]), spec),
            TensorSpec(
                names.scale,
                self.storage.scale_dtype(spec),
                self.storage.second_shape if plan.has_one_scale else plan.scale_shape_of(lead),
            ),
        ]
        if names.second is not None:
            parts.append(TensorSpec(names.second, "F32", self.storage.second_shape))
        return parts

    @property
    def specs(self) -> list[TensorSpec]:
        """Every tensor of the file that belongs to it: its parts and its constants."""
        return self.parts + [constant.spec for constant in self.constants]

    @property
    def stored(self) -> int:
        """Bytes of all of them."""
        return sum(spec.nbytes for spec in self.specs)

    @property
    def format(self) -> str:
        """Name of its block format."""
        return self.plan.format.name

    def stored_second(self) -> NDArray[np.float32]:
        """What its second-level tensor holds: finite, never 0, as the storage keeps it."""
        assert self.plan.recipe is not None
        assert self.second is not None
        with quiet():
            # 1536/amax for scales up to 256: right for readers that only know this tensor.
            return convert_second_level(
                self.second,
                self.plan.recipe.keeps,
                self.storage.keeps,
                self.plan.scheme.e4m3_max,
            )

    def second_of(self, row: int) -> NDArray[np.float32] | None:
        """The second level of a row, where groups of rows have one each."""
        if self.second is None or not self.plan.groups_rows:
            return self.second
        number = row // self.plan.rows_per_scale
        return self.second[number : number + 1]

    def facts(self) -> dict[str, Any]:
        """The entry in the file's metadata, as plain data."""
        plan = self.plan
        names: tuple[str, ...] = ("recipe",) if plan.recipe else ("scale_rule",)
        if plan.grid is not None:
            names = ("recipe", "granularity")
        rule = {name: getattr(plan.scheme, name) for name in names}
        second = None
        if plan.recipe is not None and plan.has_second_level:
            # Fixed width: the header is laid out before the scale is known.
            bits = 0 if self.second is None else int(self.second.view(np.uint32)[0])
            second = {"direction": stored_direction(plan.recipe), "bits": f"{bits:08x}"}
        return {
            "format": plan.format.name,
            **rule,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "scale_layout": plan.scale_layout,
            "nibble_order": plan.nibble_order,
            "second_level": second,
            **search_facts(plan.scheme),
        }


#: A tensor of a file: a plain one, or a quantized one as a whole.
Logical = QuantizedEntry | SourceTensor


def stored_direction(recipe: Recipe) -> str:
    """What files call the scale that a recipe keeps: `amax`, `decode` or `encode`."""
    return recipe.keeps.removesuffix("_scale")


def search_facts(scheme: Scheme) -> dict[str, Any]:
    """How scales were searched, as part of an entry."""
    if scheme.scale_search is None:
        return {}
    return {
        "scale_search": scheme.scale_search,
        "search_error": scheme.search_error,
        "e4m3_max": scheme.e4m3_max,
    }
