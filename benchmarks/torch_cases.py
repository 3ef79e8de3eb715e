# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The references in plain torch as cases, each checked against fp4kit before it is timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch_references as references
from variant_cases import DTYPE, ITEM, Inputs, quantize_bytes

import fp4kit
from fp4kit import bench

#: The share of codes, scales and values that must agree. Compiled divisions are not exact.
AGREEMENT = 0.99


@dataclass(frozen=True)
class Reference:
    """What torch is to do, and what fp4kit does instead.

    Attributes:
        name: the case of `variant_cases` that it stands beside.
        function: in torch.
        arguments: its arguments.
        nbytes: bytes that must move.
        ours: fp4kit's result as torch tensors.
        agreement: the share of `function`'s result that agrees with them.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[torch.Tensor, ...]
    nbytes: int
    ours: tuple[torch.Tensor, ...]
    agreement: Callable[..., float]

    def disagrees(self, function: Callable[..., Any]) -> str | None:
        """Why a form of the function is not timed, None if its results are right."""
        found = self.agreement(function(*self.arguments), *self.ours)
        if found >= AGREEMENT:
            return None
        return f"only {found:.4f} of its results agree with fp4kit's"


def as_torch(array: Any) -> torch.Tensor:
    """The memory of an array as a tensor."""
    if array.dtype.name == DTYPE:
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(array)


def reference_of(
    inputs: Inputs,
    name: str,
    function: Callable[..., Any],
    options: dict[str, Any],
    agreement: Callable[..., float] = references.equal_share,
    more: tuple[torch.Tensor, ...] = (),
) -> Reference:
    """A reference for `fp4kit.quantize` with some options."""
    q = fp4kit.quantize(inputs.x, nonfinite="propagate", **options)
    amax = as_torch(q.amax).reshape(())
    return Reference(
        name,
        function,
        (as_torch(inputs.x), amax, *more),
        quantize_bytes(inputs.elements),
        (as_torch(q.packed), as_torch(q.block_scale)),
        agreement,
    )


def all_references(inputs: Inputs) -> Iterator[Reference]:
    """Every reference; the arrays of one may go when the next is asked for."""
    yield reference_of(inputs, "quantize rows", references.quantize_rows, {})
    columns = {"direction": "columnwise"}
    yield reference_of(inputs, "quantize columns", references.quantize_columns, columns)
    yield reference_of(
        inputs,
        "quantize four_over_six",
        references.quantize_four_over_six,
        {"scale_search": "four_over_six", "e4m3_max": 256},
    )
    yield reference_of(
        inputs,
        "quantize stochastic",
        references.quantize_stochastically,
        {"rounding": "stochastic", "seed": 1},
        references.neighbour_share,
    )
    x = as_torch(inputs.x)
    matrix = references.hadamard_matrix(x.device)
    yield reference_of(
        inputs,
        "quantize rotated columns",
        references.quantize_rotated_columns,
        {**columns, "rht": True},
        more=(matrix,),
    )
    rotated = as_torch(fp4kit.hadamard_transform(inputs.x, rounding="bf16"))
    yield Reference(
        "hadamard_transform rowwise",
        references.rotate_rows,
        (x, matrix),
        2 * ITEM * inputs.elements,
        (rotated,),
        references.close_share,
    )


def reference_cases(
    inputs: Inputs,
    wanted: Callable[[str], object],
    not_compiled: str | None,
    skipped: dict[str, str],
) -> Iterator[bench.Case]:
    """The cases of all references, eager and compiled.

    Args:
        inputs: what fp4kit reads too.
        wanted: whether a case of that name is to be timed.
        not_compiled: why there is no torch.compile, or None.
        skipped: where the reasons of cases that cannot be timed go.
    """
    for reference in all_references(inputs):
        for kind in ("eager", "compiled"):
            name = f"torch {kind}: {reference.name}"
            if not wanted(name):
                continue
            function, reason = reference.function, None
            if kind == "compiled":
                reason = not_compiled
                function = torch.compile(function) if reason is None else function
            reason = reason or reference.disagrees(function)
            if reason is None:
                yield bench.Case(name, reference.nbytes, partial(function, *reference.arguments))
            else:
                skipped[name] = reason
