# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""A state_dict in, a checkpoint out: torch and transformers load what fp4kit.save writes."""

from __future__ import annotations

import numpy as np
import pytest

import fp4kit

torch = pytest.importorskip("torch", reason="the peers extra is not installed")
transformers = pytest.importorskip("transformers", reason="the peers extra is not installed")
pytest.importorskip("compressed_tensors", reason="the peers extra is not installed")

# Their own deprecations are not ours to fix.
pytestmark = pytest.mark.filterwarnings("ignore")

#: The weights are compared exactly; the models' bfloat16 sums over them may be split differently.
TOLERANCE = 0.02


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()


def test_every_type_of_torch(tmp_path):
    """As safetensors.torch reads it; views, other strides and shared memory included."""
    from safetensors.torch import load_file

    base = torch.arange(24).reshape(2, 12)
    tensors = {
        str(dtype): base.to(dtype)
        for dtype in (
            *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
            *(torch.uint16, torch.uint32, torch.uint64, torch.float16, torch.bfloat16),
            *(torch.float32, torch.float64, torch.complex64),
            *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
        )
    }
    weight = torch.nn.Parameter(torch.randn(4, 6, dtype=torch.bfloat16))
    tensors |= {"parameter": weight, "transposed": weight.T, "part": weight[:, ::2]}
    tensors |= {"scalar": torch.tensor(3.0), "empty": torch.zeros(0, 4), "tied": weight}
    fp4kit.save(tmp_path / "x.safetensors", tensors)
    loaded = load_file(tmp_path / "x.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        wanted = tensor.detach().contiguous()
        assert loaded[name].dtype == wanted.dtype
        assert loaded[name].shape == wanted.shape
        raw = [t.reshape(-1).view(torch.uint8) for t in (loaded[name], wanted)]
        assert torch.equal(*raw), name


def test_a_state_dict_becomes_a_model_directory(model, tmp_path):
    fp4kit.save(
        tmp_path / "model",
        model.state_dict(),
        config=model.config.to_dict(),
        max_shard_size="1MB",
    )
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.dtype == torch.bfloat16
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)


def quantized(model, format):
    """A state_dict with its layers quantized, those that engines fuse with one amax."""
    state = dict(model.state_dict())
    names = [name for name in state if "_proj" in name]
    fused = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("o_proj",), ("down_proj",))
    for name in names:
        (group,) = [members for members in fused if name.split(".")[-2] in members]
        parent = name.split(".")[:-2]
        members = [".".join([*parent, member, "weight"]) for member in group]
        shared = max(float(model.state_dict()[member].abs().max()) for member in members)
        options = {"recipe": "compressed-tensors", "amax": shared} if format == "nvfp4" else {}
        state[name] = fp4kit.quantize(model.state_dict()[name], format, **options)
    return state


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_transformers_computes_with_what_is_saved(model, tmp_path, format):
    """Weights as fp4kit decodes them to bfloat16, and logits of a model that has these."""
    state = quantized(model, format)
    fp4kit.save(tmp_path / "model", state, config=model.config.to_dict())
    assert fp4kit.verify(tmp_path / "model").faults == []
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    tokens = torch.arange(24).reshape(2, 12)
    plain = transformers.LlamaForCausalLM(model.config).to(torch.bfloat16).eval()
    decoded = {
        name: fp4kit.dequantize(value, "bfloat16")
        if isinstance(value, fp4kit.QuantizedTensor)
        else value
        for name, value in state.items()
    }
    plain.load_state_dict(decoded)
    with torch.no_grad():
        got = loaded(tokens).logits.float().numpy()  # decompresses on first use
        expected = plain(tokens).logits.float().numpy()
    for name, module in loaded.named_modules():
        if isinstance(module, torch.nn.Linear):
            assert torch.equal(module.weight, decoded[f"{name}.weight"]), name
    assert np.abs(expected).max() > 0.01
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())
