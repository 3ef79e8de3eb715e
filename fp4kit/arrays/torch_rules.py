# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What torch must not do with fp4kit's functions: compile them, or lose a gradient in silence."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import Any, TypeVar

from fp4kit.errors import DtypeError

from .frameworks import framework_of_type, loaded

#: Where torch.compile keeps the list of packages that it calls and does not look into.
_RULES = "torch._dynamo.trace_rules"
Function = TypeVar("Function", bound=Callable[..., Any])
#: Code that torch has not been told of yet.
_uncompiled: list[CodeType] = []


def refuse_gradient(x: Any, function: str, what: str = "x") -> None:
    """Refuses a torch tensor whose gradient would end in a function without anybody's notice.

    Raises:
        DtypeError: naming the function that keeps it.
    """
    torch = loaded("torch")
    if framework_of_type(type(x)) != "torch" or torch is None or not torch.is_grad_enabled():
        return
    with torch._C.DisableTorchFunctionSubclass():
        requires_grad = x.requires_grad
    if requires_grad:
        raise DtypeError(
            f"{what} requires a gradient, and {function} has none; use fp4kit.torch.{function}, "
            f"which passes it on, or {what}.detach(), or torch.no_grad()"
        )


def leave_uncompiled(function: Function) -> Function:
    """Has torch.compile call a function as it is, once there is a torch.compile to tell.

    Compiled functions may call it: their graph breaks there. Followed into it, torch would trace
    caches, foreign memory and numba with dozens of warnings, for half a minute. Its lists can only
    be added to when they are loaded, which `import torch` does not do: `torch.compile` does, when
    it is first called. The function itself stays what it is, and costs what it did.
    """
    _uncompiled.append(function.__code__)
    rules = sys.modules.get(_RULES)
    if rules is not None:
        _add(rules)
    elif not any(isinstance(finder, _OnImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OnImport())
    return function


def _add(rules: ModuleType) -> None:
    """Tells torch: fp4kit is not to be inlined, nor is anything that these functions call.

    A torch that has none of these (internal) functions is only slower, and warns.
    """
    if hasattr(rules, "add") and not rules.check_file(__file__).skipped:
        rules.add("fp4kit")
    frames: Any = loaded("torch._C._dynamo.eval_frame")
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP
        while _uncompiled:
            code = _uncompiled.pop()
            frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))


class _OnImport(MetaPathFinder, Loader):
    """Has torch's own loader load the list, then adds fp4kit to it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _RULES:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _add(module)
