# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What is excluded is never refused: a way out that works for experts that nobody knows."""

from __future__ import annotations

import re

import numpy as np
import pytest

from checkpoints import normal, read, save, stored
from fp4kit.checkpoint.verify.structure import structure_faults
from fp4kit.checkpoint.verify.values import value_faults
from fp4kit.errors import OptionError
from fused_experts import E, H, dequantize, quantize

BASE = "model.layers.0.mlp"
ATTENTION = "model.layers.0.self_attn.o_proj.weight"


def new_model(**experts):
    """(tensors, config) of a model type that nobody knows, with an attention and experts."""
    tensors = {ATTENTION: normal((H, H), seed=1)}
    tensors |= {f"{BASE}.{name}": value for name, value in experts.items()}
    return tensors, {"model_type": "brand_new_moe", "num_experts": E}


def alone(module="experts"):
    """Without `down_proj` both orientations fit."""
    return {f"{module}.gate_up_proj": normal((E, 2 * H, 2 * H), seed=2)}


def contradictory(module="experts"):
    return {
        f"{module}.gate_up_proj": normal((E, H, H), seed=2),
        f"{module}.down_proj": normal((E + 1, H, 2 * H), seed=3),
    }


def with_biases(module="experts"):
    return {
        f"{module}.gate_up_proj": normal((E, 2 * 32, H), seed=2),
        f"{module}.gate_up_proj_bias": normal((E, 2 * 32), seed=4),
        f"{module}.down_proj": normal((E, H, 32), seed=3),
    }


def mxfp4(module="experts"):
    rng = np.random.default_rng(0)
    return {
        f"{module}.gate_up_proj_blocks": ("U8", rng.integers(0, 256, (E, 64, 2, 16), np.uint8)),
        f"{module}.gate_up_proj_scales": ("U8", rng.integers(110, 130, (E, 64, 2), np.uint8)),
    }


PATTERNS = [
    ("*experts*",),
    ("re:.*experts.*",),
    ("re:.*\\.experts\\.",),
    (f"{BASE}.experts.gate_up_proj", f"{BASE}.experts.down_proj"),
    ("*gate_up_proj*", "*down_proj*"),
    ("*.experts.*.weight",),
    ("*.gate_proj*", "*.up_proj*", "*.down_proj*"),
]


@pytest.mark.parametrize("make", [contradictory, with_biases])
@pytest.mark.parametrize("patterns", PATTERNS, ids=str)
def test_excluded_experts_of_an_unknown_layout_stay_as_they_are(tmp_path, make, patterns):
    tensors, config = new_model(**make())
    source = save(tmp_path / "source", tensors, config)
    with pytest.raises(OptionError):
        quantize(source, tmp_path / "refused")
    out = quantize(source, tmp_path / "out", exclude=patterns)
    found = read(out)
    kept = stored({name: value for name, value in tensors.items() if name != ATTENTION})
    assert {name: value for name, value in found.items() if "experts" in name} == kept
    assert ATTENTION.replace("weight", "weight_packed") in found
    assert value_faults(out, source) == []
    back, report = dequantize(out, tmp_path / "back")
    assert set(back) == set(tensors)
    assert report.warnings == []


@pytest.mark.parametrize("make", [alone, contradictory, with_biases, mxfp4])
@pytest.mark.parametrize("module", ["experts", "block.moe"])
def test_the_error_names_a_pattern_that_works(tmp_path, make, module):
    tensors, config = new_model(**make(module))
    source = save(tmp_path / "source", tensors, config)
    with pytest.raises(OptionError) as caught:
        quantize(source, tmp_path / "refused")
    pattern = re.search(r"--exclude '(.*?)'", str(caught.value))
    out = quantize(source, tmp_path / "out", exclude=(pattern[1],))
    assert structure_faults(out) == []
    assert ATTENTION.replace("weight", "weight_packed") in read(out)


def test_mxfp4_in_an_unknown_order_is_decoded_whole(tmp_path):
    tensors, config = new_model(**mxfp4())
    source = save(tmp_path / "source", tensors, config)
    out = quantize(source, tmp_path / "out", exclude=("*experts*",))
    assert read(out)[f"{BASE}.experts.gate_up_proj"][:2] == ("BF16", (E, 64, 64))
    assert value_faults(out, source) == []


def test_one_of_both_fused_tensors_excluded_by_its_own_name(tmp_path):
    """Where the layout is known, its parts are excluded with it."""
    tensors = {
        ATTENTION: normal((H, H)),
        f"{BASE}.experts.gate_up_proj": normal((E, 2 * 32, H)),
        f"{BASE}.experts.down_proj": normal((E, H, 32)),
    }
    source = save(tmp_path / "source", tensors, {"model_type": "mistral4"})
    out = quantize(source, tmp_path / "out", exclude=("*experts.down_proj",))
    found = read(out)
    assert f"{BASE}.experts.0.down_proj.weight" in found
    assert f"{BASE}.experts.0.gate_proj.weight_packed" in found
    back, _ = dequantize(out, tmp_path / "back")
    assert set(back) == set(tensors)
    name = f"{BASE}.experts.down_proj"
    assert back[name] == stored(tensors)[name]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("suffix", ["", ".weight"])
def test_stacked_shared_experts_stay_as_they_are(tmp_path, count, suffix):
    """Inkling's: no token chooses among them, and readers look for them whole."""
    tensors = {
        ATTENTION: normal((H, H)),
        f"{BASE}.experts.gate_up_proj": normal((E, 2 * 32, H)),
        f"{BASE}.experts.down_proj": normal((E, H, 32)),
        f"{BASE}.shared_experts.gate_proj{suffix}": normal((count, 32, H)),
        f"{BASE}.shared_experts.up_proj{suffix}": normal((count, 32, H)),
        f"{BASE}.shared_experts.down_proj{suffix}": normal((count, H, 32)),
    }
    config = {"model_type": "inkling_text", "num_experts": E, "moe_intermediate_size": 32}
    source = save(tmp_path / "source", tensors, config)
    for number, exclude in enumerate(((), ("*shared_experts*",))):
        out = quantize(source, tmp_path / f"out{number}", exclude=exclude)
        found = read(out)
        kept = stored({name: value for name, value in tensors.items() if "shared" in name})
        assert {name: value for name, value in found.items() if "shared" in name} == kept
        assert f"{BASE}.experts.2.down_proj.weight_packed" in found
        assert value_faults(out, source) == []
        back, _ = dequantize(out, tmp_path / f"back{number}")
        assert set(back) == set(tensors)


def test_projections_stacked_apart_stay_as_they_are(tmp_path):
    """`down_proj` is no fused expert by itself where gate and up are stacked beside it."""
    tensors, config = new_model(
        **{
            "experts.gate_proj": normal((E, 32, H)),
            "experts.up_proj": normal((E, 32, H)),
            "experts.down_proj": normal((E, H, 32)),
        }
    )
    source = save(tmp_path / "source", tensors, config)
    out = quantize(source, tmp_path / "out")
    kept = stored({name: value for name, value in tensors.items() if "experts" in name})
    assert {name: value for name, value in read(out).items() if "experts" in name} == kept
