# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The golden values of FP8 are what the installed torch, compressed-tensors and ModelOpt give."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fp4kit.checkpoint.operations import (
    convert_checkpoint,
    dequantize_checkpoint,
    quantize_checkpoint,
)
from fp4kit.checkpoint.options import CheckpointOptions, ConvertOptions, DequantizeOptions

pytest.importorskip("torch", reason="the peers extra is not installed")
pytest.importorskip("compressed_tensors", reason="the peers extra is not installed")
pytest.importorskip("modelopt", reason="the peers extra is not installed")

pytestmark = pytest.mark.filterwarnings("ignore")


def test_golden_values_are_those_of_the_peers():
    import golden_fp8

    stored = np.load(golden_fp8.FILE)
    made = golden_fp8.vectors()
    assert set(stored.files) == set(made)
    for name, array in made.items():
        np.testing.assert_array_equal(array, stored[name], err_msg=name)


# ------------------------------------------------------------------------------------------------
# Checkpoints: transformers reads what fp4kit writes
# ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small random Llama, whose blocks of 128 are whole."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, dtype="bfloat16",
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("models") / "model"
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def loaded(folder, **options):
    import transformers

    read = transformers.AutoModelForCausalLM.from_pretrained
    model, info = read(folder, output_loading_info=True, dtype="bfloat16", **options)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return dict(model.named_parameters())


@pytest.mark.parametrize(
    ("layout", "granularity", "activations"),
    [
        ("compressed-tensors", "channel", None),
        ("compressed-tensors", "tensor", None),
        ("compressed-tensors", "block", None),
        ("compressed-tensors", "channel", "dynamic"),
        ("compressed-tensors", "block", "dynamic"),
        ("deepseek", "block", None),
    ],
)
def test_transformers_decodes_to_the_same_weights(
    layout, granularity, activations, model, tmp_path
):
    target = tmp_path / "fp8"
    options = CheckpointOptions("fp8", layout, granularity=granularity, activations=activations)
    quantize_checkpoint(model, target, options)
    assert_decodes_to_the_same(layout, target, tmp_path)


def assert_decodes_to_the_same(layout, target, tmp_path):
    """transformers makes of a checkpoint what `dequantize` does."""
    import torch
    import transformers

    plain = tmp_path / "plain"
    dequantize_checkpoint(target, plain, DequantizeOptions("bfloat16"))
    options = {}
    if layout == "deepseek":  # its kernels need a GPU
        pytest.importorskip("accelerate", reason="transformers loads FP8 with accelerate alone")
        options["quantization_config"] = transformers.FineGrainedFP8Config(dequantize=True)
    else:
        config = transformers.utils.quantization_config.CompressedTensorsConfig
        options["quantization_config"] = config(run_compressed=False)
    found, expected = loaded(target, **options), loaded(plain)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_activation_scales_are_loaded(model, tmp_path):
    """By default; where transformers is told to decode, it has no place for them."""
    import torch
    from safetensors.torch import load_file

    options = CheckpointOptions("fp8", granularity="tensor", activations="uncalibrated")
    quantize_checkpoint(model, tmp_path / "fp8", options)
    found = loaded(tmp_path / "fp8")
    scales = [value for name, value in found.items() if name.endswith("input_scale")]
    assert [float(value) for value in scales] == [1.0] * 7
    for name, value in load_file(tmp_path / "fp8" / "model.safetensors").items():
        assert torch.equal(found[name].float(), value.float()) or name.endswith("_scale"), name


@pytest.mark.parametrize(
    ("layout", "to"), [("compressed-tensors", "deepseek"), ("deepseek", "compressed-tensors")]
)
def test_converted_checkpoints(layout, to, model, tmp_path):
    first, target = tmp_path / "first", tmp_path / "fp8"
    quantize_checkpoint(model, first, CheckpointOptions("fp8", layout, granularity="block"))
    convert_checkpoint(first, target, ConvertOptions(to))
    assert_decodes_to_the_same(to, target, tmp_path)


@pytest.mark.parametrize(
    ("layout", "granularity"),
    [("compressed-tensors", "channel"), ("compressed-tensors", "block"), ("deepseek", "block")],
)
def test_mxfp4_as_fp8(layout, granularity, model, tmp_path):
    """Every value of the MXFP4 checkpoint, as transformers reads both."""
    import torch
    import transformers

    first, target = tmp_path / "first", tmp_path / "fp8"
    quantize_checkpoint(model, first, CheckpointOptions("mxfp4"))
    options = CheckpointOptions("fp8", layout, granularity=granularity, lossless=True)
    quantize_checkpoint(first, target, options)
    assert_decodes_to_the_same(layout, target, tmp_path)
    config = transformers.utils.quantization_config.CompressedTensorsConfig
    one = loaded(first, quantization_config=config(run_compressed=False))
    two = loaded(tmp_path / "plain")
    for name, value in one.items():
        assert torch.equal(two[name], value), name


@pytest.mark.parametrize(
    ("granularity", "activations", "preset"),
    [
        ("channel", "dynamic", "FP8_DYNAMIC"),
        ("block", "dynamic", "FP8_BLOCK"),
        ("tensor", "uncalibrated", "FP8"),
    ],
)
def test_arguments_are_those_of_the_presets(granularity, activations, preset, model, tmp_path):
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

    options = CheckpointOptions("fp8", granularity=granularity, activations=activations)
    quantize_checkpoint(model, tmp_path / "fp8", options)
    said = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    said.pop("quant_method")
    group = QuantizationConfig.model_validate(said).config_groups["group_0"]
    for part in ("weights", "input_activations"):
        found = getattr(group, part).model_dump(exclude={"observer", "observer_kwargs"})
        expected = PRESET_SCHEMES[preset][part].model_dump(exclude={"observer", "observer_kwargs"})
        assert found == expected, part


def test_deepseek_tensors_are_what_transformers_builds(model, tmp_path):
    import torch
    from safetensors.torch import load_file
    from transformers.integrations.finegrained_fp8 import FP8Linear

    quantize_checkpoint(model, tmp_path / "fp8", CheckpointOptions("fp8", "deepseek"))
    stored = load_file(tmp_path / "fp8" / "model.safetensors")
    name = "model.layers.0.mlp.up_proj."
    layer = FP8Linear(128, 256, block_size=(128, 128))
    for part, expected in layer.named_parameters():
        assert stored[name + part].shape == expected.shape, part
        assert stored[name + part].dtype == expected.dtype, part
    source = load_file(model / "model.safetensors")[f"{name}weight"].float()
    scale = stored[f"{name}weight_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
    decoded = stored[f"{name}weight"].float() * scale
    assert (decoded - source).abs().max() <= source.abs().max() / 28
    assert torch.equal(stored[f"{name}weight_scale_inv"], golden_blocks(source))


def golden_blocks(x):
    """amax / 448 of blocks."""
    import golden_fp8

    return golden_fp8.blocks(x).abs().amax((1, 3)) / 448.0
