# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""From `kernels_cu/*/*.cu` to loaded kernels: source text, NVRTC options, instances, cache, errors.

Importing this module imports no CuPy and compiles nothing. A kernel is compiled when it is first
launched on a device, one template instance at a time; CuPy keeps the result on disk.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fp4kit.errors import KernelCompileError
from fp4kit.formats import ALL_RECIPES, BLOCK_FORMATS, DTYPES, FormatSpec, Recipe, cuda_defines
from fp4kit.reference.philox import ROUNDS

from . import geometry

#: C++ names of what the table names in Python.
CXX_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "Bf16"}
CXX_FORMATS = {"nvfp4": "Nvfp4", "mxfp4": "Mxfp4", "mxfp8": "Mxfp8", "mxfp8_e5m2": "Mxfp8E5m2"}
CXX_RECIPES = {
    "te": "kRecipeTe",
    "nvfuser": "kRecipeNvfuser",
    "torchao": "kRecipeTorchao",
    "modelopt": "kRecipeModelopt",
    "compressed-tensors": "kRecipeCompressedTensors",
    "comfy": "kRecipeComfy",
}
CXX_LAYOUTS = {
    "linear": "kLayoutLinear",
    "swizzled_128x4": "kLayoutSwizzled128x4",
    "swizzled_8x4": "kLayoutSwizzled8x4",
}
NAMESPACE = "fp4kit"
#: Lines of an NVRTC log that are worth showing: the first error is among them.
LOG_LINES = 8
#: How `dequantize_rowwise_kernel` finds and moves its pieces, the fastest first.
DEQUANTIZE_ACCESSES = {
    "flat": "kAccessContiguous",
    "tiled": "kAccessAnyLayout",
    "rows": "kAccessRows",
    "single": "kAccessSingle",
}
#: CuPy adds these itself, after ours; tests that compile without CuPy add them too.
CUPY_OPTIONS = ("-ftz=true", "--device-as-default-execution-space")


@dataclass(frozen=True)
class Instance:
    """One kernel: a file below `kernels_cu/`, and the C++ name of a template instance in it."""

    file: str
    expression: str

    @property
    def kernel(self) -> str:
        """The kernel's name in the sources, without `_kernel`."""
        return self.expression.split("<")[0].removeprefix(f"{NAMESPACE}::").removesuffix("_kernel")


def instance(kernel: str, file: str, *arguments: str | bool) -> Instance:
    """An instance from template arguments: names of ours, and booleans."""
    words = [
        ("true" if value else "false") if isinstance(value, bool) else value for value in arguments
    ]
    # Booleans and types share one list; names of ours live in our namespace.
    qualified = [word if word in ("true", "false") else f"{NAMESPACE}::{word}" for word in words]
    template = f"<{', '.join(qualified)}>" if qualified else ""
    return Instance(file, f"{NAMESPACE}::{kernel}{template}")


def seed_types(stochastic: bool) -> tuple[str, ...]:
    """The last template arguments of quantizing kernels: stream, and a key for each round."""
    return ("i64",) * (1 + ROUNDS) if stochastic else ()


def function_name(name: str | None) -> str:
    """The constant of a function in the kernels."""
    return "kNoFunction" if name is None else f"k{name.capitalize()}"


def _recipe_name(recipe: Recipe | None) -> str:
    return "kRecipeNone" if recipe is None else CXX_RECIPES[recipe.name]


@cache
def amax_kernel(dtype: str) -> Instance:
    """Group maxima of an element type."""
    return instance("amax_kernel", "reduce/amax.cu", CXX_DTYPES[dtype])


@cache
def count_nonfinite_kernel(dtype: str) -> Instance:
    """Census of NaN and infinity of an element type."""
    return instance("count_nonfinite_kernel", "reduce/amax.cu", CXX_DTYPES[dtype])


@cache
def second_level_kernel(dtype: str) -> Instance:
    """Amax of a tensor of an element type to a recipe's second level."""
    return instance("second_level_kernel", "scales/second_level.cu", CXX_DTYPES[dtype])


@cache
def convert_second_level_kernel() -> Instance:
    """One direction of the second level to another."""
    return instance("convert_second_level_kernel", "scales/second_level.cu")


@cache
def quantize_rowwise_any_kernel(
    spec: FormatSpec, dtype: str, recipe: Recipe | None, second: bool, vector: bool
) -> Instance:
    """Quantization of an element type under a recipe, with 16-byte accesses or single ones."""
    names = CXX_FORMATS[spec.name], CXX_DTYPES[dtype]
    return instance(
        "quantize_rowwise_any_kernel",
        "quantize/rowwise_any.cu",
        *names,
        _recipe_name(recipe),
        second,
        vector,
    )


@cache
def quantize_rowwise_kernel(
    spec: FormatSpec,
    dtype: str,
    recipe: Recipe | None,
    second: bool,
    layout: str,
    stochastic: bool = False,
) -> Instance:
    """Quantization of whole, aligned blocks with one second-level value: the fast path."""
    names = CXX_FORMATS[spec.name], CXX_DTYPES[dtype], _recipe_name(recipe)
    rest = CXX_LAYOUTS[layout], *seed_types(stochastic)
    return instance("quantize_rowwise_kernel", "quantize/rowwise.cu", *names, second, *rest)


@cache
def quantize_rowwise_swizzled_kernel(
    spec: FormatSpec, dtype: str, recipe: Recipe | None, second: bool, stochastic: bool = False
) -> Instance:
    """The fast path into swizzled_128x4 scales, whole tiles across."""
    names = CXX_FORMATS[spec.name], CXX_DTYPES[dtype], _recipe_name(recipe)
    seed = seed_types(stochastic)
    return instance(
        "quantize_rowwise_swizzled_kernel", "quantize/rowwise_swizzled.cu", *names, second, *seed
    )


@cache
def dequantize_rowwise_kernel(
    spec: FormatSpec, dtype: str, recipe: Recipe | None, second: bool, access: str
) -> Instance:
    """Dequantization to an element type, with one of `DEQUANTIZE_ACCESSES`."""
    return instance(
        "dequantize_rowwise_kernel",
        "dequantize/rowwise.cu",
        CXX_FORMATS[spec.name],
        CXX_DTYPES[dtype],
        _recipe_name(recipe),
        second,
        DEQUANTIZE_ACCESSES[access],
    )


@cache
def quantize_dequantize_kernel(
    spec: FormatSpec, dtype: str, recipe: Recipe | None, second: bool, flat: bool
) -> Instance:
    """Fused quantization and dequantization to the same element type, 16-byte accesses only.

    Flat: whole blocks with at most one second-level value.
    """
    names = CXX_FORMATS[spec.name], CXX_DTYPES[dtype]
    return instance(
        "quantize_dequantize_kernel",
        "quantize/quantize_dequantize.cu",
        *names,
        _recipe_name(recipe),
        second,
        flat,
    )


@cache
def swizzle_kernel(layout: str, words: bool) -> Instance:
    """Linear to tiled scales, four bytes at a time or one."""
    return instance("swizzle_kernel", "scales/swizzle.cu", CXX_LAYOUTS[layout], words)


@cache
def unswizzle_kernel(layout: str, words: bool) -> Instance:
    """Tiled to linear scales."""
    return instance("unswizzle_kernel", "scales/swizzle.cu", CXX_LAYOUTS[layout], words)


@cache
def error_sums_kernel(x_dtype: str, y_dtype: str) -> Instance:
    """Error sums over two arrays."""
    return instance(
        "error_sums_kernel", "reduce/error_sums.cu", CXX_DTYPES[x_dtype], CXX_DTYPES[y_dtype]
    )


@cache
def quantized_error_sums_kernel(spec: FormatSpec, dtype: str) -> Instance:
    """Error sums over an array and its codes."""
    return instance(
        "quantized_error_sums_kernel",
        "reduce/error_sums.cu",
        CXX_FORMATS[spec.name],
        CXX_DTYPES[dtype],
    )


def _variants() -> list[tuple[FormatSpec, Recipe | None, bool]]:
    """Every (format, recipe, has a second level) that a plan can ask for."""
    result: list[tuple[FormatSpec, Recipe | None, bool]] = []
    for spec in BLOCK_FORMATS.values():
        if not spec.has_second_level:
            result.append((spec, None, False))
            continue
        for recipe in ALL_RECIPES.values():
            result.append((spec, recipe, True))
            if recipe.optional_second_level:
                result.append((spec, recipe, False))
    return result


def all_instances() -> list[Instance]:
    """Every kernel that any call can launch; tests compile each of them for each architecture."""
    result = [convert_second_level_kernel()]
    for layout in CXX_LAYOUTS:
        if layout == "linear":
            continue
        for words in (True, False):
            result += [swizzle_kernel(layout, words), unswizzle_kernel(layout, words)]
    for dtype in DTYPES:
        result += [amax_kernel(dtype), count_nonfinite_kernel(dtype), second_level_kernel(dtype)]
        result += [error_sums_kernel(dtype, other) for other in DTYPES]
        result += [quantized_error_sums_kernel(spec, dtype) for spec in BLOCK_FORMATS.values()]
        for spec, recipe, second in _variants():
            for flat in (True, False):
                result.append(quantize_dequantize_kernel(spec, dtype, recipe, second, flat))
            if spec.block_size == geometry.LANE:
                result.append(quantize_rowwise_swizzled_kernel(spec, dtype, recipe, second))
            for layout in CXX_LAYOUTS:
                result.append(quantize_rowwise_kernel(spec, dtype, recipe, second, layout))
            for vector in (True, False):
                result.append(quantize_rowwise_any_kernel(spec, dtype, recipe, second, vector))
            for access in DEQUANTIZE_ACCESSES:
                if second or access != "rows":
                    result.append(dequantize_rowwise_kernel(spec, dtype, recipe, second, access))
    return result


# ------------------------------------------------------------------------------------------------
# Source and options
# ------------------------------------------------------------------------------------------------


@cache
def kernel_directory() -> Path:
    """Where the CUDA sources lie, in a checkout or an installed wheel."""
    from importlib.resources import files

    return Path(str(files("fp4kit.kernels_cu")))


def source_hash(directory: Path) -> str:
    """16 hexadecimal digits that change with any source or header.

    CuPy's disk cache keys a kernel by its own text and options, not by the headers it includes:
    this number, as an option, makes an edited header count.
    """
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*.cu*")):
        digest.update(
            path.relative_to(directory).as_posix().encode() + b"\0" + path.read_bytes() + b"\0"
        )
    return digest.hexdigest()[:16]


def source_text(file: str) -> str:
    """A kernel file's text; the `#line` makes NVRTC name the file in its messages."""
    text = (kernel_directory() / file).read_text(encoding="utf-8")
    return f'#line 1 "kernels_cu/{file}"\n{text}'


def architecture_option(major: int, minor: int) -> str | None:
    """`-arch=` for devices that need an architecture-specific target, None elsewhere.

    The products of warpgroups exist in sm_90a, the E2M1 conversion in sm_100a, sm_103a, sm_120a and
    so on, not in the plain targets that CuPy asks for. Its own `-arch=sm_100`, later on the command
    line, keeps the suffix of ours.
    """
    return f"-arch=sm_{major}{minor}a" if major >= 9 else None


@cache
def options(major: int, minor: int) -> tuple[str, ...]:
    """The NVRTC options for a compute capability, the same in tests and in use."""
    directory = kernel_directory()
    fixed = (
        "-std=c++17",
        "-fmad=false",
        "-lineinfo",
        f"-I{directory}",
        f"-DFP4KIT_SOURCE_HASH=0x{source_hash(directory)}",
        f"-DFP4KIT_THREADS={geometry.THREADS}",
        *(f"-DFP4KIT_QUANTIZE_UNROLL_{size}={n}" for size, n in geometry.QUANTIZE_UNROLL.items()),
        *(f"-DFP4KIT_FLAT_BLOCKS_{size}={n}" for size, n in geometry.FLAT_BLOCKS.items()),
        f"-DFP4KIT_TILE_BLOCKS={geometry.TILE_BLOCKS}",
        f"-DFP4KIT_WIDE_BLOCKS={geometry.WIDE_BLOCKS}",
        f"-DFP4KIT_WIDE_BYTES={geometry.WIDE_BYTES}",
        f"-DFP4KIT_WIDE_BYTES_MOST={geometry.WIDE_BYTES_MOST}",
        *(f"-DFP4KIT_FUSED_UNROLL_{size}={n}" for size, n in geometry.FUSED_UNROLL.items()),
        f"-DFP4KIT_FUSED_BLOCKS={geometry.FUSED_BLOCKS}",
        *(f"-DFP4KIT_ROTATE_UNROLL_{size}={n}" for size, n in geometry.ROTATE_UNROLL.items()),
        *(f"-DFP4KIT_RESIDUAL_BLOCKS_{size}={n}" for size, n in geometry.RESIDUAL_BLOCKS.items()),
        f"-DFP4KIT_RESIDUAL_DEQUANTIZE_STAGED={geometry.RESIDUAL_DEQUANTIZE_STAGED}",
        f"-DFP4KIT_RESIDUAL_STAGED_THREADS={geometry.RESIDUAL_STAGED_THREADS}",
        f"-DFP4KIT_DEQUANTIZE_UNROLL={geometry.DEQUANTIZE_UNROLL}",
        f"-DFP4KIT_DEQUANTIZE_UNROLL_HEAVY={geometry.DEQUANTIZE_UNROLL_HEAVY}",
        f"-DFP4KIT_GRID_UNROLL={geometry.GRID_UNROLL}",
        *cuda_defines(),
    )
    architecture = architecture_option(major, minor)
    return fixed if architecture is None else (*fixed, architecture)


# ------------------------------------------------------------------------------------------------
# Loaded kernels
# ------------------------------------------------------------------------------------------------

_loaded: dict[tuple[int, Instance], Any] = {}


def loaded_count() -> int:
    """Kernels compiled or loaded so far in this process."""
    return len(_loaded)


def function(device: int, instance: Instance) -> Any:
    """The CuPy function of an instance, compiled for and loaded on the current device.

    Args:
        device: number of the current device.
        instance: what to load.

    Raises:
        KernelCompileError: if NVRTC refuses it.
    """
    loaded = _loaded.get((device, instance))
    if loaded is None:
        loaded = _loaded[device, instance] = _load(device, instance)
    return loaded


def _load(device: int, instance: Instance) -> Any:
    import cupy

    capability = cupy.cuda.Device(device).compute_capability
    chosen = options(int(capability[:-1]), int(capability[-1]))
    module = cupy.RawModule(
        code=source_text(instance.file),
        options=chosen,
        name_expressions=(instance.expression,),
    )
    try:
        # `.kernel` is the driver's handle: launching it skips RawKernel's checks on every call.
        return module.get_function(instance.expression).kernel
    except cupy.cuda.compiler.CompileException as error:
        raise KernelCompileError(
            compile_message(instance, capability, chosen, error.get_message())
        ) from error


def compile_message(instance: Instance, capability: str, chosen: tuple[str, ...], log: str) -> str:
    """What went wrong, with what is needed to reproduce it."""
    lines = [line for line in log.splitlines() if line.strip()]
    shown = "\n  ".join(lines[:LOG_LINES])
    more = f"\n  ... {len(lines) - LOG_LINES} more lines" if len(lines) > LOG_LINES else ""
    return (
        f"NVRTC could not compile {instance.expression} of kernels_cu/{instance.file} for compute "
        f"capability {capability}:\n  {shown}{more}\noptions: {' '.join(chosen)}\n"
        "`fp4kit env` shows the versions involved; please include its output in a report"
    )
