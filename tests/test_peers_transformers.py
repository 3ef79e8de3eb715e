# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""A model file written by `fp4kit quantize`, loaded by transformers through compressed-tensors.

Directories with their own config are another feature; here the test writes the config by hand, so
that what is checked is the file: names, dtypes, shapes, nibble order, direction of the scales.
"""

import json

import numpy as np
import pytest

import fp4kit
from fp4kit.io.quantize import quantize_file
from fp4kit.io.report import QuantizeOptions
from fp4kit.scheme import Scheme

torch = pytest.importorskip("torch", reason="the peers extra is not installed")
transformers = pytest.importorskip("transformers", reason="the peers extra is not installed")
pytest.importorskip("compressed_tensors", reason="the peers extra is not installed")

# Their own deprecations are not ours to fix.
pytestmark = pytest.mark.filterwarnings("ignore")

#: The weights are compared exactly; the models' bfloat16 sums over them may be split differently.
TOLERANCE = 0.02


def quantization_config(format_name):
    weights = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "dynamic": False,
        "strategy": "tensor_group" if format_name == "nvfp4" else "group",
        "group_size": 16 if format_name == "nvfp4" else 32,
        "scale_dtype": "torch.float8_e4m3fn" if format_name == "nvfp4" else "torch.uint8",
    }
    return {
        "quant_method": "compressed-tensors",
        "format": f"{format_name}-pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}
        },
    }


@pytest.mark.parametrize("format_name", ["nvfp4", "mxfp4"])
def test_transformers_computes_with_the_written_weights(format_name, tmp_path):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
    model.save_pretrained(tmp_path / "plain")
    quantized = tmp_path / "quantized"
    quantized.mkdir()
    quantize_file(
        tmp_path / "plain" / "model.safetensors",
        quantized / "model.safetensors",
        QuantizeOptions(Scheme(format_name), exclude=("lm_head*", "model.embed_tokens*")),
    )
    described = json.loads((tmp_path / "plain" / "config.json").read_text())
    described["quantization_config"] = quantization_config(format_name)
    (quantized / "config.json").write_text(json.dumps(described))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(quantized).eval()

    tokens = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        loaded(tokens)  # decompresses on first use
    decompressed = {
        name: module.weight.detach().clone()
        for name, module in loaded.named_modules()
        if isinstance(getattr(module, "weight", None), torch.Tensor)
    }
    count = 0
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                q = fp4kit.quantize(module.weight, format_name)
                if format_name == "nvfp4":  # engines know the encode direction only
                    encode = fp4kit.convert_second_level(q, "encode_scale")
                    q = fp4kit.QuantizedTensor(
                        packed=q.packed,
                        block_scale=q.block_scale,
                        format=q.format,
                        shape=q.shape,
                        recipe="compressed-tensors",
                        encode_scale=encode,
                    )
                module.weight.copy_(fp4kit.dequantize(q, "bfloat16"))
                assert torch.equal(decompressed[name], module.weight), name
                count += 1
        expected = model(tokens).logits.float().numpy()
        got = loaded(tokens).logits.float().numpy()
    assert count == 14
    assert np.abs(expected).max() > 0.01
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())
