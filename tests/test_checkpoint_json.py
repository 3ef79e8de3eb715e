# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""JSON values of another type anywhere in a checkpoint: an error of ours or a fault, never more."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import shutil
import time
from pathlib import Path

import pytest

from fp4kit.checkpoint.inspect import inspect_checkpoint
from fp4kit.checkpoint.layouts.expressions import PatternError, compiled
from fp4kit.checkpoint.layouts.ignore_list import IgnoreList
from fp4kit.checkpoint.operations import plan_convert_checkpoint, plan_quantize_checkpoint
from fp4kit.checkpoint.options import CheckpointOptions, ConvertOptions, DequantizeOptions
from fp4kit.checkpoint.plan.dequantize import plan_dequantize
from fp4kit.checkpoint.read.directory import Checkpoint
from fp4kit.checkpoint.verify.structure import structure_faults
from fp4kit.errors import Fp4kitError

GOLDEN = Path(__file__).parent / "golden" / "checkpoints"
CHECKPOINTS = (
    "llama-tiny-sharded--llmcompressor-NVFP4A16",
    "qwen3moe-tiny--llmcompressor-MXFP4A16",
    "llama-tiny--modelopt-NVFP4_DEFAULT_CFG",
    "llama-tiny--modelopt-MXFP8_DEFAULT_CFG",
    "llama-tiny-sharded",
)
#: A value of every JSON type, and some that are of the right type but mean nothing.
OTHERS = (None, True, 5, -1, 1.5, 10**400, "", "x", "re:(", [], [5], [[]], [{}], {}, {"a": 5})
#: Mutations of each checkpoint.
COUNT = 16


@pytest.fixture(params=CHECKPOINTS)
def folder(request, tmp_path):
    target = tmp_path / "model"
    shutil.copytree(GOLDEN / request.param, target)
    return target


def places(value, path=()):
    """Where a JSON document has a value."""
    yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*path, key))


def changed(document, rng):
    """A document with one value replaced, added or removed."""
    *path, last = rng.choice([place for place in places(document) if place])
    result = copy.deepcopy(document)
    parent = result
    for key in path:
        parent = parent[key]
    what = rng.random()
    if what < 0.1:
        del parent[last]
    elif what < 0.2 and isinstance(parent, dict):
        parent[rng.choice(("quantization_config", "text_config", "foo", "format"))] = rng.choice(
            OTHERS
        )
    else:
        parent[last] = rng.choice(OTHERS)
    return result


def operate(folder):
    """Everything that reads the JSON files, up to the plan."""
    structure_faults(folder)

    def dequantize():
        with Checkpoint(folder) as checkpoint:
            plan_dequantize(checkpoint, DequantizeOptions())

    for operation in (
        dequantize,
        lambda: inspect_checkpoint(folder),
        lambda: plan_convert_checkpoint(folder, ConvertOptions("comfy")),
        lambda: plan_quantize_checkpoint(folder, CheckpointOptions()),
    ):
        with contextlib.suppress(Fp4kitError):
            operation()


def test_values_of_other_types(folder):
    """Seconds for all; each finding becomes a case of the test below."""
    documents = {path: json.loads(path.read_text()) for path in folder.glob("*.json")}
    documents = {path: value for path, value in documents.items() if "tokenizer" not in path.name}
    rng = random.Random(f"{folder.name}{len(documents)}")
    for _ in range(COUNT):
        path = rng.choice(sorted(documents))
        path.write_text(json.dumps(changed(documents[path], rng)))
        operate(folder)
        path.write_text(json.dumps(documents[path]))


@pytest.mark.parametrize("name", [CHECKPOINTS[0], CHECKPOINTS[2]])
@pytest.mark.parametrize(
    ("document", "path"),
    [
        ("config.json", ("architectures",)),
        ("config.json", ("model_type",)),
        ("config.json", ("dtype",)),
        ("config.json", ("vocab_size",)),
        ("config.json", ("num_hidden_layers",)),
        ("config.json", ("tie_word_embeddings",)),
        ("config.json", ("text_config",)),
        ("config.json", ("quantization_config",)),
        *(
            ("config.json", ("quantization_config", key))
            for key in ("quant_method", "format", "config_groups", "ignore", "kv_cache_scheme")
        ),
        *(("config.json", ("quantization_config", key)) for key in ("quant_algo", "producer")),
        ("config.json", ("quantization_config", "weight_block_size")),
        ("config.json", ("quantization_config", "config_groups", "g")),
        ("config.json", ("quantization_config", "config_groups", "NVFP4A16", "weights")),
        ("config.json", ("quantization_config", "config_groups", "NVFP4A16", "format")),
        ("hf_quant_config.json", ("quantization",)),
        ("hf_quant_config.json", ("quantization", "quant_algo")),
        ("hf_quant_config.json", ("quantization", "exclude_modules")),
        ("hf_quant_config.json", ("quantization", "quantized_layers")),
        ("model.safetensors.index.json", ("metadata",)),
        ("model.safetensors.index.json", ("metadata", "total_size")),
        ("model.safetensors.index.json", ("weight_map",)),
        ("model.safetensors.index.json", ("weight_map", "model.norm.weight")),
    ],
)
def test_every_type_in_one_place(tmp_path, name, document, path):
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN / name, folder)
    if not (folder / document).exists():
        return
    original = json.loads((folder / document).read_text())
    for other in (None, True, 1.5, "x", [[]], {"a": 5}):
        content = copy.deepcopy(original)
        parent = content
        for key in path[:-1]:
            parent = parent.get(key)
            if not isinstance(parent, dict):
                return
        parent[path[-1]] = other
        (folder / document).write_text(json.dumps(content))
        operate(folder)


# ------------------------------------------------------------------------------------------------
# Hostile patterns
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern",
    [
        "(.*.*)*$Z",
        "(a+)+$",
        "(a|a)*b",
        "(a|aa)+$b",
        "(.*)*x",
        "([a-z.]+)*!",
        "(?:a?){30}a{30}b",
        "(x+x+)+y",
        "((a*)*)*b",
        ".*.*.*.*.*.*.*.*.*.*.*Z",
        "(.*){1,100}Z",
        "(?=(a+)+$)b",
        "^(?!.*(a+)+$b).*Q",
        "(a{0,50}){50}b",
        "(?:(?:(?:a*)*)*)*Z",
        "(.+)+(.+)+(.+)+Z",
    ],
)
def test_patterns_that_take_for_ever_do_not(pattern):
    """Exponential and polynomial families: each would take minutes to ages in Python's engine."""
    started = time.process_time()
    matches = compiled(pattern)
    assert not matches("a" * 400 + "?")
    assert not matches("model.layers.10.self_attn.q_proj" * 20)
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    "pattern",
    [
        r"(a)\1",
        r"(?<=a)b",
        "(?i)(a+)+b",
        "(?:(?:a{99}){99}){99}",
        "a{99999999999999999999}",
        "(",
        "*",
        "a" * 5000,
        "(" * 2000 + ")" * 2000,
    ],
)
def test_patterns_that_are_not_understood_are_faults(pattern):
    with pytest.raises(PatternError) as caught:
        compiled(pattern)
    assert len(str(caught.value)) < 200
    listed = IgnoreList((f"re:{pattern}",), "compressed-tensors")
    assert not listed.matches("lm_head")
    (fault,) = listed.faults
    assert "in the ignore list is not understood" in fault


def test_lists_of_too_many_expressions():
    listed = IgnoreList([f"re:x{number}(a+)+" for number in range(5000)], "modelopt")
    assert listed.matches("x999aa")
    assert not listed.matches("x4999aa")
    assert listed.faults == [
        "the ignore list has 5000 regular expressions; no more than 1000 are looked at"
    ]


def test_a_long_name_is_a_fault():
    listed = IgnoreList(("re:(a|aa)*b",), "modelopt")
    assert not listed.matches("a" * 10_000)
    assert "too long" in listed.faults[0]


def _pattern(rng, depth=0):
    """A random pattern of everything that is understood."""
    what = rng.random()
    if depth > 3 or what < 0.4:
        atoms = ("a", "b", ".", "[ab]", "[^a]", r"\d", r"\W", "x.y", r"\.", "^", "$", r"\b", "q_p")
        return rng.choice(atoms)
    inner = _pattern(rng, depth + 1)
    if what < 0.6:
        return inner + _pattern(rng, depth + 1)
    if what < 0.75:
        return f"({inner}|{_pattern(rng, depth + 1)})"
    if what < 0.9:
        return f"(?:{inner})" + rng.choice(("*", "+", "?", "{1,2}", "*?", "{2}", "{0,3}"))
    return f"(?{rng.choice('=!')}{inner})"


def test_patterns_match_as_pythons_do():
    import re

    rng = random.Random(3)
    texts = ("", "a", "ab", "abc", "a.b", "aab1", "q_p", "xay", "a\n", "bbaaba", "1.x-y")
    for _ in range(1500):
        pattern = _pattern(rng)
        try:
            regex = re.compile(pattern)
        except re.error:
            continue
        matches = compiled(pattern)
        assert [matches(text) for text in texts] == [bool(regex.match(text)) for text in texts]


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_a_hostile_ignore_list_is_verified_at_once(tmp_path, layout):
    kind = (
        "llmcompressor-NVFP4A16" if layout == "compressed-tensors" else "modelopt-NVFP4_DEFAULT_CFG"
    )
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN / f"llama-tiny--{kind}", folder)
    for document, place, key in (
        ("config.json", "quantization_config", "ignore"),
        ("hf_quant_config.json", "quantization", "exclude_modules"),
    ):
        if (folder / document).exists():
            content = json.loads((folder / document).read_text())
            content[place][key] += ["re:(.*.*)*$Z", "re:(", "re:(([a-z_.0-9]+)+)+!"]
            (folder / document).write_text(json.dumps(content))
    started = time.process_time()
    faults = structure_faults(folder)
    assert time.process_time() - started < 5
    (fault,) = faults
    assert "'re:(' in the ignore list is not understood" in fault
