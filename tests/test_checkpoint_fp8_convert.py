# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""FP8 checkpoints from one layout to another: codes verbatim, scales and how inputs are taken."""

import numpy as np
import pytest

import fp4kit
from command_line import fail, succeed
from fp4kit.errors import FileFormatError, OptionError

UP = "model.layers.0.mlp.up_proj"
HIDDEN, INTERMEDIATE = 64, 200


@pytest.fixture
def source(checkpoints, tmp_path):
    tensors, config = checkpoints.llama(layers=1, hidden=HIDDEN, intermediate=INTERMEDIATE)
    return checkpoints.save(tmp_path / "model", tensors, config)


def quantized(source, layout, granularity, activations=None):
    target = source.with_name(f"{layout}-{granularity}-{activations}")
    scheme = fp4kit.Scheme("fp8", granularity=granularity)
    fp4kit.quantize_checkpoint(source, target, scheme, layout=layout, activations=activations)
    return target


def group(folder, checkpoints):
    return checkpoints.config_of(folder)["quantization_config"]["config_groups"]["group_0"]


#: Where a checkpoint goes, and what its scales and inputs are there.
WAYS = [
    ("compressed-tensors", "block", "dynamic", "deepseek", "_scale_inv", (2, 1)),
    ("deepseek", "block", None, "compressed-tensors", "_scale", (2, 1)),
    ("modelopt", "tensor", "uncalibrated", "compressed-tensors", "_scale", (1,)),
    ("compressed-tensors", "tensor", "uncalibrated", "modelopt", "_scale", ()),
    ("modelopt", "tensor", "uncalibrated", "deepseek", "_scale_inv", (2, 1)),
]


@pytest.mark.parametrize(("layout", "granularity", "activations", "to", "suffix", "shape"), WAYS)
def test_codes_stay(
    layout, granularity, activations, to, suffix, shape, source, checkpoints, tmp_path
):
    first, target = quantized(source, layout, granularity, activations), tmp_path / "out"
    succeed("convert", first, "-o", target, "--layout", to, "--lossless")
    before, after = checkpoints.read(first), checkpoints.read(target)
    assert after[f"{UP}.weight"] == before[f"{UP}.weight"]
    old = next(name for name in before if name.startswith(f"{UP}.weight_scale"))
    scale, given = checkpoints.array(after[f"{UP}.weight{suffix}"]), checkpoints.array(before[old])
    assert scale.shape == shape
    np.testing.assert_array_equal(
        scale, np.broadcast_to(given.reshape(-1, 1), (2, 1))[: scale.size].reshape(shape)
    )
    for name in before:
        if name.removesuffix(".weight") != name and f"{name}_scale" not in before:
            assert after[name] == before[name]
    assert fp4kit.verify(target, against=source).faults == []
    values = [fp4kit.open(path, decode="float32")[f"{UP}.weight"] for path in (first, target)]
    np.testing.assert_array_equal(*values)


def test_how_inputs_are_taken(source, checkpoints, tmp_path):
    static = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor",
              "dynamic": False}  # fmt: skip
    first = quantized(source, "modelopt", "tensor", "uncalibrated")
    fp4kit.convert_checkpoint(first, tmp_path / "a", "compressed-tensors")
    assert group(tmp_path / "a", checkpoints)["input_activations"] == static
    scale = checkpoints.read(tmp_path / "a")[f"{UP}.input_scale"]
    assert (scale[0], scale[1]) == ("F32", (1,))
    first = quantized(source, "deepseek", "block")
    fp4kit.convert_checkpoint(first, tmp_path / "b", "compressed-tensors")
    inputs = group(tmp_path / "b", checkpoints)["input_activations"]
    assert (inputs["strategy"], inputs["group_size"], inputs["dynamic"]) == ("group", 128, True)
    first = source.with_name("modelopt-tensor-uncalibrated")
    report = fp4kit.convert_checkpoint(first, tmp_path / "c", "deepseek")
    assert f"{UP}.input_scale" in report.dropped
    assert f"{UP}.input_scale" not in checkpoints.read(tmp_path / "c")


def test_what_cannot_go_is_refused(source, checkpoints, tmp_path):
    target = tmp_path / "out"
    channel = quantized(source, "compressed-tensors", "channel")
    said = fail("convert", channel, "-o", target, "--layout", "deepseek")
    assert "holds fp8 with granularity channel; layout deepseek takes block only" in said
    with pytest.raises(OptionError, match="holds fp8; layout mlx takes"):
        fp4kit.convert_checkpoint(channel, target, "mlx")
    with pytest.raises(OptionError, match="is in layout compressed-tensors already"):
        fp4kit.convert_checkpoint(channel, target, "compressed-tensors")
    plain = quantized(source, "compressed-tensors", "tensor")
    with pytest.raises(OptionError, match="take a scale of each module's input"):
        fp4kit.convert_checkpoint(plain, target, "modelopt")
    static = quantized(source, "compressed-tensors", "tensor", "uncalibrated")
    tensors = {
        name: (dtype, checkpoints.array((dtype, shape, data)))
        for name, (dtype, shape, data) in checkpoints.read(static).items()
        if name != f"{UP}.input_scale"
    }
    config = checkpoints.config_of(static)
    broken = checkpoints.save(tmp_path / "broken", tensors, config)
    with pytest.raises(FileFormatError, match="1 of 7 activation scales are missing"):
        fp4kit.convert_checkpoint(broken, target, "modelopt")
    assert any(f"{UP}.input_scale: is missing" in fault for fault in fp4kit.verify(broken).faults)
    assert not target.exists()


@pytest.mark.parametrize("scale", ["F32", "BF16", "F8_E8M0"])
def test_foreign_fp8_is_taken_over_by_quantize(scale, checkpoints, tmp_path):
    """Nothing is quantized twice: DeepSeek's blocks stay what they are in another layout."""
    tensors, config, _ = checkpoints.fp8_llama(hidden=128, intermediate=160)
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        values = np.exp2(np.round(np.log2(tensors[name][1])))
        if scale == "F8_E8M0":
            values = (np.log2(values) + 127).astype(np.uint8)
        tensors[name] = scale, values.astype(checkpoints.DTYPES[scale])
    source = checkpoints.save(tmp_path / "in", tensors, config)
    target = tmp_path / "out"
    succeed("quantize", source, "-o", target, "--format", "fp8", "--granularity", "block",
            "--lossless")  # fmt: skip
    before, after = checkpoints.read(source), checkpoints.read(target)
    assert after[f"{UP}.weight"][2] == before[f"{UP}.weight"][2]
    assert after[f"{UP}.weight_scale"][0] == "F32"
    values = [fp4kit.open(path, decode="float32")[f"{UP}.weight"] for path in (source, target)]
    np.testing.assert_array_equal(*values)
    other = fail("quantize", source, "-o", tmp_path / "no", "--format", "fp8", "--lossless")
    assert "would not keep all of its values" in other
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("granularity", "activations", "expected"),
    [
        ("channel", "dynamic", {"strategy": "token", "dynamic": True}),
        ("tensor", "dynamic", {"strategy": "token", "dynamic": True}),
        ("block", "dynamic", {"strategy": "group", "group_size": 128, "dynamic": True}),
        ("tensor", "uncalibrated", {"strategy": "tensor", "dynamic": False}),
        ("channel", "uncalibrated", {"strategy": "tensor", "dynamic": False}),
    ],
)
def test_inputs_of_compressed_tensors(
    granularity, activations, expected, source, checkpoints, tmp_path
):
    target = tmp_path / "out"
    succeed("quantize", source, "-o", target, "--format", "fp8", "--granularity", granularity,
            "--activations", activations)  # fmt: skip
    said = group(target, checkpoints)["input_activations"]
    assert said == {"num_bits": 8, "type": "float", "symmetric": True} | expected
    scales = [name for name in checkpoints.read(target) if name.endswith("input_scale")]
    assert len(scales) == (0 if activations == "dynamic" else 7)
    assert fp4kit.verify(target, against=source).faults == []


def test_activations_that_do_not_fit(source, tmp_path):
    for options, message in (
        (("--format", "nvfp4", "--activations", "dynamic"), "is for fp8, not nvfp4"),
        (
            ("--format", "fp8", "--granularity", "block", "--activations", "uncalibrated"),
            "leave --activations out, or pass --activations dynamic",
        ),
        (
            ("--format", "fp8", "--layout", "modelopt", "--activations", "dynamic"),
            "pass --activations uncalibrated",
        ),
    ):
        said = fail("quantize", source, "-o", tmp_path / "out", *options)
        assert message in " ".join(said.split())
    assert not (tmp_path / "out").exists()
