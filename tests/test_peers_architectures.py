# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The table of architectures against the installed transformers: a new release shows as a diff.

A twelfth of the model types is built here, all of them with `-m slow`. Where a test fails because
transformers has changed, `python tests/architecture_facts.py` writes the table anew.
"""

from __future__ import annotations

import difflib
import zlib

import pytest

from fp4kit.checkpoint.models import architectures

pytest.importorskip("torch", reason="the peers extra is not installed")
pytest.importorskip("transformers", reason="the peers extra is not installed")

import transformers
from transformers import conversion_mapping, core_model_loading

import architecture_facts as facts

# Their own deprecations are not ours to fix.
pytestmark = pytest.mark.filterwarnings("ignore")

TYPES = sorted({key for mapping in facts.MAPPINGS for key in mapping})
#: Model types whose class is that of another one, or is made of libraries that are not installed.
UNCOMPARED = {"maskformer", "shieldgemma2"}


def some(share=12):
    """A fixed part of the model types here, the others in slow tests."""
    slow = pytest.mark.slow
    return [
        pytest.param(name, marks=() if zlib.crc32(name.encode()) % share == 0 else slow)
        for name in TYPES
    ]


def test_the_renames_and_types_are_those_of_transformers():
    content = architectures.table()
    assert content["transformers"] == transformers.__version__
    assert content["renames"] == facts.renames()
    assert content["types"] == facts.types(TYPES)


@pytest.mark.slow
def test_the_whole_table_is_that_of_transformers():
    made = facts.text(facts.table()).splitlines()
    old = facts.TABLE.read_text(encoding="utf-8").splitlines()
    assert "\n".join(difflib.unified_diff(old, made, n=0)) == ""


def stored_names(model, transforms):
    """What `save_pretrained` would call the tensors of a model."""
    model._weight_conversions = transforms
    return list(core_model_loading.revert_weight_conversion(model, dict(model.state_dict())))


@pytest.mark.parametrize("model_type", some())
@pytest.mark.parametrize("naming", ["as published", "as built"])
def test_names_are_those_that_transformers_builds(model_type, naming):
    """Old and new names of every tensor become what transformers' own code makes of them."""
    name = facts.classes_of(model_type)[0]
    model = facts.build(model_type, name)
    if isinstance(model, str) or model_type in UNCOMPARED:
        pytest.skip("it cannot be built from its default configuration")
    there = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    there |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    transforms = conversion_mapping.get_model_conversion_mapping(model)
    renames = [t for t in transforms if isinstance(t, core_model_loading.WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, core_model_loading.WeightConverter)]
    names = list(model.state_dict())
    if naming == "as published":
        names = stored_names(model, transforms)
    config = model.config.to_dict() | {"architectures": [name]}
    main = architectures.models(config, names)[0]
    for stored in sorted(names):
        built, _ = core_model_loading.rename_source_key(
            stored, renames, converters, model.base_model_prefix, dict.fromkeys(there, True)
        )
        assert built.replace("*.", "0.") in main.built(stored), stored


@pytest.mark.parametrize("model_type", some())
def test_tied_linear_layers_are_in_the_table(model_type):
    """Whatever class of a model type is built: no linear layer shares a weight unknown to us."""
    for name in facts.classes_of(model_type):
        model = facts.build(model_type, name)
        if isinstance(model, str):
            continue
        config = model.config.to_dict() | {"architectures": [name]}
        main = architectures.models(config, ())[0]
        assert facts.tied(model).keys() <= main.tied.keys()
