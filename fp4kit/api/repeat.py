# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""A call like the last one into the same result: what was found out then is not found out again.

Small arrays are quantized faster than a call is checked. A result on a GPU that is passed as `out`
again and again remembers its last call; one with the same arguments, and an array of the same
kind elsewhere in memory, is launched at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fp4kit.arrays import Raw, is_contiguous, is_current_device
from fp4kit.arrays.frameworks import framework_of_type
from fp4kit.arrays.streams import torch_stream
from fp4kit.backend.interface import Backend, Job
from fp4kit.scheme import Scheme

from .buffers import Target
from .tensor import DirectionPair, QuantizedTensor

#: Vectors are moved where addresses are multiples of this: another remainder is another kernel.
ALIGNMENT = 16


class Repeat:
    """A call that is ready to be made again.

    Attributes:
        arguments: the call's arguments but `x` and `out`: the very same objects must be passed.
    """

    def __init__(
        self,
        arguments: tuple[Any, ...],
        x: Any,
        raw: Raw,
        launch: Callable[[int], None],
        targets: Sequence[Target],
        out: Sequence[QuantizedTensor],
    ) -> None:
        """Remembers a call.

        Args:
            arguments: see above.
            x: the caller's array; only its kind and shape are kept.
            raw: the same.
            launch: quantizes an array at an address.
            targets: raw arrays of the result.
            out: the result.
        """
        self.arguments = arguments
        self._kind, self._dtype, self._shape = type(x), x.dtype, x.shape
        self._torch = framework_of_type(type(x)) == "torch"
        self._number = raw.origin.device_number
        self._nbytes, self._remainder = raw.data.nbytes, raw.data.data.ptr % ALIGNMENT
        self._launch = launch
        self._written = [(place.start, place.end) for one in targets for place in one.places]
        # A torch tensor can be given other memory: where it lies is looked at each time.
        named = [value for one in out for value in (one.packed, one.block_scale)]
        named += [one.second_level[1] for one in out if one.second_level is not None]
        named += [value for value in arguments if hasattr(value, "data_ptr")]
        self._memory = [(value, value.data_ptr()) for value in named if self._torch]

    def run(self, x: Any, arguments: tuple[Any, ...]) -> bool:
        """Makes the call with another array; False, and nothing is done, if that is not so."""
        if type(x) is not self._kind or x.dtype != self._dtype or x.shape != self._shape:
            return False
        for given, known in zip(arguments, self.arguments, strict=True):
            if given is not known:
                return False
        pointer = self._torch_address(x) if self._torch else self._address(x)
        if pointer is None or pointer % ALIGNMENT != self._remainder:
            return False
        end = pointer + self._nbytes
        for start, stop in self._written:
            if start < end and pointer < stop:
                return False  # refused, with the reason, on the way of other calls
        if self._torch:
            with torch_stream(self._number):
                self._launch(pointer)
        else:
            self._launch(pointer)
        return True

    def _address(self, x: Any) -> int | None:
        """Where a CuPy array lies, None if it is not as the first was."""
        if x.data.device_id != self._number or not is_contiguous(x):
            return None
        return x.data.ptr if is_current_device(self._number) else None

    def _torch_address(self, x: Any) -> int | None:
        """Where a torch tensor lies, None if it is not as the first was."""
        if not x.is_cuda or x.get_device() != self._number or not x.is_contiguous() or x.is_neg():
            return None
        for value, pointer in self._memory:
            if value.data_ptr() != pointer:
                return None
        address = int(x.data_ptr())
        # A storage that was freed, as sharded training does, has no address.
        return address if address and is_current_device(self._number) else None


def last_call(out: Any) -> Repeat | None:
    """The call that a result remembers, if there is one."""
    first = out[0] if type(out) is DirectionPair else out
    return getattr(first, "_repeat", None)


def remember(out: QuantizedTensor | DirectionPair, repeat: Repeat | None) -> None:
    """Has a result remember a call (None: no call); a pair's is kept with its first tensor."""
    first = out[0] if isinstance(out, DirectionPair) else out
    object.__setattr__(first, "_repeat", repeat)


def repeatable(
    engine: Backend,
    scheme: Scheme,
    name: str | None,
    jobs: Sequence[Job],
    targets: Sequence[Target],
) -> Callable[[int], None] | None:
    """What quantizes an array at another address as these jobs were, None if that takes more.

    Args:
        engine: backend.
        scheme: the call's.
        name: the second-level scale that was passed, or None.
        jobs: what was done, of each direction.
        targets: raw arrays of the result.
    """
    if scheme.spec.has_scale_grid:
        return None
    levels = {part.second_level for part in scheme.parts}
    if levels == {"none"} or (scheme.recipe_spec is not None and name == scheme.recipe_spec.keeps):
        copied = [
            (target.second, job.second)
            for target, job in zip(targets, jobs, strict=True)
            if job.second is not None and target.second.data.ptr != job.second.data.ptr
        ]
        if copied or any(part.second_level == "per_token" for part in scheme.parts):
            return None
        return engine.ready(tuple(jobs), measured=False)
    if name is None and len(jobs) == 1 and levels <= {"row_scaled", "per_token"}:
        own = [job._replace(second=one.second) for job, one in zip(jobs, targets, strict=True)]
        return engine.ready(tuple(own), measured=True)
    return None
