# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""How a model type's experts lie, where it is stored: decided by model type, names and shapes.

The two shapes of a layer's fused experts together always tell the orientation; whether gate and up
alternate only the model type tells.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fp4kit.errors import OptionError
from fp4kit.formats import one_of

from .experts import ExpertsLayout

OPTION = "--experts-layout"
EXPERTS_LAYOUTS = ("out_in", "in_out", "interleaved")
#: Values of the option where experts are put together, and the one that leaves them single.
SINGLE = "single"
RESTORED_LAYOUTS = (*EXPERTS_LAYOUTS, SINGLE)

# Model types whose files hold fused experts, seen in what save_pretrained of transformers 5.24
# writes and in its modeling code (use_experts_implementation). Most other types are fused in
# memory only and written expert by expert.
OUT_IN = frozenset((
    "diffusion_gemma", "diffusion_gemma_text", "dots3_note", "dots3_note_text", "gemma4",
    "gemma4_text", "glm4v_moe_text", "granitemoe_swa", "hy_v4", "hy_v4_vl", "hy_v4_vl_text",
    "inkling_text", "lara_mini", "minimax", "minimax_m2", "minimax_m3_vl", "minimax_m3_vl_text",
    "mistral4", "muse_spark", "muse_spark_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp",
    "qwen4_exp_text", "unlimited_ocr", "unlimited_ocr_text", "zaya",
))  # fmt: skip
IN_OUT = frozenset(["aria", "aria_text", "llama4", "llama4_text", "openai_privacy_filter"])
#: The published files are in_out, but transformers 5 saves the same model as out_in.
EITHER = frozenset(["qwen3_vl_moe", "qwen3_vl_moe_text"])
#: Alternating, and in_out where they are floats (MXFP4 blocks run along the input: out_in).
INTERLEAVED = frozenset(("gpt_oss",))

#: Of all these, those whose reader in transformers 5.24 finds fused experts only: single ones in
#: plain numbers it ignores, and leaves the experts random. By the outermost model type, as the
#: same text model inside another one may be read otherwise. The rest joins single experts.
READ_FUSED = frozenset((
    "aria", "aria_text", "diffusion_gemma", "diffusion_gemma_text", "gemma4", "gemma4_text",
    "glm4v_moe_text", "gpt_oss", "granitemoe_swa", "hy_v4", "hy_v4_vl", "hy_v4_vl_text",
    "inkling_text", "lara_mini", "llama4", "llama4_text", "minimax_m3_vl_text", "mistral4",
    "muse_spark", "muse_spark_text", "openai_privacy_filter", "qwen3_vl_moe",
    "qwen3_vl_moe_text", "zaya",
))  # fmt: skip
#: Model types that are written expert by expert, or whose reader takes both forms.
READ_SINGLE = frozenset((
    "afmoe", "axk1", "axk2", "bailing_hybrid", "beam", "cohere2_moe", "deepseek_ocr2",
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "dots1", "dots3_note",
    "dots3_note_text", "ernie4_5_moe", "ernie4_5_vl_moe", "exaone_moe", "flex_olmo", "flint",
    "glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm5_next", "glm5_next_text", "glm_moe_dsa",
    "hunyuan_v1_moe", "hy_v3", "jamba", "kimi_k2", "kimi_k25", "kimi_linear", "kolibri1",
    "laguna", "lfm2_moe", "longcat_flash", "mellum", "mimo_v2_flash", "minimax", "minimax_m2",
    "minimax_m3_vl", "mistral_large4", "mistral_large4_text", "mixtral", "nemotron_h",
    "nllb-moe", "olmoe", "phimoe", "qwen2_moe", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_moe",
    "qwen3_next", "qwen3_omni_moe", "qwen3_omni_moe_text", "qwen3_omni_moe_thinker", "qwen4_exp",
    "qwen4_exp_text", "solar_open", "switch_transformers", "unlimited_ocr",
))  # fmt: skip
#: Fused names other than `gate_up_proj` and `down_proj`, by the type in whose files they stand.
_ARIA = {"gate_up_proj": "fc1.weight", "down_proj": "fc2.weight"}
FUSED_NAMES = {"aria": _ARIA, "aria_text": _ARIA}

HIDDEN_KEYS = ("hidden_size",)
INTERMEDIATE_KEYS = ("moe_intermediate_size", "intermediate_size", "expert_intermediate_size")
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def _objects(config: object) -> Iterator[dict[str, Any]]:
    """A configuration and every one nested in it."""
    if isinstance(config, dict):
        yield config
        for value in config.values():
            yield from _objects(value)


def model_types(config: dict[str, Any]) -> list[str]:
    """Every model_type that a configuration names, the outermost first."""
    found = (item.get("model_type") for item in _objects(config))
    return list(dict.fromkeys(value for value in found if isinstance(value, str)))


def config_sizes(config: dict[str, Any], keys: tuple[str, ...]) -> set[int]:
    """Every value that a configuration has under one of some keys, nested ones too."""
    values = (item.get(key) for item in _objects(config) for key in keys)
    return {value for value in values if type(value) is int}


def _known(config: dict[str, Any]) -> tuple[bool | None, bool | None]:
    """(transposed, interleaved) as the model type says; None for what it leaves open."""
    types = set(model_types(config))
    facts = [
        (kinds, answer)
        for kinds, answer in (
            (INTERLEAVED, (True, True)),
            (IN_OUT, (True, False)),
            (OUT_IN, (False, False)),
            (EITHER, (None, False)),
        )
        if types & kinds
    ]
    return facts[0][1] if len(facts) == 1 else (None, None)


def reading(config: dict[str, Any]) -> str:
    """How the model type's reader in transformers takes experts in plain numbers.

    Returns:
        `fused`, `single` (perhaps fused as well), or "" for types that are not known.
    """
    kind = str(config.get("model_type"))
    return "fused" if kind in READ_FUSED else "single" if kind in READ_SINGLE else ""


def read_layout(config: dict[str, Any]) -> ExpertsLayout:
    """How a reader of fused experts has them in plain numbers; out x in where it takes both."""
    transposed, interleaved = _known(config)
    return ExpertsLayout(bool(transposed), bool(interleaved))


def option_layout(experts_layout: str) -> ExpertsLayout:
    """The layout of float experts that a value of the option stands for."""
    one_of("experts_layout", experts_layout, EXPERTS_LAYOUTS)
    return ExpertsLayout(experts_layout != "out_in", experts_layout == "interleaved")


def transposes_floats(config: dict[str, Any]) -> bool:
    """Whether the model type is known to keep float experts as [E, in, out]."""
    return _known(config)[0] is True


def _dimensions(
    transposed: bool, gate_up: tuple[int, ...] | None, down: tuple[int, ...] | None
) -> tuple[int, int] | None:
    """(hidden, intermediate) under an orientation, None if the shapes contradict it."""
    found = set()
    if gate_up is not None:
        hidden, twice = gate_up[1:] if transposed else gate_up[:0:-1]
        if twice % 2:
            return None
        found.add((hidden, twice // 2))
    if down is not None:
        found.add((down[2], down[1]) if transposed else (down[1], down[2]))
    return found.pop() if len(found) == 1 else None


def _leave(module: str) -> str:
    """How to go on without these experts, in words."""
    return f"leave them unquantized with --exclude '*{module.rpartition('.')[2]}.*'"


def order_is_clear(config: dict[str, Any], experts_layout: str | None) -> bool:
    """Whether :func:`interleaving` has an answer."""
    if experts_layout is not None:
        return experts_layout != "in_out"
    return _known(config)[1] is not None


def interleaving(
    config: dict[str, Any], experts_layout: str | None, about: str, module: str
) -> bool:
    """Whether gate and up alternate in MXFP4 blocks, which are always out_in."""
    if experts_layout == "in_out":
        raise OptionError(
            f"{about} holds MXFP4 blocks, which run along the input and cannot be in_out; pass "
            f"{OPTION} out_in or interleaved"
        )
    if experts_layout is not None:
        return one_of("experts_layout", experts_layout, EXPERTS_LAYOUTS) == "interleaved"
    interleaved = _known(config)[1]
    if interleaved is None:
        raise OptionError(
            f"{about} fuses gate and up, but model type {_shown(config)} is not known to this "
            f"version, so that their order is not either; pass {OPTION} interleaved (gpt-oss) or "
            f"out_in (gate, then up), or {_leave(module)}"
        )
    return interleaved


def _shown(config: dict[str, Any]) -> str:
    return ", ".join(sorted(model_types(config))) or "(none in config.json)"


def decide(
    config: dict[str, Any],
    experts_layout: str | None,
    gate_up: tuple[int, ...] | None,
    down: tuple[int, ...] | None,
    has_bias: bool,
    about: str,
    module: str,
) -> ExpertsLayout:
    """The layout of one layer's fused experts of float type.

    Args:
        config: content of config.json.
        experts_layout: the user's word, one of EXPERTS_LAYOUTS, or None. It overrides the model
            type and the sizes in config.json, not what the shapes exclude.
        gate_up: shape of `gate_up_proj`, None without one.
        down: shape of `down_proj`, None without one.
        has_bias: the experts have biases, as only interleaved ones are known to.
        about: beginning of a message.
        module: name of the module of all experts.
    """
    found = f"gate_up_proj {_text(gate_up)} and down_proj {_text(down)}"
    advice = f"pass {OPTION} {'|'.join(EXPERTS_LAYOUTS)}, or {_leave(module)}"
    sizes = {
        key[0]: config_sizes(config, key) for key in (HIDDEN_KEYS, INTERMEDIATE_KEYS, EXPERT_KEYS)
    }
    said = ", ".join(f"{key} {sorted(value)}" for key, value in sizes.items() if value)
    if experts_layout is not None:
        one_of("experts_layout", experts_layout, EXPERTS_LAYOUTS)
        interleaved: bool | None = experts_layout == "interleaved"
        transposed = None if interleaved else experts_layout == "in_out"
        sizes, reason = {}, f"{OPTION} {experts_layout}"
    else:
        transposed, interleaved = _known(config)
        reason = f"model type {_shown(config)}"
    fits = []
    for candidate in (False, True):
        dims = _dimensions(candidate, gate_up, down)
        if dims is not None and all(
            not allowed or value in allowed
            for value, allowed in zip(dims, list(sizes.values())[:2], strict=False)
        ):
            fits.append(candidate)
    counts = {shape[0] for shape in (gate_up, down) if shape is not None}
    experts = sizes.get(EXPERT_KEYS[0])
    if len(counts) != 1 or (experts and not counts & experts):
        raise OptionError(
            f"{about} {found} do not agree on the number of experts"
            f"{f' with config.json ({said})' if said else ''}; {_leave(module)}"
        )
    if not fits or (transposed is not None and transposed not in fits):
        raise OptionError(
            f"{about} {found} are no fused experts as {reason} stores them"
            f"{f', with {said} in config.json' if sizes and said else ''}; if you know how gate "
            f"and up are stored, {advice}"
        )
    if transposed is None and len(fits) > 1:
        raise OptionError(
            f"{about} {found} could be out x in or in x out, and {reason} does not tell; {advice}"
        )
    if interleaved is None and has_bias:
        raise OptionError(
            f"{about} {found} have biases and {reason} is not known, so that gate and up may "
            f"alternate as in gpt-oss or not; {advice}"
        )
    return ExpertsLayout(fits[0] if transposed is None else transposed, bool(interleaved))


def _text(shape: tuple[int, ...] | None) -> str:
    return "(absent)" if shape is None else str(list(shape))
