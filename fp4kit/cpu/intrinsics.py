# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Functions of a few numbers, written as LLVM instructions into the kernel that calls them.

numba would infer the types of each such function, lower it, optimize it and make machine code of
it, 50 ms every time, only for LLVM to inline it in the end. A function under :func:`intrinsic` is
called instead, while the kernel that needs it is compiled, with symbols in the place of numbers,
and writes down what is done to them. It may not branch: :func:`where` chooses between two results.
Integers keep their width, other than numba's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from llvmlite import ir
from numba import extending as untyped_extending
from numba import types as untyped_types

extending: Any = untyped_extending
types: Any = untyped_types
Function = TypeVar("Function", bound=Callable[..., Any])

BOOL = types.boolean
U8, U16, U32, U64 = types.uint8, types.uint16, types.uint32, types.uint64
I16, I32, I64 = types.int16, types.int32, types.int64
F32, F64 = types.float32, types.float64
HALF = "half"
WIDTHS = {BOOL: 1, U8: 8, U16: 16, I16: 16, U32: 32, I32: 32, U64: 64, I64: 64}
LLVM_TYPES = {kind: ir.IntType(width) for kind, width in WIDTHS.items()} | {
    F32: ir.FloatType(),
    F64: ir.DoubleType(),
    HALF: ir.HalfType(),
}
SIGNED, FLOATS = (I16, I32, I64), (F32, F64)


Operator = Callable[["Number", Any], "Number"]


def _operator(integers: str, floats: str = "", signed: str = "") -> Operator:
    """An operator of two numbers of one type: the instruction for it, by the type."""

    def operate(self: Number, other: Any) -> Number:
        name = floats if self.kind in FLOATS else signed if self.kind in SIGNED else integers
        instruction = getattr(self.builder, name or integers)
        return self.made(instruction(self.value, self.like(other)))

    return operate


def _swapped(operate: Operator) -> Operator:
    return lambda self, other: operate(self.made(self.like(other)), self)


def _comparison(operator: str) -> Operator:
    def compare(self: Number, other: Any) -> Number:
        # NaN differs from everything, and is in no order with anything.
        floats = "fcmp_unordered" if operator == "!=" else "fcmp_ordered"
        integers = "icmp_signed" if self.kind in SIGNED else "icmp_unsigned"
        instruction = getattr(self.builder, floats if self.kind in FLOATS else integers)
        return self.made(instruction(operator, self.value, self.like(other)), BOOL)

    return compare


class Number:
    """A number of a kernel that is being compiled; operations on it become instructions."""

    __array_ufunc__ = None  # NumPy's numbers leave it to this class what they and it give

    def __init__(self, builder: ir.IRBuilder, value: ir.Value, kind: Any) -> None:
        self.builder, self.value, self.kind = builder, value, kind

    def like(self, other: Any) -> ir.Value:
        """Another number, or a constant, as a value of this number's type."""
        if isinstance(other, Number):
            if other.kind != self.kind:
                raise TypeError(f"{self.kind} and {other.kind} in one operation")
            return other.value
        return self.constant(float(other) if self.kind in FLOATS else int(other))

    def constant(self, number: float) -> ir.Value:
        """A constant of this number's type."""
        return LLVM_TYPES[self.kind](number)

    def type_of(self, kind: Any) -> ir.Type:
        """The LLVM type of what :meth:`cast` and :meth:`bits_as` give."""
        return LLVM_TYPES[kind]

    def made(self, value: ir.Value, kind: Any = None) -> Number:
        """The result of an instruction, of this number's type unless told otherwise."""
        return type(self)(self.builder, value, kind or self.kind)

    __add__ = __radd__ = _operator("add", "fadd")
    __sub__ = _operator("sub", "fsub")
    __mul__ = __rmul__ = _operator("mul", "fmul")
    __truediv__ = _operator("fdiv")
    __and__ = __rand__ = _operator("and_")
    __or__ = __ror__ = _operator("or_")
    __xor__ = __rxor__ = _operator("xor")
    __lshift__ = _operator("shl")
    __rshift__ = _operator("lshr", signed="ashr")
    __rsub__, __rtruediv__ = _swapped(__sub__), _swapped(__truediv__)
    __rlshift__, __rrshift__ = _swapped(__lshift__), _swapped(__rshift__)
    __lt__, __le__ = _comparison("<"), _comparison("<=")
    __gt__, __ge__ = _comparison(">"), _comparison(">=")
    equals, differs = _comparison("=="), _comparison("!=")  # `==` is left to Python

    def __bool__(self) -> bool:
        raise TypeError("an intrinsic may not branch: use where()")

    def bits_as(self, kind: Any) -> Number:
        """The same bits as a type of the same width."""
        return self.made(self.builder.bitcast(self.value, self.type_of(kind)), kind)

    def cast(self, kind: Any) -> Number:
        """An integer as another integer type, or as a float; a float as another float."""
        target, build = self.type_of(kind), self.builder
        if self.kind in WIDTHS and kind in WIDTHS:
            extend = build.sext if self.kind in SIGNED else build.zext
            change = extend if WIDTHS[kind] > WIDTHS[self.kind] else build.trunc
            same = WIDTHS[kind] == WIDTHS[self.kind]
            value = self.value if same else change(self.value, target)
        elif self.kind in WIDTHS:
            to_float = build.sitofp if self.kind in SIGNED else build.uitofp
            value = to_float(self.value, target)
        elif kind == F64 or self.kind == HALF:
            value = build.fpext(self.value, target)
        else:
            value = build.fptrunc(self.value, target)
        return self.made(value, kind)


def where(condition: Number, first: Any, second: Any) -> Number:
    """`first` if the condition holds, else `second`; one of them may be a constant."""
    known = first if isinstance(first, Number) else second
    chosen = condition.builder.select(condition.value, known.like(first), known.like(second))
    return known.made(chosen)


def least(first: Number, second: Any) -> Number:
    """The smaller of two integers."""
    return where(first < second, first, second)


def most(first: Number, second: Any) -> Number:
    """The larger of two integers."""
    return where(first > second, first, second)


def intrinsic(*signatures: Any) -> Callable[[Function], Function]:
    """Makes a straight-line function of :class:`Number` known to numba.

    Args:
        signatures: its numba signatures. A call takes the one whose argument types it has, or else
            the only one, to whose types numba then converts its arguments.
    """

    def register(function: Function) -> Function:
        by_types = {signature.args: signature for signature in signatures}

        def infer(*arguments: Any) -> Any:
            exact = by_types.get(tuple(types.unliteral(argument) for argument in arguments))
            return signatures[0] if exact is None and len(signatures) == 1 else exact

        def generate(_context: Any, builder: Any, chosen: Any, values: Any) -> Any:
            return builder.call(_emitted(function, chosen, builder.module), values)

        infer.pysig = inspect.signature(function)  # type: ignore[attr-defined]
        extending.type_callable(function)(lambda _context: infer)
        for signature in signatures:
            extending.lower_builtin(function, *signature.args)(generate)
        return function

    return register


def _emitted(function: Callable[..., Any], signature: Any, module: ir.Module) -> ir.Function:
    """The LLVM function of an intrinsic in a module; written when it is first called there.

    A call is small: LLVM unrolls the loops around it before it puts the body in its place.
    """
    kinds = "_".join(str(kind) for kind in signature.args)
    name = f"fp4kit.{function.__name__}.{kinds}"
    known = module.globals.get(name)
    if known is not None:
        return known
    kind = ir.FunctionType(
        LLVM_TYPES[signature.return_type], [LLVM_TYPES[kind] for kind in signature.args]
    )
    emitted = ir.Function(module, kind, name)
    emitted.linkage = "linkonce_odr"
    emitted.attributes.add("alwaysinline")
    builder = ir.IRBuilder(emitted.append_basic_block())
    pairs = zip(emitted.args, signature.args, strict=True)
    builder.ret(function(*(Number(builder, value, kind) for value, kind in pairs)).value)
    return emitted
