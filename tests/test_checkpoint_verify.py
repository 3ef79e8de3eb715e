# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""`verify`: every kind of damage to a quantized checkpoint is found and named."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from fp4kit.checkpoint.operations import dequantize_checkpoint, quantize_checkpoint
from fp4kit.checkpoint.options import CheckpointOptions, DequantizeOptions
from fp4kit.checkpoint.verify.structure import structure_faults
from fp4kit.checkpoint.verify.values import value_faults

LAYOUTS = ("compressed-tensors", "modelopt", "comfy")
SECOND = {"compressed-tensors": "_global_scale", "modelopt": "_scale_2", "comfy": "_scale_2"}
CODES = {"compressed-tensors": "_packed", "modelopt": "", "comfy": ""}
INPUT = {
    "compressed-tensors": "input_global_scale",
    "modelopt": "input_scale",
    "comfy": "input_scale",
}
UP = "model.layers.0.mlp.up_proj"
DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def good(checkpoints, tmp_path_factory):
    """Layout to (source, quantized directory); W4A4, so that nothing can be missing unseen."""
    folder = tmp_path_factory.mktemp("good")
    tensors, config = checkpoints.llama(1)
    # Blocks differ enough that one's scale is no use to another.
    spread = tensors[f"{DOWN}.weight"][1].astype(np.float32) * 4.0 ** -(np.arange(96) // 16)
    tensors[f"{DOWN}.weight"] = "BF16", spread.astype(checkpoints.DTYPES["BF16"])
    source = checkpoints.save(folder / "in", tensors, config)
    for layout in LAYOUTS:
        options = CheckpointOptions(layout=layout, activations="uncalibrated")
        quantize_checkpoint(source, folder / layout, options)
    quantize_checkpoint(source, folder / "mxfp4", CheckpointOptions(format="mxfp4"))
    quantize_checkpoint(source, folder / "sharded", CheckpointOptions(max_shard_size=9000))
    return folder


@pytest.fixture
def damage(checkpoints, good, tmp_path):
    """Copies a good directory with some of its tensors, metadata or JSON changed."""

    def copy(name, change=None, metadata=None, **documents):
        target = tmp_path / "bad"
        shutil.copytree(good / name, target)
        for path in target.glob("*.safetensors"):
            tensors, header = checkpoints.read_file(path)
            arrays = {n: (t[0], checkpoints.array(t).copy()) for n, t in tensors.items()}
            if change is not None:
                change(arrays)
            if metadata is not None:
                metadata(header)
            checkpoints.write_file(path, arrays, header)
        for document, edit in documents.items():
            (path,) = target.glob(f"{document}.json")
            content = json.loads(path.read_text())
            edit(content)
            path.write_text(json.dumps(content))
        return target

    return copy


def faults_of(folder, match):
    faults = structure_faults(folder)
    assert any(match in fault for fault in faults), faults
    return faults


def setter(name, place, value):
    def change(tensors):
        tensors[name][1].reshape(-1)[place] = value

    return change


def test_nothing_is_wrong(good):
    for path in good.iterdir():
        if path.name != "in":
            assert structure_faults(path) == []
            assert value_faults(path, good / "in") == []


# ------------------------------------------------------------------------------------------------
# Parts
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("part", ["codes", "_scale", "second"])
@pytest.mark.parametrize("module", [UP, "model.layers.0.self_attn.o_proj"])
def test_a_part_that_is_missing(damage, layout, part, module):
    """A28, E2: whichever of the parts it is."""
    suffix = {"codes": CODES[layout], "second": SECOND[layout]}.get(part, part)
    name = f"{module}.weight{suffix}"
    faults = structure_faults(damage(layout, lambda tensors: tensors.pop(name)))
    assert faults
    assert module in faults[0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("part", ["codes", "_scale", "second"])
def test_a_part_of_the_wrong_type_or_shape(damage, layout, part):
    """E18, E24: second levels that a helper rounded to bfloat16; scales cut short."""
    suffix = {"codes": CODES[layout], "second": SECOND[layout]}.get(part, part)
    name = f"{UP}.weight{suffix}"

    def retype(tensors):
        array = tensors[name][1]
        tensors[name] = "BF16", np.zeros(array.shape, np.uint16)

    def reshape(tensors):
        dtype, array = tensors[name]
        tensors[name] = dtype, np.concatenate([np.atleast_1d(array)] * 2)

    for change in (retype, reshape):
        folder = damage(layout, change)
        faults = structure_faults(folder)
        assert faults
        assert any(UP in fault for fault in faults), faults
        shutil.rmtree(folder)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("value", [0.0, -1.0, np.inf, np.nan])
def test_second_levels_that_are_no_scale(damage, layout, value):
    name = f"{DOWN}.weight{SECOND[layout]}"
    (fault,) = structure_faults(damage(layout, setter(name, 0, value)))
    assert fault.startswith(f"{name}: is ")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("value", [0.0, -1.0, np.inf, np.nan])
def test_activation_scales_that_are_no_scale(damage, layout, value):
    name = f"{DOWN}.{INPUT[layout]}"
    (fault,) = structure_faults(damage(layout, setter(name, 0, value)))
    assert fault.startswith(f"{name}: is ")


@pytest.mark.parametrize(
    ("name", "byte", "kind"),
    [
        *((layout, 0x7F, "NaN") for layout in LAYOUTS),
        *((layout, 0xFF, "NaN") for layout in LAYOUTS),
        *((layout, 0x81, "negative") for layout in LAYOUTS),
        *((layout, 0xB8, "negative") for layout in LAYOUTS),
        ("mxfp4", 0xFF, "NaN"),
    ],
)
def test_block_scales_that_are_no_scale(damage, name, byte, kind):
    scale = f"{DOWN}.weight_scale"
    folder = damage(name, setter(scale, [0, 5], byte))
    (fault,) = structure_faults(folder)
    assert fault.startswith(f"{scale}: 2 of ")
    assert kind in fault


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("member", ["self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj"])
def test_fused_weights_that_do_not_share(damage, layout, member):
    def change(tensors):
        name = f"model.layers.0.{member}.weight{SECOND[layout]}"
        tensors[name][1].reshape(-1)[0] *= np.float32(1 + 2**-20)

    (fault,) = structure_faults(damage(layout, change))
    assert "fused weights have different second-level scales" in fault
    assert member in fault


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_activation_scales_that_are_missing(damage, layout):
    name = f"{UP}.{INPUT[layout]}"
    (fault,) = structure_faults(damage(layout, lambda tensors: tensors.pop(name)))
    assert fault.startswith(f"{name}: is missing")


# ------------------------------------------------------------------------------------------------
# JSON and headers
# ------------------------------------------------------------------------------------------------


def quantization(content):
    return content["quantization_config"]


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_ignore_lists(damage, layout):
    """E9: kept but not ignored, ignored but quantized, only a part of a fused layer."""

    def edit(ignore):
        both = {"config": lambda content: quantization(content).update(ignore=ignore)}
        if layout == "modelopt":
            both["hf_quant_config"] = lambda content: content["quantization"].update(
                exclude_modules=ignore
            )
        folder = damage(layout, **both)
        faults = structure_faults(folder)
        shutil.rmtree(folder)
        return "\n".join(faults)

    assert "lm_head is not quantized, but not in the ignore list" in edit([])
    assert f"{UP} is quantized, but in the ignore list" in edit(["lm_head", UP])
    assert f"{UP} is quantized, but in the ignore list" in edit(["re:.*up_proj", "lm_head"])
    assert edit(["re:lm_.*"]) == ""
    if layout == "modelopt":
        assert f"{UP} is quantized, but in the ignore list" in edit(["*up_proj", "lm_head"])
        assert f"{UP} is quantized, but in the ignore list" in edit(["model.layers.0", "lm_head"])
    else:
        # Names are whole there: no glob, and "Linear" is every linear layer.
        assert edit(["lm_head", "model.layers.0", "*up_proj"]) == ""
        assert f"{UP} is quantized" in edit(["Linear"])


@pytest.mark.parametrize(
    ("name", "edit", "match"),
    [
        ("compressed-tensors", lambda c: c.pop("quantization_config"), "no quantization_config"),
        ("modelopt", lambda c: c.pop("quantization_config"), "no quantization_config"),
        (
            "compressed-tensors",
            lambda c: quantization(c).pop("quantization_status"),
            "leave the weights random",
        ),
        (
            "compressed-tensors",
            lambda c: quantization(c)["config_groups"]["group_0"].update(
                format="mxfp4-pack-quantized"
            ),
            "is stored as nvfp4, the config says mxfp4",
        ),
        (
            "compressed-tensors",
            lambda c: quantization(c)["config_groups"]["group_0"].update(format="int4"),
            "format 'int4' is not read here",
        ),
        ("compressed-tensors", lambda c: quantization(c).update(config_groups={}), "config_groups"),
        ("compressed-tensors", lambda c: quantization(c).update(ignore="lm_head"), "list of names"),
        ("modelopt", lambda c: quantization(c).update(quant_algo="W4A16_NVFP4"), "quant_algo is"),
        ("modelopt", lambda c: quantization(c).update(ignore=[]), "exclude_modules"),
    ],
)
def test_config(damage, name, edit, match):
    faults_of(damage(name, config=edit), match)


def test_modelopt_needs_both_files(damage):
    """E15: tools look into one or the other."""
    folder = damage("modelopt")
    (folder / "hf_quant_config.json").unlink()
    faults_of(folder, "hf_quant_config.json: is missing")


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_a_label_that_lies(damage, layout):
    """E18: called NVFP4, but the weights are something else."""

    def change(tensors):
        for name in [n for n in tensors if f"{DOWN}.weight" in n]:
            del tensors[name]
        tensors[f"{DOWN}.weight"] = "F8_E4M3", np.zeros((64, 96), np.uint8)

    faults_of(damage(layout, change), DOWN)


def test_header_records_of_comfy(damage):
    """E22: with neither record nor marker ComfyUI takes codes for weights."""
    key = "_quantization_metadata"

    def less(header):
        record = json.loads(header[key])
        record["layers"].pop(UP)
        header[key] = json.dumps(record)

    def more(header):
        record = json.loads(header[key])
        record["layers"]["lm_head"] = {"format": "nvfp4"}
        header[key] = json.dumps(record)

    def other(header):
        header[key] = header[key].replace("nvfp4", "float8_e4m3fn")

    for edit, match in (
        (less, f"{UP}: is quantized, but the header metadata does not say so"),
        (more, "lm_head: the header metadata calls it quantized"),
        (lambda header: header.pop(key), "does not say so"),
        (other, "calls the layer 'nvfp4', the header metadata 'float8_e4m3fn'"),
        (lambda header: header.update({key: "{"}), "damaged"),
    ):
        folder = damage("comfy", metadata=edit)
        faults_of(folder, match)
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (lambda c: c.pop("metadata"), "no metadata.total_size"),
        (lambda c: c["metadata"].update(total_size=1), "total_size is 1, the tensors take"),
        (lambda c: c["weight_map"].pop("lm_head.weight"), "1 shards are not in"),
        (lambda c: c["weight_map"].pop("model.norm.weight"), "are not in it: 'model.norm.weight'"),
    ],
)
def test_index(damage, edit, match):
    """E3, E13: also of a file that an older shard size left behind."""
    faults_of(damage("sharded", **{"model.safetensors.index": edit}), match)


# ------------------------------------------------------------------------------------------------
# Against the source
# ------------------------------------------------------------------------------------------------


def swap_nibbles(array):
    array[...] = (array << 4) | (array >> 4)


def halve(array):
    array[...] = array / np.float32(4)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["swapped", "scale", "transposed", "second"])
def test_values_that_are_wrong(damage, good, layout, kind):
    """B1, A27: nothing of the structure shows it."""

    def change(tensors):
        codes = tensors[f"{DOWN}.weight{CODES[layout]}"][1]
        scale = tensors[f"{DOWN}.weight_scale"][1]
        second = tensors[f"{DOWN}.weight{SECOND[layout]}"][1]
        if kind == "swapped":
            swap_nibbles(codes)
        elif kind == "scale":
            scale[...] = scale.ravel()[::-1].reshape(scale.shape)
        elif kind == "transposed":
            codes[...] = codes[::-1]
        else:
            second[...] = 1 / second if second != 1 else 2

    folder = damage(layout, change)
    assert structure_faults(folder) == []
    faults = value_faults(folder, good / "in")
    assert [fault for fault in faults if fault.startswith(f"{DOWN}.weight: its values are far")]
    assert all(DOWN in fault for fault in faults)


@pytest.mark.parametrize("name", [*LAYOUTS, "mxfp4", "sharded"])
def test_kept_tensors_that_differ(damage, good, name):
    def change(tensors):
        if "model.norm.weight" in tensors:
            tensors["model.norm.weight"][1][3] += 1

    (fault,) = value_faults(damage(name, change), good / "in")
    assert fault.startswith("model.norm.weight: is not quantized, but ")


def test_tensors_that_are_lost_or_added(checkpoints, damage, good):
    """E11: as an engine that reads the source would miss them."""

    def change(tensors):
        tensors["extra.bias"] = checkpoints.normal((4,))
        del tensors["model.norm.weight"]

    faults = value_faults(damage("modelopt", change), good / "in")
    assert sorted(fault.split(":")[1] for fault in faults) == [
        " 'extra.bias'",
        " 'model.norm.weight'",
    ]


def test_other_models_and_unreadable_ones(checkpoints, good, tmp_path):
    tensors, config = checkpoints.llama(1, hidden=32)
    other = checkpoints.save(tmp_path / "other", tensors, config)
    faults = value_faults(good / "modelopt", other)
    assert any("has shape" in fault for fault in faults)
    (fault,) = value_faults(good / "modelopt", tmp_path / "none")
    assert "none" in fault
    (fault,) = structure_faults(good / "in")
    assert "holds no quantized weight" in fault
    dequantize_checkpoint(good / "modelopt", tmp_path / "d", DequantizeOptions())
    assert structure_faults(tmp_path / "d", plain=True) == []
