# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Which tensors of a GGUF model the codes of a checkpoint replace, and whether they fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4kit.api.quantize import dequantize
from fp4kit.api.tensor import QuantizedTensor
from fp4kit.checkpoint.models.gguf_names import FAMILIES, heads_key, interleaved, stored_names
from fp4kit.checkpoint.read.directory import Checkpoint, listed
from fp4kit.checkpoint.views.codes import Codes
from fp4kit.checkpoint.views.opened import Opened, open_quantized
from fp4kit.errors import FileFormatError, OptionError, ShapeError, brief
from fp4kit.io.coded import DECODING_RECIPE
from fp4kit.io.ggml import BLOCK_LAYOUTS
from fp4kit.io.gguf_model import architecture_of, coded_as, in_blocks
from fp4kit.io.gguf_rules import why_one_level
from fp4kit.io.read.gguf import GgufSource
from fp4kit.io.read.gguf_header import GgufTensor
from fp4kit.io.read.source import Coded
from fp4kit.io.stream.chunks import rows_view
from fp4kit.io.write.gguf import GgufOutput
from fp4kit.reference.codecs import to_float32
from fp4kit.reference.scaling import convert_second_level, quiet

Bytes = NDArray[np.uint8]
#: Rows of each weight that are compared with the template, and how far they may be from it.
SAMPLE_ROWS, FAR = 64, 0.5


@dataclass(frozen=True)
class Moved:
    """One tensor of the template whose place codes of the checkpoint take.

    Attributes:
        tensor: as the template has it.
        codes: the weight, or the experts that it stacks.
        seconds: their second levels, in decode direction; None without.
        coded: what its parts are called while it is written.
        head: rows of a head whose rows change places, 1 if none do.
    """

    tensor: GgufTensor
    codes: list[Codes]
    seconds: NDArray[np.float32] | None
    coded: Coded
    head: int = 1

    @property
    def outputs(self) -> list[GgufOutput]:
        """What is written for it."""
        return in_blocks(self.tensor.name, self.coded, len(self.codes))

    def parts(self, first: int, last: int, codes: Codes) -> tuple[Bytes, Bytes]:
        """Codes and scales of some rows of one weight, in the order of the template."""
        packed, scales = codes.read(first, last)
        if self.head > 1:
            order = interleaved(self.head)
            packed, scales = (
                part.reshape(-1, self.head, part.shape[1])[:, order].reshape(part.shape)
                for part in (packed, scales)
            )
        return packed, scales


def _architecture(template: GgufSource, checkpoint: Checkpoint) -> str:
    """The template's architecture, checked against the checkpoint's model type.

    Raises:
        OptionError: if its names are not known, or the two do not belong together.
    """
    found = architecture_of(template)
    if found not in FAMILIES:
        raise OptionError(
            f"{template.path}: names of architecture {brief(found)} are not known here, only those "
            f"of {', '.join(FAMILIES)}; quantize the .gguf itself"
        )
    said = checkpoint.config.get("model_type")
    if said is not None and said not in FAMILIES[found].types:
        raise OptionError(
            f"{template.path}: is a model of architecture {found}, {checkpoint.path} one of type "
            f"{brief(said)}; give the template of the same model"
        )
    return found


def _second(opened: Opened, name: str, codes: Codes) -> NDArray[np.float32] | None:
    """The second level of a weight in decode direction."""
    entry = opened.entries.get(name)
    if entry is None or codes.plan.recipe is None:
        return None
    assert entry.second is not None
    with quiet():
        scheme = codes.plan.scheme
        return convert_second_level(
            entry.second, codes.plan.recipe.keeps, "decode_scale", scheme.e4m3_max
        )


def _moved(
    template: GgufSource, opened: Opened, tensor: GgufTensor, codes: Mapping[str, Codes]
) -> Moved | None:
    """What becomes of a tensor of the template; None if it stays.

    Raises:
        FileFormatError: if only some experts of a stack are quantized, or in several formats.
        ShapeError: if shapes differ.
        OptionError: if GGUF cannot hold it.
    """
    experts = tensor.shape[0] if len(tensor.shape) == 3 else 0
    names = stored_names(tensor.name, experts, codes)
    if not names:
        return None
    where = f"{template.path}: tensor {brief(tensor.name)}"
    missing = [name for name in names if name not in codes]
    if missing:
        raise FileFormatError(
            f"{where}: stacks experts that are not in FP4: {listed(missing)}; quantize the .gguf "
            "itself"
        )
    weights = [codes[name] for name in names]
    formats = {one.plan.format.name for one in weights}
    if len(formats) > 1:
        raise OptionError(
            f"{where}: stacks experts in {' and '.join(sorted(formats))}, ggml those of one "
            "format; quantize the .gguf itself"
        )
    for name, one in zip(names, weights, strict=True):
        shape = (one.plan.rows, one.plan.cols)
        if shape != (prod(tensor.shape[-2:-1]), tensor.shape[-1]):
            raise ShapeError(
                f"{where}: has shape {list(tensor.shape)}, {name} in the checkpoint {list(shape)}; "
                "give the template of the same model"
            )
    (form,) = formats
    if tensor.shape[-1] % BLOCK_LAYOUTS[form].type.elements:
        raise ShapeError(
            f"{where}: rows of {tensor.shape[-1]} are no whole blocks of "
            f"{BLOCK_LAYOUTS[form].type.elements} elements, as ggml has them"
        )
    levels = [_second(opened, name, one) for name, one in zip(names, weights, strict=True)]
    seconds = (
        None if levels[0] is None else np.concatenate([one for one in levels if one is not None])
    )
    architecture = architecture_of(template)
    why = why_one_level(architecture, tensor.name, template.stored)
    if seconds is not None and why and (seconds != 1).any():
        raise OptionError(
            f"{where}: {why}, so that the second level of {names[0]} would be lost; quantize the "
            ".gguf itself with `fp4kit quantize`, which leaves that level out there"
        )
    second = seconds is not None and not why
    coded = coded_as(tensor.name, tensor.shape, form, second=second)
    return Moved(tensor, weights, seconds, coded, _head(template, tensor, architecture))


def _head(template: GgufSource, tensor: GgufTensor, architecture: str) -> int:
    """Rows of a head whose rows change places, 1 if none do.

    Raises:
        FileFormatError: if the metadata does not say how many heads there are.
    """
    key = heads_key(tensor.name, architecture)
    if not key:
        return 1
    metadata = template.metadata
    heads = metadata.get(key, metadata.get(key.removesuffix("_kv"), ""))
    if not heads.isdigit() or int(heads) == 0 or tensor.shape[0] % (2 * int(heads)):
        raise FileFormatError(
            f"{template.path}: tensor {brief(tensor.name)}: {tensor.shape[0]} rows are no heads of "
            f"which {key} says {brief(heads)}"
        )
    return tensor.shape[0] // int(heads)


def _codes(checkpoint: Checkpoint, opened: Opened) -> dict[str, Codes]:
    """The weights of a checkpoint in formats that ggml has.

    Raises:
        OptionError: if there are none.
    """
    found = {n: one for n, one in opened.codes.items() if one.plan.format.name in BLOCK_LAYOUTS}
    if opened.codes and not found:
        formats = sorted({one.plan.format.name for one in opened.codes.values()})
        raise OptionError(
            f"{checkpoint.path}: its weights are in {' and '.join(formats)}, which ggml does not "
            f"have, only {' and '.join(BLOCK_LAYOUTS)}; quantize the .gguf itself"
        )
    return found


def plan_gguf(template: GgufSource, checkpoint: Checkpoint) -> tuple[dict[str, Moved], list[str]]:
    """The tensors of a template that codes of a checkpoint replace, and what to say beside that.

    Raises:
        OptionError: if the two do not belong together, or GGUF cannot hold what there is.
        FileFormatError: if something is quantized that has no place in the template.
        ShapeError: if shapes differ.
    """
    _architecture(template, checkpoint)
    if template.coded:
        raise OptionError(
            f"{template.path}: has tensors in FP4 itself; give the model in F32, F16, BF16 or Q8_0"
        )
    opened = open_quantized(checkpoint, fold=False)
    if opened.quantized is not None and opened.quantized.pre_scales:
        raise OptionError(
            f"{checkpoint.path}: has scales of AWQ beside its weights, which GGUF cannot hold; "
            "quantize the .gguf itself"
        )
    codes, moved = _codes(checkpoint, opened), {}
    for name, (_, tensor) in template.stored.items():
        found = _moved(template, opened, tensor, codes)
        if found is not None:
            moved[name] = found
    used = {one.name for found in moved.values() for one in found.codes}
    unused = [name for name in codes if name not in used]
    if unused or not moved:
        raise FileFormatError(
            f"{template.path}: has no place for {len(unused)} quantized weights of "
            f"{checkpoint.path}: {listed(unused)}; give the template of the same model"
        )
    return moved, _notes(opened, codes)


def _notes(opened: Opened, codes: Mapping[str, Codes]) -> list[str]:
    """What of the checkpoint does not reach the result."""
    coded = [name for name in opened.source.views if opened.source.is_decoded(name)]
    others = [name for name in coded if name not in codes]
    notes = []
    if others:
        notes.append(
            f"{len(others)} weights that are quantized in another way stay as the template has "
            f"them: {listed(others)}"
        )
    if opened.quantized is not None and opened.quantized.activations:
        notes.append("activation scales are left out: llama.cpp does not use them")
    return notes


def check_sample(template: GgufSource, moved: Moved) -> None:
    """Compares some rows with the template: another model, or another order of rows, shows.

    Raises:
        FileFormatError: if they are far from it.
    """
    known = template.tensors[moved.tensor.name]
    if not known.row_bytes or known.dtype not in ("float32", "float16", "bfloat16"):
        return
    codes = moved.codes[0]
    rows = min(codes.plan.rows, lcm(SAMPLE_ROWS, moved.head, codes.step))
    ours = np.asarray(dequantize(_first_rows(moved, rows), "float32"))
    theirs = np.empty(rows * known.row_bytes, np.uint8)
    template.read(known.name, 0, theirs.data)
    values = to_float32(rows_view(theirs, known.dtype, *ours.shape), known.dtype)
    size = float(np.square(values, dtype=np.float64).sum())
    error = float(np.square(ours - values, dtype=np.float64).sum())
    if error > FAR * FAR * size:
        raise FileFormatError(
            f"{template.path}: tensor {brief(known.name)}: its values are not those of "
            f"{codes.name} in the checkpoint; give the template of the same model"
        )


def _first_rows(moved: Moved, rows: int) -> QuantizedTensor:
    """Some rows of the first weight, in the order of the template."""
    codes = moved.codes[0]
    packed, scales = moved.parts(0, rows, codes)
    more: dict[str, Any] = {}
    if moved.seconds is not None:
        more = {"recipe": DECODING_RECIPE, "decode_scale": moved.seconds[:1]}
    shape = (rows, codes.plan.cols)
    return QuantizedTensor(
        packed=packed, block_scale=scales, format=moved.coded.format, shape=shape, **more
    )
