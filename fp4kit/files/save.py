# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""`fp4kit.save`: arrays and quantized tensors into a file, or a checkpoint that engines load."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp4kit.checkpoint.layouts import get_layout
from fp4kit.checkpoint.plan.checkpoint_plan import OLD_METADATA, WRITTEN_KEY
from fp4kit.checkpoint.read.json_files import read_settings
from fp4kit.checkpoint.read.weight_files import CONFIG
from fp4kit.checkpoint.write.output import carry_out
from fp4kit.errors import OptionError
from fp4kit.io.containers import GGUF, SUFFIXES
from fp4kit.io.metadata import METADATA_KEY, describe
from fp4kit.io.read.open import FOREIGN
from fp4kit.io.report import FileReport, TensorReport
from fp4kit.io.stream.chunks import byte_ranges
from fp4kit.io.write.files import check_output
from fp4kit.io.write.open import open_writer

from .choices import Layout, check_arguments, shard_size
from .given import GivenTensors, SaveOptions
from .layout_plan import plan_layout

#: Where quantized tensors go in a directory unless a layout is named.
DIRECTORY_LAYOUT: Layout = "compressed-tensors"


def save(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Any],
    *,
    layout: Layout | None = None,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    metadata: Mapping[str, str] | None = None,
    max_shard_size: str | None = None,
    force: bool = False,
) -> FileReport:
    """Writes arrays and quantized tensors to a file, or to a directory that engines load.

    What the name ends in decides: .safetensors, .npz and .npy (one array) are files, everything
    else is a directory: model.safetensors, or shards with an index, and config.json. Codes and
    block scales are written verbatim: nothing is quantized or rounded here. :func:`fp4kit.open`
    gives back what was saved; the layouts of engines keep the second-level scale in their own
    direction, their own order of block scales and nibbles, and not what it was quantized from.

    Nothing exists under the name, and nothing there is replaced, before all is written. Tensors are
    fetched one at a time, so that an open :class:`TensorFile` of any size can be saved under
    another name.

    Args:
        path: what to write.
        tensors: names to arrays of any framework (a state_dict, for example; device arrays are
            copied to the host), or to :class:`fp4kit.QuantizedTensor`.
        layout: how quantized tensors are stored. None: in a .safetensors file as fp4kit's own, in
            a directory as `compressed-tensors`. `modelopt`, `deepseek` (FP8 blocks) and `mlx`
            (nvfp4 without a second level) are for directories, `comfy` for both.
        config: for directories: content of config.json, or its path, or that of a directory that
            holds one. Engines need it; the quantization is added to it.
        metadata: strings for the header of .safetensors files. What describes a quantization is
            written anew.
        max_shard_size: for directories: largest size of a weight file, like 5GB or 512MiB.
        force: replace a file, or what fp4kit wrote in a directory; other files there stay.

    Returns:
        The tensors with their sizes, and in `warnings` what a user should know.

    Raises:
        OptionError: for an unknown layout, one that cannot hold a tensor (with the reason), or a
            target that exists.
        DtypeError: for what is no array, or an element type that the file cannot hold.
        FileFormatError: for names that clash.
        OutputError: if the target cannot be written.

    Examples:
        >>> import tempfile, numpy as np, fp4kit
        >>> w = fp4kit.quantize(np.random.default_rng(0).standard_normal((32, 64), np.float32))
        >>> folder = tempfile.mkdtemp() + "/model"
        >>> report = fp4kit.save(
        ...     folder,
        ...     {"lm_head.weight": w, "model.norm.weight": np.ones(64, np.float32)},
        ...     config={"model_type": "llama", "dtype": "bfloat16"},
        ... )
        >>> fp4kit.verify(folder).faults
        []
    """
    check_arguments(locals())
    target = Path(path)
    checked = _metadata(metadata)
    if layout is not None:
        get_layout(layout)
    suffix = target.suffix.lower()
    if suffix in FOREIGN:
        raise OptionError(
            f"{target}: is a file of another tool by its name; give one that ends in "
            f"{', '.join(SUFFIXES)}, or a directory"
        )
    if suffix == GGUF:
        raise OptionError(
            f"{target}: a model in GGUF has metadata (architecture, sizes, tokenizer) that arrays "
            "have not; save a directory and give it to convert_checkpoint with layout='gguf' and "
            "template=, a .gguf of the same model, or give that .gguf to quantize_file"
        )
    in_file = suffix in SUFFIXES and not target.is_dir()
    if in_file and config is not None:
        raise OptionError(f"{target}: config is for directories, this is a file")
    if in_file and suffix != ".safetensors" and (layout is not None or checked):
        what = "layout" if layout is not None else "metadata"
        raise OptionError(f"{target}: NumPy's files have no place for {what}; write .safetensors")
    given = GivenTensors(
        target, tensors, is_directory=not in_file, exact=in_file and layout is None
    )
    given.metadata = checked
    if in_file and layout is None:
        return _save_file(given, force=force)
    given.settings(_config(target, config))
    options = SaveOptions(layout or DIRECTORY_LAYOUT, shard_size(max_shard_size))
    return carry_out(plan_layout(given, options), target, force=force)


def _metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    """The header metadata without what is written anew."""
    given = dict(metadata or {})
    for key, value in given.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise OptionError(f"metadata {key!r}: {value!r}: header metadata are strings")
    return {key: text for key, text in given.items() if key not in (*OLD_METADATA, WRITTEN_KEY)}


def _config(
    target: Path, config: Mapping[str, Any] | str | os.PathLike[str] | None
) -> dict[str, Any] | None:
    """The content of config.json, None without one."""
    if config is None or isinstance(config, Mapping):
        return None if config is None else dict(config)
    try:
        place = Path(config)
    except TypeError:
        kind = type(config).__name__
        raise OptionError(
            f"{target}: config is a {kind}; give a dict (config.to_dict()) or a path"
        ) from None
    file = place / CONFIG if place.is_dir() else place
    content = read_settings(file)
    if content is None:
        raise OptionError(f"{file}: no such file; config is the content or path of a config.json")
    return content


def _save_file(given: GivenTensors, *, force: bool) -> FileReport:
    """One file: of fp4kit's own if something is quantized."""
    started = time.perf_counter()
    target, entries = given.path, given.entries
    specs = [tensor.spec for tensor in given.tensors.values()]
    metadata = given.metadata
    if target.suffix.lower() != ".safetensors" and entries:
        raise OptionError(
            f"{target}: {next(iter(entries))!r} is quantized, and NumPy's files hold arrays only; "
            "write .safetensors, or dequantize it"
        )
    if entries or metadata:
        metadata = {"format": "pt", **metadata}
    if entries:
        metadata[METADATA_KEY] = describe(entries.values())
    nbytes = sum(spec.nbytes for spec in specs)
    output = check_output(given.file, target, force=force, nbytes=nbytes)
    with open_writer(output, specs, metadata) as writer:
        for tensor in given.tensors.values():
            data = given.data(tensor.name)
            for first, last in byte_ranges(tensor):
                writer.write(tensor.name, first, data[first:last])
        writer.finish()
    return FileReport(
        source="",
        target=str(target),
        tensors=[_report(given, name) for name in given.names],
        options={},
        seconds=time.perf_counter() - started,
    )


def _report(given: GivenTensors, name: str) -> TensorReport:
    entry = given.entries.get(name)
    if entry is None:
        return TensorReport.of(given.tensors[name], "keep")
    return TensorReport.of(entry, "transfer", facts=entry.facts())
