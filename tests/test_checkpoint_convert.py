# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""`convert_checkpoint`: there and back is the same, and every layout decodes to the same values."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fp4kit
from fp4kit.checkpoint.models.fusion import fusion_group
from fp4kit.checkpoint.operations import (
    convert_checkpoint,
    dequantize_checkpoint,
    plan_convert_checkpoint,
    quantize_checkpoint,
)
from fp4kit.checkpoint.options import CheckpointOptions, ConvertOptions, DequantizeOptions
from fp4kit.checkpoint.verify.structure import structure_faults
from fp4kit.errors import FileFormatError, OptionError

GOLDEN = Path(__file__).parent / "golden" / "checkpoints"
LAYOUTS = ("compressed-tensors", "modelopt", "comfy")
PAIRS = list(itertools.permutations(LAYOUTS, 2))
SECOND = {"compressed-tensors": "_global_scale", "modelopt": "_scale_2", "comfy": "_scale_2"}
INPUT = {
    "compressed-tensors": "input_global_scale",
    "modelopt": "input_scale",
    "comfy": "input_scale",
}


def convert(source, target, name, **more):
    report = convert_checkpoint(source, target, ConvertOptions(name, **more))
    assert structure_faults(target) == []
    return report


def there_and_back(checkpoints, source, first, second, **more):
    """Converts, converts back, and compares every tensor; returns the folder in between."""
    between, back = (source.with_name(f"{source.name}-{n}") for n in (second, f"{second}-{first}"))
    convert(source, between, second, **more)
    convert(between, back, first)
    before, after = checkpoints.read(source), checkpoints.read(back)
    assert after == before
    return between


def odd_scales(count):
    """Positive float32 whose inverse's inverse is another number: a search, not a formula."""
    rng = np.random.default_rng(0)
    values = rng.uniform(1e-4, 1e4, 200_000).astype(np.float32)
    one = np.float32(1)
    odd = values[one / (one / values) != values]
    assert len(odd) >= count
    return odd[:count]


def with_scales(checkpoints, source, target, suffix, values):
    """A copy of a one-file checkpoint with other values in tensors of some name, in order.

    Those that belong to modules which engines fuse get one value.
    """
    (path,) = source.glob("*.safetensors")
    tensors, metadata = checkpoints.read_file(path)
    values = iter(values)
    shared = {}
    changed = {}
    for name, tensor in tensors.items():
        array = checkpoints.array(tensor)
        if name.endswith(suffix):
            key = fusion_group(f"{name.removesuffix(suffix).rstrip('.')}.weight") or name
            if key not in shared:
                shared[key] = next(values)
            array = np.full(array.shape, shared[key], np.float32)
        changed[name] = tensor[0], array
    checkpoints.save(target, changed, checkpoints.config_of(source), metadata=metadata)
    extra = source / "hf_quant_config.json"
    if extra.exists():
        (target / extra.name).write_bytes(extra.read_bytes())
    return target


# ------------------------------------------------------------------------------------------------
# There and back
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second"), PAIRS)
@pytest.mark.parametrize("activations", [None, "uncalibrated", "calibrated"])
def test_there_and_back(checkpoints, tmp_path, first, second, activations):
    """A27: byte-identical; rows that fill no tile, several files, activation scales."""
    tensors, config = checkpoints.moe(2, hidden=80, intermediate=48)
    for name in [name for name in tensors if "shared_expert" in name]:
        del tensors[name]
    tensors["model.layers.0.mlp.down_proj.weight"] = checkpoints.normal((130, 208))
    source = checkpoints.save(tmp_path / "in", tensors, config)
    if activations == "calibrated":
        modules = [name.removesuffix(".weight") for name in tensors]
        amaxes = {name: 0.37 * number + 1 / 3 for number, name in enumerate(modules)}
        activations = str(tmp_path / "amax.json")
        Path(activations).write_text(json.dumps(amaxes))
    options = CheckpointOptions(layout=first, activations=activations, recipe="torchao")
    quantize_checkpoint(source, tmp_path / "q", options)
    there_and_back(checkpoints, tmp_path / "q", first, second, max_shard_size=9000)


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_scales_without_an_exact_inverse(checkpoints, tmp_path, first, second):
    """The header keeps the bits that a division and another would lose."""
    tensors, config = checkpoints.moe(3)
    source = checkpoints.save(tmp_path / "in", tensors, config)
    quantize_checkpoint(
        source, tmp_path / "q", CheckpointOptions(layout=first, activations="uncalibrated")
    )
    odd = odd_scales(64)
    weights = with_scales(
        checkpoints,
        tmp_path / "q",
        tmp_path / "w",
        f"weight{SECOND[first]}",
        itertools.cycle(odd[:1]),
    )
    odd_source = with_scales(checkpoints, weights, tmp_path / "odd", INPUT[first], odd[1:])
    assert structure_faults(odd_source) == []
    between = there_and_back(checkpoints, odd_source, first, second)
    turned = checkpoints.read(between)
    if "compressed-tensors" in (first, second):
        before = checkpoints.read(odd_source)
        names = [name for name in before if name.endswith(INPUT[first])]
        assert len(names) > 10
        for name in names:
            value = checkpoints.array(turned[name.removesuffix(INPUT[first]) + INPUT[second]])
            assert value == np.float32(1) / checkpoints.array(before[name]).item()


@pytest.mark.parametrize(
    "chain", [c for c in itertools.product(LAYOUTS, repeat=4) if c[0] == c[-1]]
)
def test_any_chain_of_layouts(checkpoints, tmp_path, chain):
    """Also where two of one direction follow each other: what the header keeps is handed on."""
    if any(one == other for one, other in itertools.pairwise(chain)):
        with pytest.raises(OptionError, match="already"):
            self_conversion(checkpoints, tmp_path, chain[0])
        return
    tensors, config = checkpoints.llama(1)
    source = checkpoints.save(tmp_path / "in", tensors, config)
    quantize_checkpoint(source, tmp_path / "q", CheckpointOptions(layout=chain[0]))
    odd = with_scales(
        checkpoints,
        tmp_path / "q",
        tmp_path / "0",
        SECOND[chain[0]],
        itertools.cycle(odd_scales(1)),
    )
    for number, name in enumerate(chain[1:]):
        convert(tmp_path / str(number), tmp_path / str(number + 1), name)
    assert checkpoints.read(tmp_path / "3") == checkpoints.read(odd)


def self_conversion(checkpoints, tmp_path, name):
    tensors, config = checkpoints.llama(1)
    source = checkpoints.save(tmp_path / "in", tensors, config)
    quantize_checkpoint(source, tmp_path / "q", CheckpointOptions(layout=name))
    convert_checkpoint(tmp_path / "q", tmp_path / "same", ConvertOptions(name))


@pytest.mark.parametrize(
    "name",
    [
        p.name
        for p in GOLDEN.iterdir()
        if "NVFP4" in p.name and not p.name.startswith("qwen3moe-tiny--llm")
    ],
)
def test_golden_there_and_back(checkpoints, tmp_path, name):
    """Other tools' files: all tensors, and the values by way of each layout."""
    first = "modelopt" if "modelopt" in name else "compressed-tensors"
    source = tmp_path / "q"
    source.symlink_to(GOLDEN / name)
    wanted = decoded(checkpoints, source, tmp_path / "plain")
    for second in set(LAYOUTS) - {first}:
        between = there_and_back(checkpoints, source, first, second)
        got = decoded(checkpoints, between, tmp_path / f"plain-{second}")
        assert got.keys() == wanted.keys()
        for tensor, values in wanted.items():
            # Recipes multiply in another order, and some know no -0.
            assert np.allclose(got[tensor], values, rtol=3e-7, atol=0)


def decoded(checkpoints, source, target):
    """Every tensor as float32."""
    dequantize_checkpoint(source, target, DequantizeOptions("float32"))
    return {
        name: checkpoints.array(tensor).astype(np.float32)
        for name, tensor in checkpoints.read(target).items()
    }


# ------------------------------------------------------------------------------------------------
# What changes and what does not
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_codes_and_scales_are_taken_over(checkpoints, tmp_path, first, second):
    """Looked at byte by byte, independently of the code that moves them."""
    shapes = [(1, 16), (17, 48), (130, 80), (128, 208)]
    tensors = {
        f"l.{n}.fc2.weight": checkpoints.normal(shape, seed=n) for n, shape in enumerate(shapes)
    }
    source = checkpoints.save(tmp_path / "in", tensors, {})
    quantize_checkpoint(source, tmp_path / "q", CheckpointOptions(layout=first))
    convert(tmp_path / "q", tmp_path / "c", second)
    forms = [
        parts_of(checkpoints, tmp_path / name, kind, tensors)
        for name, kind in (("q", first), ("c", second))
    ]
    for name in tensors:
        for one, other in zip(forms[0][name], forms[1][name], strict=True):
            assert (one == other).all()


def parts_of(checkpoints, folder, kind, tensors):
    """Codes one by one, linear block scales, in logical order."""
    written = checkpoints.read(folder)
    found = {}
    for name, (_, array) in tensors.items():
        rows, cols = array.shape
        suffix = "_packed" if kind == "compressed-tensors" else ""
        packed = checkpoints.array(written[f"{name}{suffix}"])
        scale = checkpoints.array(written[f"{name}_scale"])
        halves = [packed & 15, packed >> 4]
        if kind == "comfy":
            halves.reverse()
            assert not packed[rows:].any()
            scale = fp4kit.unswizzle(scale, (rows, cols // 16))
        codes = np.stack(halves, -1).reshape(len(packed), cols)[:rows]
        found[name] = codes, scale
    return found


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_the_files_around(checkpoints, tmp_path, first, second):
    """Nothing of the old layout is left: JSON files, header records, markers."""
    tensors, config = checkpoints.llama(2)
    source = checkpoints.save(
        tmp_path / "in", tensors, config, others=list(checkpoints.OTHER_FILES)
    )
    quantize_checkpoint(
        source, tmp_path / "q", CheckpointOptions(layout=first, exclude=("*o_proj*",))
    )
    report = convert(tmp_path / "q", tmp_path / "c", second)
    direct = CheckpointOptions(layout=second, exclude=("*o_proj*",))
    quantize_checkpoint(source, tmp_path / "d", direct)
    made, wanted = checkpoints.digest(tmp_path / "c"), checkpoints.digest(tmp_path / "d")
    assert made.keys() == wanted.keys()
    assert {n for n in made if made[n] != wanted[n]} <= set(report.shards)
    for name in report.shards:
        ours, headers = checkpoints.read_file(tmp_path / "c" / name)
        theirs, expected = checkpoints.read_file(tmp_path / "d" / name)
        headers.pop("fp4kit_second_level", None)
        assert headers == expected
        assert {n: t[:2] for n, t in ours.items()} == {n: t[:2] for n, t in theirs.items()}


def test_what_cannot_be_converted(checkpoints, tmp_path):
    tensors, config = checkpoints.llama(1)
    source = checkpoints.save(tmp_path / "in", tensors, config)
    fp8 = checkpoints.save(tmp_path / "fp8", *checkpoints.fp8_llama()[:2])
    quantize_checkpoint(source, tmp_path / "mx", CheckpointOptions(format="mxfp4"))
    quantize_checkpoint(source, tmp_path / "nv", CheckpointOptions())
    cases = [
        (source, "comfy", FileFormatError, "holds no quantized weight"),
        (fp8, "comfy", OptionError, "holds fp8; layout comfy takes nvfp4 only"),
        (tmp_path / "mx", "modelopt", OptionError, "holds mxfp4; layout modelopt takes nvfp4"),
        (tmp_path / "mx", "comfy", OptionError, "holds mxfp4"),
        (tmp_path / "nv", "compressed-tensors", OptionError, "already"),
        (tmp_path / "nv", "gguf", OptionError, "gguf"),
    ]
    for folder, name, kind, match in cases:
        for run in (
            lambda f=folder, n=name: plan_convert_checkpoint(f, ConvertOptions(n)),
            lambda f=folder, n=name: convert_checkpoint(f, tmp_path / "out", ConvertOptions(n)),
        ):
            with pytest.raises(kind, match=match):
                run()
    assert not (tmp_path / "out").exists()


@settings(max_examples=15, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9)), min_size=1, max_size=4),
    first=st.sampled_from(LAYOUTS),
    second=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 1 << 30),
)
def test_any_codes_and_scales(checkpoints, tmp_path_factory, sizes, first, second, seed):
    """Arbitrary bytes, as no quantizer makes them: -0, unused codes, any finite block scale."""
    if first == second:
        return
    rng = np.random.default_rng(seed)
    tensors, config = {}, {}
    for number, (rows, blocks) in enumerate(sizes):
        name = f"l.{number}.fc2.weight"
        scale = rng.integers(0, 0x7F, (rows, blocks), np.uint8)
        tensors[f"{name}_packed"] = "U8", rng.integers(0, 256, (rows, blocks * 8), np.uint8)
        tensors[f"{name}_scale"] = "F8_E4M3", scale
        level = rng.uniform(1e-3, 1e6, 1).astype(np.float32)
        tensors[f"{name}_global_scale"] = "F32", level
    folder = tmp_path_factory.mktemp("any")
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}}},
        "ignore": [],
    }
    source = checkpoints.save(folder / "ct", tensors, config)
    if first != "compressed-tensors":
        convert(source, folder / "q", first)
        source = folder / "q"
    there_and_back(checkpoints, source, first, second)
