# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Models filled from quantized checkpoints without decoding: every layout, names, ties, memory."""

from __future__ import annotations

import copy
import io
import json

import numpy as np
import pytest

import fp4kit
from fp4kit import DtypeError, FileFormatError, OptionError, ShapeError

torch = pytest.importorskip("torch", reason="the peers extra is not installed")
transformers = pytest.importorskip("transformers", reason="the peers extra is not installed")

import fp4kit.torch  # noqa: E402 - it needs torch
from torch_models import TOKENS, backend, built, class_of, config_of, outputs  # noqa: E402

# Their own deprecations are not ours to fix.
pytestmark = pytest.mark.filterwarnings("ignore")

#: Largest difference of outputs, of the largest output: order of float32 sums, some layers deep.
TOLERANCE = 2e-5
LAYOUTS = {
    "nvfp4": {},
    "mxfp4": {"scheme": "mxfp4"},
    "fp8 deepseek": {"scheme": "fp8", "layout": "deepseek"},
    "fp8 channel": {"scheme": "fp8", "granularity": "channel"},
    "fp8 modelopt": {"scheme": "fp8", "layout": "modelopt", "granularity": "tensor"},
    "mxfp8": {"scheme": "mxfp8", "layout": "modelopt"},
    "nvfp4 modelopt": {"layout": "modelopt"},
    "nvfp4 comfy": {"layout": "comfy"},
    "W4A4": {"activations": "uncalibrated"},
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Makes the plain checkpoint of a small model, once."""
    made = {}

    def make(name, **changes):
        key = (name, *sorted(changes.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp(name) / "plain"
            built(name, device="cpu", **changes).float().save_pretrained(made[key])
        return made[key]

    return make


def quantized(source, target, scheme="nvfp4", **options):
    """A quantized checkpoint, and a model of transformers with the same weights decoded."""
    if options.get("layout") == "comfy":
        # ComfyUI's files are single ones.
        source, target = source / "model.safetensors", target.with_suffix(".safetensors")
    fp4kit.quantize_checkpoint(source, target, scheme, **options)
    return target


def decoded(source, target, name):
    """The model of transformers with the weights of a quantized checkpoint decoded."""
    fp4kit.dequantize_checkpoint(source, target, dtype="float32")
    if source.is_file():
        config = config_of(name)
        model = class_of(name).from_config(config)
        model.load_state_dict(
            {key: torch.from_numpy(value) for key, value in fp4kit.open(target).items()}
        )
        return model.float().eval()
    return class_of(name).from_pretrained(target, dtype=torch.float32).eval()


def load(name, checkpoint, **options):
    model = built(name, **options.pop("changes", {}))
    return model, fp4kit.torch.load(model, checkpoint, backend=backend(), **options)


def assert_close(actual, expected):
    difference = float((actual - expected).abs().max())
    assert difference <= TOLERANCE * float(expected.abs().max())


# ------------------------------------------------------------------------------------------------
# Layouts and models
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_computes_what_decoded_weights_do(layout, plain, tmp_path):
    source = quantized(plain("llama"), tmp_path / "q", **LAYOUTS[layout])
    reference = decoded(source, tmp_path / ("d.safetensors" if source.is_file() else "d"), "llama")
    model, report = load("llama", source)
    assert len(report.replaced) == 14, report
    assert report.kept == ("lm_head",)
    assert not report.decoded
    assert all(
        isinstance(model.get_submodule(name), fp4kit.torch.Linear) for name in report.replaced
    )
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    assert_close(outputs(model), outputs(reference))
    assert any("activations" in note for note in report.notes) == (
        layout in ("W4A4", "fp8 deepseek", "fp8 modelopt", "mxfp8", "fp8 channel")
    ), report.notes
    assert report.nbytes < report.nbytes_bfloat16


@pytest.mark.parametrize("name", ["tied", "bert", "qwen3_moe"])
@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp4"])
def test_model_types(name, scheme, plain, tmp_path):
    source = quantized(plain(name), tmp_path / "q", scheme)
    reference = decoded(source, tmp_path / "d", name)
    model, report = load(name, source)
    assert_close(outputs(model), outputs(reference))
    weights = dict(reference.named_parameters())
    for key in report.decoded:
        assert torch.equal(model.get_parameter(key), weights[key]), key
        assert report.decoded[key] == weights[key].nbytes
    if name == "qwen3_moe":
        assert sorted(report.decoded) == sorted(
            f"model.layers.{layer}.mlp.experts.{role}"
            for layer in range(2)
            for role in ("gate_up_proj", "down_proj")
        )
    else:
        assert len(report.replaced) > 12
