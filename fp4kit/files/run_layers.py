# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Runs a model of transformers on the CPU, and notes what its products are given and lead to.

The pages of a layer's weights are given back once the layer has run, and layers run anew for their
derivatives, so that memory holds one layer and the inputs of all.

What an error of a layer's output does to the model's follows from random probes: for v of
independent entries of variance 1, the derivative of v * output by a channel has as its mean square
the sum of the squares of all derivatives of the output by that channel. For predictions of words v
is the derivative of the log-likelihood of a word drawn from the prediction, so that it is the
divergence of predictions that counts (Fisher information), and not all logits alike.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4kit.errors import OptionError
from fp4kit.io.stream.chunks import Progress

#: A line of /proc/self/maps: its addresses and, from here on, its file.
_FILE_COLUMN = 5


@dataclass(eq=False)
class LayerInputs:
    """What the modules that share a weight were given, and what their outputs led to.

    Attributes:
        modules: their names.
        squares: sum of the squares of each input channel, None before any was seen.
        effects: the same of the derivatives of the model's output by each output channel.
        rows: rows of input.
        amax: the largest magnitude.
    """

    modules: list[str]
    squares: NDArray[np.float64] | None = None
    effects: NDArray[np.float64] | None = None
    rows: int = 0
    amax: float = 0.0

    def add_effects(self, gradient: Any) -> None:
        """Takes the derivatives of the model's output by the rows of an output."""
        sums = _squares(gradient)
        self.effects = sums if self.effects is None else self.effects + sums

    def add(self, x: Any) -> None:
        """Takes the rows of an input."""
        if not x.numel():
            return
        squares = _squares(x)
        self.squares = squares if self.squares is None else self.squares + squares
        self.rows += x.numel() // x.shape[-1]
        self.amax = max(self.amax, float(x.detach().abs().max()))


def _squares(x: Any) -> NDArray[np.float64]:
    """The sum of the squares of each channel."""
    flat = x.detach().reshape(-1, x.shape[-1]).float()
    sums: NDArray[np.float64] = flat.square().sum(0, dtype=flat.new_empty(0).double().dtype).numpy()
    return sums


def run_batches(
    model: Any,
    inputs: Mapping[int, LayerInputs],
    batches: Sequence[Sequence[Sequence[int]]],
    *,
    effects: bool,
    progress: Progress | None,
) -> None:
    """Runs a model, and notes what each watched weight is multiplied with.

    Args:
        model: a model of transformers.
        inputs: what is noted, by the address of the weight.
        batches: tokens of texts of equal length.
        effects: take derivatives as well.
        progress: called with (tokens done, tokens in all).

    Raises:
        OptionError: if the model's output has no derivatives.
    """
    import torch

    total = sum(len(piece) for batch in batches for piece in batch)
    random = torch.Generator().manual_seed(0)
    done = 0
    model.requires_grad_(False)
    if effects:
        model.enable_input_require_grads()
    watch = _watch(inputs)
    with _layers_alone(model), torch.set_grad_enabled(effects):
        for batch in batches:
            with watch:
                output = model(torch.tensor(batch))
            # Outside of the watch: layers that run anew are not counted twice.
            if effects:
                _backward(output, random)
            done += sum(map(len, batch))
            if progress is not None:
                progress(done, total)


def _watch(inputs: Mapping[int, LayerInputs]) -> Any:
    """A context in which products with watched weights are noted."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Watch(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is torch.nn.functional.linear and len(args) > 1:
                found = inputs.get(args[1].data_ptr())
                if found is not None:
                    found.add(args[0])
                    if result.requires_grad:
                        result.register_hook(found.add_effects)
            return result

    return Watch()


def _backward(output: Any, random: Any) -> None:
    """Takes the derivatives of a random probe of a model's output."""
    import torch

    logits = output.get("logits")
    found = output.get("last_hidden_state") if logits is None else logits
    if found is None or not found.requires_grad:
        raise OptionError(
            f"{type(output).__name__} has no derivatives that could be taken; leave them out with "
            "effects=False (--no-effects)"
        )
    if logits is None:
        probe = torch.randn(found.shape, generator=random)
    else:
        flat = found.detach().reshape(-1, found.shape[-1]).float().softmax(-1)
        drawn = torch.multinomial(flat, 1, generator=random)
        probe = flat.neg_().scatter_add_(1, drawn, torch.ones(len(flat), 1)).reshape(found.shape)
    found.backward(probe.to(found.dtype))


@contextlib.contextmanager
def _layers_alone(model: Any) -> Iterator[None]:
    """Has each layer's memory given back once it has run, and its results made anew when needed."""
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    layers = [part for part in model.modules() if type(part).__name__ in kinds]
    for layer in layers:
        layer.forward = _alone(layer, layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _alone(layer: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a layer of which nothing is kept but its inputs."""
    import torch
    from torch.utils.checkpoint import checkpoint

    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            first = next((x for x in (*args, *kwargs.values()) if _has_gradient(x)), None)
            if first is not None:
                # Called once all derivatives by the layer's input are known.
                first.register_hook(lambda _: _release(layer.parameters()))
            result = checkpoint(
                forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs
            )
        else:
            result = forward(*args, **kwargs)
        _release(layer.parameters())
        return result

    return run


def _has_gradient(x: Any) -> bool:
    return bool(getattr(x, "requires_grad", False))


def _release(parameters: Iterable[Any]) -> None:
    """Gives back the pages of parameters that are mapped from files, which can be read again."""
    mapped = _mapped_files()
    libc = ctypes.CDLL(None, use_errno=True)
    page = mmap.PAGESIZE
    for parameter in parameters:
        first = parameter.data_ptr()
        last = first + parameter.numel() * parameter.element_size()
        if any(low <= first and last <= high for low, high in mapped):
            begin, end = -(-first // page) * page, last // page * page
            if end > begin:
                libc.madvise(
                    ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED
                )


def _mapped_files() -> list[tuple[int, int]]:
    """Addresses at which weight files are mapped; elsewhere nothing could be read again."""
    found = []
    for line in Path(f"/proc/{os.getpid()}/maps").read_text().splitlines():
        parts = line.split(maxsplit=_FILE_COLUMN)
        if len(parts) > _FILE_COLUMN and parts[_FILE_COLUMN].endswith(".safetensors"):
            low, _, high = parts[0].partition("-")
            found.append((int(low, 16), int(high, 16)))
    return found
