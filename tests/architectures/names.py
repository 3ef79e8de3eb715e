# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What must hold of names: stored ones, built ones, and those in lists of what is not quantized."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from fp4kit.checkpoint.options import CheckpointOptions
from fp4kit.checkpoint.plan.quantize import plan_quantize
from fp4kit.checkpoint.plan.rules import Rules
from fp4kit.checkpoint.read.directory import Checkpoint

Faults = Iterator[str]
SHOWN = 4
LARGEST_BLOCK = 32
#: What wraps the same model in other files.
WRAPPERS = ("model.", "language_model.", "model.diffusion_model.", "diffusion_model.")


def some(names: Iterable[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return ", ".join(listed[:SHOWN]) + more


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """{name: shape} of every tensor of a model directory."""
    shapes = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as opened:
            names = opened.keys()  # it is no mapping
            shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in names}
    return shapes


def prefixes(source: Path) -> Faults:
    """Weights about which the default rules decide otherwise where something wraps the model."""
    config = json.loads((source / "config.json").read_text())
    shapes = stored_shapes(source)
    plain = Rules((), (), config, shapes)
    for wrapper in WRAPPERS:
        wrapped = Rules((), (), config, [wrapper + name for name in shapes])
        other = [
            name
            for name, shape in shapes.items()
            if bool(plain.reason_to_keep(name, shape, "bfloat16"))
            != bool(wrapped.reason_to_keep(wrapper + name, shape, "bfloat16"))
        ]
        if other:
            yield f"{len(other)} weights are decided otherwise behind {wrapper!r}: {some(other)}"


def kept_modules(model: torch.nn.Module, plain: torch.nn.Module) -> tuple[list[str], list[str]]:
    """Linear modules that were not quantized, under each built name, and those that were.

    Those whose rows hold no whole blocks of every format are left out.

    Args:
        model: the model as it was.
        plain: the same after quantizing and decoding, so that weights differ if quantized.
    """
    modules = dict(plain.named_modules(remove_duplicate=False))
    kept, quantized = [], []
    for name, module in model.named_modules(remove_duplicate=False):
        linear = isinstance(module, torch.nn.Linear) and name in modules
        if linear and module.in_features % LARGEST_BLOCK == 0:
            same = torch.equal(module.weight, modules[name].weight)
            (kept if same else quantized).append(name)
    return kept, quantized


@dataclasses.dataclass(frozen=True)
class IgnoreLists:
    """Lists of modules that are not quantized.

    Attributes:
        compressed_tensors: names, or `re:` and a regular expression that matches from the start.
        modelopt: names, or globs.
    """

    compressed_tensors: list[str]
    modelopt: list[str]

    def _has(self, name: str) -> dict[str, bool]:
        return {
            "compressed-tensors": any(
                bool(re.match(entry[3:], name)) if entry.startswith("re:") else name == entry
                for entry in self.compressed_tensors
            ),
            "modelopt": any(fnmatch.fnmatchcase(name, entry) for entry in self.modelopt),
        }

    def faults(self, kept: Iterable[str], quantized: Iterable[str]) -> Faults:
        """Modules whose place in a list is wrong, by built name."""
        for what, names, right in (
            ("kept Linear modules are not ignored", kept, True),
            ("quantized Linear modules are ignored", quantized, False),
        ):
            wrong: dict[str, list[str]] = {}
            for name in names:
                for layout, has in self._has(name).items():
                    if has != right:
                        wrong.setdefault(layout, []).append(name)
            for layout, listed in wrong.items():
                yield f"{len(listed)} {what} by {layout}: {some(listed)}"


def ignored(source: Path, compressed_tensors: list[str]) -> IgnoreLists:
    """What each layout lists of a model.

    Args:
        source: its directory.
        compressed_tensors: what was written in that layout.
    """
    options = CheckpointOptions(layout="modelopt")
    with Checkpoint(source) as checkpoint:
        plan = plan_quantize(checkpoint, options)
        described = plan.layout.hf_quant_config(plan.summary) if plan.layout else None
    assert described is not None
    return IgnoreLists(compressed_tensors, described["quantization"]["exclude_modules"])
