# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""MLX decodes, multiplies with and loads what fp4kit writes in layout mlx, on a CPU."""

from __future__ import annotations

import json

import numpy as np
import pytest

import fp4kit

mx = pytest.importorskip("mlx.core", reason="the engines are not installed")
nn = pytest.importorskip("mlx.nn", reason="the engines are not installed")
mlx_lm = pytest.importorskip("mlx_lm.utils", reason="the engines are not installed")

# Deprecations of their dependencies are not ours to fix.
pytestmark = pytest.mark.filterwarnings("ignore")

SCHEMES = {
    "mxfp4": {"scale_rule": "rceil"},
    "mxfp8": {},
    "nvfp4": {"recipe": "nvfuser", "second_level": "none"},
}
#: Scale bytes that are numbers: E8M0 without NaN, E4M3 without NaN and sign.
SCALES = {"mxfp4": range(255), "mxfp8": range(255), "nvfp4": range(127)}
TOKENS = mx.arange(32).reshape(2, 16)


def words(packed):
    """Codes as MLX keeps them: words of 32 bits, the first element lowest."""
    return mx.array(np.ascontiguousarray(packed).view(np.uint32))


def decoded(tensor):
    """What MLX makes of a quantized tensor of fp4kit's, as float32."""
    values = mx.dequantize(
        words(tensor.packed), mx.array(tensor.block_scale), mode=tensor.format, dtype=mx.float32
    )
    return np.array(values)


def every_code(format):
    """Every code under every scale byte."""
    spec = fp4kit.Scheme(format).spec
    codes = np.arange(256, dtype=np.uint8)
    if spec.codes_per_byte == 1:
        codes = codes[(codes & 0x7F) != 0x7F]  # NaN
    width = spec.block_size // spec.codes_per_byte
    codes = np.resize(codes, -(-len(codes) // width) * width)
    scales = np.array(SCALES[format], np.uint8)
    packed = np.tile(codes, (len(scales), 1))
    block_scale = np.repeat(scales[:, None], packed.shape[1] // width, 1)
    scheme = fp4kit.Scheme(format, **SCHEMES[format])
    shape = (len(scales), packed.shape[1] * spec.codes_per_byte)
    return fp4kit.QuantizedTensor(
        packed=packed, block_scale=block_scale, scheme=scheme, shape=shape, source_dtype="float32"
    )


@pytest.mark.parametrize("format", SCHEMES)
def test_every_code_under_every_scale(format):
    q = every_code(format)
    np.testing.assert_array_equal(decoded(q), fp4kit.dequantize(q, "float32"))


@pytest.mark.parametrize("size", [1.0, 0.02, 100.0])
@pytest.mark.parametrize("format", SCHEMES)
def test_mlx_quantizes_to_the_same_values(format, size):
    """The scales are equal; codes may differ in ties of E2M1 and in the sign of zero."""
    x = (np.random.default_rng(0).standard_normal((64, 256)) * size).astype(np.float32)
    packed, scales = mx.quantize(mx.array(x), mode=format)
    q = fp4kit.quantize(x, format, **SCHEMES[format])
    assert np.array_equal(np.array(scales), q.block_scale)
    if format == "mxfp8":
        assert np.array_equal(np.array(packed).view(np.uint8), q.packed)
    values = mx.dequantize(packed, scales, mode=format, dtype=mx.float32)
    ours, theirs = (np.abs(each - x) for each in (fp4kit.dequantize(q), np.array(values)))
    np.testing.assert_allclose(ours, theirs, atol=1e-6 * size)


@pytest.mark.parametrize("format", SCHEMES)
def test_a_product(format):
    rng = np.random.default_rng(1)
    x, w = (rng.standard_normal(shape, np.float32) for shape in ((3, 256), (48, 256)))
    q = fp4kit.quantize(w, format, **SCHEMES[format])
    made = mx.quantized_matmul(
        mx.array(x), words(q.packed), mx.array(q.block_scale), mode=format, transpose=True
    )
    exact = x.astype(np.float64) @ fp4kit.dequantize(q).astype(np.float64).T
    bound = 256 * 2.0**-24 * (np.abs(x) @ np.abs(fp4kit.dequantize(q)).T)
    assert (np.abs(np.array(made) - exact) <= bound).all()


# ------------------------------------------------------------------------------------------------
# Directories, loaded by mlx-lm
# ------------------------------------------------------------------------------------------------

LLAMA = {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
MOE = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_experts_per_tok": 2,
    "vocab_size": 80,
}


def without(tensors, *parts):
    return {name: value for name, value in tensors.items() if not any(p in name for p in parts)}


@pytest.fixture
def llama(checkpoints, tmp_path):
    tensors, config = checkpoints.llama(layers=2, dtype="F32")
    tensors = without(tensors, "q_norm", "q_proj.bias")
    for layer in range(2):
        name = f"model.layers.{layer}.post_attention_layernorm.weight"
        tensors[name] = ("F32", np.ones(64, np.float32))
    return checkpoints.save(tmp_path / "llama", tensors, config | LLAMA)


@pytest.fixture
def moe(checkpoints, tmp_path):
    tensors, config = checkpoints.moe(experts=4, dtype="F32")
    tensors = without(tensors, "q_norm")
    norms = ("input_layernorm", "post_attention_layernorm")
    for name in (*(f"layers.0.{norm}" for norm in norms), "norm"):
        tensors[f"model.{name}.weight"] = ("F32", np.ones(64, np.float32))
    for part, rows in (("k_proj", 32), ("v_proj", 32)):
        name = f"model.layers.0.self_attn.{part}.bias"
        tensors[name] = ("F32", np.zeros(rows, np.float32))
    return checkpoints.save(tmp_path / "moe", tensors, config | MOE)


def modules(model):
    """The quantized modules of a model by name."""
    kinds = (nn.QuantizedLinear, nn.QuantizedEmbedding)
    found = {name: one for name, one in model.named_modules() if isinstance(one, kinds)}
    return found | {name: one for name, one in model.named_modules() if "Switch" in str(type(one))}


def logits(model):
    return np.array(model(TOKENS).astype(mx.float32))


@pytest.mark.parametrize("format", SCHEMES)
def test_mlx_lm_loads_a_model(format, llama, tmp_path):
    target, back = tmp_path / "out", tmp_path / "back"
    fp4kit.quantize_checkpoint(llama, target, format, layout="mlx")
    model, config = mlx_lm.load_model(target)
    assert config["quantization"]["mode"] == format
    with fp4kit.open(target) as opened:
        for name, module in modules(model).items():
            held = opened[f"{name}.weight"]
            assert (module.mode, module.group_size) == (format, held.scheme.spec.block_size)
            assert np.array_equal(np.array(module.weight).view(np.uint8), held.packed)
            assert np.array_equal(np.array(module.scales), held.block_scale)
        quantized = {name for name in opened if opened.info(name).format}
    assert {f"{name}.weight" for name in modules(model)} == quantized
    fp4kit.dequantize_checkpoint(target, back, "float32")
    plain, _ = mlx_lm.load_model(back)
    assert not modules(plain)
    np.testing.assert_allclose(logits(model), logits(plain), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["qwen2_moe", "olmoe"])
def test_mlx_lm_stacks_experts(kind, moe, checkpoints, tmp_path):
    if kind == "olmoe":
        tensors = {
            name: (dtype, checkpoints.array((dtype, shape, data)))
            for name, (dtype, shape, data) in checkpoints.read(moe).items()
        }
        tensors = without(tensors, "shared_expert", ".bias")
        for part, size in (("q_norm", 64), ("k_norm", 32)):
            name = f"model.layers.0.self_attn.{part}.weight"
            tensors[name] = ("F32", np.ones(size, np.float32))
        config = checkpoints.config_of(moe) | {"model_type": kind, "intermediate_size": 32}
        moe = checkpoints.save(tmp_path / kind, tensors, config)
    target, back = tmp_path / "out", tmp_path / "back"
    fp4kit.quantize_checkpoint(moe, target, "mxfp4", layout="mlx")
    model, _ = mlx_lm.load_model(target)
    stack = dict(model.named_modules())["model.layers.0.mlp.switch_mlp.up_proj"]
    with fp4kit.open(target) as opened:
        for expert in range(4):
            held = opened[f"model.layers.0.mlp.experts.{expert}.up_proj.weight"]
            assert np.array_equal(np.array(stack.weight[expert]).view(np.uint8), held.packed)
            assert np.array_equal(np.array(stack.scales[expert]), held.block_scale)
    fp4kit.dequantize_checkpoint(target, back, "float32")
    plain, _ = mlx_lm.load_model(back)
    np.testing.assert_allclose(logits(model), logits(plain), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("format", SCHEMES)
def test_what_mlx_lm_writes_is_read(format, llama, tmp_path):
    """It also quantizes embedding and head, which fp4kit leaves."""
    model, config = mlx_lm.load_model(llama)
    model, config = mlx_lm.quantize_model(model, config, None, None, mode=format)
    theirs, ours, back = tmp_path / "theirs", tmp_path / "ours", tmp_path / "back"
    mlx_lm.save_model(theirs, model)
    mlx_lm.save_config(config, theirs / "config.json")
    assert fp4kit.verify(theirs, against=llama).faults == []
    fp4kit.dequantize_checkpoint(theirs, back, "float32")
    found = modules(model)
    with fp4kit.open(back) as opened:
        for name, module in found.items():
            values = mx.dequantize(module.weight, module.scales, mode=format, dtype=mx.float32)
            assert np.array_equal(np.array(values), opened[f"{name}.weight"])
    fp4kit.quantize_checkpoint(llama, ours, format, layout="mlx")
    mine, _ = mlx_lm.load_model(ours)
    assert found.keys() - modules(mine).keys() == {"lm_head", "model.embed_tokens"}
    one, two = (json.loads((path / "config.json").read_text()) for path in (ours, theirs))
    assert one["quantization"] == two["quantization"] == one["quantization_config"]


def test_parameters_of_single_modules(llama, tmp_path):
    """As mlx-lm writes them where a predicate gives some modules other parameters."""
    eight = {"group_size": 32, "bits": 8, "mode": "mxfp8"}

    def predicate(path, module):
        return dict(eight) if "down_proj" in path else "embed" not in path

    model, config = mlx_lm.load_model(llama)
    model, config = mlx_lm.quantize_model(
        model, config, 32, 4, mode="mxfp4", quant_predicate=predicate
    )
    theirs, back = tmp_path / "theirs", tmp_path / "back"
    mlx_lm.save_model(theirs, model)
    mlx_lm.save_config(config, theirs / "config.json")
    assert json.loads((theirs / "config.json").read_text())["quantization"] == {
        "group_size": 32,
        "bits": 4,
        "mode": "mxfp4",
        "model.layers.0.mlp.down_proj": eight,
        "model.layers.1.mlp.down_proj": eight,
    }
    assert fp4kit.verify(theirs, against=llama).faults == []
    fp4kit.dequantize_checkpoint(theirs, back, "float32")
    with fp4kit.open(back) as opened:
        for name, module in modules(model).items():
            values = mx.dequantize(module.weight, module.scales, mode=module.mode, dtype=mx.float32)
            assert np.array_equal(np.array(values), opened[f"{name}.weight"])


@pytest.mark.parametrize("format", SCHEMES)
def test_experts_that_are_stacked_in_the_file(format, moe, checkpoints, tmp_path):
    tensors = {
        name: (dtype, checkpoints.array((dtype, shape, data)))
        for name, (dtype, shape, data) in checkpoints.read(moe).items()
    }
    tensors = without(tensors, "shared_expert", ".bias")
    for part in ("q_norm", "k_norm"):
        name = f"model.layers.0.self_attn.{part}.weight"
        tensors[name] = ("F32", np.ones(16, np.float32))
    config = checkpoints.config_of(moe) | {"model_type": "qwen3_moe", "head_dim": 16}
    config |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    config |= {"max_position_embeddings": 64}
    source = checkpoints.save(tmp_path / "qwen3", tensors, config)
    target, back = tmp_path / "out", tmp_path / "back"
    fp4kit.quantize_checkpoint(source, target, format, layout="mlx")
    model, _ = mlx_lm.load_model(target)
    stack = dict(model.named_modules())["model.layers.0.mlp.switch_mlp.up_proj"]
    assert (stack.mode, stack.weight.shape[0]) == (format, 4)
    fp4kit.dequantize_checkpoint(target, back, "float32", experts_layout="single")
    plain, _ = mlx_lm.load_model(back)
    np.testing.assert_allclose(logits(model), logits(plain), rtol=1e-4, atol=1e-4)
    # What mlx-lm writes has the same form, but for the router, of which it makes integers.
    model, config = mlx_lm.load_model(source)
    model, config = mlx_lm.quantize_model(
        model,
        config,
        None,
        None,
        mode=format,
        quant_predicate=lambda path, _: "gate" not in path[-4:],
    )
    theirs = tmp_path / "theirs"
    mlx_lm.save_model(theirs, model)
    mlx_lm.save_config(config, theirs / "config.json")
    names = [{each for each in fp4kit.open(path, raw=True) if "switch_mlp" in each}
             for path in (target, theirs)]  # fmt: skip
    assert names[0] == names[1]
    assert fp4kit.verify(theirs, against=source).faults == []
