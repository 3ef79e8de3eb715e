# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""A linear layer whose weight is quantized, and stays so."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

import fp4kit
from fp4kit import PreparedTensor, QuantizedTensor, ResidualTensor
from fp4kit.errors import DtypeError, OptionError, ShapeError
from fp4kit.scheme import Scheme

from .arrays import of_torch
from .product import Call, multiply

if TYPE_CHECKING:
    from fp4kit.api.options import Backend
    from fp4kit.options import Format

_Tensors = dict[str, torch.Tensor]


class Linear(nn.Module):
    """`torch.nn.Linear` with a quantized weight: `y = x @ weight.T + bias`, nothing decoded.

    Codes, block scales and second level are buffers, so that `to`, `cuda`, `state_dict`, copies and
    pickles take them along. `half`, `to(dtype)` and the like change the bias alone: codes and
    scales stay what they are. The result has the element type of the input, under autocast that of
    autocast. Gradients pass to the input and the bias. A state_dict says how the weight is
    quantized (`_extra_state`), and loads into a module of the same kind only.

    Attributes:
        in_features: K, size of the last axis of the input.
        out_features: N, size of the last axis of the result.
        bias: parameter (N,), or None.
        scheme: how the weight is quantized; None for one with residual channels.
        shape: that of the weight.
        backend: `reference`, `cpu`, `cuda`, or None for the default of the device.

    Example:
        >>> import torch
        >>> layer = Linear.from_linear(torch.nn.Linear(64, 32), "nvfp4")
        >>> layer
        Linear(in_features=64, out_features=32, bias=True, nvfp4, 4.52 bits per element)
        >>> layer(torch.ones(2, 5, 64)).shape
        torch.Size([2, 5, 32])
    """

    in_features: int
    out_features: int
    bias: nn.Parameter | None
    scheme: Scheme | None
    shape: tuple[int, ...]

    def __init__(
        self,
        weight: Any,
        bias: torch.Tensor | None = None,
        *,
        backend: Backend | None = None,
    ) -> None:
        """Holds a weight; its arrays become torch tensors of the same memory.

        Args:
            weight: what :func:`fp4kit.matmul` takes as `b`, of two axes: a rowwise
                :class:`fp4kit.QuantizedTensor` (N, K) (or columnwise, (K, N)), perhaps prepared
                (:func:`fp4kit.prepare`), or a :class:`fp4kit.ResidualTensor`.
            bias: tensor (N,), or None.
            backend: `reference`, `cpu`, `cuda`, or None for the default of the device.

        Raises:
            OptionError: if the weight is no quantized tensor.
            ShapeError: for a weight or bias of another shape.
            DtypeError: if the bias is no torch tensor.
        """
        super().__init__()
        self.backend = backend
        self._hold(weight)
        if bias is not None and not isinstance(bias, torch.Tensor):
            raise DtypeError(f"bias is a {type(bias).__name__}; pass a torch tensor, or None")
        if bias is not None and tuple(bias.shape) != (self.out_features,):
            raise ShapeError(
                f"bias has shape {tuple(bias.shape)}; the weight {tuple(weight.shape)} takes "
                f"({self.out_features},)"
            )
        if bias is None or isinstance(bias, nn.Parameter):
            self.register_parameter("bias", bias)
        else:
            self.register_parameter("bias", nn.Parameter(bias.detach()))

    def _hold(self, weight: Any) -> None:
        """Takes a weight apart: arrays are buffers, all else says how to put them together."""
        if not isinstance(weight, (QuantizedTensor, PreparedTensor, ResidualTensor)):
            raise OptionError(
                f"weight is a {type(weight).__name__}; pass a fp4kit.QuantizedTensor, or use "
                "fp4kit.torch.Linear.from_linear"
            )
        if len(weight.shape) != 2:
            raise ShapeError(f"weight has shape {tuple(weight.shape)}; a layer has two axes (N, K)")
        held = of_torch(weight)
        self.scheme, self.shape = getattr(held, "scheme", None), held.shape
        turned = self.scheme is not None and self.scheme.direction == "columnwise"
        self.out_features, self.in_features = held.shape[::-1] if turned else held.shape
        self._kind = type(held)
        self._facts = {**held._facts(), "source_dtype": held.source_dtype}
        for name, array in held._arrays().items():
            self.register_buffer(name, array)
        self._held: Any = held

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        scheme: Scheme | Format = "nvfp4",
        *,
        backend: Backend | None = None,
        **options: Any,
    ) -> Linear:
        """A layer with the quantized weight of another one, on its device; the bias is shared.

        Args:
            linear: a `torch.nn.Linear`, or a module with `weight` and `bias` like it.
            scheme: see :func:`fp4kit.quantize`.
            backend: for quantizing and multiplying.
            **options: further options of :func:`fp4kit.quantize`.

        Raises:
            OptionError: as :func:`fp4kit.quantize`.
            DtypeError: as :func:`fp4kit.quantize`.
            ShapeError: as :func:`fp4kit.quantize`.
        """
        weight = fp4kit.quantize(linear.weight.detach(), scheme, backend=backend, **options)
        layer = cls(weight, linear.bias, backend=backend)
        layer.train(linear.training)
        return layer

    @property
    def weight(self) -> Any:
        """The quantized weight; its arrays are the buffers of this module."""
        held = self._held
        if held is not None:
            for name, array in self._buffers.items():
                if getattr(held, name) is not array:
                    break
            else:
                return held
        # They were moved, or loaded. The same object is kept, as it remembers what it found out
        # about its arrays.
        held = self._held = self._kind(**self._facts, **self._arrays())
        return held

    @property
    def codes(self) -> torch.Tensor:
        """The buffer that holds the codes: `packed`, or `tiles` of a prepared weight."""
        held: torch.Tensor = getattr(self, self._kind._CODES)
        return held

    def _arrays(self) -> _Tensors:
        return {name: array for name, array in self._buffers.items() if array is not None}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product with the weight, plus the bias.

        Args:
            x: float32, float16 or bfloat16 tensor (..., K).

        Returns:
            Tensor (..., N) of the element type of `x`, or of autocast.
        """
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        return multiply(x, Call(self.weight, None, 1.0, self.backend), self.bias)

    def extra_repr(self) -> str:
        """What `repr` shows."""
        held = self.weight
        format, *words = held._named()
        shown = [
            f"in_features={self.in_features}, out_features={self.out_features}",
            f"bias={self.bias is not None}",
            format.strip("'"),
            *words,
            f"{held.bits_per_element:.3g} bits per element",
        ]
        return ", ".join(shown)

    # Moves and element types.

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Linear:
        """`to`, `cuda`, `half` and so on: buffers change their place, never their type."""
        held = {id(array) for array in self._arrays().values()}

        def of_buffer(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            if id(tensor) in held and moved.dtype != tensor.dtype:
                return tensor.to(moved.device)
            return moved

        self._held = None  # it would hold memory that is left
        super()._apply(of_buffer, recurse)
        return self

    # Copies and state_dict.

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": None}

    def _description(self) -> dict[str, Any]:
        """What decides the values of the arrays."""
        facts = {name: value for name, value in self._facts.items() if name != "source_dtype"}
        if self.scheme is not None:
            fields = asdict(self.scheme.decoding).items()
            facts["scheme"] = {name: value for name, value in fields if value is not None}
        return {"kind": self._kind.__name__, **facts, "shape": list(self.shape)}

    def get_extra_state(self) -> torch.Tensor:
        """How the weight is quantized: JSON, as bytes, so that any file of tensors takes it."""
        text = json.dumps(self._description()).encode()
        return torch.from_numpy(np.frombuffer(text, np.uint8).copy())

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Nothing is left to do: it was compared before the arrays were loaded."""

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *rest: Any, **options: Any
    ) -> None:
        """Loads arrays, but not those that are quantized in another way than this module's."""
        state = state_dict.get(f"{prefix}_extra_state")
        if state is not None:
            theirs, mine = json.loads(bytes(state.cpu().numpy())), self._description()
            if theirs != mine:
                errors: list[str] = rest[-1]
                errors.append(
                    f"{prefix}weight is quantized as {theirs} in the state_dict, as {mine} in this "
                    "module; make a Linear of that kind, or use fp4kit.torch.load"
                )
                return
        super()._load_from_state_dict(state_dict, prefix, *rest, **options)
