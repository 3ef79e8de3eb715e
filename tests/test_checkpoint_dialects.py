# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Forms of a model that lie side by side: variants, Mistral's own, adapters, folders of modules."""

from __future__ import annotations

import json

import numpy as np
import pytest

from command_line import fail, succeed
from fp4kit.checkpoint.convert import (
    convert_checkpoint,
    dequantize_checkpoint,
    plan_quantize_checkpoint,
    quantize_checkpoint,
)
from fp4kit.checkpoint.directory import Checkpoint
from fp4kit.checkpoint.options import CheckpointOptions, ConvertOptions, DequantizeOptions
from fp4kit.checkpoint.verify import structure_faults
from fp4kit.checkpoint.verify_values import value_faults
from fp4kit.errors import FileFormatError, OptionError
from fp4kit.io.quantize_file import quantize_file
from fp4kit.io.report import QuantizeOptions


def rename(folder, old, new, index):
    """Gives the shards and the index of a model other names."""
    (found,) = folder.glob("*.index.json")
    text = found.read_text()
    found.unlink()
    for path in list(folder.glob(f"{old}*.safetensors")):
        name = path.name.replace(old, new)
        text = text.replace(path.name, name)
        path.rename(folder / name)
    (folder / index).write_text(text)


# ------------------------------------------------------------------------------------------------
# F12: variants
# ------------------------------------------------------------------------------------------------

VARIANTS = [
    # how transformers and diffusers have called index and shards
    ("model", "model.fp16", "model.safetensors.index.fp16.json"),
    ("diffusion_pytorch_model", "diffusion_pytorch_model.fp16",
     "diffusion_pytorch_model.safetensors.index.fp16.json"),
    ("diffusion_pytorch_model", "diffusion_pytorch_model.bf16",
     "diffusion_pytorch_model.bf16.safetensors.index.json"),
    ("diffusion_pytorch_model", "diffusion_pytorch_model.fp16",
     "diffusion_pytorch_model.safetensors.fp16.index.json"),
]  # fmt: skip


@pytest.mark.parametrize(("base", "variant", "index"), VARIANTS)
@pytest.mark.parametrize("size", [10**9, 20_000])
def test_a_variant_alone(checkpoints, tmp_path, base, variant, index, size):
    """It keeps its names, so that it is loaded as before; `verify` and back find it again."""
    tensors, config = checkpoints.llama(1)
    source = checkpoints.save(tmp_path / "in", tensors, config, shards=3, base=base)
    rename(source, base, variant, index)
    out, back = tmp_path / "out", tmp_path / "back"
    report = quantize_checkpoint(source, out, CheckpointOptions(max_shard_size=size))
    assert all(name.startswith(variant) for name in report.shards)
    assert not report.left_out
    expected = {index} if size < 10**9 else set()
    assert {path.name for path in out.glob("*index*")} == expected
    assert structure_faults(out) == []
    dequantize_checkpoint(out, back, DequantizeOptions())
    assert checkpoints.read(back).keys() == tensors.keys()


@pytest.mark.parametrize(("base", "variant", "index"), VARIANTS)
@pytest.mark.parametrize("sharded", [False, True])
def test_the_default_variant_wins(checkpoints, tmp_path, base, variant, index, sharded):
    """The other is named, and neither its weights nor its index are copied."""
    tensors, config = checkpoints.llama(1)
    source = checkpoints.save(tmp_path / "in", tensors, config, shards=2, base=base)
    rename(source, base, variant, index)
    others = {path.name for path in source.glob("*safetensors*")}
    checkpoints.save(source, tensors, config, shards=2 if sharded else 1, base=base)
    report = quantize_checkpoint(source, tmp_path / "out", CheckpointOptions())
    assert list(report.shards) == [f"{base}.safetensors"]
    assert set(report.left_out) == others
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        f"{base}.safetensors",
    }


def test_single_files_of_variants(checkpoints, tmp_path):
    tensors, config = checkpoints.llama(1)
    source = checkpoints.save(tmp_path / "in", tensors, config, base="model.fp16")
    report = quantize_checkpoint(source, tmp_path / "out", CheckpointOptions())
    assert list(report.shards) == ["model.fp16.safetensors"]
    checkpoints.save(source, tensors, config, base="model.bf16")
    with pytest.raises(FileFormatError, match=r"2 variants .*model\.bf16\.safetensors.*keep one"):
        plan_quantize_checkpoint(source, CheckpointOptions())
    checkpoints.save(source, tensors, config)
    report = plan_quantize_checkpoint(source, CheckpointOptions())
    assert list(report.shards) == ["model.safetensors"]
    assert report.left_out == ["model.bf16.safetensors", "model.fp16.safetensors"]


# ------------------------------------------------------------------------------------------------
# F15: the index decides
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [False, True])
def test_the_index_decides_over_stale_copies(checkpoints, tmp_path, after):
    """The copy may stand before or after: its values are nowhere in the output, and it is named."""
    tensors, config = checkpoints.llama(1)
    fresh = checkpoints.save(tmp_path / "fresh", tensors, config, shards=2)
    source = checkpoints.save(tmp_path / "in", tensors, config, shards=2)
    shards = sorted(source.glob("*.safetensors"))
    held = [list(checkpoints.read_file(path)[0]) for path in shards]
    name = held[0 if after else 1][1]
    dtype, array = tensors[name]
    stale = shards[1 if after else 0]
    part = {key: tensors[key] for key in held[1 if after else 0]}
    checkpoints.write_file(stale, part | {name: (dtype, array * 0 + 7)}, {"format": "pt"})
    for folder in (fresh, source):
        report = quantize_checkpoint(folder, tmp_path / f"{folder.name}-out", CheckpointOptions())
    assert checkpoints.digest(tmp_path / "in-out") == checkpoints.digest(tmp_path / "fresh-out")
    (warning,) = report.warnings
    assert f"{name} ({stale.name})" in warning
    assert "left out" in warning
    faults = structure_faults(source, plain=True)
    assert any(name in fault and "holds a copy" in fault for fault in faults)


# ------------------------------------------------------------------------------------------------
# F4: weights of other modules
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "2_Dense/model.safetensors",
        "2_Dense/pytorch_model.bin",
        "2_Dense/model.safetensors.index.json",
        "3_Head/adapter_config.json",
        "speech/tokenizer.pt",
        "spk_dict.pt",
        "training_args.bin",
        "params.json",
    ],
)
def test_what_is_not_understood_is_copied(checkpoints, tmp_path, name):
    tensors, config = checkpoints.llama(1)
    source = checkpoints.save(tmp_path / "in", tensors, config)
    (source / name).parent.mkdir(exist_ok=True)
    (source / name).write_bytes(b"content")
    report = quantize_checkpoint(source, tmp_path / "out", CheckpointOptions())
    assert report.copied == [name]
    assert report.left_out == []
    assert (tmp_path / "out" / name).read_bytes() == b"content"


@pytest.mark.parametrize(
    "name",
    [
        "pytorch_model.bin",
        "pytorch_model-00001-of-00002.bin",
        "pytorch_model.bin.index.json",
        "pytorch_model.fp16.bin",
        "model.pt",
        "tf_model.h5",
        "flax_model.msgpack",
        "consolidated.00.pth",
        "consolidated.safetensors",
        "some-model-Q4.gguf",
        "onnx/model.onnx",
    ],
)
def test_other_forms_of_the_same_weights_are_not(checkpoints, tmp_path, name):
    tensors, config = checkpoints.llama(1)
    source = checkpoints.save(tmp_path / "in", tensors, config)
    (source / name).parent.mkdir(exist_ok=True)
    (source / name).write_bytes(b"content")
    report = quantize_checkpoint(source, tmp_path / "out", CheckpointOptions())
    assert report.left_out == [name]
    assert not (tmp_path / "out" / name).exists()


# ------------------------------------------------------------------------------------------------
# F9: adapters
# ------------------------------------------------------------------------------------------------

FACTORS = [
    ("base_model.model.layers.0.q_proj", ".lora_A.weight", ".lora_B.weight"),
    ("base_model.model.layers.0.q_proj", ".lora_A.default.weight", ".lora_B.default.weight"),
    ("lora_unet_blocks_0_attn_to_q", ".lora_down.weight", ".lora_up.weight"),
    ("transformer.blocks.0.attn.to_q", ".lora.down.weight", ".lora.up.weight"),
    ("lora_unet_blocks_0", ".lokr_w1", ".lokr_w2"),
    ("lora_unet_blocks_0", ".hada_w1_a", ".hada_w1_b"),
]


@pytest.mark.parametrize(("module", "first", "second"), FACTORS)
@pytest.mark.parametrize("base", ["adapter_model", "model", "pytorch_lora_weights"])
def test_adapters_are_refused(checkpoints, tmp_path, module, first, second, base):
    tensors = {f"{module}{part}": checkpoints.normal((16, 64)) for part in (first, second)}
    tensors[f"{module}.alpha"] = checkpoints.normal(())
    source = checkpoints.save(tmp_path / "in", tensors, None, base=base)
    for run in (
        lambda: plan_quantize_checkpoint(source, CheckpointOptions()),
        lambda: quantize_checkpoint(source, tmp_path / "out", CheckpointOptions()),
        lambda: quantize_checkpoint(
            source / f"{base}.safetensors",
            tmp_path / "out.safetensors",
            CheckpointOptions(layout="comfy"),
        ),
        lambda: quantize_file(
            source / f"{base}.safetensors", tmp_path / "out.safetensors", QuantizeOptions()
        ),
    ):
        with pytest.raises(FileFormatError, match=r"is an adapter, no model; .*merge"):
            run()
    assert {path.name for path in tmp_path.iterdir()} == {"in"}


def test_an_adapter_by_its_settings(checkpoints, tmp_path):
    """Trained heads alone have no factors."""
    tensors = {"base_model.model.score.weight": checkpoints.normal((16, 64))}
    source = checkpoints.save(tmp_path / "in", tensors, None, base="adapter_model")
    (source / "adapter_config.json").write_text("{}")
    with pytest.raises(FileFormatError, match="is an adapter"):
        plan_quantize_checkpoint(source, CheckpointOptions())


def test_an_adapter_beside_a_model(checkpoints, tmp_path):
    """Both of its files stay behind: transformers would look for a base model by the settings."""
    tensors, config = checkpoints.llama(1)
    source = checkpoints.save(tmp_path / "in", tensors, config)
    factors = {"".join(FACTORS[0][:2]): checkpoints.normal((16, 64))}
    checkpoints.save(source, factors, None, base="adapter_model")
    (source / "adapter_config.json").write_text("{}")
    report = quantize_checkpoint(source, tmp_path / "out", CheckpointOptions())
    assert report.left_out == ["adapter_config.json", "adapter_model.safetensors"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        "model.safetensors",
    }


def test_a_model_with_adapters_inside_is_one(checkpoints, tmp_path):
    """Phi-4-multimodal comes with the factors of two adapters beside each weight."""
    tensors, config = checkpoints.llama(1)
    for name in [name for name in tensors if "_proj.weight" in name]:
        module = name.removesuffix(".weight")
        tensors[f"{module}.base_layer.weight"] = tensors.pop(name)
        for sense in ("vision", "speech"):
            for factor in ("lora_A", "lora_B"):
                tensors[f"{module}.{factor}.{sense}.weight"] = checkpoints.normal((16, 64))
    source = checkpoints.save(tmp_path / "in", tensors, config)
    assert plan_quantize_checkpoint(source, CheckpointOptions()).shards


# ------------------------------------------------------------------------------------------------
# F6: Mistral's own format
# ------------------------------------------------------------------------------------------------


def native(checkpoints, folder, *, mla=False, shards=1, params=None):
    """A model directory of consolidated weights and params.json."""
    shapes = {"tok_embeddings.weight": (80, 64), "output.weight": (80, 64), "norm.weight": (64,)}
    names = {"wq": (64, 64), "wk": (32, 64), "wv": (32, 64), "wo": (64, 64)}
    if mla:
        names = {"wq_a": (32, 64), "wq_b": (64, 32), "wkv_a_with_mqa": (48, 64)}
        names |= {"wkv_b": (64, 32), "wo": (64, 64)}
    for layer in range(2):
        shapes |= {f"layers.{layer}.attention.{n}.weight": shape for n, shape in names.items()}
        mlp = {"w1": (96, 64), "w3": (96, 64), "w2": (64, 96)}
        if mla and layer:
            shapes[f"layers.{layer}.gate.weight"] = (2, 64)
            for part in ("experts.0", "experts.1", "shared_experts"):
                shapes |= {f"layers.{layer}.{part}.{n}.weight": s for n, s in mlp.items()}
        else:
            shapes |= {f"layers.{layer}.feed_forward.{n}.weight": s for n, s in mlp.items()}
    shapes["vision_language_adapter.w_in.weight"] = (64, 64)
    shapes["vision_encoder.transformer.layers.0.attention.wo.weight"] = (64, 64)
    tensors = {
        name: checkpoints.normal(shape, seed=number)
        for number, (name, shape) in enumerate(shapes.items())
    }
    checkpoints.save(folder, tensors, None, base="consolidated", shards=shards)
    given = {"dim": 64, "n_layers": 2, "vocab_size": 80, "tied_embeddings": False}
    (folder / "params.json").write_text(json.dumps(given | (params or {})))
    return tensors, given


def params_of(folder):
    return json.loads((folder / "params.json").read_text())


@pytest.mark.parametrize("mla", [False, True])
@pytest.mark.parametrize("shards", [1, 3])
def test_mistral_native(checkpoints, tmp_path, mla, shards):
    """As vLLM reads it: `quantization` of params.json, stored and built names, no config.json."""
    source, out, back = (tmp_path / name for name in ("in", "out", "back"))
    tensors, given = native(checkpoints, source, mla=mla, shards=shards)
    size = 10**9 if shards == 1 else 20_000
    report = quantize_checkpoint(source, out, CheckpointOptions(max_shard_size=size))
    assert not list(out.glob("config.json"))
    assert all(name.startswith("consolidated") for name in report.shards)
    assert (out / "consolidated.safetensors.index.json").exists() == (shards > 1)
    params = params_of(out)
    quantization = params.pop("quantization")
    assert params == given
    assert quantization["quant_method"] == "compressed-tensors"
    assert quantization["format"] == "nvfp4-pack-quantized"
    ignore = quantization["ignore"]
    assert {"output", "lm_head", "re:vision_encoder.*", "re:vision_language_adapter.*"} <= {*ignore}
    quantized = {name.removesuffix("_packed") for name in checkpoints.read(out) if "packed" in name}
    assert "layers.0.feed_forward.w1.weight" in quantized
    if mla:
        assert {"layers.1.gate", "model.layers.1.mlp.gate"} <= {*ignore}
        assert "layers.1.experts.1.w2.weight" in quantized
        assert "layers.1.shared_experts.w3.weight" in quantized
        assert "layers.0.attention.wkv_b.weight" in quantized
    else:
        # vLLM reorders rows of wq and wk, but not of their codes; wv is fused with them.
        assert {"layers.0.attention.wq", "model.layers.0.self_attn.k_proj"} <= {*ignore}
        assert not any(".wq." in name or ".wk." in name or ".wv." in name for name in quantized)
        assert "layers.0.attention.wo.weight" in quantized
    assert structure_faults(out) == []
    dequantize_checkpoint(out, back, DequantizeOptions())
    assert params_of(back) == given
    assert not list(back.glob("config.json"))
    decoded = checkpoints.read(back)
    assert decoded.keys() == tensors.keys()
    for name, (_, array) in tensors.items():
        got = checkpoints.array(decoded[name]).astype(np.float32)
        assert got.shape == array.shape
        if name not in quantized:
            assert decoded[name][2] == array.tobytes()
    with pytest.raises(FileFormatError, match="quantized already"):
        plan_quantize_checkpoint(out, CheckpointOptions())


def test_verify_of_mistral_native(checkpoints, tmp_path):
    """By the names that readers build, as llm-compressor's recipe for Mistral Large 3 has them."""
    native(checkpoints, tmp_path / "in", mla=True)
    out = tmp_path / "out"
    quantize_checkpoint(tmp_path / "in", out, CheckpointOptions(exclude=("*wq_a*", "*wkv_a*")))
    params = params_of(out)
    recipe = ["lm_head", "re:vision_encoder.*", "re:vision_language_adapter.*", "re:.*gate$"]
    recipe += ["re:.*kv_a_proj_with_mqa$", "re:.*q_a_proj$"]
    for ignore, faults in (
        (recipe, 0),
        (recipe[1:], 1),
        ([*recipe, "model.layers.0.mlp.down_proj"], 1),
        (["output", *recipe[1:]], 1),
    ):
        params["quantization"]["ignore"] = ignore
        (out / "params.json").write_text(json.dumps(params))
        found = structure_faults(out)
        assert len(found) == faults
        assert all(fault.startswith("params.json: ") for fault in found)


def test_layouts_of_mistral_native(checkpoints, tmp_path):
    """vLLM refuses other methods in params.json."""
    source = tmp_path / "in"
    native(checkpoints, source)
    with pytest.raises(OptionError, match=r"Mistral's own format.*--layout compressed-tensors"):
        plan_quantize_checkpoint(source, CheckpointOptions(layout="modelopt"))
    quantize_checkpoint(source, tmp_path / "out", CheckpointOptions())
    with pytest.raises(OptionError, match="Mistral's own format"):
        convert_checkpoint(tmp_path / "out", tmp_path / "x", ConvertOptions("modelopt"))
    convert_checkpoint(tmp_path / "out", tmp_path / "comfy", ConvertOptions("comfy"))
    assert "quantization" not in params_of(tmp_path / "comfy")
    convert_checkpoint(tmp_path / "comfy", tmp_path / "again", ConvertOptions("compressed-tensors"))
    assert checkpoints.digest(tmp_path / "again") == checkpoints.digest(tmp_path / "out")


def test_mistral_native_that_is_quantized_by_others(checkpoints, tmp_path):
    source = tmp_path / "in"
    fp8 = {"quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}}
    native(checkpoints, source, params=fp8)
    with pytest.raises(FileFormatError, match=r"quantized already by Mistral's fp8_e4m3"):
        plan_quantize_checkpoint(source, CheckpointOptions())


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_both_forms_of_mistral(checkpoints, tmp_path, sharded, own):
    """The Hugging Face form is converted; the other is left out with its settings, and named."""
    tensors, config = checkpoints.llama(1)
    source = checkpoints.save(tmp_path / "in", tensors, config, shards=2 if sharded else 1)
    native(checkpoints, source, shards=2 if own else 1)
    report = quantize_checkpoint(source, tmp_path / "out", CheckpointOptions())
    left = {path.name for path in source.glob("consolidated*")} | {"params.json"}
    assert set(report.left_out) == left
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        "model.safetensors",
    }
    assert structure_faults(tmp_path / "out") == []


# ------------------------------------------------------------------------------------------------
# F12: components of pipelines
# ------------------------------------------------------------------------------------------------


def pipeline(checkpoints, folder, denoisers=("transformer",), index=None):
    """A diffusers pipeline with a text encoder, a VAE, and what else there is."""
    for name in (*denoisers, "text_encoder", "vae"):
        tensors = {
            f"transformer_blocks.0.attn.{part}.weight": checkpoints.normal((64, 64), seed=number)
            for number, part in enumerate(("to_q", "to_k", "to_v"))
        }
        base = "model" if name == "text_encoder" else "diffusion_pytorch_model"
        checkpoints.save(folder / name, tensors, {"_class_name": name}, base=base)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "X"} | (index or {})))
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text("{}")
    return folder


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt", "comfy"])
@pytest.mark.parametrize(
    ("denoisers", "index"),
    [
        (["transformer"], {}),
        (["unet"], {}),
        (["transformer", "transformer_2"], {}),
        (["prior"], {"prior": ["diffusers", "PriorTransformer"], "vae": ["diffusers", "VAE"]}),
        (["denoiser"], {"denoiser": ["diffusers", "StableCascadeUNet"], "x": [None, None]}),
    ],
)
def test_a_pipeline(checkpoints, tmp_path, layout, denoisers, index):
    """What takes away noise is quantized; every other folder is the same byte for byte."""
    source = pipeline(checkpoints, tmp_path / "in", denoisers, index)
    (source / "flux1-dev.safetensors").write_bytes(b"single-file form")
    options = CheckpointOptions(layout=layout)
    plan = plan_quantize_checkpoint(source, options)
    out, back = tmp_path / "out", tmp_path / "back"
    report = quantize_checkpoint(source, out, options)
    assert plan.shards == report.shards
    assert plan.disk_needed == report.disk_needed
    assert set(report.shards) == {f"{n}/diffusion_pytorch_model.safetensors" for n in denoisers}
    assert report.left_out == ["flux1-dev.safetensors"]
    assert {t.name.partition("/")[0] for t in report.tensors} == set(denoisers)
    assert all(tensor.action == "quantize" for tensor in report.tensors)
    before, after = checkpoints.digest(source), checkpoints.digest(out)
    kept = {n for n in before if n.partition("/")[0] not in (*denoisers, "flux1-dev.safetensors")}
    assert {name: before[name] for name in kept} == {name: after[name] for name in kept}
    assert "model_index.json" in kept
    for name in denoisers:
        alone = tmp_path / name
        quantize_checkpoint(source / name, alone, options)
        assert checkpoints.digest(alone) == checkpoints.digest(out / name)
    assert structure_faults(out) == []
    assert value_faults(out, source) == []
    dequantize_checkpoint(out, back, DequantizeOptions())
    assert {n: d for n, d in checkpoints.digest(back).items() if n in kept} == {
        name: before[name] for name in kept
    }
    assert (
        checkpoints.read(back / denoisers[0]).keys()
        == checkpoints.read(source / denoisers[0]).keys()
    )


def test_faults_of_a_pipeline(checkpoints, tmp_path):
    source = pipeline(checkpoints, tmp_path / "in")
    (fault,) = structure_faults(source)
    assert "no folder of it holds a quantized weight" in fault
    out = tmp_path / "out"
    quantize_checkpoint(source, out, CheckpointOptions())
    config = checkpoints.config_of(out / "transformer")
    config["quantization_config"]["quantization_status"] = "frozen"
    (out / "transformer" / "config.json").write_text(json.dumps(config))
    faults = structure_faults(out)
    assert len(faults) == 1
    assert faults[0].startswith("transformer: ")


def test_a_pipeline_converts(checkpoints, tmp_path):
    source = pipeline(checkpoints, tmp_path / "in")
    for layout in ("modelopt", "comfy"):
        quantize_checkpoint(source, tmp_path / layout, CheckpointOptions(layout=layout))
    convert_checkpoint(tmp_path / "modelopt", tmp_path / "new", ConvertOptions("comfy"))
    assert structure_faults(tmp_path / "new") == []
    assert (
        checkpoints.digest(tmp_path / "new").keys() == checkpoints.digest(tmp_path / "comfy").keys()
    )


def test_a_pipeline_without_a_denoiser(checkpoints, tmp_path):
    source = pipeline(checkpoints, tmp_path / "in", ())
    with pytest.raises(FileFormatError, match=r"none of its folders 'text_encoder', 'vae'"):
        plan_quantize_checkpoint(source, CheckpointOptions())
    with pytest.raises(FileFormatError, match=r"is a diffusers pipeline: .* give one of them"):
        Checkpoint(source)


def test_a_pipeline_that_was_interrupted(checkpoints, tmp_path, monkeypatch):
    """Without model_index.json it is no pipeline yet; going on gives the same bytes."""
    source = pipeline(checkpoints, tmp_path / "in", ("transformer", "transformer_2"))
    out, whole = tmp_path / "out", tmp_path / "whole"
    quantize_checkpoint(source, whole, CheckpointOptions())
    with pytest.raises(FileFormatError, match="no unfinished conversion"):
        quantize_checkpoint(source, out, CheckpointOptions(), resume=True)
    assert not out.exists()
    with monkeypatch.context() as patched:

        def stop(self, name, offset, buffer):
            if self.path.name == "transformer_2":
                raise KeyboardInterrupt
            return read(self, name, offset, buffer)

        read = Checkpoint.read
        patched.setattr(Checkpoint, "read", stop)
        with pytest.raises(KeyboardInterrupt):
            quantize_checkpoint(source, out, CheckpointOptions())
    assert not (out / "model_index.json").exists()
    with pytest.raises(OptionError, match="not empty"):
        quantize_checkpoint(source, out, CheckpointOptions())
    quantize_checkpoint(source, out, CheckpointOptions(), resume=True)
    assert checkpoints.digest(out) == checkpoints.digest(whole)
    quantize_checkpoint(source, out, CheckpointOptions(), force=True)
    assert checkpoints.digest(out) == checkpoints.digest(whole)


def test_links_out_of_a_pipeline(checkpoints, tmp_path):
    source = pipeline(checkpoints, tmp_path / "in")
    (source / "vae" / "config.json").rename(tmp_path / "outside.json")
    (source / "vae" / "config.json").symlink_to(tmp_path / "outside.json")
    with pytest.raises(OptionError, match="--follow-links"):
        quantize_checkpoint(source, tmp_path / "out", CheckpointOptions())
    assert not (tmp_path / "out").exists()
    quantize_checkpoint(source, tmp_path / "out", CheckpointOptions(follow_links=True))
    assert (tmp_path / "out" / "vae" / "config.json").is_file()


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt", "comfy"])
def test_a_layout_that_no_diffusers_reader_knows(checkpoints, tmp_path, layout):
    config = {"_class_name": "FluxTransformer2DModel"}
    source = checkpoints.save(
        tmp_path / "in", checkpoints.diffusion(), config, base="diffusion_pytorch_model"
    )
    warnings = plan_quantize_checkpoint(source, CheckpointOptions(layout=layout)).warnings
    said = any("--layout comfy" in warning for warning in warnings)
    assert said == (layout == "compressed-tensors")


# ------------------------------------------------------------------------------------------------
# The command line
# ------------------------------------------------------------------------------------------------


def test_a_pipeline_from_the_command_line(checkpoints, tmp_path):
    source = pipeline(checkpoints, tmp_path / "in")
    out, back, new = (tmp_path / name for name in ("out", "back", "new"))
    dry = succeed("quantize", source, "-o", out, "--dry-run", "--device", "cpu")
    assert "would write" in dry.stderr
    assert not out.exists()
    result = succeed("quantize", source, "-o", out, "--device", "cpu")
    assert "Warning: transformer: " in result.stderr
    assert "--layout comfy" in result.stderr
    succeed("verify", out)
    succeed("verify", out, "--against", source, "--device", "cpu")
    succeed("dequantize", out, "-o", back, "--device", "cpu")
    succeed("convert", out, "-o", new, "--layout", "modelopt")
    assert (new / "transformer" / "hf_quant_config.json").is_file()
    assert "transformer/transformer_blocks.0.attn.to_q.weight" in succeed("inspect", out).stdout


def test_links_from_the_command_line(checkpoints, tmp_path):
    tensors, config = checkpoints.llama(1)
    source = checkpoints.save(tmp_path / "in", tensors, config)
    (tmp_path / "private").write_text("private")
    (source / "link").symlink_to(tmp_path / "private")
    out = tmp_path / "out"
    for command, more in (("quantize", []), ("quantize", ["--dry-run"])):
        said = fail(command, source, "-o", out, "--device", "cpu", *more)
        assert "link out of the model directory" in said
    succeed("quantize", source, "-o", out, "--device", "cpu", "--follow-links")
    assert (out / "link").read_text() == "private"
    (out / "link").unlink()
    (out / "link").symlink_to(tmp_path / "private")
    for number, command in enumerate((["dequantize"], ["convert", "--layout", "modelopt"])):
        target = tmp_path / str(number)
        assert "--follow-links" in fail(command[0], out, "-o", target, *command[1:])
        succeed(command[0], out, "-o", target, *command[1:], "--follow-links")
        assert not (target / "link").is_symlink()
    plain = source / "model.safetensors"
    assert "for model directories" in fail("quantize", plain, "--follow-links", code=2)


def test_an_adapter_from_the_command_line(checkpoints, tmp_path):
    tensors = {"x.lora_A.weight": checkpoints.normal((16, 64))}
    path = checkpoints.write_file(tmp_path / "adapter.safetensors", tensors)
    for more in ([], ["--dry-run"], ["--layout", "comfy"]):
        assert "is an adapter" in fail("quantize", path, "--device", "cpu", *more)
    assert {entry.name for entry in tmp_path.iterdir()} == {"adapter.safetensors"}
