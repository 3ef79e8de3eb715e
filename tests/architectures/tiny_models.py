# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""A small random model of any model type, and what it computes."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import torch
import transformers

from tiny_configs import VOCABULARY, shrunken_config

#: Above this a config is not small: a size of it has another name than those that are known.
MOST_PARAMETERS = 40_000_000
#: Spread of the weights, so that what a model computes stays finite.
SPREAD, NOISE = 0.08, 0.02
SEED = 0


class TooLargeError(ValueError):
    """A model type whose config has sizes that are not known."""


def model_class(name: str) -> Any:
    return getattr(transformers, name)


def build(model_type: str, class_name: str) -> torch.nn.Module:
    """A random bfloat16 model, in evaluation mode."""
    config = shrunken_config(model_type)
    cls = model_class(class_name)
    with torch.device("meta"):
        count = sum(weight.numel() for weight in cls(copy.deepcopy(config)).parameters())
    if count > MOST_PARAMETERS:
        raise TooLargeError(f"{model_type}: {count / 1e6:.0f} million parameters")
    torch.manual_seed(SEED)
    model = cls._from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for weight in model.parameters():
            if not weight.is_floating_point():
                continue
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim > 1:
                weight.copy_(noise * SPREAD)
            else:  # norms, biases, decays: near to what they begin with
                weight.add_((noise * NOISE).to(weight.dtype))
    return model.eval()


def _tokens(model: torch.nn.Module) -> torch.Tensor:
    return torch.arange(24).reshape(2, 12) % (VOCABULARY - 56) + 5


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(SEED)).bfloat16()


def _size(config: Any, *names: str, default: int) -> int:
    for part in (config, *vars(config).values()):
        for name in names:
            value = getattr(part, name, None) if hasattr(part, "to_dict") else None
            if isinstance(value, int):
                return value
            if isinstance(value, (list, tuple)) and value and isinstance(value[0], int):
                return value[0]
    return default


def candidate_inputs(model: torch.nn.Module) -> Iterator[dict[str, Any]]:
    """Inputs that may suit a model, by the names that its forward takes; the best ones first."""
    takes = inspect.signature(model.forward).parameters
    config = model.config
    tokens = _tokens(model)
    common: dict[str, Any] = {"use_cache": False} if "use_cache" in takes else {}
    for name in ("decoder_input_ids", "decoder_text_input_ids"):
        if name in takes:
            common[name] = tokens
    if "decoder_input_values" in takes:
        common["decoder_input_values"] = _noise(2, 12, _size(config, "num_mel_bins", default=16))
    if "input_ids" in takes:
        yield {**common, "input_ids": tokens}
    channels = getattr(getattr(config, "decoder_config", None), "num_channels", None)
    if "decoder_input_ids" in takes and channels:
        yield {
            **common,
            "input_ids": tokens,
            "decoder_input_ids": tokens[..., None].expand(-1, -1, channels),
        }
    mels = _size(config, "num_mel_bins", "feature_size", "input_feat_per_channel", default=16)
    frames = 2 * _size(config, "max_source_positions", default=64)
    size = _size(config, "image_size", default=32)
    image = _noise(2, _size(config, "num_channels", default=3), size, size)
    video = image[:, None].expand(-1, _size(config, "num_frames", default=1), -1, -1, -1)
    if "input_features" in takes:
        yield {**common, "input_features": _noise(2, mels, frames)}
        yield {**common, "input_features": _noise(2, frames, mels)}
        mask = torch.ones(2, frames, dtype=torch.long)
        for name in ("attention_mask", "input_features_mask", "feature_attention_mask"):
            if name in takes:
                yield {**common, "input_features": _noise(2, mels, frames), name: mask}
                yield {**common, "input_features": _noise(2, frames, mels), name: mask}
    if "input_values" in takes:
        yield {**common, "input_values": _noise(2, 4000)}
        yield {**common, "input_values": _noise(2, 1, 4000)}
    if "pixel_values" in takes:
        yield {**common, "pixel_values": image}
        if "input_ids" in takes:
            yield {**common, "input_ids": tokens, "pixel_values": image}
            yield {**common, "input_ids": tokens, "pixel_values": video}
        yield {**common, "pixel_values": video}
    if "bbox" in takes and "input_ids" in takes:
        yield {**common, "input_ids": tokens, "bbox": torch.zeros(2, 12, 4, dtype=torch.long)}
    if "flattened_patches" in takes:
        width = _size(config, "patch_embed_hidden_size", default=768)
        patches = torch.cat((torch.ones(2, 8, 2).bfloat16(), _noise(2, 8, width)), 2)
        yield {**common, "flattened_patches": patches}


def computed(model: torch.nn.Module, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Every float tensor that a model gives for inputs."""
    torch.manual_seed(SEED)
    with torch.no_grad():
        return dict(_tensors("", model(**inputs)))


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield name, value.detach()
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _tensors(f"{name}.{key}".lstrip("."), part)
    elif isinstance(value, (list, tuple)):
        for number, part in enumerate(value):
            yield from _tensors(f"{name}.{number}", part)
