# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Quantizing files and checkpoints: what `fp4kit quantize` calls."""

from __future__ import annotations

import os
from dataclasses import replace as with_changes
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fp4kit.checkpoint import operations as checkpoints
from fp4kit.checkpoint.options import CheckpointOptions
from fp4kit.checkpoint.report import CheckpointReport
from fp4kit.checkpoint.views.search import decoded_file
from fp4kit.errors import OptionError
from fp4kit.fleet.mirror import opened
from fp4kit.fleet.workers import Workers
from fp4kit.io import quantize as files
from fp4kit.io.containers import GGUF
from fp4kit.io.gguf_model import default_target as gguf_target
from fp4kit.io.report import FileReport, QuantizeOptions
from fp4kit.io.storage import FILE_FIELDS
from fp4kit.io.stream.chunks import Progress
from fp4kit.io.tensor_names import Patterns
from fp4kit.options import Format
from fp4kit.scheme import Scheme

from .choices import (
    CheckpointChoices,
    FileChoices,
    Layout,
    StrPath,
    check_arguments,
    checked,
    known_with_scheme,
    shard_size,
)
from .devices import resolve_device, resolve_devices
from .shared import is_shared, job_of, run_shared
from .survey_plan import choices_of, file_choices_of

#: What the name of a result gets whose tensors have several formats.
MIXED = "mixed"
_ONE_OR_PLAN = "a plan says the format of each tensor; leave format and scheme out"

if TYPE_CHECKING:
    from typing_extensions import Unpack


def default_target(source: Path, format: str) -> Path:
    """Where the result of a quantization goes: beside the source, the format added to its name."""
    if source.suffix.lower() == GGUF and not source.is_dir():
        return gguf_target(source, format)
    if not source.is_dir():
        return source.with_name(f"{source.stem}-{format}.safetensors")
    real = source.resolve()  # `.` has a name, too
    return real.with_name(f"{real.name}-{format}")


def quantize_file(
    source: StrPath,
    target: StrPath | None = None,
    scheme: Scheme | Format = "nvfp4",
    *,
    device: str = "auto",
    force: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    **choices: Unpack[FileChoices],
) -> FileReport:
    """Quantizes the float tensors of a file that have two or more dimensions: `fp4kit quantize`.

    The result is a self-describing .safetensors file. All other tensors are carried through
    unchanged, byte for byte, and listed with the reason. The data is streamed: memory stays
    bounded whatever the size of the file. A .gguf model becomes another one, for llama.cpp: the
    weights that it would quantize itself are, everything else stays.

    Args:
        source: .safetensors, .npy, .npz or .gguf file; of a .gguf model in shards, the first.
        target: .safetensors file (.gguf of a .gguf) to write, atomically; None for the source's
            name with the format added.
        scheme: a :class:`fp4kit.Scheme`, or the name of a block format with fields of a scheme as
            keywords.
        device: `auto` (cuda where it can run), `cpu`, `cuda` or `cuda:N`; the bytes are the same.
        force: replace an older target.
        dry_run: plan from the headers alone; nothing is computed or written.
        progress: called with (bytes done, bytes in all) of the source.
        **choices: `recipe`, `scale_rule`, `granularity`, `scale_layout`, `nibble_order`, `pad`,
            `scale_search`, `search_error`, `e4m3_max`: fields of a :class:`fp4kit.Scheme`.
            `include`, `exclude`: name patterns, globs or `re:` and a regular expression.
            `cast="float32"`: take float64 as that. `void_dtype="bfloat16"`: what 2-byte void data
            of NumPy's files is. `unscaled_fp8`: FP8 without a scale was only cast. `allow_nothing`:
            no error if nothing is quantized. `plan`: the format of each tensor, from
            :func:`fp4kit.survey` or as the path of a file; it takes the place of `scheme`.

    Returns:
        An entry per tensor with error statistics; the numbers of `--json`.

    Raises:
        OptionError: for unknown options, a target that exists or is the source, or if nothing
            would be quantized.
        FileFormatError: if the source is malformed or quantized already.
        NonFiniteError: if a tensor holds NaN or infinity.
        BackendUnavailableError: if the device cannot be used.
        OutputError: if the target cannot be written.

    Examples:
        >>> import tempfile, numpy as np, fp4kit
        >>> folder = tempfile.mkdtemp()
        >>> w = np.random.default_rng(0).standard_normal((64, 64), np.float32)
        >>> np.save(f"{folder}/w.npy", w)
        >>> report = fp4kit.quantize_file(f"{folder}/w.npy", f"{folder}/w.safetensors", "mxfp8")
        >>> [(tensor.name, tensor.format) for tensor in report.tensors]
        [('w', 'mxfp8')]
        >>> report.total_stats.sqnr > 30
        True
    """
    check_arguments(locals(), ("target",))
    given = known_with_scheme(choices, FileChoices, scheme)
    path = checked(source)
    if path.is_dir():
        raise OptionError(f"{path}: is a directory; use quantize_checkpoint")
    excluded = Patterns(given.get("exclude", ()), "exclude")
    decode = partial(
        decoded_file,
        excluded=lambda name: excluded.match(name) is not None,
        unscaled_fp8=given.pop("unscaled_fp8", False),
    )
    # A dry run computes nothing, so it needs no device, unless one was asked for by name.
    used = "cpu" if dry_run and device == "auto" else resolve_device(device)
    given = {"allow_nothing": False, **given}
    plan = given.pop("plan", None)
    wanted = Scheme(**{name: given.pop(name) for name in FILE_FIELDS})
    options = QuantizeOptions(wanted, device=used, force=force, **given)
    if plan is not None:
        if wanted != Scheme():
            raise OptionError(_ONE_OR_PLAN)
        if path.suffix.lower() == GGUF:
            raise OptionError(f"{path}: a .gguf file takes one format; leave the plan out")
        options = with_changes(options, choices=file_choices_of(path, options, plan))
    name = MIXED if plan is not None else wanted.format
    out = default_target(path, name) if target is None else Path(target)
    return files.quantize_file(path, None if dry_run else out, options, progress, decode)


def quantize_checkpoint(
    source: StrPath,
    target: StrPath | None = None,
    scheme: Scheme | Format = "nvfp4",
    *,
    layout: Layout = "compressed-tensors",
    device: str = "auto",
    resume: bool = False,
    force: bool = False,
    dry_run: bool = False,
    workers: Workers = None,
    progress: Progress | None = None,
    **choices: Unpack[CheckpointChoices],
) -> CheckpointReport:
    """Quantizes a checkpoint into one that engines load: `fp4kit quantize DIR`.

    Args:
        source: model directory or diffusers pipeline; for layout `comfy` also a .safetensors file;
            or the URL of a model directory (`s3://`, `gs://`, `hf://`, `https://`).
        target: directory to create (or file, for one), or URL; None for the source's name with the
            format added.
        scheme: as for :func:`quantize_file`; how scales and nibbles lie is the layout's.
        layout: for which engines: `compressed-tensors` (vLLM, SGLang, transformers), `modelopt`
            (TensorRT-LLM, vLLM, SGLang), `comfy` (ComfyUI), `deepseek` (FP8 in blocks: vLLM,
            SGLang, transformers) or `mlx` (mlx-lm).
        device: as for :func:`quantize_file`; `cuda` is every GPU of the machine.
        resume: finish what an interrupted run of the same call began.
        force: start an unfinished conversion over; replace a finished result of fp4kit, or a file.
        dry_run: plan from headers and JSON alone; nothing is written.
        workers: who shares the work: any executor of concurrent.futures, the address of a dask
            scheduler, `local:N`, or a part like `2/8` (:func:`fp4kit.finish_checkpoint` ends it);
            None for this process.
        progress: called with (bytes done, bytes in all) of the source.
        **choices: `recipe`, `scale_rule`, `granularity`, `scale_search`, `search_error`,
            `e4m3_max`, `include`, `exclude`, `cast`, `unscaled_fp8`, `allow_nothing`: as for
            :func:`quantize_file`. `activations`: None for weights only, `uncalibrated`, a JSON file
            with the amax of each module's input, or one that :func:`fp4kit.calibrate` wrote; for
            fp8 also `dynamic`. `moments`: of the layers' inputs, as for :func:`fp4kit.survey`: they
            weigh the errors that `sweep` compares. `experts_layout`: how fused experts are stored
            where that is not clear. `max_shard_size`: like 5GB. `follow_links`: copy what links
            out of the source point to. `lossless`: refuse to change a value, so that only codes
            that are taken over are written; some are read for that. `plan`: the format of each
            group of tensors, from :func:`fp4kit.survey` or as the path of a file; it takes the
            place of `scheme`.

    Returns:
        An entry per tensor with error statistics, and the files around them.

    Raises:
        OptionError: for unknown options, or a target that is not empty or is the source.
        FileFormatError: if the checkpoint is malformed or quantized already.
        NonFiniteError: if a weight holds NaN or infinity.
        BackendUnavailableError: if the device cannot be used.
        OutputError: if the target cannot be written.

    Examples:
        >>> import tempfile, numpy as np, fp4kit
        >>> folder = tempfile.mkdtemp()
        >>> w = np.random.default_rng(0).standard_normal((64, 64), np.float32)
        >>> model = {"model.layers.0.mlp.down_proj.weight": w}
        >>> _ = fp4kit.save(f"{folder}/model", model, config={"model_type": "llama"})
        >>> report = fp4kit.quantize_checkpoint(f"{folder}/model", f"{folder}/model-nvfp4")
        >>> report.shards.keys(), report.ignore
        (dict_keys(['model.safetensors']), ['lm_head'])
    """
    check_arguments(locals(), ("target",))
    given = known_with_scheme(choices, CheckpointChoices, scheme)
    shared = is_shared(source, target, workers)
    path = Path(source) if shared else checked(source)
    plan = given.pop("plan", None)
    size = shard_size(given.pop("max_shard_size", None))
    for name in ("activations", "moments"):
        if given.get(name) is not None:
            given[name] = os.fspath(given[name])
    if given.get("moments") is not None:
        if device not in ("auto", "cpu"):
            raise OptionError(f"device={device!r}: moments are for the CPU; leave device out")
        device = "cpu"
    options = CheckpointOptions(
        **{"allow_nothing": False, **given},
        layout=layout,
        max_shard_size=size,
    )
    if plan is not None:
        if options.scheme != Scheme():
            raise OptionError(_ONE_OR_PLAN)
        with opened(os.fspath(source)) as folder:
            options = with_changes(options, choices=choices_of(folder, options, plan))
    if shared:
        options = _with_absolute_files(options)
        return run_shared(
            job_of("quantize", source, target, options, device), workers,
            resume=resume, force=force, dry_run=dry_run, progress=progress,
        )  # fmt: skip
    if dry_run:
        return checkpoints.plan_quantize_checkpoint(path, options)
    name = MIXED if plan is not None else given["format"]
    return checkpoints.quantize_checkpoint(
        path,
        default_target(path, name) if target is None else Path(target),
        options,
        devices=resolve_devices(device),
        resume=resume,
        force=force,
        progress=progress,
    )


def _with_absolute_files(options: CheckpointOptions) -> CheckpointOptions:
    """Options whose files are found by workers, wherever they were started."""
    if options.files:
        options = with_changes(options, activations=str(options.files[0].absolute()))
    if options.binary_files:
        options = with_changes(options, moments=str(options.binary_files[0].absolute()))
    return options
