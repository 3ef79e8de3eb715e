# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What the command line does with files and checkpoints, as functions; it calls these."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from fp4kit.checkpoint import operations as checkpoints
from fp4kit.checkpoint.compare import is_checkpoint
from fp4kit.checkpoint.options import (
    DEFAULT_SHARD_SIZE,
    CheckpointOptions,
    ConvertOptions,
    DequantizeOptions,
    parse_size,
)
from fp4kit.checkpoint.report import CheckpointReport
from fp4kit.checkpoint.verify.paths import path_faults, path_value_faults, reader_notes
from fp4kit.checkpoint.views.search import decoded_file
from fp4kit.errors import OptionError
from fp4kit.io import dequantize as dequantizing
from fp4kit.io import quantize as quantizing
from fp4kit.io.read.open import check_source
from fp4kit.io.report import FileReport, QuantizeOptions
from fp4kit.io.stream.chunks import Progress
from fp4kit.io.tensor_names import Patterns

from .devices import resolve_device, resolve_devices

if TYPE_CHECKING:
    from typing_extensions import Unpack

StrPath = str | os.PathLike[str]
Format = Literal["nvfp4", "mxfp4", "mxfp8", "mxfp8_e5m2"]
FloatType = Literal["float32", "float16", "bfloat16"]
Layout = Literal["compressed-tensors", "modelopt", "comfy"]
ExpertsLayout = Literal["out_in", "in_out", "interleaved"]


class Choices(TypedDict, total=False):
    """What decides the bytes, and which tensors are quantized; see :func:`quantize_file`."""

    recipe: str
    scale_rule: str | None
    scale_search: str | None
    error: str | None
    e4m3_max: int
    include: Sequence[str]
    exclude: Sequence[str]
    cast: Literal["float32"] | None
    unscaled_fp8: bool
    allow_nothing: bool


class FileChoices(Choices, total=False):
    """The choices of :func:`quantize_file`."""

    scale_layout: str
    nibble_order: str
    pad: bool
    void_dtype: Literal["bfloat16"] | None


class CheckpointChoices(Choices, total=False):
    """The choices of :func:`quantize_checkpoint`."""

    activations: str | os.PathLike[str] | None
    experts_layout: ExpertsLayout | None
    max_shard_size: str | None
    follow_links: bool


class RestoreChoices(TypedDict, total=False):
    """The choices of :func:`dequantize_checkpoint`."""

    experts_layout: ExpertsLayout | Literal["single"] | None
    unscaled_fp8: bool
    max_shard_size: str | None
    follow_links: bool


def _checked(path: StrPath) -> Path:
    """A source, refused if it cannot be one at all."""
    source = Path(path)
    check_source(source)
    return source


def _known(choices: Any, kind: Any) -> dict[str, Any]:
    """Choices by name, lists as tuples.

    Raises:
        OptionError: for a name that is none of them.
    """
    names: set[str] = set(kind.__optional_keys__)
    for name in choices:
        if name not in names:
            raise OptionError(f"{name!r} is no option of this; choose {', '.join(sorted(names))}")
    return {
        name: tuple(value) if name in ("include", "exclude") else value
        for name, value in choices.items()
    }


def _size(text: str | None) -> int:
    return parse_size(text or DEFAULT_SHARD_SIZE)


def default_target(source: Path, format: str) -> Path:
    """Where the result of a quantization goes: beside the source, the format added to its name."""
    if not source.is_dir():
        return source.with_name(f"{source.stem}-{format}.safetensors")
    real = source.resolve()  # `.` has a name, too
    return real.with_name(f"{real.name}-{format}")


def quantize_file(
    source: StrPath,
    target: StrPath | None = None,
    format: Format = "nvfp4",
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
    bounded whatever the size of the file.

    Args:
        source: .safetensors, .npy or .npz file.
        target: .safetensors file to write, atomically; None for the source's name with the format
            added.
        format: block format.
        device: `auto` (cuda where it can run), `cpu`, `cuda` or `cuda:N`; the bytes are the same.
        force: replace an older target.
        dry_run: plan from the headers alone; nothing is computed or written.
        progress: called with (bytes done, bytes in all) of the source.
        **choices: `recipe`, `scale_rule`, `scale_layout`, `nibble_order`, `pad`, `scale_search`,
            `error`, `e4m3_max`: as :func:`fp4kit.quantize`. `include`, `exclude`: name patterns,
            globs or `re:` and a regular expression. `cast="float32"`: take float64 as that.
            `void_dtype="bfloat16"`: what 2-byte void data of NumPy's files is. `unscaled_fp8`: FP8
            without a scale was only cast. `allow_nothing`: no error if nothing is quantized.

    Returns:
        An entry per tensor with error statistics; the numbers of `--json`.

    Raises:
        OptionError: for unknown options, a target that exists or is the source, or if nothing
            would be quantized.
        FileFormatError: if the source is malformed or quantized already.
        NonFiniteError: if a tensor holds NaN or infinity.
        BackendUnavailableError: if the device cannot be used.
        OutputError: if the target cannot be written.

    Example:
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
    given = _known(choices, FileChoices)
    path = _checked(source)
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
    options = QuantizeOptions(format=format, device=used, force=force, **given)
    if dry_run:
        return quantizing.plan_quantize_file(path, options, decode)
    out = default_target(path, format) if target is None else Path(target)
    return quantizing.quantize_file(path, out, options, progress, decode)


def quantize_checkpoint(
    source: StrPath,
    target: StrPath | None = None,
    format: Format = "nvfp4",
    *,
    layout: Layout = "compressed-tensors",
    device: str = "auto",
    resume: bool = False,
    force: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    **choices: Unpack[CheckpointChoices],
) -> CheckpointReport:
    """Quantizes a checkpoint into one that engines load: `fp4kit quantize DIR`.

    Args:
        source: model directory or diffusers pipeline; for layout `comfy` also a .safetensors file.
        target: directory to create (or file, for one); None for the source's name with the format
            added.
        format: block format.
        layout: for which engines: `compressed-tensors` (vLLM, SGLang, transformers), `modelopt`
            (TensorRT-LLM, vLLM, SGLang) or `comfy` (ComfyUI).
        device: as for :func:`quantize_file`; `cuda` is every GPU of the machine.
        resume: finish what an interrupted run of the same call began.
        force: start an unfinished conversion over; replace a finished result of fp4kit, or a file.
        dry_run: plan from headers and JSON alone; nothing is written.
        progress: called with (bytes done, bytes in all) of the source.
        **choices: `recipe`, `scale_rule`, `scale_search`, `error`, `e4m3_max`, `include`,
            `exclude`, `cast`, `unscaled_fp8`, `allow_nothing`: as for :func:`quantize_file`.
            `activations`: None for weights only, `uncalibrated`, or a JSON file with the amax of
            each module's input. `experts_layout`: how fused experts are stored where that is not
            clear. `max_shard_size`: like 5GB. `follow_links`: copy what links out of the source
            point to.

    Returns:
        An entry per tensor with error statistics, and the files around them.

    Raises:
        OptionError: for unknown options, or a target that is not empty or is the source.
        FileFormatError: if the checkpoint is malformed or quantized already.
        NonFiniteError: if a weight holds NaN or infinity.
        BackendUnavailableError: if the device cannot be used.
        OutputError: if the target cannot be written.

    Example:
        >>> import tempfile, numpy as np, fp4kit
        >>> folder = tempfile.mkdtemp()
        >>> w = np.random.default_rng(0).standard_normal((64, 64), np.float32)
        >>> model = {"model.layers.0.mlp.down_proj.weight": w}
        >>> _ = fp4kit.save(f"{folder}/model", model, config={"model_type": "llama"})
        >>> report = fp4kit.quantize_checkpoint(f"{folder}/model", f"{folder}/model-nvfp4")
        >>> report.shards.keys(), report.ignore
        (dict_keys(['model.safetensors']), ['lm_head'])
    """
    given = _known(choices, CheckpointChoices)
    path = _checked(source)
    size = _size(given.pop("max_shard_size", None))
    if given.get("activations") is not None:
        given["activations"] = os.fspath(given["activations"])
    options = CheckpointOptions(
        **{"allow_nothing": False, **given},
        format=format,
        layout=layout,
        max_shard_size=size,
    )
    if dry_run:
        return checkpoints.plan_quantize_checkpoint(path, options)
    return checkpoints.quantize_checkpoint(
        path,
        default_target(path, format) if target is None else Path(target),
        options,
        devices=resolve_devices(device),
        resume=resume,
        force=force,
        progress=progress,
    )


def dequantize_file(
    source: StrPath,
    target: StrPath,
    dtype: FloatType | None = None,
    *,
    device: str = "auto",
    force: bool = False,
    progress: Progress | None = None,
) -> FileReport:
    """Turns a quantized file back into plain numbers: `fp4kit dequantize`.

    Args:
        source: a file of fp4kit's own, or in the layout of an engine, or with FP8 weights.
        target: file to write, atomically: .safetensors, .npz, or .npy for a single tensor; for a
            source in a layout .safetensors.
        dtype: element type of what was quantized; None for float32, or bfloat16 of a layout.
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

    Example:
        >>> import tempfile, numpy as np, fp4kit
        >>> folder = tempfile.mkdtemp()
        >>> q = fp4kit.quantize(np.eye(32, dtype=np.float32))
        >>> _ = fp4kit.save(f"{folder}/q.safetensors", {"w": q})
        >>> report = fp4kit.dequantize_file(f"{folder}/q.safetensors", f"{folder}/w.npy")
        >>> float(np.load(f"{folder}/w.npy").sum())
        32.0
    """
    path = _checked(source)
    if path.is_dir():
        raise OptionError(f"{path}: is a directory; use dequantize_checkpoint")
    if is_checkpoint(path):
        return dequantize_checkpoint(
            path, target, dtype or "bfloat16", device=device, force=force, progress=progress
        )
    return dequantizing.dequantize_file(
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
    dtype: FloatType = "bfloat16",
    *,
    device: str = "auto",
    resume: bool = False,
    force: bool = False,
    progress: Progress | None = None,
    **choices: Unpack[RestoreChoices],
) -> CheckpointReport:
    """Turns a quantized checkpoint of any tool into plain numbers: `fp4kit dequantize DIR`.

    Args:
        source: model directory, pipeline or .safetensors file in a known layout, or with FP8
            weights.
        target: directory to create (or file, for one).
        dtype: element type of the weights that were quantized.
        device: as for :func:`quantize_checkpoint`, like `resume`, `force` and `progress`.
        resume: finish what an interrupted run of the same call began.
        force: start over, or replace a finished result of fp4kit.
        progress: called with (bytes done, bytes in all).
        **choices: `experts_layout`: how single experts are put together, `single` for not at all.
            `unscaled_fp8`, `max_shard_size`, `follow_links`: as for :func:`quantize_checkpoint`.

    Raises:
        OptionError: for unknown options, or a target that is not empty or is the source.
        FileFormatError: if nothing is quantized, or in a way that is not known.
        BackendUnavailableError: if the device cannot be used.
        OutputError: if the target cannot be written.

    Example:
        >>> import tempfile, numpy as np, fp4kit
        >>> folder = tempfile.mkdtemp()
        >>> model = {"lm_head.weight": fp4kit.quantize(np.ones((32, 32), np.float32))}
        >>> _ = fp4kit.save(f"{folder}/q", model, config={"model_type": "llama"})
        >>> report = fp4kit.dequantize_checkpoint(f"{folder}/q", f"{folder}/back")
        >>> fp4kit.open(f"{folder}/back")["lm_head.weight"].dtype
        dtype(bfloat16)
    """
    given = _known(choices, RestoreChoices)
    path = _checked(source)
    options = DequantizeOptions(dtype, _size(given.pop("max_shard_size", None)), **given)
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
    layout: Layout,
    *,
    max_shard_size: str | None = None,
    follow_links: bool = False,
    resume: bool = False,
    force: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> CheckpointReport:
    """Stores a quantized checkpoint in another layout, codes verbatim: `fp4kit convert`.

    Args:
        source: model directory, pipeline or .safetensors file in a known layout.
        target: directory to create (or file, for one).
        layout: that of the result.
        max_shard_size: largest size of a weight file, like 5GB (the default) or 512MiB.
        follow_links: copy also what links out of the source point to.
        resume: finish what an interrupted run of the same call began.
        force: as for :func:`quantize_checkpoint`.
        dry_run: plan from headers and JSON alone; nothing is written.
        progress: called with (bytes done, bytes in all).

    Raises:
        OptionError: for an unknown layout, the one that it has, or one that lacks its format.
        FileFormatError: if nothing is quantized, or in a way that is not known.
        OutputError: if the target cannot be written.

    Example:
        >>> import tempfile, numpy as np, fp4kit
        >>> folder = tempfile.mkdtemp()
        >>> model = {"lm_head.weight": fp4kit.quantize(np.ones((32, 32), np.float32))}
        >>> _ = fp4kit.save(f"{folder}/ct", model, config={"model_type": "llama"})
        >>> _ = fp4kit.convert_checkpoint(f"{folder}/ct", f"{folder}/mo", "modelopt")
        >>> fp4kit.open(f"{folder}/mo").layout
        'modelopt'
    """
    path = _checked(source)
    options = ConvertOptions(layout, _size(max_shard_size), follow_links=follow_links)
    if dry_run:
        return checkpoints.plan_convert_checkpoint(path, options)
    return checkpoints.convert_checkpoint(
        path, Path(target), options, resume=resume, force=force, progress=progress
    )


@dataclass(frozen=True)
class VerifyReport:
    """What was found in a quantized file or checkpoint.

    Attributes:
        source: path that was looked at.
        faults: one line each; empty if there is none.
        notes: readers that are known to fail on it although it has no fault.
    """

    source: str
    faults: list[str]
    notes: list[str]

    @property
    def ok(self) -> bool:
        """Whether there is no fault."""
        return not self.faults


def verify(
    path: StrPath,
    against: StrPath | None = None,
    *,
    experts_layout: ExpertsLayout | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> VerifyReport:
    """Looks for faults in a quantized checkpoint or file of any tool: `fp4kit verify`.

    Checks every tensor that an engine expects, element types and shapes, the ignore list,
    second-level scales that fused weights must share, NaN scales, index, sizes and metadata.

    Args:
        path: file or model directory.
        against: what it was made from: also compare the values.
        experts_layout: how fused experts of `against` are stored, where that is not clear.
        device: where values are compared; as for :func:`quantize_file`.
        progress: called with (bytes done, bytes in all) while values are compared.

    Raises:
        FileFormatError: if there is nothing of that name.
        OptionError: if it is a file of another kind.
        BackendUnavailableError: if the device cannot be used.

    Example:
        >>> import tempfile, numpy as np, fp4kit
        >>> file = tempfile.mkdtemp() + "/q.safetensors"
        >>> _ = fp4kit.save(file, {"w": fp4kit.quantize(np.eye(32, dtype=np.float32))})
        >>> fp4kit.verify(file).ok
        True
    """
    source = _checked(path)
    original = None if against is None else _checked(against)
    used = "cpu" if original is None else resolve_device(device)
    faults = path_faults(source)
    if original is not None and not faults:
        faults = path_value_faults(
            source, original, experts_layout=experts_layout, device=used, progress=progress
        )
    return VerifyReport(str(source), faults, reader_notes(source))
