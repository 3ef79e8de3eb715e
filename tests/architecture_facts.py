# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Writes `fp4kit/checkpoint/models/architecture_table.json` from the installed transformers.

    python tests/architecture_facts.py            writes the table
    python tests/architecture_facts.py --check    tells whether it is the same

Models are built without weights, from default configurations with few layers. What the columns mean
is said in `fp4kit/checkpoint/models/architectures.py`, which reads them.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parent / "architectures"))

import torch
import transformers
from transformers import PreTrainedModel, conversion_mapping, core_model_loading
from transformers.models.auto import modeling_auto

import tiny_configs

TABLE = Path(__file__).parents[1] / "fp4kit" / "checkpoint" / "models" / "architecture_table.json"
#: Tables of transformers, the one that says most about a model type first.
HEADS = (
    "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM",
    "CAUSAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "MASKED_LM",
    "PRETRAINING",
)
BASE = modeling_auto.MODEL_MAPPING_NAMES
CAUSAL = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
MAPPINGS = [getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES") for head in HEADS] + [BASE]
#: Counts of layers in configurations; a few layers show every kind of module.
COUNTS = ("num_hidden_layers", "depth", "encoder_layers", "decoder_layers", "n_layer", "num_layers")
VOCABULARY = {"<image>": 4, "IMGIMGA": 5}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
#: What default configurations lack, by model type and path.
GIVEN: dict[str, dict[str, Any]] = {
    "autoformer": {"prediction_length": 2},
    "aya_vision": {"vision_config.num_attention_heads": 16},
    "chameleon": {"vocabulary_map": VOCABULARY},
    "deepseek_ocr2": {"text_config.mlp_layer_types": ["dense"] * 6},
    "diffusion_gemma": {
        "text_config.moe_intermediate_size": 64,
        "text_config.num_experts": 4,
        "text_config.top_k_experts": 2,
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "emu3": {"vocabulary_map": VOCABULARY},
    "esm": {"vocab_size": 33},
    "granite4_vision": {"deepstack_layer_map": [[0, 0]]},
    "hunyuan_v1_dense": {"head_dim": 16, "rope_parameters": ROPE},
    "hunyuan_v1_moe": {"head_dim": 16, "rope_parameters": ROPE},
    "hunyuan_vl": {"text_config.head_dim": 16, "text_config.rope_parameters": ROPE},
    "informer": {"prediction_length": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "ministral": {"head_dim": 16, "rope_parameters": ROPE},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 8},
    "qwen3_omni_moe": {
        "talker_config.text_config.shared_expert_intermediate_size": 64,
        "talker_config.spatial_merge_size": 2,
    },
    "qwen4_exp": {"text_config.indexer_budget": 8, "text_config.indexer_compress_ratio": 2},
    "time_series_transformer": {"prediction_length": 2},
}


def strings(value: str | Iterable[str]) -> list[str]:
    """One or several texts as a list."""
    return [value] if isinstance(value, str) else list(value)


def classes_of(model_type: str) -> list[str]:
    """Classes that transformers knows for a model type, the one that says most first."""
    found = [name for mapping in MAPPINGS for name in strings(mapping.get(model_type, ()))]
    return list(dict.fromkeys(found))


# ------------------------------------------------------------------------------------------------
# Renames
# ------------------------------------------------------------------------------------------------


def rename_row(transform: Any) -> list[Any]:
    """[kind, source as one regular expression, targets] of a transform of transformers."""
    kind = "rename"
    if isinstance(transform, core_model_loading.LayerPairCollapse):
        return ["pairs", transform.pattern.pattern, []]
    if isinstance(transform, core_model_loading.Inkling2IndexOffsetWeightRename):
        kind = f"offset {transform.offset}"
    elif isinstance(transform, core_model_loading.GroupWeightRename):
        kind = "group"
    elif isinstance(transform, core_model_loading.WeightConverter):
        kind = "convert"
    return [kind, transform.compiled_sources.pattern, list(transform.target_patterns)]


def renames() -> dict[str, list[list[Any]]]:
    """The transforms of every model type or class that has some."""
    conversion_mapping.get_checkpoint_conversion_mapping("legacy")
    cached = conversion_mapping._checkpoint_conversion_mapping_cache
    return {name: [rename_row(transform) for transform in cached[name]] for name in sorted(cached)}


# ------------------------------------------------------------------------------------------------
# Classes
# ------------------------------------------------------------------------------------------------


def give(config: Any, path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for name in parents:
        config = getattr(config, name)
    setattr(config, last, copy.deepcopy(value))


def sub_configs(config: Any) -> Iterator[tuple[str, Any]]:
    """(attribute, configuration) of the parts of a configuration."""
    for key in sorted(getattr(config, "sub_configs", {})):
        part = getattr(config, key, None)
        if isinstance(part, transformers.PretrainedConfig):
            yield key, part


def trim(config: Any) -> None:
    """Reduces the counts of layers, also of the parts."""
    for count in COUNTS:
        value = getattr(config, count, None)
        if isinstance(value, int) and value > 5 and not getattr(config, "layer_types", None):
            with contextlib.suppress(NotImplementedError):
                setattr(config, count, 5)
    for _, part in sub_configs(config):
        trim(part)


@contextlib.contextmanager
def without_timm() -> Iterator[None]:
    """Has parts that need libraries which are not installed built as nothing: they are timm's."""
    made = transformers.AutoModel.from_config

    def from_config(config: Any, **options: Any) -> torch.nn.Module:
        try:
            return made(config, **options)
        except ImportError:
            return torch.nn.Module()

    transformers.AutoModel.from_config = from_config
    try:
        yield
    finally:
        transformers.AutoModel.from_config = made


def default_config(model_type: str) -> Any:
    """The default configuration of a model type with few layers, and what it lacks."""
    config = transformers.CONFIG_MAPPING[model_type]()
    trim(config)
    for path, value in GIVEN.get(model_type, {}).items():
        give(config, path, value)
    return config


def build(model_type: str, name: str) -> PreTrainedModel | str:
    """A model without weights, or why it cannot be built.

    From its default configuration; where that is refused, from the small one that the tests of
    every model type have.
    """
    reasons = []
    for configured in (default_config, tiny_configs.shrunken_config):
        try:
            config = configured(model_type)
            with torch.device("meta"), without_timm():
                return getattr(transformers, name)(config)
        except Exception as error:  # what a configuration lacks differs by model
            reasons.append(f"{type(error).__name__}: {error}")
    return reasons[0]


def direct_parts(model: PreTrainedModel) -> list[tuple[str, PreTrainedModel]]:
    """Models inside a model, but for those inside of these."""
    found: list[tuple[str, PreTrainedModel]] = []
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer, _ in found)
        if path and not inside and isinstance(module, PreTrainedModel):
            found.append((path, module))
    return found


def config_key(config: Any, part: Any) -> str | None:
    """Where the configuration of a part stands in that of the whole, "" if it is the same."""
    if part is config:
        return ""
    same = [key for key, value in sub_configs(config) if value is part]
    same += [key for key, value in sub_configs(config) if value.to_dict() == part.to_dict()]
    if same:
        return same[0]
    for key, value in sub_configs(config):
        inner = config_key(value, part)
        if inner:
            return f"{key}.{inner}"
    # Encoders and decoders have copies of the whole's, with other counts.
    return "" if part.model_type == config.model_type else None


def is_free(config: Any, key: str) -> bool:
    """Whether the part of a configuration may be that of any model type."""
    *parents, last = key.split(".")
    for name in parents:
        config = getattr(config, name)
    return getattr(config, "sub_configs", {}).get(last) is transformers.AutoConfig


def tied(model: PreTrainedModel) -> dict[str, str]:
    """Linear layers that share a weight, "*" for numbers of layers, with a linear one of theirs."""
    given = getattr(model, "_tied_weights_keys", None) or {}
    linear = [p for p, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    found: dict[str, str] = {}
    for pair in given.items():
        both = []
        for pattern in pair:
            paths = [path for path in linear if re.search(f"^{pattern}", f"{path}.weight")]
            both.append(sorted({re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path) for path in paths}))
        same = len(both[0]) == len(both[1])  # transformers pairs them by their order
        for mine, others in (both, reversed(both)):
            partners = others if same else [""] * len(mine)
            for path, partner in zip(mine, partners, strict=True):
                found[path] = partner if partner != path else ""
    return dict(sorted(found.items()))


def class_row(model: PreTrainedModel) -> dict[str, Any]:
    parts = []
    for path, part in direct_parts(model):
        key = config_key(model.config, part.config)
        row = [path, key, type(part).__name__]
        if key != "":
            row.append(part.config.model_type)
        if key is not None and is_free(model.config, key):
            row.append("any")
        parts.append(row)
    modules = [name for name, _ in model.named_children()]
    tensors = [name for name, _ in model.named_parameters(recurse=False)]
    row = {
        "type": getattr(type(model).config_class, "model_type", "") or model.config.model_type,
        "prefix": model.base_model_prefix,
        "children": sorted({*modules, *tensors}),
        "parts": parts,
        "tied": tied(model),
    }
    return {key: value for key, value in row.items() if value}


def static_row(model_type: str, name: str) -> dict[str, Any]:
    """What the class says of a model that cannot be built here."""
    cls = getattr(transformers, name)
    prefix = cls.base_model_prefix
    keys = getattr(cls, "_tied_weights_keys", None)
    heads = {key.removesuffix(".weight"): "" for key in sorted(keys or ()) if "head" in key}
    row: dict[str, Any] = {"type": model_type, "prefix": prefix, "tied": heads}
    base = next(iter(strings(BASE.get(model_type, ()))), name)
    if name != base:
        row["children"] = sorted({prefix, *(head.partition(".")[0] for head in heads)})
        row["parts"] = [[prefix, "", base]]
    return {key: value for key, value in row.items() if value}


def class_rows(model_types: Iterable[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """({class: row}, {class: why it cannot be built})."""
    rows: dict[str, Any] = {}
    failed: dict[str, str] = {}
    inner: dict[str, Any] = {}
    for model_type in model_types:
        for name in classes_of(model_type):
            model = build(model_type, name)
            if isinstance(model, str):
                failed[name] = model
                continue
            rows.setdefault(name, class_row(model))
            for _, module in model.named_modules():
                if isinstance(module, PreTrainedModel):
                    inner.setdefault(type(module).__name__, class_row(module))
    rows = inner | rows
    for model_type in model_types:
        for name in classes_of(model_type):
            cls = getattr(transformers, name, None)
            if name not in rows and type(cls) is type and issubclass(cls, PreTrainedModel):
                rows[name] = static_row(model_type, name)
    return dict(sorted(rows.items())), failed


def types(model_types: Iterable[str]) -> dict[str, list[str]]:
    """Model type to [class that says most about it, base model, causal language model]."""
    found = {}
    for model_type in model_types:
        head = classes_of(model_type)[0]
        base = next(iter(strings(BASE.get(model_type, ()))), head)
        causal = next(iter(strings(CAUSAL.get(model_type, ()))), head)
        found[model_type] = [head, base, causal]
    return found


def table(model_types: Iterable[str] | None = None) -> dict[str, Any]:
    """All of it, or what concerns some model types."""
    known = {key for mapping in MAPPINGS for key in mapping}
    wanted = sorted(known if model_types is None else known.intersection(model_types))
    rows, failed = class_rows(wanted)
    for name, reason in failed.items():
        print(f"{name}: {reason.splitlines()[0]:.100}", file=sys.stderr)
    return {
        "transformers": transformers.__version__,
        "types": types(wanted),
        "classes": rows,
        "renames": renames(),
    }


def text(content: dict[str, Any]) -> str:
    """The table as JSON with a line for each row, so that differences can be read."""
    lines = ["{", f' "transformers": {json.dumps(content["transformers"])},']
    for part in ("types", "classes"):
        lines.append(f' "{part}": {{')
        rows = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in content[part].items()]
        lines += [",\n".join(rows), " },"]
    lines.append(' "renames": {')
    blocks = []
    for name, rows in content["renames"].items():
        inner = ",\n".join(f"   {json.dumps(row)}" for row in rows)
        blocks.append(f"  {json.dumps(name)}: [\n{inner}\n  ]")
    lines += [",\n".join(blocks), " }", "}"]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Writes or checks the table."""
    made = text(table())
    if "--check" not in sys.argv[1:]:
        TABLE.write_text(made, encoding="utf-8")
        return 0
    old = TABLE.read_text(encoding="utf-8")
    print("".join(difflib.unified_diff(old.splitlines(True), made.splitlines(True), n=0)))
    return int(old != made)


if __name__ == "__main__":
    sys.exit(main())
