# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Rounding and rotation that gradients pass through.

Quantization is a step function, whose gradient is zero wherever it exists. These functions give the
straight-through estimate instead: rounding counts as the identity, and all else has its own
gradient (Bengio, Leonard and Courville 2013, arXiv:1308.3432).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

import fp4kit
from fp4kit.arrays.torch_rules import leave_uncompiled
from fp4kit.errors import DtypeError, OptionError
from fp4kit.scheme import Scheme, as_scheme

if TYPE_CHECKING:
    from typing import Unpack

    from fp4kit.api.options import Backend, Nonfinite
    from fp4kit.options import Direction, Format, RhtRounding, SchemeFields

    class FakeOptions(SchemeFields, total=False):
        """Options of :func:`quantize_dequantize` beside the scheme."""

        dtype: Any
        amax: Any
        decode_scale: Any
        encode_scale: Any
        seed: int | None
        subsequence: int
        nonfinite: Nonfinite
        undo_rht: bool
        backend: Backend | None


#: Options of a call that are no fields of a Scheme.
_OF_CALL = (
    *("dtype", "amax", "decode_scale", "encode_scale", "seed", "subsequence", "nonfinite"),
    *("undo_rht", "backend"),
)
_Map = Callable[[torch.Tensor], torch.Tensor]


class _StraightThrough(torch.autograd.Function):
    """A function whose gradient another one maps back."""

    @staticmethod
    def forward(x: torch.Tensor, function: _Map, back: _Map | None) -> torch.Tensor:
        return function(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, _, ctx.back = inputs
        ctx.dtype = x.dtype

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        passed = gradient if ctx.back is None else ctx.back(gradient)
        return passed.to(ctx.dtype), None, None


def _apply(x: torch.Tensor, function: _Map, back: _Map | None) -> torch.Tensor:
    if not isinstance(x, torch.Tensor):
        raise DtypeError(
            f"x is a {type(x).__name__}; fp4kit.torch takes torch tensors, the functions of fp4kit "
            "itself arrays of any framework"
        )
    result: torch.Tensor = _StraightThrough.apply(x, function, back)
    return result


@leave_uncompiled
def quantize_dequantize(
    x: torch.Tensor, scheme: Scheme | Format = "nvfp4", **options: Unpack[FakeOptions]
) -> torch.Tensor:
    """:func:`fp4kit.quantize_dequantize` with a straight-through gradient.

    The gradient of the result is that of `x`, also where values are beyond the largest code; where
    values stay rotated (`rht=` without `undo_rht`) it is rotated back. Second-level scales count as
    constants. Functions under torch.compile may call it: their graph breaks there.

    Args:
        x: float32, float16 or bfloat16 tensor (..., K).
        scheme: see :func:`fp4kit.quantize_dequantize`.
        **options: its other options, but `out`.

    Returns:
        Tensor of the shape of `x`, on its device.

    Raises:
        DtypeError: for what is no torch tensor, or of another type.
        OptionError: as :func:`fp4kit.quantize_dequantize`, and for `out`.
        ShapeError: as :func:`fp4kit.quantize_dequantize`.
        NonFiniteError: as :func:`fp4kit.quantize_dequantize`.
        BackendUnavailableError: as :func:`fp4kit.quantize_dequantize`.

    Example:
        >>> import torch
        >>> weight = torch.full((1, 16), 5.1, requires_grad=True)
        >>> quantize_dequantize(weight, amax=6.0).sum().backward()
        >>> weight.grad.unique().tolist()
        [1.0]
    """
    if "out" in options:
        raise OptionError("out= would overwrite what gradients are computed from; leave it out")
    rest: dict[str, Any] = {name: value for name, value in options.items() if name in _OF_CALL}
    fields = {name: value for name, value in options.items() if name not in _OF_CALL}
    wanted = as_scheme(scheme, fields)
    part = wanted.parts[0]
    back = None
    if part.rht is not None and not options.get("undo_rht", False):
        along: Direction = "columnwise" if part.direction == "columnwise" else "rowwise"
        back = partial(hadamard_transform, mask=part.rht, direction=along, inverse=True)
    return _apply(x, partial(fp4kit.quantize_dequantize, scheme=wanted, **rest), back)


@leave_uncompiled
def hadamard_transform(
    x: torch.Tensor,
    mask: bool | int = True,
    *,
    direction: Direction = "rowwise",
    rounding: RhtRounding = "none",
    inverse: bool = False,
    dtype: Any = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """:func:`fp4kit.hadamard_transform` with its gradient: the opposite rotation.

    Args:
        x: float32, float16 or bfloat16 tensor (..., K).
        mask: see :func:`fp4kit.hadamard_transform`, like what follows.
        direction: see above.
        rounding: see above; its gradient is the identity.
        inverse: see above.
        dtype: see above.
        backend: see above.

    Returns:
        Tensor of the shape of `x`, on its device.

    Raises:
        DtypeError: for what is no torch tensor, or of another type.
        OptionError: for unknown options.
        ShapeError: if the rotated axis is not a multiple of 16.
        BackendUnavailableError: if the backend cannot serve the tensor, with the reason.
    """
    rotate = partial(fp4kit.hadamard_transform, mask=mask, direction=direction, backend=backend)
    back = partial(
        hadamard_transform, mask=mask, direction=direction, inverse=not inverse, backend=backend
    )
    return _apply(x, partial(rotate, rounding=rounding, inverse=inverse, dtype=dtype), back)
