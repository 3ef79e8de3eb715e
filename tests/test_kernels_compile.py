# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Every kernel instance compiles with NVRTC, without a GPU, under the options used on one.

The plain run compiles every instance at least once, spread over the architectures, and every kernel
for every architecture; `-m slow` compiles every instance for every architecture, which takes an
hour. The NVRTC is that of the installed `cuda-bindings` (tried: 12.9 and 13.5); an instance meets
NVRTC 12 for another architecture than NVRTC 13.
"""

import re
import shutil
import subprocess
import sys
from collections import defaultdict
from functools import cache

import pytest

import member_samples
import variant_samples
from fp4kit.cuda import (
    activations as cuda_activations,
)
from fp4kit.cuda import (
    compile as cuda_module,
)
from fp4kit.cuda import (
    grid as cuda_grid,
)
from fp4kit.cuda import (
    matmul_instances as cuda_matmul_instances,
)
from fp4kit.cuda import (
    matmul_shapes as cuda_matmul_shapes,
)
from fp4kit.cuda import (
    matmul_warpgroup as cuda_matmul_warpgroup,
)
from fp4kit.cuda import (
    measured as cuda_measured,
)
from fp4kit.cuda import (
    prepared as cuda_prepared,
)
from fp4kit.cuda import (
    residual_launch as cuda_residual_launch,
)
from fp4kit.cuda.compile import CUPY_OPTIONS, Instance, all_instances, options, source_text
from fp4kit.errors import KernelCompileError

#: Compute capabilities; the last three have the E2M1 conversion, in their `a` targets.
CAPABILITIES = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)]
INSTANCES = [
    *all_instances(),
    *variant_samples.sample_instances(),
    *member_samples.sample_instances(),
    *cuda_activations.all_instances(),
    *cuda_residual_launch.all_instances(),
    *cuda_measured.sample_instances(),
    *cuda_matmul_shapes.sample_instances(),
    *cuda_matmul_warpgroup.sample_instances(),
    *cuda_prepared.all_instances(),
    *cuda_grid.sample_instances(),
    *cuda_matmul_instances.all_instances(),
]
#: Files whose kernels activate elements.
ACTIVATING = (
    "activation/activate.cu",
    "reduce/column_sums.cu",
    "quantize/rowwise.cu",
    "quantize/rowwise_column_sums.cu",
    "tiles/quantize_tiles.cu",
)
FILES = sorted({instance.file for instance in INSTANCES})


def target_name(capability):
    major, minor = capability
    return f"sm_{major}{minor}{'a' if major >= 10 else ''}"


@cache
def nvrtc():
    """cuda-bindings' NVRTC module, or a skip with the reason."""
    try:
        from cuda.bindings import nvrtc as module

        error, *_ = module.nvrtcVersion()
    except Exception as problem:  # the package, or the library it loads, may be missing
        pytest.skip(f"NVRTC through cuda-bindings is not available: {problem}")
    assert error == module.nvrtcResult.NVRTC_SUCCESS
    return module


def nvrtc_major():
    _, major, _ = nvrtc().nvrtcVersion()
    return major


def read_back(size_of, copy, program):
    _, size = size_of(program)
    # Not bytes: one of length 1 would be the interpreter's shared b" ", and NVRTC writes into it.
    buffer = bytearray(size)
    copy(program, buffer)
    return buffer.decode().rstrip("\0")


def compile_ptx(text, file, expressions, capability):
    """PTX of a source under the backend's options and CuPy's, which come last as they do there."""
    rtc = nvrtc()
    major, minor = capability
    chosen = [*options(major, minor), *CUPY_OPTIONS, f"-arch=sm_{major}{minor}"]
    _, program = rtc.nvrtcCreateProgram(text.encode(), file.encode(), 0, [], [])
    for expression in expressions:
        rtc.nvrtcAddNameExpression(program, expression.encode())
    encoded = [option.encode() for option in chosen]
    (status,) = rtc.nvrtcCompileProgram(program, len(encoded), encoded)
    log = read_back(rtc.nvrtcGetProgramLogSize, rtc.nvrtcGetProgramLog, program)
    if status != rtc.nvrtcResult.NVRTC_SUCCESS:
        instance = Instance(file, ", ".join(expressions))
        message = cuda_module.compile_message(instance, f"{major}.{minor}", tuple(chosen), log)
        raise KernelCompileError(message)
    for expression in expressions:
        error, _ = rtc.nvrtcGetLoweredName(program, expression.encode())
        assert error == rtc.nvrtcResult.NVRTC_SUCCESS, expression
    ptx = read_back(rtc.nvrtcGetPTXSize, rtc.nvrtcGetPTX, program)
    rtc.nvrtcDestroyProgram(program)
    return ptx


def kernel_of(instance):
    return instance.expression.split("<")[0]


def share_of(capability, file, major):
    """This architecture's part of a file's instances for an NVRTC, and one of each kernel."""
    shift = major % 2 * len(CAPABILITIES) // 2
    position = (CAPABILITIES.index(capability) + shift) % len(CAPABILITIES)
    mine = [instance for instance in INSTANCES if instance.file == file]
    chosen = {kernel_of(instance): instance for instance in reversed(mine)}
    rotated = mine[position :: len(CAPABILITIES)]
    return [instance.expression for instance in dict.fromkeys([*chosen.values(), *rotated])]


def check_ptx(ptx, file, capability):
    assert f".target {target_name(capability)}" in ptx
    if file in ACTIVATING:
        # A guess for numbers that are never subnormal, which is then made exact.
        ptx = ptx.replace("rcp.approx.ftz.f32", "")
    # CuPy asks for flushed subnormals; no float operation of ours may follow.
    assert not re.findall(r"\S+\.ftz\S*", ptx)
    assert not re.findall(r"\.approx\S*", ptx)
    encodes = file.startswith(("quantize/", "search/", "tiles/", "residual/quantize"))
    assert ("e2m1x2" in ptx) == (encodes and capability[0] >= 10)


@pytest.mark.parametrize("capability", CAPABILITIES, ids=target_name)
@pytest.mark.parametrize("file", FILES)
def test_instances_compile(file, capability):
    expressions = share_of(capability, file, nvrtc_major())
    ptx = compile_ptx(source_text(file), file, expressions, capability)
    check_ptx(ptx, file, capability)


@pytest.mark.parametrize("major", [12, 13])
def test_the_plain_run_compiles_every_instance(major):
    compiled = {
        expression
        for file in FILES
        for capability in CAPABILITIES
        for expression in share_of(capability, file, major)
    }
    assert compiled == {instance.expression for instance in INSTANCES}


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES, ids=target_name)
@pytest.mark.parametrize("file", FILES)
def test_every_instance_compiles_for_every_architecture(file, capability):
    expressions = [instance.expression for instance in INSTANCES if instance.file == file]
    ptx = compile_ptx(source_text(file), file, expressions, capability)
    check_ptx(ptx, file, capability)


def test_no_header_is_needed():
    """Nothing but our own files is included: NVRTC alone is enough (no toolkit headers)."""
    directory = cuda_module.kernel_directory()
    for path in directory.rglob("*.cu*"):
        for name in re.findall(r"^#include\s+(\S+)", path.read_text(encoding="utf-8"), re.M):
            assert name.startswith('"'), f"{path.name} includes {name}"
            assert (directory / name.strip('"')).exists()


def test_every_source_is_instantiated():
    directory = cuda_module.kernel_directory()
    sources = {path.relative_to(directory).as_posix() for path in directory.rglob("*.cu")}
    assert sources == set(FILES)
    declared = defaultdict(set)
    for instance in INSTANCES:
        declared[instance.file].add(kernel_of(instance).removeprefix("fp4kit::"))
    for file in FILES:
        found = re.findall(r"__global__[^;{]*?(\w+_kernel)\(", source_text(file))
        assert set(found) == declared[file]


def test_errors_name_the_kernel_file_and_options():
    text = '#line 1 "kernels_cu/amax.cu"\nnamespace fp4kit { __global__ void f() { oops; } }\n'
    with pytest.raises(KernelCompileError) as caught:
        compile_ptx(text, "reduce/amax.cu", ["fp4kit::f"], (9, 0))
    message = str(caught.value)
    for part in ("kernels_cu/amax.cu(1)", "oops", "fp4kit::f", "-fmad=false", "`fp4kit env`"):
        assert part in message


def test_options_depend_on_every_source(tmp_path):
    shutil.copytree(cuda_module.kernel_directory(), tmp_path, dirs_exist_ok=True)
    before = cuda_module.source_hash(tmp_path)
    assert f"-DFP4KIT_SOURCE_HASH=0x{before}" in options(9, 0)
    header = tmp_path / "common/numerics.cuh"
    header.write_text(header.read_text(encoding="utf-8") + "// edited\n", encoding="utf-8")
    assert cuda_module.source_hash(tmp_path) != before


def test_importing_compiles_nothing():
    code = (
        "import sys\n"
        "from fp4kit.cuda import backend, launch, compile as cuda_module\n"
        "cuda_module.all_instances()\n"
        "assert 'cupy' not in sys.modules\n"
        "assert cuda_module.loaded_count() == 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
