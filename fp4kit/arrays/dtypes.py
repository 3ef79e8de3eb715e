# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Element types by name or by dtype object of any framework, none of which is imported."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from fp4kit.errors import OptionError, brief
from fp4kit.formats import DTYPES


def dtype_name(value: Any, what: str = "dtype") -> str:
    """The name of an element type that values are decoded to.

    Args:
        value: `float32`, `float16` or `bfloat16`; a string, or a dtype object: `numpy.float32`,
            `numpy.dtype("float16")`, `ml_dtypes.bfloat16`, `torch.bfloat16`, `jax.numpy.bfloat16`.
        what: the argument's name, for messages.

    Raises:
        OptionError: for anything else.
    """
    name: str | None = value if isinstance(value, str) else None
    if isinstance(value, (np.dtype, type)) or _is_torch_dtype(value):
        name = _name_of(value)
    if name in DTYPES:
        return name
    given = brief(value) if name is None or name is value else f"{brief(value)} ({name})"
    raise OptionError(
        f"{what}={given} is not known; choose one of {', '.join(DTYPES)}, by name or as a dtype of "
        "NumPy, ml_dtypes, torch or JAX"
    )


@lru_cache(maxsize=64)
def _name_of(value: Any) -> str | None:
    """The name that a dtype object gives itself, None if it is no such object."""
    if isinstance(value, np.dtype):
        return value.name if value.isnative else f"{value.name} in the other byte order"
    if isinstance(value, type):
        # NumPy's and ml_dtypes' types are classes of scalars; those of JAX hold a NumPy dtype.
        if issubclass(value, np.generic):
            return value.__name__
        inner = getattr(value, "dtype", None)
        return inner.name if isinstance(inner, np.dtype) else None
    return str(value).removeprefix("torch.")


def _is_torch_dtype(value: Any) -> bool:
    kind = type(value)
    return (kind.__module__, kind.__name__) == ("torch", "dtype")
