# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What every part of the CUDA backend needs to run a kernel: launches, memory, addresses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np

from fp4kit import trace
from fp4kit.arrays.capture import is_capturing, keep_if_captured
from fp4kit.backend.interface import Job, RawArray

from . import compile as cuda_module
from . import ready as cuda_ready
from .choices import trace_launch
from .geometry import THREADS
from .launch import VECTOR

BLOCK = (THREADS,)


def current_device() -> int:
    """The number of CuPy's current device."""
    import cupy

    number: int = cupy.cuda.runtime.getDevice()
    return number


def _word(argument: Any) -> int:
    """An argument of a kernel; 0 for what is passed by value."""
    if isinstance(argument, (int, np.number, np.bool_)):
        return int(argument)
    return 0 if isinstance(argument, np.ndarray) else argument.data.ptr


def launch(
    instance: cuda_module.Instance,
    grid: tuple[int, ...],
    arguments: tuple[Any, ...],
    shared: int = 0,
) -> None:
    """Launches a kernel on the current device and stream, with bytes of dynamic shared memory.

    Arguments are integers of 64 bits, device arrays for their addresses, and NumPy arrays, which
    are passed by value.
    """
    import cupy

    device = current_device()
    function = cuda_module.function(device, instance)
    if trace.ENABLED:
        trace_launch(device, instance, grid)
    # As `ready.Ready` does, and for the same reasons.
    words = [each if type(each) is int else _word(each) for each in arguments]
    _values, addresses, where = cuda_ready.parameters(words)
    for place, argument in enumerate(arguments):
        if isinstance(argument, np.ndarray):
            addresses[place] = argument.ctypes.data
    cupy.cuda.runtime.setDevice(device)
    stream = cupy.cuda.get_current_stream().ptr
    shape = (*(*grid, 1, 1)[:3], *(*BLOCK, 1, 1)[:3])
    cupy.cuda.driver.launchKernel(function.ptr, *shape, shared, stream, where, 0)


def scratch(shape: int | tuple[int, ...], dtype: Any, *, clear: bool = False) -> RawArray:
    """A device array, kept alive for good if a graph is being captured."""
    import cupy

    array = keep_if_captured(cupy.empty(shape, dtype))
    if clear and array.nbytes:
        array.data.memset_async(0, array.nbytes)
    return array


@contextmanager
def memory(size: int) -> Iterator[int]:
    """The address of so many bytes, for what is launched in between on the current stream.

    In a graph they are its own, and given back at that point of it: scratch that is kept for good
    would be too much.
    """
    import cupy

    if not size:
        yield 0
    elif is_capturing():
        runtime, stream = cupy.cuda.runtime, cupy.cuda.get_current_stream().ptr
        address = int(runtime.mallocAsync(size, stream))
        yield address
        runtime.freeAsync(address, stream)
    else:
        array = cupy.empty(size, np.uint8)
        yield array.data.ptr


@contextmanager
def byte_arrays(*shapes: tuple[int, ...]) -> Iterator[tuple[RawArray, ...]]:
    """Arrays of bytes in such memory, each aligned."""
    if not is_capturing():
        yield tuple(scratch(shape, np.uint8) for shape in shapes)
        return
    sizes = [-(-prod(shape) // VECTOR) * VECTOR for shape in shapes]
    with memory(sum(sizes)) as address:
        starts = accumulate(sizes[:-1], initial=address)
        yield tuple(_bytes_at(start, shape) for start, shape in zip(starts, shapes, strict=True))


def _bytes_at(address: int, shape: tuple[int, ...]) -> RawArray:
    import cupy

    owned = cupy.cuda.UnownedMemory(address, prod(shape), None, current_device())
    return cupy.ndarray(shape, np.uint8, cupy.cuda.MemoryPointer(owned, 0))


def grid_of_tiles(
    instance: cuda_module.Instance, tiles: tuple[int, ...], shared: int = 0
) -> tuple[tuple[int, ...], RawArray | None]:
    """Grid of a kernel whose blocks take tiles one after the other, and how many are `taken`.

    Counting costs a launch more, which is not worth it if each block gets one tile.
    """
    resident = cuda_ready.resident_blocks(current_device(), instance, shared)
    (count,) = tiles
    taken = scratch(1, np.uint32, clear=True) if count > resident else None
    return (min(count, resident),), taken


def address_of(array: RawArray | None) -> int:
    """What a kernel takes for an array that may be missing."""
    return 0 if array is None else array.data.ptr


def is_aligned(addresses: int) -> bool:
    """Whether vectors may be moved at all of some addresses, joined by `|`."""
    return addresses % VECTOR == 0


def are_aligned(*arrays: RawArray) -> bool:
    """Whether vectors may be moved of all arrays."""
    return all(is_aligned(array.data.ptr) for array in arrays)


def addresses_of(job: Job) -> tuple[int, int, int]:
    """Addresses of (second, packed, block_scale)."""
    return address_of(job.second), job.packed.data.ptr, job.block_scale.data.ptr
