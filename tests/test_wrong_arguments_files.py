# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments of every function on files: one line that says what, or a result."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

import fp4kit
from sample_arrays import F32, gaussian
from test_wrong_arguments import OTHERS, fault_of

X = gaussian((32, 64))
#: Functions by a call of them that works; "model", "codes", "x.npy" and "q.safetensors" are there.
CALLS = {
    "open": (fp4kit.open, {"path": "codes"}),
    "save": (fp4kit.save, {"path": "new.safetensors", "tensors": {"a": X}}),
    "save a layout": (
        fp4kit.save,
        {"path": "new", "tensors": {"a.weight": X}, "layout": "modelopt", "config": {}},
    ),
    "quantize_file": (fp4kit.quantize_file, {"source": "x.npy", "target": "new.npz"}),
    "quantize_checkpoint": (fp4kit.quantize_checkpoint, {"source": "model", "target": "new"}),
    "dequantize_file": (fp4kit.dequantize_file, {"source": "q.safetensors", "target": "new.npz"}),
    "dequantize_checkpoint": (fp4kit.dequantize_checkpoint, {"source": "codes", "target": "new"}),
    "convert_checkpoint": (
        fp4kit.convert_checkpoint,
        {"source": "codes", "target": "new", "layout": "modelopt"},
    ),
    "verify": (fp4kit.verify, {"path": "codes"}),
}
CHOICES = (
    *("recipe", "scale_rule", "scale_search", "search_error", "e4m3_max", "include", "exclude"),
    *("cast", "unscaled_fp8", "allow_nothing", "scale_layout", "nibble_order", "pad", "void_dtype"),
    *("activations", "experts_layout", "max_shard_size", "follow_links"),
)


def parameters():
    for name, (function, call) in CALLS.items():
        known = inspect.signature(function).parameters
        choices = any(one.kind is one.VAR_KEYWORD for one in known.values())
        names = [one.name for one in known.values() if one.kind is not one.VAR_KEYWORD]
        names = dict.fromkeys([*names, *call, *(CHOICES if choices else ()), "unknown"])
        yield from ((name, one) for one in names)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", X)
    fp4kit.save("q.safetensors", {"w": fp4kit.quantize(X, backend="reference")})
    model = {"model.layers.0.mlp.up_proj.weight": np.ones((32, 64), F32)}
    codes = {name: fp4kit.quantize(w, backend="reference") for name, w in model.items()}
    fp4kit.save("codes", codes, layout="modelopt", config={"model_type": "llama"})
    fp4kit.save("model", model, config={"model_type": "llama"})


@pytest.mark.parametrize(("name", "parameter"), list(parameters()))
def test_one_line_or_a_result(name, parameter, folder, checkpoints):
    function, call = CALLS[name]
    if "target" in call or name.startswith("save"):
        call = {"force": True, **call}
    faults = {
        what: fault_of(function, {**call, parameter: other}, parameter)
        for what, other in OTHERS.items()
        if parameter != "progress" or not callable(other)
    }
    assert not {what: fault for what, fault in faults.items() if fault is not None}
