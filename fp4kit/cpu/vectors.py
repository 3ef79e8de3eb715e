# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Numbers side by side in kernels: vectors of LLVM, whatever the processor's width.

LLVM makes table look-ups of no loop, so what multiplies codes is written as vectors. They have 16
lanes everywhere: LLVM cuts them for processors with narrower ones, and the order of sums, hence
their bytes, stays.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from .codecs import DOUBLED_VALUES, decode_e4m3, decode_e8m0
from .elements import HAS_HALF, QUIET_NAN, widen_half
from .intrinsics import F32, HALF, LLVM_TYPES, U16, U32, Number, most, where

LANES = 16
BYTE, WORD, FLOAT, INDEX = ir.IntType(8), ir.IntType(32), ir.FloatType(), ir.IntType(64)
FLOATS = ir.VectorType(FLOAT, LANES)
#: E4M3 scales are taken as float16 of the same fields, which are this part of them.
HALF_SCALE = 256.0


#: Lanes, of which operators of numbers say no more than that they are numbers.
Vector = Any


class Lanes(Number):
    """A vector of a kernel that is being compiled; what is written for numbers takes it too."""

    def type_of(self, kind: Any) -> ir.Type:
        """A vector of as many lanes."""
        return ir.VectorType(LLVM_TYPES[kind], self.value.type.count)

    def constant(self, number: float) -> ir.Value:
        """The number in all lanes."""
        return ir.Constant(self.type_of(self.kind), [number] * self.value.type.count)

    def picked(self, lanes: list[int]) -> Vector:
        """The lanes of these numbers."""
        mask = ir.Constant(ir.VectorType(WORD, len(lanes)), lanes)
        return self.made(self.builder.shuffle_vector(self.value, self.value, mask))

    def fma(self, factor: Vector, addend: Vector) -> Vector:
        """Itself times a factor plus an addend, rounded once."""
        kind = self.value.type
        name = f"llvm.fma.v{kind.count}f32"
        values = [self.value, factor.value, addend.value]
        return self.made(_called(self.builder, name, kind, values))

    def total(self) -> ir.Value:
        """The sum of float32 lanes, a power of two of them: halves are added to each other."""
        rest: Vector = self
        while rest.value.type.count > 1:
            half = rest.value.type.count // 2
            rest = rest.picked(list(range(half))) + rest.picked(list(range(half, 2 * half)))
        return self.builder.extract_element(rest.value, WORD(0))


def _called(builder: ir.IRBuilder, name: str, result: ir.Type, values: list[ir.Value]) -> ir.Value:
    """A call of an LLVM intrinsic."""
    kind = ir.FunctionType(result, [value.type for value in values])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, values)


def splat(builder: ir.IRBuilder, value: ir.Value, kind: Any) -> Vector:
    """One number in all lanes."""
    one = ir.VectorType(LLVM_TYPES[kind], 1)
    vector = builder.insert_element(ir.Constant(one, ir.Undefined), value, WORD(0))
    return Lanes(builder, vector, kind).picked([0] * LANES)


def at(builder: ir.IRBuilder, pointer: ir.Value, offset: ir.Value | int) -> ir.Value:
    """A pointer so many bytes on."""
    return builder.gep(pointer, [INDEX(offset) if isinstance(offset, int) else offset])


def load(builder: ir.IRBuilder, pointer: ir.Value, kind: Any, lanes: int = LANES) -> Vector:
    """Lanes from any address."""
    vector = ir.VectorType(LLVM_TYPES[kind], lanes)
    typed = builder.bitcast(pointer, vector.as_pointer())
    return Lanes(builder, builder.load(typed, align=1), kind)


def prefetch(builder: ir.IRBuilder, pointer: ir.Value) -> None:
    """Asks for a cache line that will be read; it need not exist."""
    hints = [WORD(0), WORD(3), WORD(1)]
    _called(builder, "llvm.prefetch.p0i8", ir.VoidType(), [pointer, *hints])


def store(pointer: ir.Value, lanes: Vector) -> None:
    """Lanes to any address."""
    build = lanes.builder
    build.store(lanes.value, build.bitcast(pointer, lanes.value.type.as_pointer()), align=1)


def features_of(context: Any) -> frozenset[str]:
    """What the processor that numba compiles for can do."""
    named = context.codegen().magic_tuple()[2].split(",")
    # The last word on a feature counts.
    state = {name[1:]: name[0] for name in named if name}
    return frozenset(name for name, sign in state.items() if sign == "+")


def e2m1(words: Vector, factor: float, features: frozenset[str]) -> Vector:
    """The E2M1 codes in the lowest four bits of each lane, as float32 times a power of two."""
    build = words.builder
    values = [((int(DOUBLED_VALUES) >> (4 * code)) & 15) * factor / 2 for code in range(8)]
    if "avx512f" in features:
        # The instruction looks at no more than the four bits.
        table = ir.Constant(FLOATS, values + [-value for value in values])
        name = "llvm.x86.avx512.permvar.sf.512"
        return words.made(_called(build, name, FLOATS, [table, words.value]), F32)
    if "avx2" in features:
        table = ir.Constant(ir.VectorType(FLOAT, 8), values)
        low, high = (
            _called(build, "llvm.x86.avx2.permps", table.type, [table, words.picked(part).value])
            for part in ([*range(8)], [*range(8, 16)])
        )
        both = ir.Constant(ir.VectorType(WORD, LANES), [*range(LANES)])
        magnitude = words.made(build.shuffle_vector(low, high, both), F32)
    else:
        doubled = words.made(words.like(DOUBLED_VALUES)) >> ((words & 7) << 2)
        magnitude = (doubled & 15).cast(F32) * (factor / 2)
    return (magnitude.bits_as(U32) | ((words & 8) << 28)).bits_as(F32)


def e4m3_part(byte: Vector, *, ordinary: bool) -> Vector:
    """float32 of E4M3 bytes (U8) over HALF_SCALE; `ordinary`: of 0 to 0x7E alone."""
    if not HAS_HALF:
        return decode_e4m3(byte.cast(U32)) * (1 / HALF_SCALE)
    fields = byte.cast(U16) << 7
    if ordinary:
        return fields.bits_as(HALF).cast(F32)
    value = ((fields & 0x3F80) | ((fields & 0x4000) << 1)).bits_as(HALF).cast(F32)
    is_nan = (fields & 0x3F80).equals(0x3F80)
    return where(is_nan, QUIET_NAN, value.bits_as(U32)).bits_as(F32)


def e5m2(byte: Vector) -> Vector:
    """float32 of E5M2 bytes (U8): they are float16 without its lower half."""
    return widen_half(byte.cast(U32) << 8)


def e8m0(exponent: Vector, *, ordinary: bool) -> Vector:
    """float32 of E8M0 bytes that are exponents of U32 already; `ordinary`: of 0 to 254 alone."""
    if not ordinary:
        return decode_e8m0(exponent >> 23)
    # Byte 0 is half of what byte 1 is.
    return most(exponent, 0x00400000).bits_as(F32)


def picked_exponents(builder: ir.IRBuilder, pointer: ir.Value, picks: list[int]) -> Vector:
    """Of four bytes that of each lane, by its number, as the exponent of a float32 (U32)."""
    number = builder.load(builder.bitcast(pointer, WORD.as_pointer()), align=1)
    words = splat(builder, number, U32)
    turns = ir.Constant(words.value.type, [(23 - 8 * pick) % 32 for pick in picks])
    values = [words.value, words.value, turns]
    name = f"llvm.fshl.v{LANES}i32"
    return words.made(_called(builder, name, words.value.type, values)) & 0x7F800000
