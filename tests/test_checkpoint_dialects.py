# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Forms of a model that lie side by side: variants, Mistral's own, adapters, folders of modules."""

from __future__ import annotations

import pytest

from command_line import fail
from fp4kit.checkpoint.operations import (
    dequantize_checkpoint,
    plan_quantize_checkpoint,
    quantize_checkpoint,
)
from fp4kit.checkpoint.options import CheckpointOptions, DequantizeOptions
from fp4kit.checkpoint.verify.structure import structure_faults
from fp4kit.errors import FileFormatError
from fp4kit.io.quantize import quantize_file
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
    ("diffusion_model.blocks.0.self_attn.q", ".diff", ".diff_b"),
    ("base_model.model", ".vera_A", ".vera_B"),
    ("base_model.model.layers.0", ".k_proj.ia3_l", ".v_proj.ia3_l"),
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


def test_an_adapter_from_the_command_line(checkpoints, tmp_path):
    tensors = {"x.lora_A.weight": checkpoints.normal((16, 64))}
    path = checkpoints.write_file(tmp_path / "adapter.safetensors", tensors)
    for more in ([], ["--dry-run"], ["--layout", "comfy"]):
        assert "is an adapter" in fail("quantize", path, "--device", "cpu", *more)
    assert {entry.name for entry in tmp_path.iterdir()} == {"adapter.safetensors"}
