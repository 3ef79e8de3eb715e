# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""A model through fp4kit and back, and all that must hold of what comes out."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import fp4kit
import fp4kit.torch
from expected import ROUNDED, ROUNDED_ERROR
from fp4kit.checkpoint.operations import dequantize_checkpoint, quantize_checkpoint
from fp4kit.checkpoint.options import CheckpointOptions, DequantizeOptions
from fp4kit.checkpoint.verify.paths import reader_notes
from fp4kit.checkpoint.verify.structure import structure_faults
from fp4kit.checkpoint.verify.values import value_faults
from names import Faults, ignored, kept_modules, prefixes, some, stored_shapes
from tiny_configs import OVERRIDES
from tiny_models import build, candidate_inputs, computed

#: What `from_pretrained` says of names that did not match.
#: Of batches that a norm has seen: nothing is computed with it.
COUNTER = "num_batches_tracked"
EXPERT = re.compile(r"(?<=\.experts)\.\d+\.")
MISMATCHES = ("missing_keys", "unexpected_keys", "mismatched_keys")


@dataclasses.dataclass(frozen=True)
class Fault:
    """Something that does not hold.

    Attributes:
        stage: what was done: `rules`, `quantize`, `verify`, `dequantize`, `back` where transformers
            reads the decoded checkpoint, `load` where fp4kit.torch loads the quantized one,
            `ignore` for the list of modules that are not quantized, or `out` where transformers
            reads the quantized checkpoint.
        text: what was seen, one line.
    """

    stage: str
    text: str

    def __str__(self) -> str:
        return f"{self.stage}: {self.text}"


@dataclasses.dataclass
class RoundTrip:
    """What became of a model.

    Attributes:
        faults: everything that does not hold.
        quantized: how many tensors were quantized.
        computed: whether its results could be compared as well.
        known: what `verify` says of readers that are known to fail with it.
    """

    faults: list[Fault] = dataclasses.field(default_factory=list)
    quantized: int = 0
    computed: bool = False
    known: list[str] = dataclasses.field(default_factory=list)


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def load(folder: Path, cls: Any) -> tuple[torch.nn.Module, list[str]]:
    """A model as transformers loads it by default, decoded; and the names that did not match."""
    model, info = cls.from_pretrained(folder, output_loading_info=True)
    wrong = [
        f"{len(info[kind])} {kind.replace('_', ' ')}: {some(map(str, info[kind]))}"
        for kind in MISMATCHES
        if info.get(kind)
    ]
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and not wrong:
        quantizer.compressor.decompress_model(model)
    return model.eval(), wrong


def tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer, under each of its names."""
    found = dict(model.named_parameters(remove_duplicate=False))
    found |= dict(model.named_buffers(remove_duplicate=False))
    return {name: tensor.detach() for name, tensor in found.items()}


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, but for the payload of NaN."""
    return one.dtype == other.dtype and torch.equal(one.nan_to_num(0.25), other.nan_to_num(0.25))


def differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> Faults:
    """How the tensors of one model differ from those of another."""
    # compressed-tensors may build experts as modules of their own: what they compute is compared.
    single = {f"{name[: match.start()]}." for name in one if (match := EXPERT.search(name))}
    absent = [name for name in other if name not in one and not name.startswith(tuple(single))]
    if absent:
        yield f"{len(absent)} tensors absent: {some(absent)}"
    unequal = [
        name
        for name in other
        if name in one and not name.endswith(COUNTER) and not _same(one[name], other[name])
    ]
    if unequal:
        yield f"{len(unequal)} of {len(other)} tensors differ: {some(unequal)}"


def save(model_type: str, class_name: str, folder: Path) -> tuple[torch.nn.Module, Path]:
    """Builds a model and saves it.

    Args:
        model_type: what to build.
        class_name: of the model.
        folder: an empty directory.

    Returns:
        The model, and the directory that holds it.

    Raises:
        ValueError: if transformers does not load what it saved.
    """
    model = build(model_type, class_name)
    source = folder / "source"
    model.save_pretrained(source)
    for name, content in OVERRIDES.get(model_type, {}).get("files", {}).items():
        torch.save(content, source / name)
    loaded, wrong = load(source, type(model))
    built = dict(model.named_parameters(remove_duplicate=False))
    types = {name: tensor.dtype for name, tensor in built.items()}
    again = {
        name: tensor.to(types[name]) for name, tensor in tensors(loaded).items() if name in types
    }
    wrong += differences(again, built)
    if wrong:
        raise ValueError(f"{model_type}: does not load as it was saved: {'; '.join(wrong)}")
    return model, source


def round_trip(model: torch.nn.Module, source: Path, format: str) -> RoundTrip:
    """Quantizes, verifies, decodes and loads a model.

    Args:
        model: a model.
        source: the directory that holds it; the results come beside it.
        format: what it is quantized to.
    """
    result = RoundTrip()
    out, back = source.with_name("out"), source.with_name("back")
    result.faults += [Fault("rules", text) for text in prefixes(source)]
    result.faults += _through_fp4kit(source, out, back, format, result)
    if result.quantized:
        result.faults += _through_transformers(model, out, back, result)
    return result


def _through_fp4kit(
    source: Path, out: Path, back: Path, format: str, result: RoundTrip
) -> Iterator[Fault]:
    report = quantize_checkpoint(source, out, CheckpointOptions(format=format))
    result.quantized = sum(entry.action == "quantize" for entry in report.tensors)
    if not result.quantized:
        return
    for text in structure_faults(out) or value_faults(out, source):
        yield Fault("verify", text)
    for note in reader_notes(out):
        if "is known to fail" in note:
            result.known.append(note)
        else:
            yield Fault("verify", note)
    dequantize_checkpoint(out, back, DequantizeOptions("bfloat16"))
    before, after = stored_shapes(source), stored_shapes(back)
    for what, names in (
        ("lost", [name for name in before if name not in after]),
        ("new", [name for name in after if name not in before]),
        ("of another shape", [n for n in before if n in after and before[n] != after[n]]),
    ):
        if names:
            yield Fault("dequantize", f"{len(names)} tensors are {what}: {some(names)}")


def _through_transformers(
    model: torch.nn.Module, out: Path, back: Path, result: RoundTrip
) -> Iterator[Fault]:
    plain, wrong = load(back, type(model))
    yield from (Fault("back", text) for text in wrong)
    if not wrong:
        yield from (Fault("load", text) for text in _by_fp4kit(plain, out))
    config = json.loads((out / "config.json").read_text())
    lists = ignored(out.with_name("source"), config["quantization_config"]["ignore"])
    yield from (Fault("ignore", text) for text in lists.faults(*kept_modules(model, plain)))
    try:
        loaded, wrong = load(out, type(model))
        wrong += differences(tensors(loaded), tensors(plain)) if not wrong else ()
        if not wrong:
            wrong += _compared(loaded, plain, result)
    # Of any kind: what transformers raises is what is looked for.
    except Exception as error:
        wrong = [one_line(error)]
    yield from (Fault("out", text) for text in wrong)


def _by_fp4kit(plain: torch.nn.Module, out: Path) -> Faults:
    """How a model that fp4kit.torch filled on the meta device differs from one of decoded weights.

    What was decoded for transformers is what the layers of fp4kit decode to.
    """
    with torch.device("meta"):
        model = type(plain)._from_config(copy.deepcopy(plain.config), dtype=torch.bfloat16)
    fp4kit.torch.load(model, out, dtype=torch.bfloat16)
    for module in model.modules():
        if isinstance(module, fp4kit.torch.Linear):
            weight = module.weight.dequantize("bfloat16")
            module._buffers.clear()
            module.register_buffer("weight_of_codes", weight)
    found = {
        name.replace("weight_of_codes", "weight"): tensor for name, tensor in tensors(model).items()
    }
    yield from differences(found, tensors(plain))


def _compared(loaded: torch.nn.Module, plain: torch.nn.Module, result: RoundTrip) -> Faults:
    """How what a model computes differs from what it should."""
    for inputs in candidate_inputs(plain):
        try:
            expected = computed(plain, inputs)
        except Exception:  # these inputs do not suit it, whatever it says about them
            continue
        if expected and all(bool(tensor.isfinite().all()) for tensor in expected.values()):
            result.computed = True
            got = computed(loaded, inputs)
            if plain.config.model_type in ROUNDED:
                got = {name: _rounded(got[name], expected[name]) for name in expected}
            yield from (f"results: {text}" for text in differences(got, expected))
            return


def _rounded(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """What is expected, if the other is near to it."""
    error = float((got.float() - expected.float()).abs().max())
    return expected if error <= ROUNDED_ERROR * float(expected.abs().max()) else got
