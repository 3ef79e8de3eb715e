# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Models of transformers that read fused experts only load what `dequantize` makes of them.

Without their tensors transformers leaves experts random, and says so in a log line at most.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fp4kit.checkpoint.models.expert_types import READ_FUSED, READ_SINGLE
from fp4kit.checkpoint.models.reader_faults import reader_faults
from fp4kit.checkpoint.operations import dequantize_checkpoint, quantize_checkpoint
from fp4kit.checkpoint.options import CheckpointOptions, DequantizeOptions

torch = pytest.importorskip("torch", reason="the peers extra is not installed")
transformers = pytest.importorskip("transformers", reason="the peers extra is not installed")
safetensors_torch = pytest.importorskip("safetensors.torch", reason="the peers extra is missing")

# Their own deprecations are not ours to fix.
pytestmark = pytest.mark.filterwarnings("ignore")

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "intermediate_size_mlp": 96,
    "moe_intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_group": 1,
    "topk_group": 1,
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_topk": 8,
    "num_nextn_predict_layers": 0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "depth": 1,
    "num_heads": 4,
    "image_size": 28,
    "patch_size": 14,
    "out_hidden_size": 64,
    "vision_output_dim": 64,
    "projector_input_dim": 64,
    "projector_output_dim": 64,
    "deepstack_visual_indexes": [0],
}
#: Class, and what its small configuration needs beside SMALL.
MODELS = {
    "aria": ("AriaForConditionalGeneration", {}),
    "aria_text": ("AriaTextForCausalLM", {}),
    "gpt_oss": ("GptOssForCausalLM", {}),
    "granitemoe_swa": ("GraniteMoeSWAForCausalLM", {}),
    "hy_v4": ("HYV4ForCausalLM", {"num_key_value_heads": 4}),
    "inkling_text": ("InklingForCausalLM", {}),
    "lara_mini": ("LaraMiniForCausalLM", {}),
    "llama4": ("Llama4ForConditionalGeneration", {}),
    "llama4_text": ("Llama4ForCausalLM", {}),
    "minimax_m3_vl_text": ("MiniMaxM3VLForCausalLM", {}),
    "mistral4": ("Mistral4ForCausalLM", {"num_key_value_heads": 4}),
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration", {}),
}


def shrink(config, sizes):
    """Sets what a configuration has of some sizes; layers of every kind stay."""
    for key, value in sizes.items():
        if hasattr(config, key):
            setattr(config, key, value)
    for key in ("layer_types", "mlp_layer_types", "layers_block_type"):
        kinds = getattr(config, key, None)
        if isinstance(kinds, list):
            kinds = list(dict.fromkeys(kinds))
            setattr(config, key, kinds * 2 if len(kinds) == 1 else kinds)
            config.num_hidden_layers = max(len(kinds), 2)


def build(model_type):
    """A small model with random weights."""
    name, more = MODELS[model_type]
    config = transformers.CONFIG_MAPPING[model_type]()
    text = getattr(config, "text_config", None)
    shrink(config if text is None else text, SMALL | more)
    if getattr(config, "vision_config", None) is not None:
        shrink(config.vision_config, VISION)
    if hasattr(config, "projector_patch_to_query_dict"):
        config.projector_patch_to_query_dict = {4: 4}
    torch.manual_seed(0)
    model = getattr(transformers, name)._from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.copy_(torch.randn(weight.shape) * 0.08)
    return model.eval()


def stored(folder):
    """Every tensor of a directory's one file."""
    return safetensors_torch.load_file(folder / "model.safetensors")


def load(folder, kind):
    """(model, names that it lacks or does not know)."""
    model, info = kind.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
    return model, {key: sorted(map(str, names)) for key, names in info.items() if names}


@pytest.mark.parametrize("model_type", MODELS)
def test_models_of_fused_experts_load_what_dequantize_makes(model_type, tmp_path):
    model = build(model_type)
    source, out, back = (tmp_path / name for name in ("source", "out", "back"))
    model.save_pretrained(source)
    report = quantize_checkpoint(source, out, CheckpointOptions())
    assert any(
        entry.action == "quantize" and ".experts.0." in entry.name for entry in report.tensors
    )
    dequantize_checkpoint(out, back, DequantizeOptions("bfloat16"))
    before, after = stored(source), stored(back)
    assert {name: (t.dtype, t.shape) for name, t in before.items()} == {
        name: (t.dtype, t.shape) for name, t in after.items()
    }
    loaded, info = load(back, type(model))
    assert not info
    parameters = dict(loaded.named_parameters())
    for name, weight in model.named_parameters():
        error = (parameters[name] - weight).float().norm() / weight.float().norm().clamp(min=1e-9)
        # As far as four bits are from the source: neither random nor in another order.
        assert error < 0.2, name

    # Without our note, as another tool would have written it: the model type tells the same.
    tensors = safetensors_torch.load_file(out / "model.safetensors")
    safetensors_torch.save_file(tensors, out / "model.safetensors", {"format": "pt"})
    dequantize_checkpoint(out, tmp_path / "told", DequantizeOptions("bfloat16"))
    told = stored(tmp_path / "told")
    assert told.keys() == after.keys()
    assert all(torch.equal(told[name], tensor) for name, tensor in after.items())


@pytest.mark.parametrize("model_type", sorted(MODELS.keys() - {"inkling_text"}))
def test_quantized_experts_are_lost_by_the_types_that_are_said_to_lose_them(model_type, tmp_path):
    """Fails when transformers has learnt it: then the table of readers' faults is outdated."""
    pytest.importorskip("compressed_tensors", reason="the peers extra is not installed")
    model = build(model_type)
    model.save_pretrained(tmp_path / "source")
    options = CheckpointOptions(format="mxfp4", exclude=("re:.*(vision|attn|project)",))
    report = quantize_checkpoint(tmp_path / "source", tmp_path / "out", options)
    _, info = load(tmp_path / "out", type(model))
    lost = [name for name in info.get("missing_keys", ()) if name.endswith("experts.gate_up_proj")]
    modules = [t.name.removesuffix(".weight") for t in report.tensors if t.action == "quantize"]
    config = json.loads((tmp_path / "out/config.json").read_text())
    said = [line for line in reader_faults(config, ["mxfp4"], modules) if "stay random" in line]
    assert bool(lost) == bool(said)


#: Written under other fused names, which are never separated: `input_linear`, `w13_weight`, `moe.`.
OTHER_NAMES = {
    "granitemoe",
    "granitemoehybrid",
    "granitemoeshared",
    "inkling2",
    "inkling2_loop",
    "inkling2_loop_text",
    "inkling2_text",
    "inkling_mm_model",
    "step3p7",
}
#: Their renames belong to classes, so that those of the model type do not show it.
BY_CLASS = {"dots3_note_text", "unlimited_ocr"}
JOINING = {"MergeModulelist", "ErnieFuseAndSplitTextVisionExperts"}


def nested_types(model_type):
    """A model type and those of the configurations inside of its own."""
    found = [model_type]
    for name in found:
        parts = (transformers.CONFIG_MAPPING[name].sub_configs or {}).values()
        kinds = [getattr(part, "model_type", "") for part in parts]
        found += [k for k in kinds if k in transformers.CONFIG_MAPPING and k not in found]
    return found


def joins_experts(model_type):
    """Whether transformers joins single experts when it loads a model."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    return any(
        type(operation).__name__ in JOINING
        for name in nested_types(model_type)
        for renamed in get_checkpoint_conversion_mapping(name) or ()
        for operation in getattr(renamed, "operations", ())
    )


def fused_types():
    """Model types of generating models with experts in one parameter."""
    from transformers.models.auto import configuration_auto, modeling_auto

    folder = Path(transformers.__file__).parent / "models"
    classes = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        | modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    )
    for name in transformers.CONFIG_MAPPING:
        module = folder / configuration_auto.model_type_to_module_name(name)
        texts = (path.read_text("utf-8") for path in module.glob("modeling_*.py"))
        if name in classes and any("self.gate_up_proj = nn.Parameter" in text for text in texts):
            yield name


def test_tables_of_model_types_are_those_of_the_installed_transformers():
    """Which types read fused experts only; a new release shows here what changed."""
    found = {name: joins_experts(name) for name in fused_types()}
    single = {name for name, joins in found.items() if joins}
    fused = found.keys() - single
    assert single <= READ_SINGLE
    assert fused == (READ_FUSED & found.keys()) | OTHER_NAMES | BY_CLASS
    assert BY_CLASS <= READ_SINGLE
    # What is in the table and generates nothing are text models inside of others, and encoders.
    assert READ_FUSED - found.keys() == {
        "diffusion_gemma_text",
        "glm4v_moe_text",
        "hy_v4_vl_text",
        "muse_spark_text",
        "openai_privacy_filter",
        "qwen3_vl_moe_text",
    }
