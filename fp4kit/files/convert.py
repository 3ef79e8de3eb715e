# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""From quantized files and checkpoints: what `fp4kit dequantize` and `convert` call."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp4kit.arrays.dtypes import dtype_name
from fp4kit.checkpoint import operations as checkpoints
from fp4kit.checkpoint.compare import is_checkpoint
from fp4kit.checkpoint.options import ConvertOptions, DequantizeOptions
from fp4kit.checkpoint.report import CheckpointReport
from fp4kit.checkpoint.write.gguf import convert_to_gguf
from fp4kit.errors import OptionError
from fp4kit.fleet.workers import Workers
from fp4kit.io import dequantize as files
from fp4kit.io.containers import GGUF
from fp4kit.io.report import FileReport
from fp4kit.io.stream.chunks import Progress

from .choices import (
    GGUF_LAYOUT,
    ConvertChoices,
    ConvertedLayout,
    RestoreChoices,
    StrPath,
    check_arguments,
    checked,
    known,
    shard_size,
)
from .devices import resolve_device, resolve_devices
from .shared import is_shared, job_of, run_shared

if TYPE_CHECKING:
    from typing_extensions import Unpack


def dequantize_file(
    source: StrPath,
    target: StrPath,
    dtype: Any = None,
    *,
    device: str = "auto",
    force: bool = False,
    progress: Progress | None = None,
) -> FileReport:
    """Turns a quantized file back into plain numbers: `fp4kit dequantize`.

    Args:
        source: a file of fp4kit's own, or in the layout of an engine, or with FP8 weights, or a
            .gguf model.
        target: file to write, atomically: .safetensors, .npz, or .npy for a single tensor; for a
            source in a layout .safetensors; .gguf for a .gguf, of which all else is kept.
        dtype: element type of what was quantized, by name or as a dtype of any framework; None for
            float32, or bfloat16 of a layout.
        device: as for :func:`quantize_file`.
        force: replace an older target.
        progress: called with (bytes done, bytes in all) of the source.

    Returns:
        An entry per logical tensor.

    Raises:
        OptionError: for unknown options, or a target that exists or is the source.
        FileFormatError: if the source is malformed or holds nothing quantized.
        BackendUnavailableError: if the device cannot be used.
        OutputError: if the target cannot be written.

    Examples:
        >>> import tempfile, numpy as np, fp4kit
        >>> folder = tempfile.mkdtemp()
        >>> q = fp4kit.quantize(np.eye(32, dtype=np.float32))
        >>> _ = fp4kit.save(f"{folder}/q.safetensors", {"w": q})
        >>> report = fp4kit.dequantize_file(f"{folder}/q.safetensors", f"{folder}/w.npy")
        >>> float(np.load(f"{folder}/w.npy").sum())
        32.0
    """
    check_arguments(locals())
    dtype = None if dtype is None else dtype_name(dtype)
    path = checked(source)
    if path.is_dir():
        raise OptionError(f"{path}: is a directory; use dequantize_checkpoint")
    if is_checkpoint(path):
        return dequantize_checkpoint(
            path, target, dtype or "bfloat16", device=device, force=force, progress=progress
        )
    return files.dequantize_file(
        path,
        Path(target),
        dtype or "float32",
        device=resolve_device(device),
        force=force,
        progress=progress,
    )


def dequantize_checkpoint(
    source: StrPath,
    target: StrPath,
    dtype: Any = "bfloat16",
    *,
    device: str = "auto",
    resume: bool = False,
    force: bool = False,
    workers: Workers = None,
    progress: Progress | None = None,
    **choices: Unpack[RestoreChoices],
) -> CheckpointReport:
    """Turns a quantized checkpoint of any tool into plain numbers: `fp4kit dequantize DIR`.

    Args:
        source: model directory, pipeline or .safetensors file in a known layout, or with FP8
            weights.
        target: directory to create (or file, for one).
        dtype: element type of the weights that were quantized, by name or as a dtype object.
        device: as for :func:`quantize_checkpoint`, like `resume`, `force` and `progress`.
        resume: finish what an interrupted run of the same call began.
        force: start over, or replace a finished result of fp4kit.
        workers: as for :func:`quantize_checkpoint`, and so may `source` and `target` be URLs.
        progress: called with (bytes done, bytes in all).
        **choices: `experts_layout`: how single experts are put together, `single` for not at all.
            `unscaled_fp8`, `max_shard_size`, `follow_links`: as for :func:`quantize_checkpoint`.

    Raises:
        OptionError: for unknown options, or a target that is not empty or is the source.
        FileFormatError: if nothing is quantized, or in a way that is not known.
        BackendUnavailableError: if the device cannot be used.
        OutputError: if the target cannot be written.

    Examples:
        >>> import tempfile, numpy as np, fp4kit
        >>> folder = tempfile.mkdtemp()
        >>> model = {"lm_head.weight": fp4kit.quantize(np.ones((32, 32), np.float32))}
        >>> _ = fp4kit.save(f"{folder}/q", model, config={"model_type": "llama"})
        >>> report = fp4kit.dequantize_checkpoint(f"{folder}/q", f"{folder}/back")
        >>> fp4kit.open(f"{folder}/back")["lm_head.weight"].dtype
        dtype(bfloat16)
    """
    check_arguments(locals())
    given = known(choices, RestoreChoices)
    options = DequantizeOptions(
        dtype_name(dtype), shard_size(given.pop("max_shard_size", None)), **given
    )
    if is_shared(source, target, workers):
        return run_shared(
            job_of("dequantize", source, target, options, device), workers,
            resume=resume, force=force, dry_run=False, progress=progress,
        )  # fmt: skip
    path = checked(source)
    return checkpoints.dequantize_checkpoint(
        path,
        Path(target),
        options,
        devices=resolve_devices(device),
        resume=resume,
        force=force,
        progress=progress,
    )


def convert_checkpoint(
    source: StrPath,
    target: StrPath,
    layout: ConvertedLayout,
    *,
    template: StrPath | None = None,
    resume: bool = False,
    force: bool = False,
    dry_run: bool = False,
    workers: Workers = None,
    progress: Progress | None = None,
    **choices: Unpack[ConvertChoices],
) -> FileReport:
    """Stores a quantized checkpoint in another layout, codes verbatim: `fp4kit convert`.

    Args:
        source: model directory, pipeline or .safetensors file in a known layout.
        target: directory to create (or file, for one).
        layout: that of the result, or `gguf` for a .gguf file that llama.cpp runs.
        template: for `gguf`: the same model as a .gguf in F32, F16, BF16 or Q8_0, which has the
            names, the metadata and all that is not quantized.
        resume: finish what an interrupted run of the same call began.
        force: as for :func:`quantize_checkpoint`.
        dry_run: plan from headers and JSON alone; nothing is written.
        workers: as for :func:`quantize_checkpoint`, and so may `source` and `target` be URLs.
        progress: called with (bytes done, bytes in all).
        **choices: `max_shard_size`: largest size of a weight file, like 5GB (the default) or
            512MiB. `follow_links`: copy also what links out of the source point to. `lossless`:
            refuse to quantize anything again.

    Raises:
        OptionError: for an unknown layout, the one that it has, or one that lacks its format.
        FileFormatError: if nothing is quantized, or in a way that is not known; or if the template
            is another model.
        OutputError: if the target cannot be written.

    Examples:
        >>> import tempfile, numpy as np, fp4kit
        >>> folder = tempfile.mkdtemp()
        >>> model = {"lm_head.weight": fp4kit.quantize(np.ones((32, 32), np.float32))}
        >>> _ = fp4kit.save(f"{folder}/ct", model, config={"model_type": "llama"})
        >>> _ = fp4kit.convert_checkpoint(f"{folder}/ct", f"{folder}/mo", "modelopt")
        >>> fp4kit.open(f"{folder}/mo").layout
        'modelopt'
    """
    check_arguments(locals())
    given = known(choices, ConvertChoices)
    shared = is_shared(source, target, workers)
    path = Path(source) if shared else checked(source)
    if isinstance(layout, str) and layout == GGUF_LAYOUT:
        if shared:
            raise OptionError("layout gguf is one file: it takes neither workers nor URLs")
        return _into_gguf(
            path, target, template, given,
            resume=resume, force=force, dry_run=dry_run, progress=progress,
        )  # fmt: skip
    if template is not None:
        raise OptionError(f"template is for layout gguf, not {layout!r}; leave it out")
    size = shard_size(given.pop("max_shard_size", None))
    options = ConvertOptions(layout, size, **given)
    if shared:
        return run_shared(
            job_of("convert", source, target, options), workers,
            resume=resume, force=force, dry_run=dry_run, progress=progress,
        )  # fmt: skip
    if dry_run:
        return checkpoints.plan_convert_checkpoint(path, options)
    return checkpoints.convert_checkpoint(
        path, Path(target), options, resume=resume, force=force, progress=progress
    )


def _into_gguf(
    source: Path,
    target: StrPath,
    template: StrPath | None,
    given: dict[str, Any],
    *,
    resume: bool,
    **run: Any,
) -> FileReport:
    """A checkpoint as a .gguf file, made from one of the same model."""
    if template is None:
        raise OptionError(
            "layout gguf needs a template: a .gguf of the same model that is not in FP4, as "
            "llama.cpp's convert_hf_to_gguf.py makes it"
        )
    if resume or given.get("lossless") or given.get("max_shard_size") is not None:
        raise OptionError(
            "resume, lossless and max_shard_size are not for layout gguf; leave them out"
        )
    model = checked(template)
    if model.suffix.lower() != GGUF:
        raise OptionError(f"{model}: a template is a .gguf file")
    links = given.get("follow_links", False)
    return convert_to_gguf(source, Path(target), model, follow_links=links, **run)
