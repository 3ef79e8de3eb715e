# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""diffusers pipelines: components with settings of their own, converted as a whole."""

from __future__ import annotations

import json

import pytest

import fp4kit
from command_line import fail, succeed
from fp4kit.checkpoint.operations import (
    convert_checkpoint,
    dequantize_checkpoint,
    plan_quantize_checkpoint,
    quantize_checkpoint,
)
from fp4kit.checkpoint.options import CheckpointOptions, ConvertOptions, DequantizeOptions
from fp4kit.checkpoint.read.directory import Checkpoint
from fp4kit.checkpoint.verify.structure import structure_faults
from fp4kit.checkpoint.verify.values import value_faults
from fp4kit.errors import FileFormatError, OptionError


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


@pytest.mark.parametrize(
    ("layout", "wide", "budget"), [("compressed-tensors", "fp8", 6.5), ("comfy", "bf16", 11)]
)
def test_a_plan_for_a_pipeline(layout, wide, budget, checkpoints, tmp_path):
    source = pipeline(checkpoints, tmp_path / "in")
    (source / "transformer").rename(tmp_path / "old")
    tensors = {
        f"transformer_blocks.{block}.ff.net.{part}.weight": checkpoints.normal((64, 64), seed=part)
        for block in range(2)
        for part in (0, 2)
    }
    base = "diffusion_pytorch_model"
    checkpoints.save(source / "transformer", tensors, {"_class_name": "transformer"}, base=base)
    report = fp4kit.survey(source, ["nvfp4", wide], budget=budget, layout=layout)
    assert set(report.plan.values()) == {"nvfp4", wide}
    fp4kit.quantize_checkpoint(source, tmp_path / "out", plan=report.plan, layout=layout)
    alone = fp4kit.survey(source / "transformer", ["nvfp4", wide], budget=budget, layout=layout)
    assert alone.plan == report.plan
    fp4kit.quantize_checkpoint(
        source / "transformer", tmp_path / "one", plan=report.plan, layout=layout
    )
    one, other = (
        sorted(path.glob("*.safetensors"))
        for path in (tmp_path / "one", tmp_path / "out/transformer")
    )
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in other]
    assert fp4kit.verify(tmp_path / "out", source).ok


def test_a_survey_is_of_one_model(checkpoints, tmp_path):
    source = pipeline(checkpoints, tmp_path / "in", ("transformer", "transformer_2"))
    with pytest.raises(OptionError, match="with 2 models to quantize, 'transformer', 'transf"):
        fp4kit.survey(source)
