# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Which weights are quantized: those of linear layers, but for the ones that engines keep whole.

The defaults are those of checkpoints.md section 4. They match whole parts of a name (what stands
between dots), or whole words of one (between underscores), so that a rule about `gate` does not
catch `gate_proj`. Whatever wraps a model (`model.`, `language_model.`, `model.diffusion_model.`)
changes nothing: rules about the outermost modules look behind it. `tests/test_peers_rules.py`
holds them against the modules of every architecture of transformers.

A name does not always tell an embedding from a linear layer: `patch_embedding` is either, by
model. Such a weight is kept, and counts as linear: a name too many in an ignore list is harmless,
but a linear layer that is missing there is built as a quantized one, and cannot be loaded.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from fp4kit.formats import DTYPES
from fp4kit.io.tensor_names import Patterns

WEIGHT = ".weight"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Modules that look up rows instead of multiplying, whatever the model.
EMBEDDINGS = _words(
    """
    embed_tokens embed_tokens_per_layer wte wpe word_embeddings position_embeddings
    token_type_embeddings embed_positions embed_in tok_embeddings embeddings embed shared
    relative_attention_bias position_embedding token_embedding word_embedding tokens_embed
    positions_embed embed_audio_tokens embed_text_tokens input_embeds_layer
    input_embeds_layers position_embeds_layer position_embedding_table
    visual_embeddings_table
    """
)
#: Last words (`embed` the first as well) of modules that are embeddings in most models, and linear
#: layers in some.
EMBEDDING_WORDS = _words(
    "embed embeds embedding embeddings embedder emb token tokens resolution codebook"
)
#: Last parts of modules that are lookup tables of detectors, or of relative positions.
TABLES = _words("query_feat queries_features reference_points pe_k query_768 query_1024")
#: Rows of a norm that is chosen by a condition.
NORM_ROWS = _words("scale shift")
#: Modules that only wrap a model; the same weight has or lacks them from file to file.
WRAPPERS = _words(
    """
    model language_model diffusion_model transformer text_model module base_model net _orig_mod
    """
)
#: Parts of a name under which states are turned into words.
HEADS = _words("lm_head lm_heads audio_lm_head generator_lm_head pred_layer")
#: Last parts of modules that do so, outside of numbered layers.
LAST_HEADS = _words("embed_out output_layer output_projection vocab_projector lm_loss")
#: Those where nothing but wrappers stand before them.
OUTER_HEADS = _words("output head head.head head.decoder decoder proj_out")
#: Last parts of modules that choose experts: their output decides, not only its size.
ROUTERS = _words(
    """
    router shared_expert_gate shared_experts_gate expert_gate experts_gate moe_gate gate_network
    gate_score router_proj router_weight routing switch wg ffn_gate_inp ffn_gate_inp_shexp
    """
)
#: A `gate` is a router only inside one of these, of a part that ends in `moe` or `experts`, of a
#: numbered layer itself, or where experts are its siblings.
ROUTER_PARENTS = frozenset(("mlp", "feed_forward", "ffn", "mixer"))
#: What stands between a module and its experts.
EXPERTS = _words("experts local_experts")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
#: Parts of a name under which everything serves another sense than text, or joins two.
TOWERS = _words(
    """
    visual vision vision_model vision_tower vision_encoder audio audio_tower audio_model
    audio_encoder multi_modal_projector mm_projector vision_projector audio_projector
    embed_vision embed_audio image_newline modality_projection aligner connector vit
    image_tower video_tower vision_projection vision_adapter language_projection
    image_to_text_projection projector merger resampler resampler_model qformer
    embed_tokens_extend vision_language_adapter patch_merger visual_projection text_projection
    vit_large_projector deepstack_merger_list vision_embed_tokens vae audio_vae first_stage_model
    vocoder autoencoder control_model model_ema codec_model
    """
)
#: Classes of diffusers that turn images into latents and back: nothing of them is quantized.
AUTOENCODERS = ("Autoencoder", "AsymmetricAutoencoder", "ConsistencyDecoder", "VQModel")
#: How an autoencoder names its blocks where nothing else tells it: under an encoder or decoder.
AUTOENCODER_BLOCKS = _words("mid mid_block up up_blocks down down_blocks")
#: Last parts of modules of state spaces and linear attention that decide how states decay: small,
#: and kept by the reference converters. vLLM builds x_proj and dt_proj without a quantized form.
DECAYS = _words("b_proj a_proj f_a_proj f_b_proj x_proj dt_proj fgate_preact igate_preact")
CONVOLUTIONS = _words(
    """
    conv1d conv conv2d short_conv conv_in conv_out
    """
)
#: What NVFP4 files of diffusion models keep whole: layers at the ends, and modulation. ComfyUI
#: reads sizes of the model from the shapes of some (its PR 15273); others are those of ModelOpt's
#: filters for diffusers.
DIFFUSION = _words(
    """
    img_in txt_in time_in vector_in guidance_in final_layer time_embed time_embedder
    t_embedder time_text_embed context_embedder x_embedder y_embedder proj_in proj_out
    norm_out img_mod txt_mod modulation adaLN_modulation single_stream_modulation
    double_stream_modulation_img double_stream_modulation_txt time_embedding time_projection
    text_embedding pos_embed time_emb_proj add_embedding img_emb emb_layers label_emb
    distilled_guidance_layer zero_convs init_x_linear cond_seq_linear final_linear
    all_final_layer time_guidance_embed byt5_in vision_in audio_proj_out time_proj
    """
)
#: Words of parts that say the same, whatever else the part is called (`av_ca_video_adaln_single`).
DIFFUSION_WORDS = _words("adaln modulation patchify embedder timestep")
#: Two neighbouring words that do so.
DIFFUSION_PAIRS = frozenset((("caption", "projection"), ("ada", "rms"), ("av", "ca")))
#: Parts of a name that make a weight a factor of a low-rank adapter.
ADAPTERS = _words("lora_A lora_B lora_a lora_b lora_up lora_down lora_mid")
#: Model types whose linear weights are stored [in, out].
TRANSPOSED_TYPES = _words("gpt2 openai-gpt imagegpt decision_transformer clvp clvp_decoder")
TRANSPOSED = frozenset(("c_attn", "c_proj", "c_fc", "q_attn"))


def setting(config: dict[str, Any], key: str) -> Any:
    """A value of config.json, or of its text_config, where models of several senses keep it."""
    text = config.get("text_config")
    nested = text if isinstance(text, dict) else {}
    return config[key] if config.get(key) is not None else nested.get(key)


def _module(name: str) -> list[str]:
    return name.removesuffix(WEIGHT).split(".")


def _named(parts: list[str]) -> str:
    """The last part that is no number: modules of a list share the name of the list."""
    return next((part for part in reversed(parts) if not part.isdigit()), "")


def is_embedding(name: str) -> bool:
    """Whether a weight is that of an embedding in every model."""
    return name.endswith(WEIGHT) and _named(_module(name)) in EMBEDDINGS


def _is_norm(part: str) -> bool:
    lowered = part.lower()
    return "norm" in lowered or lowered in ("ln_f", "ln_1", "ln_2")


def is_linear_weight(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is, or may be, the weight of a linear layer, as an engine builds it."""
    if not name.endswith(WEIGHT) or len(shape) != 2:
        return False
    return not is_embedding(name) and not _is_norm(_module(name)[-1])


def _outer(parts: list[str]) -> list[str]:
    """A name without what only wraps the model."""
    return list(itertools.dropwhile(lambda part: part in WRAPPERS, parts[:-1])) + parts[-1:]


def _is_head(parts: list[str], shape: tuple[int, ...], config: dict[str, Any]) -> bool:
    if not HEADS.isdisjoint(parts):
        return True
    if any(part.isdigit() for part in parts):
        return False
    outer = ".".join(_outer(parts))
    if parts[-1] in LAST_HEADS or outer in OUTER_HEADS or parts[-2:] == ["predictions", "decoder"]:
        return True
    return bool(shape[0] == setting(config, "vocab_size"))


def _experts_parents(names: Iterable[str]) -> frozenset[str]:
    """Modules that have experts among their children."""
    found = set()
    for name in names:
        parts = name.split(".")
        at = next((number for number, part in enumerate(parts) if part in EXPERTS), -1)
        if at >= 0:
            found.add(".".join(parts[:at]))
    return frozenset(found)


def _is_autoencoder(parts: list[str], config: dict[str, Any]) -> bool:
    if str(config.get("_class_name", "")).startswith(AUTOENCODERS):
        return True
    outer = _outer(parts)
    return outer[0] in ("encoder", "decoder") and not AUTOENCODER_BLOCKS.isdisjoint(outer[1:2])


def _diffusion_part(parts: list[str]) -> str | None:
    """The part of a name that says that a layer stands at an end of a diffusion model."""
    for part in parts:
        words = part.lower().split("_")
        if part in DIFFUSION or not DIFFUSION_WORDS.isdisjoint(words):
            return part
        if not DIFFUSION_PAIRS.isdisjoint(itertools.pairwise(words)):
            return part
    if parts[-1] == "linear" and len(parts) > 1 and _is_norm(parts[-2]):
        return parts[-2]  # how diffusers names modulation
    return None


def _by_last_part(parts: list[str]) -> str:
    """Why a linear weight is left alone by the name of its module and that of the parent."""
    last, parent = _named(parts), parts[-2] if len(parts) > 1 else ""
    if parent == "linear_attn" and last in ("in_proj_a", "in_proj_b", "in_proj_ba"):
        return "small projection of linear attention"
    if last == "weights_proj" or (parent == "indexer" and last == "wk"):
        # vLLM and SGLang fuse the two into one layer that has no quantized form.
        return "chooses the tokens that are attended to"
    if last in DECAYS:
        return "small projection of a state space or of linear attention"
    if not ADAPTERS.isdisjoint(parts):
        return "low-rank adapter"
    words = [word for word in last.split("_") if not word.isdigit()]
    if words and (words[0] == "embed" or words[-1] in EMBEDDING_WORDS):
        return "embedding by its name"
    if last in TABLES or (last in NORM_ROWS and _is_norm(parent)):
        return "looked up by its name"
    return "convolution by its name" if last in CONVOLUTIONS else ""


def _is_transposed(name: str, config: dict[str, Any]) -> bool:
    """Whether a weight is stored [in, out]; blocks would run along the wrong axis."""
    if _module(name)[-1] not in TRANSPOSED:
        return False
    nested = [part for part in config.values() if isinstance(part, dict)]
    return any(part.get("model_type") in TRANSPOSED_TYPES for part in (config, *nested))


def _is_extra_layer(parts: list[str], config: dict[str, Any]) -> bool:
    """Whether it is of a layer beyond the last, where DeepSeek and GLM keep prediction heads."""
    count = setting(config, "num_hidden_layers")
    if type(count) is not int or not setting(config, "num_nextn_predict_layers"):
        return False
    for before, number in itertools.pairwise(parts):
        if before == "layers" and number.isdigit():
            return int(number) >= count
    return False


class Rules:
    """The default rules and the user's patterns."""

    def __init__(
        self,
        include: tuple[str, ...],
        exclude: tuple[str, ...],
        config: dict[str, Any],
        names: Iterable[str] = (),
    ) -> None:
        """Takes the patterns, and what the rules have to know of the model.

        Args:
            include: patterns (globs, or `re:` and a regular expression) of weights or modules that
                are quantized although a default rule leaves them alone.
            exclude: patterns of those left alone; wins over `include`.
            config: content of config.json.
            names: every tensor of the model: a `gate` beside experts is a router.
        """
        self._include = Patterns(include, "include")
        self._exclude = Patterns(exclude, "exclude")
        self._config = config
        self._experts_parents = _experts_parents(names)
        self._excluded: set[str] = set()

    @staticmethod
    def _match(patterns: Patterns, name: str) -> str | None:
        """The first pattern that matches a weight or its module."""
        return patterns.match(name) or patterns.match(name.removesuffix(WEIGHT))

    def check_used(self, names: Iterable[str]) -> None:
        """Refuses patterns that match nothing: most likely they are misspelt."""
        listed = [*names, *self._excluded]
        both = listed + [name.removesuffix(WEIGHT) for name in listed]
        for patterns in (self._include, self._exclude):
            patterns.check_used(both)

    def idle(self, reasons: Mapping[str, str]) -> list[str]:
        """What to say of include patterns that match only weights which are never quantized."""
        return self._include.idle(reasons, WEIGHT)

    def excludes(self, name: str) -> bool:
        """Whether the user left a tensor alone, whatever it is."""
        if self._match(self._exclude, name) is None:
            return False
        self._excluded.add(name)
        return True

    def reason_to_keep(self, name: str, shape: tuple[int, ...], dtype: str) -> str:
        """Why a tensor is left alone, "" if it is quantized."""
        if dtype not in DTYPES:
            return f"{dtype} is not quantized"
        excluded = self._match(self._exclude, name)
        if excluded is not None:
            return f"excluded by {excluded}"
        if len(shape) != 2:
            return f"{len(shape)}-D"
        if not name.endswith(WEIGHT):
            return "not the weight of a layer"
        included = self._match(self._include, name)
        if is_embedding(name):
            # Engines look rows up in it: no layout has a quantized form of that.
            return "embedding"
        if not is_linear_weight(name, shape):
            return "norm"
        if _is_transposed(name, self._config):
            return "stored transposed (Conv1D)"
        return "" if included is not None else self._default(name, shape)

    def _default(self, name: str, shape: tuple[int, ...]) -> str:
        """Why a linear weight is left alone unless it is asked for; "" if it is not."""
        parts, config = _module(name), self._config
        if _is_head(parts, shape, config):
            return "output head"
        if self._is_router(parts, shape):
            return "router"
        if "mtp" in parts or _is_extra_layer(parts, config):
            return "multi-token prediction"
        tower = next((part for part in parts if part in TOWERS), None)
        if tower is not None:
            return f"part of {tower}"
        if _is_autoencoder(parts, config):
            return "part of an autoencoder"
        ends = _diffusion_part(parts)
        if ends is not None:
            return f"sensitive layer of a diffusion model ({ends})"
        return _by_last_part(parts)

    def _is_router(self, parts: list[str], shape: tuple[int, ...]) -> bool:
        last, parent = parts[-1], parts[-2] if len(parts) > 1 else ""
        if last in ROUTERS or any(p == "router" or p.endswith("_router") for p in parts):
            return True
        beside_experts = ".".join(parts[:-1]) in self._experts_parents
        if last == "gate":
            within = parent in ROUTER_PARENTS or parent.endswith(("moe", *EXPERTS))
            of_layer = parent.isdigit() and EXPERTS.isdisjoint(parts)
            return within or of_layer or beside_experts
        # Under whatever name: a row for each expert.
        counts = (setting(self._config, key) for key in EXPERT_COUNTS)
        return beside_experts and shape[0] in {count for count in counts if count}
