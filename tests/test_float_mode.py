# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Bytes do not depend on the float mode of the thread, as a -ffast-math library leaves it."""

import ctypes
import dataclasses
import platform
import subprocess
import sys
import threading

import numpy as np
import pytest
import safetensors.numpy

import fp4kit
from fp4kit import float_mode
from fp4kit.cpu import threads as cpu_threads
from fp4kit.cpu.matrices import decode_float8, round_float32
from fp4kit.errors import BackendUnavailableError
from fp4kit.io.compare import compare_files
from fp4kit.io.dequantize import dequantize_file
from fp4kit.io.quantize import quantize_file
from fp4kit.io.report import QuantizeOptions
from parity_cases import OPTIONS, OUTPUT_OF
from sample_arrays import NUMPY

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or platform.machine() not in ("x86_64", "aarch64"),
    reason="the control word is known on Linux with x86-64 or 64-bit Arm only",
)
X86 = platform.machine() == "x86_64"
#: The 32-bit word of `fenv_t` with the control bits: MXCSR, FPCR.
PLACE = 7 if X86 else 0
FLUSH = {"results and operands": 0x8040, "results": 0x8000, "operands": 0x0040}
if not X86:
    FLUSH = {"both": 1 << 24}
#: Rounding up, down and to zero.
ROUNDING = (0x4000, 0x2000, 0x6000) if X86 else (1 << 22, 2 << 22, 3 << 22)


class Mode:
    """The control word of this thread."""

    def __init__(self):
        self.library = float_mode._library()

    def _environment(self):
        words = (ctypes.c_uint32 * 128)()
        self.library.fegetenv(words)
        return words

    def get(self):
        return self._environment()[PLACE] & ~0x3F  # without what has happened so far

    def set(self, bits):
        words = self._environment()
        words[PLACE] |= bits
        self.library.fesetenv(words)


@pytest.fixture
def mode():
    saved = (ctypes.c_uint32 * 128)()
    float_mode._library().fegetenv(saved)
    yield Mode()
    float_mode._library().fesetenv(saved)


def small(dtype, shape=(32, 256)):
    """Values around and below the smallest normal float32, some zeros and some larger ones."""
    rng = np.random.default_rng(7)
    scale = np.exp2(rng.integers(-150, -120, shape)).astype(np.float64)
    values = rng.standard_normal(shape) * scale
    if dtype == "float16":
        values = values * 2.0**110
    values[0] = rng.standard_normal(shape[1])
    values[1] = 0
    return values.astype(np.float32).astype(NUMPY[dtype])


def parts(value):
    """The bytes of all arrays of a result."""
    if isinstance(value, np.ndarray):
        return [value.tobytes()]
    if dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, (tuple, list)):
        return [part for item in value for part in parts(item)]
    return [repr(value)]


def everything(x, backend, options, out_dtype="float32"):
    """What the library makes of an array."""
    q = fp4kit.quantize(x, backend=backend, **options)
    decoded = fp4kit.dequantize(q, out_dtype, backend=backend)
    return parts([q, decoded, fp4kit.amax(x, backend=backend)])


VARIANTS = {
    "columns": {"direction": "columnwise"},
    "2d": {"block_shape": "2d"},
    "both": {"direction": "both"},
    "per token": {"second_level": "per_token"},
    "rotated": {"direction": "columnwise", "rht": True},
    "stochastic": {"rounding": "stochastic", "seed": 1},
    "four_over_six": {"scale_search": "four_over_six"},
    "sweep": {"scale_search": "sweep"},
}


def test_the_mode_is_what_these_tests_take_it_for(mode):
    tiny, one = np.full(64, 1e-39, np.float32), np.ones(64, np.float32)
    assert np.all(tiny * one == tiny)
    assert float_mode.is_ieee()
    mode.set(next(iter(FLUSH.values())))
    flushed = (tiny * one).view(np.uint32)
    still = float_mode.is_ieee()
    float_mode._reset()
    assert not flushed.any()
    assert not still


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_format_and_recipe(mode, backend, dtype, name):
    x = small(dtype)
    arguments = (OPTIONS[name], OUTPUT_OF[dtype])
    expected = everything(x, "reference", *arguments)
    for bits in FLUSH.values():
        mode.set(bits)
        before = mode.get()
        result, after = everything(x, backend, *arguments), mode.get()
        float_mode._reset()
        assert result == expected
        assert before == after
        assert before & bits == bits


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", VARIANTS)
def test_variants(mode, backend, name):
    x, options = small("float32"), {"amax": None} | VARIANTS[name]
    options = {key: value for key, value in options.items() if value is not None}

    def result(chosen):
        q = fp4kit.quantize(x, backend=chosen, **options)
        halves = list(q) if isinstance(q, fp4kit.DirectionPair) else [q]
        return parts([[half, fp4kit.dequantize(half, backend=chosen)] for half in halves])

    expected = result("reference")
    mode.set(next(iter(FLUSH.values())))
    flushed = result(backend)
    float_mode._reset()
    assert flushed == expected


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_operations_around_quantization(mode, backend):
    x = small("float32")

    def result(chosen):
        r = fp4kit.quantize_residual(x, 64, backend=chosen)
        gelu = fp4kit.quantize(x, activation="gelu", backend=chosen)
        turned = fp4kit.hadamard_transform(x, backend=chosen)
        stats = fp4kit.error_stats(x, fp4kit.quantize(x, backend=chosen), backend=chosen)
        fake = fp4kit.quantize_dequantize(x, backend=chosen)
        codes = parts([fake, r, fp4kit.dequantize_residual(r, backend=chosen), gelu, turned])
        return codes, stats.saturated, stats.zero_codes, stats.scale_subnormal

    expected = result(backend)
    mode.set(next(iter(FLUSH.values())))
    flushed = result(backend)
    float_mode._reset()
    assert flushed == expected


@pytest.mark.parametrize("bits", ROUNDING)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_the_direction_of_rounding(mode, backend, bits):
    x = small("float32")
    expected = everything(x, backend, {})
    mode.set(bits)
    result = everything(x, backend, {})
    float_mode._reset()
    assert result == expected


@pytest.mark.parametrize("started", ["before", "after", "by another thread"])
def test_threads_of_the_pool(mode, monkeypatch, started):
    monkeypatch.setenv(cpu_threads.THREADS_VARIABLE, "3")
    cpu_threads._pool.cache_clear()
    x = small("float32", (512, 4096))
    pieces = [fp4kit.quantize(x[i : i + 16], amax=fp4kit.amax(x)) for i in range(0, 512, 16)]
    expected = b"".join(piece.packed.tobytes() for piece in pieces)
    if started == "before":
        assert fp4kit.quantize(x).packed.tobytes() == expected
    bits = next(iter(FLUSH.values()))
    if started == "by another thread":

        def flush():
            mode.set(bits)
            cpu_threads.run(lambda begin, end: None, 1 << 20, 1)

        thread = threading.Thread(target=flush)
        thread.start()
        thread.join()
    mode.set(bits)
    large, decoded = fp4kit.quantize(x), fp4kit.dequantize(pieces[3], "float32")
    float_mode._reset()
    cpu_threads._pool.cache_clear()
    assert large.packed.tobytes() == expected
    assert decoded.tobytes() == fp4kit.dequantize(pieces[3], "float32").tobytes()


def test_files(mode, tmp_path):
    source = tmp_path / "in.safetensors"
    safetensors.numpy.save_file({"w": small("float32")}, source)

    def result(name):
        target, back = tmp_path / f"{name}.safetensors", tmp_path / f"{name}-back.safetensors"
        quantize_file(source, target, QuantizeOptions())
        dequantize_file(target, back, "float32")
        report = compare_files(source, back)
        return target.read_bytes(), back.read_bytes(), repr(report.tensors[0].stats)

    expected = result("a")
    mode.set(next(iter(FLUSH.values())))
    flushed = result("b")
    float_mode._reset()
    assert flushed == expected


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_where_it_cannot_be_changed_it_is_refused(monkeypatch, backend):
    monkeypatch.setattr(float_mode, "_library", lambda: None)
    monkeypatch.setattr(float_mode, "is_ieee", lambda: False)
    with pytest.raises(BackendUnavailableError, match="treats subnormal numbers as zero"):
        fp4kit.quantize(small("float32"), backend=backend)


def test_numbers_of_checkpoints(mode):
    codes = np.arange(256, dtype=np.uint8).reshape(4, 64)
    table = fp4kit.ALL_FORMATS["mxfp8"].element.values
    scale, row = np.full((4, 1), 2.0**-130, np.float32), np.arange(4)
    values = small("float32").reshape(-1)

    def result():
        out, rounded = np.empty((4, 64), np.float32), np.empty(2 * values.size, np.uint8)
        decode_float8(codes, table, scale, row, 64, out)
        round_float32(values, "bfloat16", rounded)
        return out.tobytes(), rounded.tobytes()

    expected = result()
    mode.set(next(iter(FLUSH.values())))
    flushed = result()
    float_mode._reset()
    assert flushed == expected


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("recipe", [("te", "amax"), ("modelopt", "decode_scale")], ids=str)
def test_scales_that_are_numbers(mode, backend, recipe):
    x, value = small("float32"), 2.0**-130
    options = {"recipe": recipe[0], recipe[1]: value, "backend": backend}
    expected = parts(fp4kit.quantize(x, **options))
    mode.set(next(iter(FLUSH.values())))
    flushed = parts(fp4kit.quantize(x, **options))
    float_mode._reset()
    assert flushed == expected


#: Sets the mode before anything of fp4kit is there, then tells what becomes of small numbers.
IMPORT = """
import ctypes, sys
place, bits = int(sys.argv[1]), int(sys.argv[2])
library = ctypes.PyDLL(None)
library = library if hasattr(library, "fesetenv") else ctypes.PyDLL("libm.so.6")
words = (ctypes.c_uint32 * 128)()
library.fegetenv(words)
words[place] |= bits
library.fesetenv(words)
import numpy as np
import fp4kit
x = np.arange(4096, dtype=np.uint32).reshape(32, 128).view(np.float32)
for options in ({}, {"format": "mxfp4"}, {"format": "mxfp8"}):
    q = fp4kit.quantize(x, backend="reference", **options)
    y = fp4kit.dequantize(q, backend="reference")
    print(np.asarray(q.packed).tobytes().hex(), q.block_scale.tobytes().hex(), y.tobytes().hex())
"""


def test_a_library_that_was_loaded_before(tmp_path):
    """Python compiles the modules in that mode, in which its parser reads 5e-324 as zero."""

    def result(bits, place):
        command = [sys.executable, "-X", f"pycache_prefix={tmp_path / str(bits)}", "-c", IMPORT]
        command += [str(place), str(bits)]
        return subprocess.run(command, capture_output=True, check=True).stdout

    flushed = result(next(iter(FLUSH.values())), PLACE)
    assert flushed == result(0, PLACE)
    assert flushed.count(b"\n") == 3
