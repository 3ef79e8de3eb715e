# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""MXFP4 to FP8: values kept where the exponents allow, and every other one counted."""

import json

import ml_dtypes
import numpy as np
import pytest

import fp4kit
from command_line import fail, succeed
from fp4kit.checkpoint.write import lossless, lossless_fp8
from fp4kit.formats import E4M3
from fp4kit.plan import Plan

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
GRANULARITIES = ("tensor", "channel", "block")
UP = "model.layers.0.mlp.up_proj.weight"


def textbook(packed, scale):
    """Values in float64, which holds all of them."""
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)
    signs = np.where(codes & 8, -1.0, 1.0)
    return E2M1[codes & 7] * signs * np.ldexp(1.0, scale.astype(int) - 127).repeat(32, 1)


def recoded(packed, scale, granularity):
    """(values in float64, scales, number of rounded ones) of FP8."""
    rows, cols = len(packed), packed.shape[1] * 2
    plan = Plan(fp4kit.Scheme("fp8", granularity=granularity).parts[0], rows, cols)
    known = lossless.exponents_of(packed, scale) if granularity == "tensor" else None
    recoder = lossless_fp8.Fp8Recoder(plan, known)
    codes, scales = recoder(packed, scale)
    assert codes.shape == (rows, cols)
    assert scales.shape == plan.scale_shape
    assert scales.dtype == np.float32
    per = {"tensor": (rows, cols), "channel": (1, cols), "block": (128, 128)}[granularity]
    spread = scales.astype(np.float64).repeat(per[0], 0)[:rows].repeat(per[1], 1)[:, :cols]
    return E4M3.values[codes].astype(np.float64) * spread, scales, recoder.rounded


def random_blocks(rows, cols, low, high, seed=0):
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (rows, cols // 2), np.uint8)
    scale = rng.integers(low, high, (rows, cols // 32)).astype(np.uint8)
    packed[rng.random(rows) < 0.05] = 0x80  # rows of zeros of both signs
    return packed, scale


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize(("low", "high"), [(0, 15), (112, 125), (120, 135), (235, 250)])
def test_a_spread_of_14_keeps_every_value(low, high, granularity):
    """2^14 between the largest and smallest block; the scale of a tensor may cost 2 of that."""
    packed, scale = random_blocks(300, 416, low, high - (2 if granularity == "tensor" else 0))
    found, scales, rounded = recoded(packed, scale, granularity)
    if low:  # the smallest scales are at 2^-126, so that fewer exponents fit at the very bottom
        assert rounded == 0
    expected = textbook(packed, scale)
    assert np.array_equal(found, expected) == (rounded == 0)
    assert np.array_equal(np.signbit(found), np.signbit(expected))
    assert (np.frexp(scales)[0] == 0.5).all()
    assert (scales >= np.finfo(np.float32).tiny).all()


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("seed", range(3))
def test_every_other_value_is_counted_and_near(granularity, seed):
    packed, scale = random_blocks(260, 416, 90, 130, seed)
    found, scales, rounded = recoded(packed, scale, granularity)
    expected = textbook(packed, scale)
    changed = found != expected
    assert rounded == changed.sum() > 0
    # Half of the smallest step of E4M3 under the largest scale.
    assert np.abs(found - expected).max() <= 2.0**-10 * scales.max()


def test_one_code_after_another():
    """Every code of E2M1 under every exponent below the largest."""
    for down in range(40):
        packed = np.full((1, 32), 0x77, np.uint8)
        packed[0, 16:] = np.tile(np.arange(8, dtype=np.uint8) * 0x22 + 0x10, 2)
        scale = np.array([[127, 127 - down]], np.uint8)
        found, _, rounded = recoded(packed, scale, "channel")
        expected = textbook(packed, scale)
        assert rounded == (found != expected).sum()
        # 6 is stored as 384, 0.5 as 32: 2^-14 of that is the smallest step of E4M3.
        assert (rounded == 0) == (down <= 14)


# ------------------------------------------------------------------------------------------------
# Checkpoints
# ------------------------------------------------------------------------------------------------


def packed_model(checkpoints, folder, low=118, high=126, seed=0):
    """A compressed-tensors MXFP4 checkpoint with exponents of our choice."""
    tensors, config = checkpoints.llama(layers=1, hidden=128, intermediate=160)
    plain = checkpoints.save(folder.with_name(f"{folder.name}-plain"), tensors, config)
    fp4kit.quantize_checkpoint(plain, folder.with_name(f"{folder.name}-first"), "mxfp4")
    first = folder.with_name(f"{folder.name}-first")
    rng = np.random.default_rng(seed)
    given = {}
    for name, (dtype, shape, data) in checkpoints.read(first).items():
        array = checkpoints.array((dtype, shape, data))
        if name.endswith("weight_scale"):
            array = rng.integers(low, high, shape).astype(np.uint8)
        given[name] = dtype, array
    return checkpoints.save(folder, given, checkpoints.config_of(first))


def values(folder, name=UP):
    return fp4kit.open(folder, decode="float32")[name]


@pytest.mark.parametrize(
    ("layout", "granularity", "suffix"),
    [
        ("compressed-tensors", "block", "_scale"),
        ("compressed-tensors", "channel", "_scale"),
        ("compressed-tensors", "tensor", "_scale"),
        ("deepseek", "block", "_scale_inv"),
    ],
)
def test_a_checkpoint(layout, granularity, suffix, checkpoints, tmp_path):
    source, target = packed_model(checkpoints, tmp_path / "in"), tmp_path / "out"
    report = tmp_path / "report.json"
    succeed("quantize", source, "-o", target, "--layout", layout, "--format", "fp8",
            "--granularity", granularity, "--lossless", "--report", report)  # fmt: skip
    np.testing.assert_array_equal(values(target), values(source))
    scales = checkpoints.array(checkpoints.read(target)[f"{UP}{suffix}"])
    assert (np.frexp(scales)[0] == 0.5).all()
    said = {one["name"]: one for one in json.loads(report.read_text())["tensors"]}
    assert said[UP]["action"] == "transfer"
    assert said[UP]["reason"] == "MXFP4 codes taken over, no value changes"
    assert fp4kit.verify(target, against=source).faults == []


def test_values_that_are_rounded(checkpoints, tmp_path):
    source = packed_model(checkpoints, tmp_path / "in", 95, 127)
    target, report = tmp_path / "out", tmp_path / "report.json"
    options = ("--format", "fp8", "--granularity", "block")
    said = fail("quantize", source, "-o", target, *options, "--lossless")
    assert "MXFP4 values are rounded" in said
    assert "--lossless" in said
    assert not target.exists()
    planned = fail("quantize", source, "-o", target, *options, "--lossless", "--dry-run")
    assert "would not keep all of its values" in planned
    said = succeed("quantize", source, "-o", target, *options, "--report", report)
    changed = sum(
        int((values(target, name) != values(source, name)).sum())
        for name in fp4kit.open(target)
        if name.endswith("_proj.weight")
    )
    assert f"{changed} MXFP4 values of 7 weights are rounded" in " ".join(said.output.split())
    lines = {one["name"]: one for one in json.loads(report.read_text())["tensors"]}
    here = int((values(target) != values(source)).sum())
    assert lines[UP]["reason"].startswith(f"{here} of {160 * 128} MXFP4 values are rounded")


def test_gpt_oss_and_deepseek_v4(checkpoints, tmp_path):
    rng = np.random.default_rng(0)
    prefix = "model.layers.0.mlp.experts"
    tensors = {}
    for role, rows, cols in (("gate_up_proj", 256, 128), ("down_proj", 128, 128)):
        shape = (2, rows, cols // 32)
        blocks = rng.integers(0, 256, (*shape, 16), np.uint8)
        tensors[f"{prefix}.{role}_blocks"] = "U8", blocks
        tensors[f"{prefix}.{role}_scales"] = "U8", rng.integers(118, 126, shape).astype(np.uint8)
        bias = np.zeros((2, rows), ml_dtypes.bfloat16)
        tensors[f"{prefix}.{role}_bias"] = "BF16", bias
    config = {"model_type": "gpt_oss", "hidden_size": 128, "intermediate_size": 128}
    config["quantization_config"] = {"quant_method": "mxfp4"}
    source = checkpoints.save(tmp_path / "gpt", tensors, config)
    target, back = tmp_path / "gpt-fp8", tmp_path / "nv"
    succeed("quantize", source, "-o", target, "--layout", "deepseek", "--format", "fp8",
            "--lossless")  # fmt: skip
    succeed("quantize", source, "-o", back, "--lossless")
    for name in ("0.up_proj", "1.down_proj"):
        one, two = (values(path, f"{prefix}.{name}.weight") for path in (target, back))
        np.testing.assert_array_equal(one, two)
    name = "layers.0.ffn.experts.0.w1.weight"
    tensors = {
        name: ("I8", rng.integers(0, 256, (128, 64), np.uint8).view(np.int8)),
        name.replace("weight", "scale"): (
            "F8_E8M0",
            rng.integers(118, 126, (128, 4)).astype(np.uint8),
        ),
        "norm.weight": checkpoints.normal((64,)),
    }
    config = {"model_type": "deepseek_v4", "quantization_config": {"quant_method": "fp8"}}
    source = checkpoints.save(tmp_path / "v4", tensors, config)
    succeed("quantize", source, "-o", tmp_path / "v4-fp8", "--layout", "deepseek", "--format",
            "fp8", "--lossless")  # fmt: skip
    np.testing.assert_array_equal(values(tmp_path / "v4-fp8", name), values(source, name))


def test_plain_weights_are_never_lossless(checkpoints, tmp_path):
    tensors, config = checkpoints.llama(layers=1)
    source = checkpoints.save(tmp_path / "in", tensors, config)
    said = fail("quantize", source, "-o", tmp_path / "out", "--lossless")
    assert "it is quantized from plain numbers" in said
    first = tmp_path / "first"
    fp4kit.quantize_checkpoint(source, first, "nvfp4")
    said = fail("convert", first, "-o", tmp_path / "out", "--layout", "mlx", "--lossless")
    assert "requantized: the layout keeps no second level" in said
    succeed("convert", first, "-o", tmp_path / "out", "--layout", "modelopt", "--lossless")
