# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""`fp4kit.calibrate`: runs a model on text and keeps what its layers were given.

transformers loads the model, :mod:`.run_layers` runs it on the CPU. transformers maps plain weights
from their files and copies none of them; experts that are stored one by one are put together in a
file first (:mod:`.merge_experts`).
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as with_changes
from pathlib import Path
from typing import Any

from fp4kit.checkpoint.layouts import module_of
from fp4kit.checkpoint.models import architectures
from fp4kit.checkpoint.options import CheckpointOptions
from fp4kit.checkpoint.read.directory import listed, read_json
from fp4kit.checkpoint.survey import choice_groups, open_survey
from fp4kit.errors import FileFormatError, OptionError
from fp4kit.io.candidates import candidate
from fp4kit.io.moments import Floats, InputMoments, write_moments
from fp4kit.io.stream.chunks import Progress
from fp4kit.io.write.files import check_output

from .choices import StrPath, check_arguments, checked
from .merge_experts import State, merged_state
from .run_layers import LayerInputs, run_batches

#: Tokens of one text at most; longer ones are cut into pieces.
LENGTH = 512
#: Tokens that go through the model together.
BATCH_TOKENS = 512
#: What a user needs.
EXTRA = ("torch", "transformers")


@dataclass(frozen=True)
class CalibrationReport:
    """What a calibration saw.

    Attributes:
        source: the model.
        target: the file that was written.
        texts: texts, or pieces of long ones.
        tokens: tokens in all.
        modules: modules whose inputs were seen.
        unseen: modules that no token reached; their errors stay those of the weights.
        warnings: what the user should know.
    """

    source: str
    target: str
    texts: int
    tokens: int
    modules: list[str]
    unseen: list[str]
    warnings: list[str] = field(default_factory=list)


def calibrate(
    path: StrPath,
    text: StrPath,
    target: StrPath,
    *,
    length: int = LENGTH,
    effects: bool = True,
    force: bool = False,
    progress: Progress | None = None,
) -> CalibrationReport:
    """Measures the inputs of every layer that would be quantized: `fp4kit calibrate`.

    Needs the extra `calibrate` (torch and transformers).

    Args:
        path: model directory, with its tokenizer.
        text: file with a text on each line.
        target: .safetensors file to write, atomically: second moments and amaxes, for `moments` of
            :func:`fp4kit.survey` and `activations` of :func:`fp4kit.quantize_checkpoint`.
        length: tokens of a text at most; longer ones are cut into pieces.
        effects: measure too what an error of each layer's output does to the model's, by
            derivatives: two to three times the work.
        force: replace an older target.
        progress: called with (tokens done, tokens in all).

    Raises:
        OptionError: if torch or transformers is missing, or there is no text.
        FileFormatError: if transformers cannot load the model.
        OutputError: if the target cannot be written.

    Examples:
        >>> import tempfile, pathlib, fp4kit
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "texts.txt").write_text("A man is eating food.")
        >>> fp4kit.calibrate("Llama-3-8B", folder / "texts.txt", folder / "moments.safetensors")
        Traceback (most recent call last):
        ...
        fp4kit.errors.FileFormatError: Llama-3-8B: no such file or directory
    """
    check_arguments(locals())
    source, texts, out = checked(path), Path(text), Path(target)
    if not source.is_dir():
        raise OptionError(f"{source}: is a file; calibrate runs a model directory")
    if not texts.is_file():
        raise OptionError(f"{texts}: no such file; give one with a text on each line")
    missing = [name for name in EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise OptionError(
            f"calibrate needs {' and '.join(missing)}: pip install 'fp4kit[calibrate]'"
        )
    output = check_output(source, out, force=force, nbytes=0)
    with open_survey(source, CheckpointOptions(), [candidate("fp8")]) as found:
        names = [work.tensor.name for work in found.works]
        stored = [*names, *(work.tensor.name for work in found.kept)]
        shapes = {module_of(w.tensor.name): w.tensor.spec.shape[-2:] for w in found.works}
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".calibrate-") as scratch:
        model, tokenizer = _load(source, merged_state(source, Path(scratch)))
        inputs = _watched(model, source, names, stored)
        batches = list(_batches(tokenizer, texts, length))
        tokens = sum(len(piece) for batch in batches for piece in batch)
        run_batches(model, inputs, batches, effects=effects, progress=progress)
    seen = _moments(out, inputs.values(), shapes)
    unseen = [module_of(name) for name in names if module_of(name) not in seen.second]
    amax = dict(seen.amax)
    warnings = _fall_back(names, amax, unseen)
    blind = [name for name in seen.second if effects and name not in seen.effect]
    if blind:
        warnings.append(
            f"no derivatives by the outputs of {len(blind)} of {len(names)} modules: "
            f"{listed(blind)}; of these only what they are given is known"
        )
    facts = {"texts": str(sum(map(len, batches))), "tokens": str(tokens), "model": source.name}
    write_moments(output, with_changes(seen, amax=amax), facts)
    return CalibrationReport(
        str(source), str(out), sum(map(len, batches)), tokens, list(seen.second), unseen, warnings
    )


def _moments(
    path: Path, seen: Iterable[LayerInputs], shapes: Mapping[str, tuple[int, ...]]
) -> InputMoments:
    """What was seen, as means of each module."""
    second: dict[str, Floats] = {}
    amax: dict[str, float] = {}
    rows: dict[str, float] = {}
    effect: dict[str, Floats] = {}
    for each in {id(each): each for each in seen}.values():
        if each.squares is None:
            continue
        first = 0
        heights = [shapes[name][0] for name in each.modules]
        for module, height in zip(each.modules, heights, strict=True):
            if len(each.squares) != shapes[module][-1]:
                continue
            second[module] = each.squares / each.rows
            amax[module], rows[module] = each.amax, float(each.rows)
            if each.effects is None:
                continue
            if len(each.effects) == height:
                effect[module] = each.effects / each.rows
            elif len(each.effects) == sum(heights):  # gate and up of an expert, one matrix
                effect[module] = each.effects[first : first + height] / each.rows
                first += height
    return InputMoments(path, second, amax, rows, effect)


def _fall_back(names: Sequence[str], amax: dict[str, float], unseen: Sequence[str]) -> list[str]:
    """Gives unseen experts the largest amax of their layer's; says what was not seen."""
    for members in choice_groups(names).values():
        seen = [amax[module_of(name)] for name in members if module_of(name) in amax]
        for name in members if seen else ():
            amax.setdefault(module_of(name), max(seen))
    if not unseen:
        return []
    return [
        f"no token reached {len(unseen)} of {len(names)} modules: {listed(list(unseen))}; their "
        "errors stay those of the weights, and experts have the largest input of their layer's"
    ]


def _load(source: Path, state: State | None) -> tuple[Any, Any]:
    """The model as its config.json names it, and its tokenizer.

    Args:
        source: model directory.
        state: its parameters, None where transformers is to take them from its files.
    """
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config = read_json(source / "config.json")
    named = config.get("architectures")
    name = named[0] if isinstance(named, list) and named else ""
    loader = getattr(transformers, str(name), transformers.AutoModel)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        options: dict[str, Any] = {"dtype": "auto", "local_files_only": True}
        if state is None:
            model = loader.from_pretrained(source, **options)
        else:
            made = transformers.AutoConfig.from_pretrained(source)
            model = loader.from_pretrained(None, config=made, state_dict=state, **options)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise FileFormatError(
            f"{source}: transformers cannot load it: {str(error).splitlines()[0][:200]}"
        ) from None
    # One product for each expert, whose input can be told from those of the others.
    for part in model.modules():
        if hasattr(part, "config") and hasattr(part.config, "_experts_implementation"):
            part.config._experts_implementation = "eager"
        # A layer that runs anew must not find its own keys and values.
        if hasattr(part, "config") and hasattr(part.config, "use_cache"):
            part.config.use_cache = False
    return model.eval(), tokenizer


def _watched(
    model: Any, source: Path, names: Sequence[str], stored: Sequence[str]
) -> dict[int, LayerInputs]:
    """Address of a weight to the modules that it is the weight of."""
    config = read_json(source / "config.json")
    models = architectures.models(config, stored)
    parameters = dict(model.named_parameters())
    found: dict[int, LayerInputs] = {}
    for name in names:
        module = module_of(name)
        for built in dict.fromkeys([name, *(text for each in models for text in each.built(name))]):
            weight = parameters.get(built)
            if weight is None:
                continue
            if weight.dim() == 3:  # all experts of a layer
                weight = weight[_expert_of(module)]
            found.setdefault(weight.data_ptr(), LayerInputs([])).modules.append(module)
            break
    if not found:
        raise FileFormatError(
            f"{source}: none of its weights is a parameter of {type(model).__name__} under a name "
            "that is known, so that nothing can be measured"
        )
    return found


def _expert_of(module: str) -> int:
    """The number of an expert in the name of its module."""
    return next(int(part) for part in reversed(module.split(".")) if part.isdigit())


def _batches(tokenizer: Any, text: Path, length: int) -> Iterator[list[list[int]]]:
    """Texts of equal length together, so that none is padded."""
    by_length: dict[int, list[list[int]]] = {}
    for line in text.read_text("utf-8").splitlines():
        tokens = tokenizer(line)["input_ids"] if line.strip() else []
        for first in range(0, len(tokens), length):
            piece = tokens[first : first + length]
            by_length.setdefault(len(piece), []).append(piece)
    if not by_length:
        raise OptionError(f"{text}: holds no text; give a file with a text on each line")
    for size, pieces in by_length.items():
        step = max(BATCH_TOKENS // size, 1)
        for first in range(0, len(pieces), step):
            yield pieces[first : first + step]
