# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Launches that small calls repeat: everything about them but the arrays is looked up once.

`aligned` says whether the arrays that are read or written in vectors allow it; each function must
be called with `device` current, as it may have to load the kernel there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any, NamedTuple

from fp4kit import trace
from fp4kit.arrays.capture import driver
from fp4kit.backend.interface import NO_SEED, Plan
from fp4kit.backend.operations import ResidualPlan

from . import (
    activations as cuda_activations,
)
from . import (
    compile as cuda_module,
)
from . import (
    device as cuda_device,
)
from . import (
    launch as cuda_launch,
)
from . import (
    residual_launch as cuda_residual_launch,
)
from . import (
    search as cuda_search,
)
from . import (
    variants as cuda_variants,
)
from .choices import trace_launch
from .geometry import THREADS
from .variants import Directions

#: Blocks of searched rows for each that the device holds at once: those that the scheduler prefers
#: are done early, and others take their places.
SEARCH_WAVES = 6


@cache
def multiprocessors(device: int) -> int:
    """Multiprocessors of a device."""
    import cupy

    return int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])


@cache
def _shared_memory(device: int) -> tuple[int, int]:
    """Bytes of shared memory that a thread block may ask for, and that a multiprocessor has."""
    import cupy

    attributes = cupy.cuda.Device(device).attributes
    names = ("MaxSharedMemoryPerBlockOptin", "MaxSharedMemoryPerMultiprocessor")
    block, multiprocessor = (int(attributes[name]) for name in names)
    return block, multiprocessor


def _allow_shared_memory(device: int, function: Any) -> None:
    """Lets launches of a kernel ask for more than the 48 KiB that all devices grant.

    Always for as much as there is: launches of one kernel ask for different sizes.
    """
    from cupy.cuda import driver

    limit, _ = _shared_memory(device)
    driver.funcSetAttribute(
        function.ptr, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, limit
    )
    # In percent: without it fewer thread blocks might share a multiprocessor than could.
    driver.funcSetAttribute(
        function.ptr, driver.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100
    )


def shared_memory_of_block(device: int) -> int:
    """Bytes of shared memory that a thread block may ask for, the system's share left out."""
    return _shared_memory(device)[0]


def has_shared_memory(device: int, size: int) -> bool:
    """Whether two thread blocks that ask for so many bytes fit a multiprocessor; 0 never do."""
    if not size:
        return False
    block, multiprocessor = _shared_memory(device)
    return size <= block and 2 * (size + 1024) <= multiprocessor


@cache
def resident_blocks(
    device: int, instance: cuda_module.Instance, shared: int = 0, threads: int = THREADS
) -> int:
    """Thread blocks of a kernel, asking for so many bytes, that the device holds at once."""
    import cupy

    function = cuda_module.function(device, instance)
    if shared:
        _allow_shared_memory(device, function)
    each = cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor(function.ptr, threads, shared)
    return int(each) * multiprocessors(device)


def parameters(words: Sequence[int]) -> tuple[Any, Any, int]:
    """(values, their addresses, the address of these) of a launch with 64-bit words."""
    size = len(words)
    values = (ctypes.c_int64 * size)(*words)
    start = ctypes.addressof(values)
    addresses = (ctypes.c_void_p * size)(*range(start, start + 8 * size, 8))
    return values, addresses, ctypes.addressof(addresses)


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute of the driver."""

    _fields_ = (("number", ctypes.c_int), ("unused", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig of the driver."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z")),
        *((name, ctypes.c_uint) for name in ("block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


#: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, and the first driver that captures it.
BEGINS_EARLY = 6
EARLY_DRIVER = 12030
#: The compute capability from which on kernels can begin before the one before has ended.
EARLY_CAPABILITY = (9, 0)


@cache
def _launch_early() -> Any:
    """The driver's call for launches with attributes, or None if it is older than they are."""
    import cupy

    if cupy.cuda.runtime.driverGetVersion() < EARLY_DRIVER:
        return None
    function = driver().cuLaunchKernelEx
    function.argtypes = (ctypes.c_void_p,) * 4
    function.restype = ctypes.c_int
    return function


class Ready:
    """A loaded kernel with its grid and scalars: what is missing are the addresses of arrays.

    CuPy's own call converts every argument anew, for as long as the launch itself takes. All our
    kernels take addresses and 64-bit integers, so that the driver can be handed a block of memory
    in which a call writes nothing but its addresses, and what else differs from call to call.
    """

    def __init__(
        self, device: int, launch: cuda_launch.Launch, addresses: int, *, early: bool = False
    ) -> None:
        """Loads the kernel, whose first parameters are so many addresses, or other numbers.

        Args:
            device: number of the device.
            launch: the kernel, its grid and scalars.
            addresses: how many there are.
            early: whether it may begin while the kernel before it runs, for which it waits itself
                (kernels_cu/common/launch_order.cuh). Where devices and drivers can.
        """
        import cupy

        # The function owns the module: it must live as long as its handle.
        self._function = cuda_module.function(device, launch.instance)
        self._instance = launch.instance
        grid = (*launch.grid, 1, 1)[:3]
        self._shape = (self._function.ptr, *grid, launch.threads, 1, 1, launch.shared)
        if launch.shared:
            _allow_shared_memory(device, self._function)
        self._device = device
        self._initial = (*(0,) * addresses, *launch.scalars)
        self._addresses = slice(addresses)
        self._free: list[tuple[Any, Any, int, Any]] = []
        self._driver, self._runtime = cupy.cuda.driver, cupy.cuda.runtime
        self._stream = cupy.cuda.get_current_stream
        can = early and cuda_device.capability(device) >= EARLY_CAPABILITY
        self._early = _launch_early() if can else None

    def _config(self) -> _Config:
        """What is launched early, all but the stream."""
        attributes = (_Attribute * 1)(_Attribute(BEGINS_EARLY, 0, (ctypes.c_int * 16)(1)))
        return _Config(*self._shape[1:], None, attributes, 1)

    def _arguments(self) -> tuple[Any, Any, int, Any]:
        """(values, their addresses, the address of these, _config) of a launch."""
        config = None if self._early is None else self._config()
        return *parameters(self._initial), config

    def launch(self, *pointers: int) -> None:
        """Launches the kernel on the current stream of its device, which must be current."""
        if trace.ENABLED:
            trace_launch(self._device, self._instance, self._shape[1:4])
        # Taken out while in use: other threads, or a finalizer in this one, launch with their own.
        try:
            arguments = self._free.pop()
        except IndexError:
            arguments = self._arguments()
        # One assignment: a loop took a microsecond. It refuses another number of addresses.
        arguments[0][self._addresses] = pointers
        # Makes the device's context current in a thread that has not used it yet.
        self._runtime.setDevice(self._device)
        if self._early is None:
            self._driver.launchKernel(*self._shape, self._stream().ptr, arguments[2], 0)
        else:
            config = arguments[3]
            config.stream = self._stream().ptr
            status = self._early(ctypes.addressof(config), self._function.ptr, arguments[2], None)
            if status:
                raise self._driver.CUDADriverError(status)
        self._free.append(arguments)


@lru_cache(maxsize=1024)
def amax(device: int, dtype: str, size: int, groups: int, item_size: int) -> Ready:
    """For (x, result, flag)."""
    grid, scalars = cuda_launch.amax_geometry(size, groups, item_size)
    launch = cuda_launch.Launch(cuda_module.amax_kernel(dtype), grid, scalars)
    return Ready(device, launch, addresses=3)


def seed_count(plan: Plan) -> int:
    """How many arguments a quantizing kernel takes of a seed: of any seed as many."""
    return len(cuda_launch.seed_arguments(plan, NO_SEED))


@lru_cache(maxsize=1024)
def quantize(device: int, plan: Plan, dtype: str, scales: int, aligned: bool) -> Ready:
    """For (x, second, packed, block_scale), and what follows from the seed."""
    vector = aligned and cuda_launch.rows_are_vectors(plan.cols, dtype)
    processors = multiprocessors(device)
    launch = cuda_launch.quantize_launch(plan, dtype, scales, vector, processors)
    return Ready(device, launch, addresses=4 + seed_count(plan))


class Tiles(NamedTuple):
    """A kernel of tiles.

    Attributes:
        ready: for (taken, x, factor, second, packed, block_scale of either direction), and the
            seed.
        counts: whether `taken` is needed: clearing it costs a launch more, which is not worth it
            if each block gets one tile.
        repeats: a kernel to follow, for the block_scale of either direction, or None.
    """

    ready: Ready
    counts: bool
    repeats: Ready | None = None


def _tiles(
    device: int, directions: Directions, kernel: cuda_module.Instance, wide: bool, shared: int
) -> Tiles:
    launch = cuda_variants.quantize_tiles_launch(directions, kernel, wide, shared)
    resident = resident_blocks(device, kernel, shared)
    (tiles,) = launch.grid
    launch = replace(launch, grid=(min(tiles, resident),))
    ready = Ready(device, launch, addresses=9 + seed_count(directions.any))
    return Tiles(ready, tiles > resident)


def _wide_shared(device: int, directions: Directions, dtype: str, vector: bool) -> int:
    """Shared memory that wide tiles ask for, 0 if there cannot be such."""
    one_level = cuda_variants.shares_levels(directions)
    shared = cuda_variants.wide_shared(directions, dtype, vector, one_level)
    return shared if has_shared_memory(device, shared) else 0


@lru_cache(maxsize=1024)
def quantize_tiles(
    device: int, directions: Directions, dtype: str, vector: bool, pieces: bool
) -> Tiles:
    """`vector`: all but the scales allows 16-byte accesses; `pieces`: those do."""
    shared = _wide_shared(device, directions, dtype, vector)
    wide = shared > 0
    whole = wide and pieces and cuda_variants.is_whole(directions)
    kernel = cuda_variants.quantize_tiles_kernel(directions, dtype, vector, wide, whole)
    tiles = _tiles(device, directions, kernel, wide, shared)
    if not (whole and cuda_variants.repeats_scales(directions)):
        return tiles
    launch = cuda_variants.repeat_scales_launch(directions)
    return tiles._replace(repeats=Ready(device, launch, addresses=2))


@lru_cache(maxsize=1024)
def quantize_activated_tiles(
    device: int, directions: Directions, dtype: str, name: str
) -> Tiles | None:
    """With 16-byte accesses; None if tiles cannot be wide."""
    shared = _wide_shared(device, directions, dtype, True)
    if not shared:
        return None
    kernel = cuda_variants.quantize_tiles_kernel(directions, dtype, True, True, name=name)
    return _tiles(device, directions, kernel, True, shared)


@lru_cache(maxsize=1024)
def quantize_searched(device: int, plan: Plan, dtype: str) -> Ready:
    """For (x, second, packed, block_scale)."""
    kernel = cuda_search.quantize_searched_kernel(plan, dtype)
    blocks = SEARCH_WAVES * resident_blocks(device, kernel)
    return Ready(device, cuda_search.quantize_searched_launch(plan, dtype, blocks), addresses=4)


@lru_cache(maxsize=1024)
def dequantize(device: int, plan: Plan, dtype: str, scales: int, aligned: bool) -> Ready:
    """For (packed, block_scale, second, out)."""
    vector = aligned and cuda_launch.rows_are_vectors(plan.cols, dtype)
    return Ready(device, cuda_launch.dequantize_launch(plan, dtype, scales, vector), addresses=4)


@lru_cache(maxsize=1024)
def fused(device: int, plan: Plan, dtype: str, scales: int) -> Ready:
    """For (x, second, out), x and out aligned."""
    processors = multiprocessors(device)
    launch = cuda_launch.quantize_dequantize_launch(plan, dtype, scales, processors)
    return Ready(device, launch, addresses=3)


@lru_cache(maxsize=1024)
def activate(device: int, name: str, dtype: str, rows: int, width: int, aligned: bool) -> Ready:
    """For (gate, factor, out, measured)."""
    vector = aligned and cuda_activations.can_vector(name, width, dtype)
    launch = cuda_activations.activate_launch(name, dtype, rows, width, vector)
    return Ready(device, launch, addresses=4)


@lru_cache(maxsize=1024)
def column_sums(
    device: int, name: str | None, dtype: str, rows: int, cols: int, vector: bool
) -> Ready:
    """For (gate, factor, out, sums, measured)."""
    launch = cuda_activations.column_sums_launch(name, dtype, rows, cols, vector)
    return Ready(device, launch, addresses=5)


@lru_cache(maxsize=1024)
def quantize_activated(device: int, plan: Plan, dtype: str, name: str) -> Ready:
    """For (gate, factor, second, packed, block_scale)."""
    kernel = cuda_activations.quantize_activated_kernel(plan, dtype, name)
    resident = resident_blocks(device, kernel)
    launch = cuda_activations.quantize_activated_launch(plan, dtype, name, resident)
    return Ready(device, launch, addresses=5)


@lru_cache(maxsize=1024)
def quantize_sums(device: int, plan: Plan, dtype: str, name: str | None) -> Ready | None:
    """For (gate, factor, second, packed, block_scale, sums); None if it would leave much idle."""
    launch = cuda_activations.quantize_sums_launch(plan, dtype, name)
    if launch.grid[0] < multiprocessors(device):
        return None
    return Ready(device, launch, addresses=6)


def _residual_limits(device: int) -> cuda_residual_launch.Limits:
    return cuda_residual_launch.Limits(multiprocessors(device), *_shared_memory(device))


@lru_cache(maxsize=1024)
def quantize_residual(
    device: int, plan: ResidualPlan, dtype: str, ordered: bool, aligned: bool
) -> Ready:
    """For (x, scale, order, packed, block_scale)."""
    limits = _residual_limits(device)
    launch = cuda_residual_launch.quantize_launch(plan, dtype, ordered, aligned, limits)
    return Ready(device, launch, addresses=5)


@lru_cache(maxsize=1024)
def dequantize_residual(
    device: int, plan: ResidualPlan, dtype: str, ordered: bool, aligned: bool
) -> Ready:
    """For (packed, block_scale, scale, order, out)."""
    limits = _residual_limits(device)
    launch = cuda_residual_launch.dequantize_launch(plan, dtype, ordered, aligned, limits)
    return Ready(device, launch, addresses=5)
