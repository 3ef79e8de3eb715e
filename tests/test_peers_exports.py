# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Layouts key by key and byte by byte what ModelOpt and llm-compressor export."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fp4kit.checkpoint.operations import quantize_checkpoint
from fp4kit.checkpoint.options import CheckpointOptions

torch = pytest.importorskip("torch", reason="the peers extra is not installed")
transformers = pytest.importorskip("transformers", reason="the peers extra is not installed")
pytest.importorskip("modelopt", reason="the peers extra is not installed")

# Their own deprecations are not ours to fix.
pytestmark = pytest.mark.filterwarnings("ignore")

GOLDEN = Path(__file__).parent / "golden" / "checkpoints"
MODELS = ["llama-tiny", "qwen3moe-tiny"]
#: Configuration of ModelOpt, whether activations are quantized.
CONFIGS = {"W4A16_NVFP4_CFG": False, "NVFP4_DEFAULT_CFG": True}
JSON_FILES = ("config.json", "generation_config.json", "hf_quant_config.json")


def stored(folder):
    """{name: (dtype, shape, bytes)} of a model directory."""
    from safetensors.torch import load_file

    return {
        name: (tensor.dtype, tuple(tensor.shape), bytes(tensor.reshape(-1).view(torch.uint8)))
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def read(path):
    return json.loads(path.read_text())


def calibrate(model):
    tokens = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _ in range(4):
            model(torch.randint(0, 128, (2, 16), generator=tokens))


def input_amaxes(model):
    """What calibration found, by the names of the layers that ModelOpt writes."""
    amaxes = {}
    for name, module in model.named_modules():
        prefix, _, last = name.rpartition(".")
        if not last.endswith("input_quantizer") or getattr(module, "amax", None) is None:
            continue
        amax = float(module.amax)
        if last == "input_quantizer":
            amaxes[prefix] = amax
        else:  # of fused experts: written as single ones
            halves = {"gate_up_proj_input_quantizer": ("gate_proj", "up_proj")}
            for half in halves.get(last, ("down_proj",)):
                amaxes |= {f"{prefix}.{number}.{half}": amax for number in range(4)}
    return amaxes


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """ModelOpt's export of a golden model, made now, and the activation amaxes that it found."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    made = {}

    def make(model, config):
        if (model, config) not in made:
            module = transformers.AutoModelForCausalLM.from_pretrained(GOLDEN / model).eval()
            mtq.quantize(module, getattr(mtq, config), calibrate if CONFIGS[config] else None)
            amaxes = input_amaxes(module)
            folder = tmp_path_factory.mktemp("modelopt")
            export_hf_checkpoint(module, export_dir=folder)
            made[model, config] = folder, amaxes
        return made[model, config]

    return make


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("model", MODELS)
def test_equals_what_modelopt_exports_now(model, config, exported, tmp_path):
    """Names, element types, shapes, every byte of every tensor, and all JSON."""
    theirs, amaxes = exported(model, config)
    activations = None
    if CONFIGS[config]:
        activations = str(tmp_path / "amax.json")
        Path(activations).write_text(json.dumps(amaxes))
    else:
        assert not amaxes
    options = CheckpointOptions(layout="modelopt", recipe="modelopt", activations=activations)
    quantize_checkpoint(GOLDEN / model, tmp_path / "ours", options)
    ours = tmp_path / "ours"
    assert sorted(path.name for path in ours.iterdir()) == sorted(
        path.name for path in theirs.iterdir()
    )
    got, expected = stored(ours), stored(theirs)
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name] == tensor, name
    for name in JSON_FILES:
        assert read(ours / name) == read(theirs / name), name


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("model", MODELS)
def test_the_golden_export_is_what_modelopt_exports_now(model, config, exported):
    """So that the golden checkpoints speak for the pinned version; activations depend on data."""
    theirs, _ = exported(model, config)
    golden = GOLDEN / f"{model}--modelopt-{config}"
    got, expected = stored(theirs), stored(golden)
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        same = got[name][:2] == tensor[:2] if name.endswith(".input_scale") else got[name] == tensor
        assert same, name
    assert read(theirs / "hf_quant_config.json") == read(golden / "hf_quant_config.json")


# ------------------------------------------------------------------------------------------------
# llm-compressor, of which golden exports speak
# ------------------------------------------------------------------------------------------------


def compressed(model, format_name, tmp_path):
    """Both directories: ours and llm-compressor's."""
    recipe = {"nvfp4": {"recipe": "compressed-tensors"}, "mxfp4": {"scale_rule": "even"}}
    options = CheckpointOptions(format=format_name, **recipe[format_name])
    quantize_checkpoint(GOLDEN / model, tmp_path / "ours", options)
    return tmp_path / "ours", GOLDEN / f"{model}--llmcompressor-{format_name.upper()}A16"


def unshared(theirs):
    """Modules that llm-compressor gave a second level of their own: a fault of it.

    It shares the second level of gate and up of dense layers (and rounds 2688 / amax to the
    model's bfloat16, as recipe compressed-tensors does), but not of an expert, although engines
    use one for both. The larger amax, that is the smaller scale, is the shared one.
    """
    second = {
        name.removesuffix(".weight_global_scale"): np.frombuffer(data, np.float32)[0]
        for name, (_, _, data) in theirs.items()
        if name.endswith(".weight_global_scale")
    }
    alone = {}
    for up in [name for name in second if name.endswith(".up_proj")]:
        gate = up.replace(".up_proj", ".gate_proj")
        shared = min(second[up], second[gate])
        alone |= {name: shared for name in (gate, up) if second[name] != shared}
    return alone


@pytest.mark.parametrize("format_name", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("model", [*MODELS, "llama-tiny-sharded"])
def test_equals_what_llm_compressor_exports(model, format_name, tmp_path):
    ours, theirs = compressed(model, format_name, tmp_path)
    got, expected = stored(ours), stored(theirs)
    alone = unshared(expected)
    assert len(alone) == (8 if (model, format_name) == ("qwen3moe-tiny", "nvfp4") else 0)
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        module, _, part = name.rpartition(".")
        if module not in alone:
            assert got[name] == tensor, name
            continue
        assert got[name][:2] == tensor[:2], name
        if part == "weight_global_scale":
            assert np.frombuffer(got[name][2], np.float32) == alone[module], name


@pytest.mark.parametrize("format_name", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("model", MODELS)
def test_the_config_means_what_llm_compressors_does(model, format_name, tmp_path):
    """As the reader understands it; ours lists what is there, theirs what might be."""
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.utils.match import match_named_modules

    ours, theirs = compressed(model, format_name, tmp_path)
    configs = [read(folder / "config.json") for folder in (ours, theirs)]
    understood = [QuantizationConfig.model_validate(c["quantization_config"]) for c in configs]
    schemes = [list(config.config_groups.values()) for config in understood]
    assert schemes[0] == schemes[1]
    assert len(schemes[0]) == 1
    others = [
        config.model_dump(exclude={"config_groups", "ignore", "version"}) for config in understood
    ]
    assert others[0] == others[1]
    module = transformers.AutoModelForCausalLM.from_pretrained(GOLDEN / model)
    quantized = [
        {name for name, _ in match_named_modules(module, ["Linear"], config.ignore)}
        for config in understood
    ]
    assert quantized[0] == quantized[1]
    assert quantized[0]
