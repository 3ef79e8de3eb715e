# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""A gpt-oss model in MXFP4, as transformers reads it, becomes NVFP4 without a change of value."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest

import fp4kit
from fp4kit.checkpoint.operations import dequantize_checkpoint, quantize_checkpoint
from fp4kit.checkpoint.options import CheckpointOptions, DequantizeOptions

torch = pytest.importorskip("torch", reason="the peers extra is not installed")
transformers = pytest.importorskip("transformers", reason="the peers extra is not installed")
pytest.importorskip("compressed_tensors", reason="the peers extra is not installed")

# Their own deprecations are not ours to fix.
pytestmark = pytest.mark.filterwarnings("ignore")

HIDDEN, INTERMEDIATE, EXPERTS, LAYERS = 64, 96, 4, 2
LAYOUTS = ["compressed-tensors", "modelopt", "comfy"]
TOKENS = torch.arange(32).reshape(2, 16)
#: Scale bytes of the blocks: exponents -22 to -5, as far apart as NVFP4 can hold without loss.
LOWEST, HIGHEST = 105, 122
ATTENTION = "*self_attn*"


def stored(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def mxfp4_model(folder, scale_bytes):
    """A model directory as openai publishes them.

    Args:
        folder: directory to create.
        scale_bytes: called with (name, shape), gives uint8 scales.
    """
    from safetensors.torch import save_file

    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_hidden_layers=LAYERS,
        vocab_size=64,
        head_dim=32,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        pad_token_id=0,
        layer_types=["sliding_attention", "full_attention"],
    )
    model = transformers.GptOssForCausalLM(config).to(torch.bfloat16)
    for name, weight in model.named_parameters():
        if name.endswith("_bias"):
            weight.data.normal_()
    model.save_pretrained(folder)
    rng = np.random.default_rng(0)
    tensors = {}
    for name, weight in stored(folder).items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = weight
            continue
        experts, inputs, outputs = weight.shape
        shape = (experts, outputs, inputs // 32)
        blocks = rng.integers(0, 256, (*shape, 16), np.uint8)
        blocks[:, ::7, 0] = 0x80  # blocks of zeros, of both signs
        tensors[f"{name}_blocks"] = torch.from_numpy(blocks)
        tensors[f"{name}_scales"] = torch.from_numpy(scale_bytes(name, shape))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    described = json.loads((folder / "config.json").read_text())
    described["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    }
    (folder / "config.json").write_text(json.dumps(described))


def wide_scales(name, shape):
    """Exponents over all that fits; every expert has one of both ends in each projection."""
    scales = np.random.default_rng(len(name)).integers(LOWEST, HIGHEST + 1, shape, np.uint8)
    scales[:, 1:3, 0], scales[:, 3:5, 0] = LOWEST, HIGHEST
    return scales


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """The model with the widest exponents that fit, and what transformers makes of it."""
    folder = tmp_path_factory.mktemp("gpt-oss") / "mxfp4"
    mxfp4_model(folder, wide_scales)
    config = transformers.Mxfp4Config(dequantize=True)
    model, info = load(folder, quantization_config=config)
    assert not info
    return folder, model


def load(folder, **options):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, **options
    )
    return model.eval(), {kind: set(names) for kind, names in info.items() if names}


def decoded(folder):
    """{name of a projection of an expert: float32}, by transformers' own decoding."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors = stored(folder)
    weights = {}
    for name in tensors:
        base, part, _ = name.partition("_blocks")
        if not part:
            continue
        scales = tensors[f"{base}_scales"]
        whole = convert_moe_packed_tensors(tensors[name], scales, dtype=torch.float32)
        for expert, matrix in enumerate(whole.transpose(1, 2)):
            prefix, _, role = base.rpartition(".")
            if role == "down_proj":
                weights[f"{prefix}.{expert}.down_proj.weight"] = matrix
            else:
                weights[f"{prefix}.{expert}.gate_proj.weight"] = matrix[::2]
                weights[f"{prefix}.{expert}.up_proj.weight"] = matrix[1::2]
    assert len(weights) == LAYERS * EXPERTS * 3
    return {name: weight.contiguous() for name, weight in weights.items()}


def fused(tensors, prefix):
    """Parameters of transformers' experts from those of single ones."""

    def both(kind, dim):
        gate, up = (
            torch.stack([tensors[f"{prefix}.{e}.{half}_proj.{kind}"] for e in range(EXPERTS)])
            for half in ("gate", "up")
        )
        return torch.stack((gate, up), dim).flatten(1, 2)

    down = torch.stack([tensors[f"{prefix}.{e}.down_proj.weight"] for e in range(EXPERTS)])
    biases = [tensors[f"{prefix}.{e}.down_proj.bias"] for e in range(EXPERTS)]
    return {
        f"{prefix}.gate_up_proj": both("weight", 2).transpose(1, 2),
        f"{prefix}.gate_up_proj_bias": both("bias", 2),
        f"{prefix}.down_proj": down.transpose(1, 2),
        f"{prefix}.down_proj_bias": torch.stack(biases),
    }


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


def experts_of(report):
    return {
        entry.name: entry
        for entry in report.tensors
        if ".experts." in entry.name and entry.name.endswith(".weight")
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_value_changes(layout, original, tmp_path):
    folder, model = original
    options = CheckpointOptions(layout=layout, exclude=(ATTENTION,))
    report = quantize_checkpoint(folder, tmp_path / "nvfp4", options)
    experts = experts_of(report)
    expected = decoded(folder)
    assert experts.keys() == expected.keys()
    assert {entry.action for entry in experts.values()} == {"transfer"}
    single = DequantizeOptions("float32", experts_layout="single")
    dequantize_checkpoint(tmp_path / "nvfp4", tmp_path / "plain", single)
    plain = stored(tmp_path / "plain")
    for name, weight in expected.items():
        got = plain[name]
        if layout == "modelopt":  # its table has one zero, so that decoding drops the sign of -0
            got, weight = got + 0.0, weight + 0.0
        assert torch.equal(got.view(torch.int32), weight.view(torch.int32)), name
    # The model computes what it did, to the last bit.
    parameters = dict(model.named_parameters())
    rebuilt = {name: plain[name] for name in plain if ".experts." not in name}
    for layer in range(LAYERS):
        rebuilt |= fused(plain, f"model.layers.{layer}.mlp.experts")
    assert rebuilt.keys() == parameters.keys()
    other = copy.deepcopy(model)
    other.load_state_dict({name: tensor.bfloat16() for name, tensor in rebuilt.items()})
    assert torch.equal(logits(other), logits(model))


@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_exponents_that_do_not_fit_are_requantized(layout, tmp_path):
    """One block of one expert is too small: its fusion group is made anew, and said so."""
    victim = "model.layers.1.mlp.experts"

    def scales(name, shape):
        result = wide_scales(name, shape)
        if name == f"{victim}.gate_up_proj":
            result[2, 10, 1] = LOWEST - 1  # row 10 is one of gate_proj, fused with up_proj
        return result

    mxfp4_model(tmp_path / "mxfp4", scales)
    options = CheckpointOptions(layout=layout, exclude=(ATTENTION,))
    report = quantize_checkpoint(tmp_path / "mxfp4", tmp_path / "nvfp4", options)
    anew = {f"{victim}.2.{half}_proj.weight" for half in ("gate", "up")}
    for name, entry in experts_of(report).items():
        assert entry.action == ("quantize" if name in anew else "transfer"), name
        assert ("requantized: 1 of" in entry.reason) == (name in anew), entry.reason
    single = DequantizeOptions("float32", experts_layout="single")
    dequantize_checkpoint(tmp_path / "nvfp4", tmp_path / "plain", single)
    plain = stored(tmp_path / "plain")
    expected = decoded(tmp_path / "mxfp4")
    amax = max(float(expected[name].abs().max()) for name in anew)
    decode = {"compressed-tensors": "encode_scale", "modelopt": "decode_scale"}[layout]
    for name, weight in expected.items():
        if name in anew:
            q = fp4kit.quantize(weight.numpy(), recipe="te", amax=amax)
            second = fp4kit.convert_second_level(q, decode)
            q = fp4kit.QuantizedTensor(
                packed=q.packed,
                block_scale=q.block_scale,
                format="nvfp4",
                shape=q.shape,
                recipe=layout,
                **{decode: second},
            )
            weight = torch.from_numpy(fp4kit.dequantize(q, "float32"))
        assert torch.equal(plain[name], weight), name


def test_transformers_reads_the_dequantized_mxfp4_model(original, tmp_path):
    """Without a layout of single experts in between, the result is a model of transformers."""
    folder, model = original
    dequantize_checkpoint(folder, tmp_path / "plain", DequantizeOptions("bfloat16"))
    plain, info = load(tmp_path / "plain")
    assert not info
    assert torch.equal(logits(plain), logits(model))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_transformers_reads_what_was_separated_in_between(layout, original, tmp_path):
    """Single experts come back as the fused tensors of transformers' own float model."""
    folder, model = original
    quantize_checkpoint(
        folder, tmp_path / "nvfp4", CheckpointOptions(layout=layout, exclude=(ATTENTION,))
    )
    dequantize_checkpoint(tmp_path / "nvfp4", tmp_path / "plain", DequantizeOptions("bfloat16"))
    plain, info = load(tmp_path / "plain")
    assert not info
    assert torch.equal(logits(plain), logits(model))
    parameters = dict(model.named_parameters())
    for name, weight in plain.named_parameters():
        assert torch.equal(weight + 0.0, parameters[name] + 0.0), name


def test_transformers_has_no_single_experts_of_gpt_oss(original, tmp_path):
    """Why the tests above put experts together: engines read single ones, transformers does not.

    transformers 5.24 converts the experts of other models, but has no rule for those of gpt-oss.
    """
    folder, _ = original
    quantize_checkpoint(folder, tmp_path / "nvfp4", CheckpointOptions())
    _, info = load(tmp_path / "nvfp4")
    lost = {name.rpartition(".")[2] for name in info["missing_keys"]}
    assert lost == {"gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"}
