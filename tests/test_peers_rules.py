# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The default rules, which see names only, against the modules of transformers' architectures."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

import pytest

from fp4kit.checkpoint.plan.rules import Rules, is_linear_weight

torch = pytest.importorskip("torch", reason="the peers extra is not installed")
transformers = pytest.importorskip("transformers", reason="the peers extra is not installed")

from transformers.models.auto import modeling_auto  # noqa: E402

# Their own deprecations are not ours to fix.
pytestmark = pytest.mark.filterwarnings("ignore")

CAUSAL = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
CLASSES = {
    **modeling_auto.MODEL_MAPPING_NAMES,
    **modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    **modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    **modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    **CAUSAL,
}
#: Counts of layers in configurations; a few layers show every kind of module.
COUNTS = ("num_hidden_layers", "depth", "encoder_layers", "decoder_layers", "n_layer", "num_layers")
#: What wraps the same model in other files.
WRAPPERS = ("model.", "language_model.", "model.diffusion_model.", "diffusion_model.")
#: Modules that are no linear layers, though their names do not tell.
UNTOLD = {
    "canine": r".*HashBucketCodepointEmbedder_\d$",
    "ctrl": r"transformer\.w$",
    "ibert": r".*(query|key|value|dense)$",  # linear layers that the model itself quantizes
}


class Weight(NamedTuple):
    """A two-dimensional weight and what its module is."""

    name: str
    shape: tuple[int, ...]
    linear: bool
    router: bool
    head: bool


@functools.cache
def build(model_type):
    """(weights, configuration) of a model of default sizes, or (None, why it cannot be built)."""
    name = CLASSES[model_type]
    try:
        config = transformers.CONFIG_MAPPING[model_type]()
        for part in (config, *(getattr(config, f"{s}_config", None) for s in ("text", "vision"))):
            for count in COUNTS if part is not None else ():
                value = getattr(part, count, None)
                if isinstance(value, int) and value > 5 and not getattr(part, "layer_types", None):
                    setattr(part, count, 5)
        with torch.device("meta"):
            model = getattr(transformers, name if isinstance(name, str) else name[0])(config)
    except Exception as error:  # what a default configuration lacks differs by model
        return None, str(error)
    found, head = [], model.get_output_embeddings()
    for path, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None and weight.ndim == 2:
            linear = isinstance(module, torch.nn.Linear)
            router = re.search("Router$|Gate$", type(module).__name__) is not None
            shape = tuple(weight.shape)
            found.append(Weight(f"{path}.weight", shape, linear, router, module is head))
    return found, config.to_dict()


@pytest.fixture(params=sorted(CLASSES))
def model(request):
    """(model type, weights, {name: reason to keep it})."""
    found, config = build(request.param)
    if found is None:
        pytest.skip(f"cannot be built from its default configuration: {config:.80}")
    return request.param, found, decided(found, config)


def decided(found, config, wrapper=""):
    """{name: why it is kept}, behind something that wraps the model."""
    rules = Rules((), (), config, [wrapper + weight.name for weight in found])
    return {
        weight.name: rules.reason_to_keep(wrapper + weight.name, weight.shape, "bfloat16")
        for weight in found
    }


def test_most_models_can_be_built():
    """Else the others here would say nothing."""
    built = [model_type for model_type in CLASSES if build(model_type)[0]]
    assert len(built) > 0.8 * len(CLASSES)


def test_only_linear_layers_are_quantized(model):
    """E22: an embedding or a router in four bits has no place in any engine's model."""
    model_type, found, reasons = model
    wrong = [w.name for w in found if not w.linear and not reasons[w.name]]
    untold = re.compile(UNTOLD.get(model_type, "(?!)"))
    assert [name for name in wrong if not untold.match(name.removesuffix(".weight"))] == []


def test_every_linear_layer_counts_as_one(model):
    """E9: one that is kept must be in the ignore list, or it is built as a quantized one."""
    _, found, _ = model
    assert [w.name for w in found if w.linear and not is_linear_weight(w.name, w.shape)] == []


def test_heads_and_routers_are_kept(model):
    """By what they are, not by their names."""
    _, found, reasons = model
    assert [w.name for w in found if (w.router or w.head) and not reasons[w.name]] == []


def test_what_wraps_a_model_changes_nothing(model):
    model_type, found, reasons = model
    _, config = build(model_type)
    for wrapper in WRAPPERS:
        wrapped = decided(found, config, wrapper)
        other = [name for name in reasons if bool(reasons[name]) != bool(wrapped[name])]
        assert not other, wrapper


@pytest.mark.parametrize("model_type", sorted(CAUSAL))
def test_layers_are_quantized(model_type):
    """The rules are not too wide: nearly all of what a text model's layers hold is quantized."""
    found, config = build(model_type)
    inside = re.compile(r"(?!.*(vis|audio|image)).*\b(layers|h|blocks?)\.\d+\.")
    layers = [w for w in found or () if w.linear and inside.match(w.name)]
    if not layers:
        pytest.skip("it cannot be built, or has no linear layers in numbered ones")
    rules = Rules((), (), config)
    reasons = {w.name: rules.reason_to_keep(w.name, w.shape, "bfloat16") for w in layers}
    # Mamba's x_proj and dt_proj, which engines build without a quantized form, are 5.3 % of it.
    kept = [w for w in layers if reasons[w.name] and "state space" not in reasons[w.name]]
    size = {w.name: w.shape[0] * w.shape[1] for w in layers}
    assert sum(size[w.name] for w in kept) <= 0.05 * sum(size.values())
