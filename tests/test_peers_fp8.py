# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The golden values of FP8 are what the installed torch, compressed-tensors and ModelOpt give."""

from __future__ import annotations

import numpy as np
import pytest

from fp4kit.checkpoint.operations import dequantize_checkpoint, quantize_checkpoint
from fp4kit.checkpoint.options import CheckpointOptions, DequantizeOptions

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
    ("layout", "granularity"),
    [
        ("compressed-tensors", "channel"),
        ("compressed-tensors", "tensor"),
        ("compressed-tensors", "block"),
        ("deepseek", "block"),
    ],
)
def test_transformers_decodes_to_the_same_weights(layout, granularity, model, tmp_path):
    import torch
    import transformers

    target, plain = tmp_path / "fp8", tmp_path / "plain"
    quantize_checkpoint(model, target, CheckpointOptions("fp8", layout, granularity=granularity))
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
