# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What all results of quantization have in common: facts, copies, comparison, NumPy's protocol."""

from __future__ import annotations

from dataclasses import fields, replace
from math import prod
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from fp4kit import arrays
from fp4kit.arrays.devices import device_name, framework_and_device, move, place_in_words
from fp4kit.arrays.frameworks import Origin
from fp4kit.arrays.index_arrays import ingest_integers
from fp4kit.errors import DtypeError, OptionError
from fp4kit.formats import DTYPES, FormatSpec, get_format

Self = TypeVar("Self", bound="StoredTensor")
#: Fields that say where the values came from, and nothing of what they are.
_OF_ORIGIN = ("source_dtype",)


class StoredTensor:
    """Base of frozen dataclasses of arrays and of what is needed to decode them.

    Two are equal (`==`) if all that decides their values is equal and their arrays are the same
    bytes, whatever framework these belong to; `source_dtype` does not count. Nothing is copied for
    that: tensors on different devices cannot be compared. There is no hash, as arrays can change.
    """

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    #: The fields that are arrays, or None.
    _ARRAYS: ClassVar[tuple[str, ...]] = (
        "packed",
        "block_scale",
        "amax",
        "decode_scale",
        "encode_scale",
    )
    #: The field that holds the codes.
    _CODES: ClassVar[str] = "packed"
    shape: tuple[int, ...]

    @property
    def format(self) -> str:
        """Name of the format."""
        raise NotImplementedError

    def dequantize(self, dtype: Any = "float32", *, backend: str | None = None) -> Any:
        """The decoded values; each class says how."""
        raise NotImplementedError

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, block scales and second-level scale together."""
        sizes = {self._CODES: 1, "block_scale": get_format(self.format).scales.bytes, "order": 0}
        return sum(
            prod(getattr(value, "shape", ())) * sizes.get(name, 4)
            for name, value in self._arrays().items()
        )

    @property
    def bits_per_element(self) -> float:
        """Stored bits per logical element, 0.0 for an empty tensor."""
        return 8 * self.nbytes / self.size if self.size else 0.0

    @property
    def device(self) -> str:
        """`cpu` or `cuda:N`: where the codes lie."""
        return framework_and_device(self._codes)[1]

    @property
    def _codes(self) -> Any:
        return getattr(self, self._CODES)

    def to(self: Self, device: Any) -> Self:
        """The tensor on another device: its arrays are copied by the means of their framework.

        NumPy arrays become CuPy's on a GPU, and CuPy's NumPy's on the host; those of torch and JAX
        stay theirs. This is the only way in which fp4kit copies between devices.

        Args:
            device: `cpu`, `cuda` (the current GPU), `cuda:1`; `numpy` for NumPy arrays on the
                host; or a device object of torch, CuPy or JAX.

        Returns:
            The tensor itself if all of it lies there, as torch's `to` does.

        Raises:
            OptionError: if it is no device.
            BackendUnavailableError: if there is no such device, with the reason.
        """
        name = device_name(device)
        held = self._arrays()
        moved = {
            field: value if isinstance(value, (int, float, list, tuple)) else move(value, name)
            for field, value in held.items()
        }
        if all(moved[field] is held[field] for field in held):
            return self
        return replace(self, **moved)  # type: ignore[type-var]

    def _named(self) -> list[str]:
        """What `repr` shows before the shape."""
        raise NotImplementedError

    def __repr__(self) -> str:
        words = [*self._named(), f"shape={self.shape}"]
        place = place_in_words(self._codes)
        if place != "numpy":
            words.append(place)
        words.append(f"{self.bits_per_element:.3g} bits per element")
        return f"{type(self).__name__}({', '.join(words)})"

    def _arrays(self) -> dict[str, Any]:
        held = {name: getattr(self, name) for name in self._ARRAYS}
        return {name: value for name, value in held.items() if value is not None}

    def _facts(self) -> dict[str, Any]:
        """Every field that is no array and decides what the values are."""
        names = (one.name for one in fields(self))  # type: ignore[arg-type]
        skipped = (*self._ARRAYS, *_OF_ORIGIN)
        return {name: getattr(self, name) for name in names if name not in skipped}

    def __getstate__(self) -> dict[str, Any]:
        # The fields: what is kept beside them is not for copies.
        return {one.name: getattr(self, one.name) for one in fields(self)}  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        # `len` would make empty tensors false.
        return True

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        mine, theirs = self._arrays(), other._arrays()
        if self._facts() != other._facts() or mine.keys() != theirs.keys():
            return False
        if self.device != other.device:
            raise DtypeError(
                f"one tensor lies on {self.device}, the other on {other.device}; compare them on "
                "one device: q.to(...) copies"
            )
        origin = arrays.ingest_bytes(self._codes, self._CODES).origin
        with arrays.device_scope(origin):
            spec = get_format(self.format)
            return all(
                _same_bytes(*(_raw(name, held[name], origin, spec) for held in (mine, theirs)))
                for name in mine
            )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise OptionError("codes are decoded into a new array, which copy=False rules out")
        if self.device != "cpu":
            raise DtypeError(
                f"the {type(self).__name__} lies on {self.device}, NumPy's arrays on the host: "
                "q.to('cpu') copies it there, q.dequantize() decodes it where it is"
            )
        wanted = np.dtype(np.float32 if dtype is None else dtype)
        name = wanted.name if wanted.name in DTYPES else "float32"
        values = arrays.ingest(self.dequantize(name)).data
        if name == "bfloat16":
            import ml_dtypes

            values = values.view(ml_dtypes.bfloat16)
        if not values.flags.writeable:  # as those of JAX
            values = values.copy()
        return np.asarray(values, wanted)


def _raw(name: str, value: Any, origin: Origin, spec: FormatSpec) -> Any:
    """The raw data of an array of a tensor, contiguous."""
    if name in ("packed", "tiles", "block_scale"):
        is_codes = name != "block_scale"
        raw = (
            arrays.ingest_bytes(value, name)
            if is_codes
            else arrays.ingest_scales(value, name, spec)
        )
        return arrays.contiguous(raw.data, origin)
    if name == "order":
        return ingest_integers(value, name, origin)
    return arrays.ingest_scale(value, name, origin)


def _same_bytes(first: Any, second: Any) -> bool:
    if first.size != second.size:
        return False
    one, other = (data.reshape(-1).view(np.uint8) for data in (first, second))
    return bool((one == other).all())
