# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Weights packed as integers: MXFP4 of DeepSeek-V4, and dialects that are refused by name."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from command_line import fail, succeed
from fp4kit.checkpoint.operations import dequantize_checkpoint, quantize_checkpoint
from fp4kit.checkpoint.options import CheckpointOptions, DequantizeOptions
from fp4kit.checkpoint.verify.structure import structure_faults
from fp4kit.checkpoint.verify.values import value_faults
from test_checkpoint_bytes import E2M1, fp8_codes

# ------------------------------------------------------------------------------------------------
# DeepSeek-V4
# ------------------------------------------------------------------------------------------------


def e8m0_blocks(rows, cols, seed, dtype="F8_E8M0"):
    """(weight, scale, decoded) in blocks of 128 x 128 with powers of two."""
    codes = fp8_codes((rows, cols), seed=seed)
    grid = -(-rows // 128), -(-cols // 128)
    exponents = np.random.default_rng(seed).integers(110, 130, grid).astype(np.uint8)
    spread = np.ldexp(np.float32(1), exponents.astype(int) - 127)
    spread = spread.repeat(128, 0)[:rows].repeat(128, 1)[:, :cols]
    decoded = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * spread
    return ("F8_E4M3", codes), (dtype, exponents), decoded.astype(np.float32)


def packed_mxfp4(rows, cols, seed, spread=6):
    """(weight, scale, decoded): codes packed as int8."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (rows, cols)).astype(np.uint8)
    exponents = rng.integers(120, 121 + spread, (rows, cols // 32)).astype(np.uint8)
    values = np.where(codes & 8, -1, 1) * E2M1[codes & 7]
    values = values * np.ldexp(np.float32(1), exponents.astype(int) - 127).repeat(32, 1)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).view(np.int8)
    return ("I8", packed), ("F8_E8M0", exponents), values.astype(np.float32)


def deepseek_v4(checkpoints, scale_name=".scale"):
    """(tensors, config, decoded) of a small model as it is published."""
    tensors = {"embed.weight": checkpoints.normal((96, 128))}
    tensors["head.weight"] = checkpoints.normal((96, 128))
    tensors["layers.0.ffn.gate.weight"] = checkpoints.normal((4, 128))
    decoded = {}

    def add(module, made):
        weight, scale, decoded[f"{module}.weight"] = made
        tensors[f"{module}.weight"], tensors[module + scale_name] = weight, scale

    shapes = {"wq_a": (160, 128), "wkv": (64, 128), "wo_b": (128, 64)}
    for seed, (name, shape) in enumerate(shapes.items()):
        add(f"layers.0.attn.{name}", e8m0_blocks(*shape, seed))
    for expert in range(2):
        for seed, (name, shape) in enumerate(
            {"w1": (64, 128), "w3": (64, 128), "w2": (128, 64)}.items()
        ):
            add(f"layers.0.ffn.experts.{expert}.{name}", packed_mxfp4(*shape, seed + 3 * expert))
    config = {
        "model_type": "deepseek_v4",
        "expert_dtype": "fp4",
        "hidden_size": 128,
        "quantization_config": {
            "quant_method": "fp8",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        },
    }
    return tensors, config, decoded


@pytest.mark.parametrize("said", [True, False])
@pytest.mark.parametrize("scale_name", [".scale", ".weight_scale_inv"])
def test_deepseek_v4_is_dequantized(checkpoints, tmp_path, said, scale_name):
    """F8: with and without a word of config.json; the values are exact."""
    tensors, config, decoded = deepseek_v4(checkpoints, scale_name)
    if not said:
        del config["quantization_config"]
    source = checkpoints.save(tmp_path / "in", tensors, config)
    dequantize_checkpoint(source, tmp_path / "out", DequantizeOptions("float32"))
    written = checkpoints.read(tmp_path / "out")
    assert written.keys() == {name for name in tensors if not name.endswith(scale_name)}
    for name, values in decoded.items():
        assert written[name] == ("F32", values.shape, values.tobytes())
    assert not checkpoints.config_of(tmp_path / "out").keys() & {
        "quantization_config",
        "expert_dtype",
    }


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt", "comfy"])
def test_deepseek_v4_experts_keep_their_codes(checkpoints, tmp_path, layout):
    """MXFP4 to NVFP4 without loss; nothing is carried through as int8."""
    tensors, config, decoded = deepseek_v4(checkpoints)
    source = checkpoints.save(tmp_path / "in", tensors, config)
    report = quantize_checkpoint(source, tmp_path / "out", CheckpointOptions(layout=layout))
    assert structure_faults(tmp_path / "out") == []
    assert value_faults(tmp_path / "out", source) == []
    actions = {tensor.name: tensor.action for tensor in report.tensors}
    experts = [name for name in decoded if "experts" in name]
    assert all(actions[name] == "transfer" for name in experts)
    dequantize_checkpoint(tmp_path / "out", tmp_path / "back", DequantizeOptions("float32"))
    back = checkpoints.read(tmp_path / "back")
    for name in experts:
        assert (checkpoints.array(back[name]) == decoded[name]).all()
    assert not any(t[0] in ("I8", "F8_E8M0") for t in checkpoints.read(tmp_path / "out").values())


def test_a_plain_file_of_experts(checkpoints, tmp_path):
    tensors, _, decoded = deepseek_v4(checkpoints)
    source = checkpoints.write_file(tmp_path / "in.safetensors", tensors)
    for command, out in (("dequantize", "d"), ("quantize", "q")):
        succeed(command, source, "-o", tmp_path / f"{out}.safetensors", "--device", "cpu")
    written, _ = checkpoints.read_file(tmp_path / "d.safetensors")
    assert decoded.keys() < written.keys()
    quantized, _ = checkpoints.read_file(tmp_path / "q.safetensors")
    for name, values in decoded.items():
        own = checkpoints.quantized(values, checkpoints.amax(values))
        assert quantized[f"{name}_packed"][2] == np.asarray(own.packed).tobytes()


# ------------------------------------------------------------------------------------------------
# Integers with a scale beside them
# ------------------------------------------------------------------------------------------------

RNG = np.random.default_rng(0)
I32 = RNG.integers(-(2**31), 2**31 - 1, (64, 8)).astype(np.int32)
I8 = RNG.integers(-128, 127, (64, 64)).astype(np.int8)
U8 = RNG.integers(0, 255, (64, 32)).astype(np.uint8)
ONES = np.ones((64, 2), ml_dtypes.bfloat16)
#: Dialect to what it stores beside a module; the first tensor is the codes.
FOREIGN = {
    "GPTQ": {"qweight": ("I32", I32), "scales": ("F16", ONES), "g_idx": ("I32", I32[0])},
    "AWQ": {"qweight": ("I32", I32), "qzeros": ("I32", I32), "scales": ("F16", ONES)},
    "pack-quantized": {"weight_packed": ("I32", I32), "weight_scale": ("BF16", ONES)},
    "LLM.int8": {"weight": ("I8", I8), "SCB": ("F32", np.ones(64, np.float32))},
    "int8": {"weight": ("I8", I8), "weight_scale": ("BF16", np.ones((64, 1), np.float32))},
    "nf4": {"weight": ("U8", U8), "weight.absmax": ("F32", np.ones(64, np.float32))},
    "HQQ": {"W_q": ("U8", U8), "scale": ("BF16", ONES), "zero": ("BF16", ONES)},
    "MLX": {"weight": ("U32", I32), "scales": ("BF16", ONES), "biases": ("BF16", ONES)},
    "quanto": {"weight._data": ("I8", I8), "weight._scale": ("BF16", ONES)},
    "torchao": {"weight_qdata": ("I8", I8), "weight_scale": ("BF16", ONES)},
    "ComfyUI int4": {"weight": ("I8", I8), "weight_s_rel": ("F32", np.ones((64, 4), np.float32))},
    "int8 E8M0": {"weight": ("I8", I8), "scale": ("F8_E8M0", U8)},
}


@pytest.fixture
def foreign(checkpoints):
    def make(dialect):
        names = {"F16": np.float16, "BF16": ml_dtypes.bfloat16}
        tensors = {"model.layers.0.self_attn.o_proj.weight": checkpoints.normal((64, 64))}
        for name, (dtype, values) in FOREIGN[dialect].items():
            array = values.astype(names[dtype]) if dtype in names else values
            tensors[f"model.layers.0.mlp.down_proj.{name}"] = dtype, array
        return tensors

    return make


@pytest.mark.parametrize("dialect", FOREIGN)
@pytest.mark.parametrize("said", [True, False])
def test_codes_that_are_not_read_are_refused_by_name(checkpoints, foreign, tmp_path, dialect, said):
    """F8: also without any quantization_config; never carried along as integers."""
    tensors = foreign(dialect)
    config = {"model_type": "llama"}
    if said:
        config["quantization_config"] = {"quant_method": "fp8"}
    source = checkpoints.save(tmp_path / "in", tensors, config)
    name = f"model.layers.0.mlp.down_proj.{next(iter(FOREIGN[dialect]))}"
    for command in ("quantize", "dequantize"):
        message = fail(command, source, "-o", tmp_path / "out", "--device", "cpu")
        assert f"{name}: {tensors[name][0]} with a scale beside it is quantized" in message
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dialect", FOREIGN)
def test_plain_files_of_such_codes_are_refused(checkpoints, foreign, tmp_path, dialect):
    source = checkpoints.write_file(tmp_path / "in.safetensors", foreign(dialect))
    message = fail("quantize", source, "-o", tmp_path / "out.safetensors", "--device", "cpu")
    assert f"down_proj.{next(iter(FOREIGN[dialect]))}" in message
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt", "comfy"])
@pytest.mark.parametrize("dialect", FOREIGN)
def test_such_codes_beside_a_layout(checkpoints, foreign, tmp_path, layout, dialect):
    """One module of another tool in a checkpoint that is fine otherwise."""
    tensors, config = checkpoints.llama(1)
    del tensors["model.layers.0.mlp.down_proj.weight"]
    source = checkpoints.save(tmp_path / "in", tensors, config)
    quantize_checkpoint(source, tmp_path / "q", CheckpointOptions(layout=layout))
    (path,) = (tmp_path / "q").glob("*.safetensors")
    stored, metadata = checkpoints.read_file(path)
    arrays = {name: (t[0], checkpoints.array(t)) for name, t in stored.items()}
    added = {name: t for name, t in foreign(dialect).items() if "down_proj" in name}
    checkpoints.write_file(path, arrays | added, metadata)
    name = next(iter(added))
    assert any(name in fault for fault in structure_faults(tmp_path / "q"))
    other = "comfy" if layout != "comfy" else "modelopt"
    for command in (("dequantize",), ("convert", "--layout", other)):
        assert name in fail(*command, tmp_path / "q", "-o", tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_scales_without_their_weights_are_dropped(checkpoints, tmp_path):
    tensors, config, _ = deepseek_v4(checkpoints)
    del tensors["layers.0.attn.wkv.weight"]
    source = checkpoints.save(tmp_path / "in", tensors, config)
    report = dequantize_checkpoint(source, tmp_path / "out", DequantizeOptions())
    assert report.dropped == {
        "layers.0.attn.wkv.scale": "scale of 'layers.0.attn.wkv.weight', which is not there"
    }


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("model.embeddings.position_ids", "I64", (1, 64)),
        ("model.layers.0.attn.relative_position_index", "I64", (49, 49)),
        ("model.layers.0.attn.bias", "U8", (1, 1, 8, 8)),
        ("model.layers.0.bn.num_batches_tracked", "I32", ()),
        ("tokens", "I32", (64, 8)),
    ],
)
def test_integers_of_models_are_carried_along(checkpoints, tmp_path, name, dtype, shape):
    parent = name.rpartition(".")[0]
    tensors = {
        "model.layers.0.self_attn.o_proj.weight": checkpoints.normal((64, 64)),
        name: (dtype, np.ones(shape, {"I64": np.int64, "U8": np.uint8, "I32": np.int32}[dtype])),
        f"{parent}.logit_scale": ("F32", np.ones(4, np.float32)),
        f"{parent}.scale": ("F32", np.ones(4, np.float32)),
    }
    source = checkpoints.save(tmp_path / "in", tensors, {"model_type": "swinv2"})
    quantize_checkpoint(source, tmp_path / "out", CheckpointOptions())
    assert checkpoints.read(tmp_path / "out")[name] == checkpoints.stored(tensors)[name]
