# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""How the numba kernels are compiled and cached.

numba's own cache looks only at the file that defines a kernel, but these kernels inline functions
from several files: an edit elsewhere would leave stale machine code, and so wrong bytes, behind.
The cache folder's name therefore carries a hash of all kernel sources and of the format table.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba as untyped_numba

numba: Any = untyped_numba
CACHE_VARIABLE = "FP4KIT_CACHE_DIR"


def _source_hash() -> str:
    digest = hashlib.sha256()
    here = Path(__file__).parent
    for path in (*sorted(here.glob("cpu*.py")), here.parent / "formats.py"):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@cache
def cache_dir() -> Path | None:
    """Folder for compiled kernels, or None if no place is writable (kernels then recompile).

    `FP4KIT_CACHE_DIR` names it; otherwise it lies in the user's cache folder.
    """
    base = os.environ.get(CACHE_VARIABLE) or os.environ.get("XDG_CACHE_HOME")
    root = Path(base) if base else Path(os.path.expanduser("~"), ".cache")  # noqa: PTH111 - Path.home() raises without HOME
    folder = root / "fp4kit" / f"numba-{_source_hash()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return None


def jit(function: Callable[..., Any]) -> Any:
    """Compiles a kernel on first call: without the GIL, IEEE arithmetic, cached on disk."""
    return _jit(function, fastmath=False)


def jit_inner(function: Callable[..., Any]) -> Any:
    """Like :func:`jit`, for functions that only kernels call: spares them Python's wrappers."""
    return _jit(function, fastmath=False, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def jit_sums(function: Callable[..., Any]) -> Any:
    """Like :func:`jit`, but sums may be reordered so that they vectorize: for statistics only."""
    return _jit(function, fastmath={"reassoc", "contract"})


def _jit(function: Callable[..., Any], fastmath: bool | set[str], **more: bool) -> Any:
    options = {"nogil": True, "error_model": "numpy", "fastmath": fastmath, **more}
    folder = cache_dir()
    if folder is None:
        return numba.njit(function, **options)
    saved = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(folder)
    try:
        return numba.njit(function, cache=True, **options)
    finally:
        numba.config.CACHE_DIR = saved
