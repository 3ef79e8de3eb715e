# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Carrying a plan out: a directory of finished files, whatever happens in between."""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp4kit.checkpoint.layouts import mlx
from fp4kit.checkpoint.models.mistral import new_params
from fp4kit.checkpoint.options import ConvertOptions
from fp4kit.checkpoint.plan.checkpoint_plan import WRITTEN_KEY, CheckpointPlan
from fp4kit.checkpoint.read.directory import CONFIG, HF_QUANT_CONFIG, PARAMS, Checkpoint
from fp4kit.checkpoint.read.other_files import REPLACEMENT
from fp4kit.checkpoint.read.weight_files import INDEX_NAME
from fp4kit.checkpoint.report import CheckpointReport, make_report
from fp4kit.checkpoint.verify.structure import structure_faults
from fp4kit.errors import FileFormatError, OptionError
from fp4kit.formats import DTYPES
from fp4kit.io.read.files import InputFile
from fp4kit.io.read.safetensors import read_header
from fp4kit.io.stream.chunks import Progress, Tally
from fp4kit.io.write.files import (
    AtomicFile,
    Output,
    OutputError,
    check_output,
    output_suffix,
    permissions_of,
)

from .shards import make_backend, write_shard, write_shards
from .state import State, fingerprint, write_json

#: Keys of config.json that describe an older quantization.
OLD_KEYS = ("quantization_config", "compression_config", "expert_dtype")
COPY_BYTES = 16 << 20


def earlier_result(target: Path, planned: Sequence[str]) -> list[str]:
    """Files of a finished result of fp4kit's that a new one takes the place of.

    Returns:
        Its weight files, their index, and what else both write; relative to the directory.
    """
    weights = sorted(path.name for path in target.glob("*.safetensors"))
    for name in weights:
        if not _is_ours(target / name):
            raise OptionError(
                f"{target}: holds {name!r}, which fp4kit did not write, so that --force does not "
                "replace it; choose another directory, or remove this one first"
            )
    if not weights:
        raise OptionError(
            f"{target}: is not empty and holds no result of fp4kit that --force could replace; "
            "choose another directory"
        )
    indexes = [path.name for path in target.iterdir() if INDEX_NAME.fullmatch(path.name)]
    both = [name for name in planned if os.path.lexists(target / name)]
    return list(dict.fromkeys([*weights, *indexes, *both]))


def _is_ours(path: Path) -> bool:
    """Whether a weight file says in its header that fp4kit wrote it."""
    if path.is_symlink():
        return False
    try:
        with InputFile(path) as file:
            return WRITTEN_KEY in read_header(file).metadata
    except FileFormatError:
        return False


def check_place(source: Path | None, target: Path) -> None:
    """Refuses an output directory by where it is, and where the source is if it is on a disk."""
    wanted = Path(os.path.realpath(target))
    given = None if source is None else Path(os.path.realpath(source))
    if given is not None and (
        wanted == given or given in wanted.parents or wanted in given.parents
    ):
        raise OptionError(
            f"{target}: the output must lie outside the input {source}; choose another directory"
        )
    if target.exists() and not target.is_dir():
        raise OptionError(f"{target}: is a file; choose a directory for the output")
    if not wanted.parent.is_dir():
        raise OutputError(f"{target}: cannot be written: there is no directory {wanted.parent}")


def check_start(target: Path, resume: bool, force: bool) -> bool:
    """Whether a directory without notes holds something that `force` replaces."""
    if resume:
        raise FileFormatError(
            f"{target}: holds no unfinished conversion; leave --resume out to start one"
        )
    if not target.is_dir() or not any(target.iterdir()):
        return False
    if not force:
        raise OptionError(
            f"{target}: is not empty; choose another directory, or pass --force to replace a "
            "result of fp4kit"
        )
    return True


def check_target(
    source: Path | None,
    target: Path,
    state: State,
    planned: Sequence[str],
    *,
    resume: bool,
    force: bool,
) -> list[str]:
    """Refuses an output directory that would destroy something, before any work.

    Returns:
        Files of a finished result that are to be replaced.
    """
    check_place(source, target)
    if state.exists:
        if not resume and not force:
            raise OptionError(
                f"{target}: holds an unfinished conversion; pass --resume to go on, or --force to "
                "start over"
            )
        # Without a plan a run was killed as it began, or as it removed its notes at the end.
        ended = not state.planned and any(target.glob("*.safetensors"))
        return earlier_result(target, planned) if ended else []
    return earlier_result(target, planned) if check_start(target, resume, force) else []


def planned_files(plan: CheckpointPlan) -> list[str]:
    """Every file that a plan writes, relative to the output directory."""
    checkpoint = plan.source.checkpoint
    copied = checkpoint.others.copied
    names = [shard.name for shard in plan.shards]
    if len(plan.shards) > 1:
        names.append(checkpoint.index.name)
    return list(dict.fromkeys([*names, HF_QUANT_CONFIG, CONFIG, PARAMS, *copied]))


def _identities(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """What changes when a file of the source is written to or replaced."""
    paths = list(checkpoint.weight_files())
    if checkpoint.is_directory:
        copied = checkpoint.others.copied
        paths += [checkpoint.path / name for name in copied]
        paths += [path for path in checkpoint.path.glob("*.json") if path.is_file()]
    facts = ((str(path), path.stat()) for path in paths)
    return {name: (fact.st_ino, fact.st_size, fact.st_mtime_ns) for name, fact in facts}


def _check_unchanged(checkpoint: Checkpoint, before: dict[str, tuple[int, ...]]) -> None:
    """Refuses a result whose source has changed meanwhile."""
    now = _identities(checkpoint)
    changed = sorted(name for name in before | now if before.get(name) != now.get(name))
    if changed:
        raise FileFormatError(
            f"{changed[0]}: has changed during the conversion, so that the result was given up; "
            "start over with --force once nothing writes to the source"
        )


def check_space(target: Path, needed: int) -> None:
    """Refuses an output that the disk cannot take."""
    free = shutil.disk_usage(target).free
    if needed > free:
        raise OutputError(
            f"{target}: cannot be written: {needed} bytes are needed, {free} are free there"
        )


def copy_file(source: Path, target: Path) -> None:
    """Copies a file atomically."""
    target.parent.mkdir(parents=True, exist_ok=True)
    output = Output(target, permissions_of(source), replace=True)
    with InputFile(source) as reader, AtomicFile(output) as writer:
        for at in range(0, reader.size, COPY_BYTES):
            writer.write_at(at, reader.read(at, COPY_BYTES))
        writer.commit()


def new_config(
    config: dict[str, Any],
    quantization: dict[str, Any] | None,
    keys: Sequence[str] = ("quantization_config",),
) -> dict[str, Any]:
    """config.json of the output: the source's, with the quantization under some keys replaced."""
    old = (*OLD_KEYS, *mlx.KEYS) if mlx.is_said(config) else OLD_KEYS
    result = {key: value for key, value in config.items() if key not in old}
    nested = result.get("text_config")
    if isinstance(nested, dict):
        result["text_config"] = {k: v for k, v in nested.items() if k not in OLD_KEYS}
    if quantization is not None:
        result |= dict.fromkeys(keys, quantization)
    return result


def write_documents(plan: CheckpointPlan, target: Path) -> None:
    """Everything but the weights; config.json comes last, as engines look for it."""
    checkpoint = plan.source.checkpoint
    for name in checkpoint.others.copied:
        copy_file(checkpoint.path / name, target / name)
    config_file = checkpoint.path / CONFIG
    given = [*checkpoint.weight_files(), *([config_file] if config_file.is_file() else [])]
    permissions = permissions_of(*given)
    if len(plan.shards) > 1:
        content = {
            "metadata": {"total_parameters": plan.parameters, "total_size": plan.nbytes},
            "weight_map": dict(sorted(plan.weight_map.items())),
        }
        write_json(target / checkpoint.index.name, content, permissions)
    quantization = None
    if plan.layout is not None and not plan.plain:
        hf_quant = plan.layout.hf_quant_config(plan.summary)
        if hf_quant is not None:
            write_json(target / HF_QUANT_CONFIG, hf_quant, permissions)
        quantization = plan.layout.quantization_config(plan.summary)
    if checkpoint.native:
        params = new_params(checkpoint.documents[PARAMS], plan.config, quantization)
        write_json(target / PARAMS, params, permissions)
    stored = checkpoint.documents.get(CONFIG, {})
    if stored or (quantization is not None and not checkpoint.native):
        keys = plan.layout.config_keys if plan.layout is not None else ()
        config = new_config(stored | plan.config, quantization, keys)
        write_json(target / CONFIG, config, permissions)


def check_result(plan: CheckpointPlan, target: Path) -> None:
    """Looks at what was written as an engine would.

    A conversion of layouts keeps every value, so that the faults of its source come with it: they
    are a warning.
    """
    # What is no float was looked at when the plan was made; what is there was excluded, or is the
    # model's own.
    left = {work.tensor.name for work in plan.works if work.tensor.dtype not in DTYPES}
    faults = structure_faults(target, unfinished=True, plain=plan.plain, excluded=left.__contains__)
    if faults and isinstance(plan.options, ConvertOptions):
        inherited = structure_faults(plan.source.checkpoint.path)
        if len(inherited) >= len(faults):
            plan.warnings.append(
                f"the source is faulty ({len(inherited)} faults), and so is the result: "
                f"{inherited[0]}"
            )
            return
    if faults:
        advice = (
            "look at what was given" if plan.source.checkpoint.in_memory else "please report it"
        )
        raise OutputError(
            f"{target}: the result is faulty ({len(faults)} faults): {faults[0]}; {advice}"
        )


def carry_out(
    plan: CheckpointPlan,
    target: Path,
    *,
    devices: Sequence[str] = ("cpu",),
    resume: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> CheckpointReport:
    """Writes everything that a plan says.

    Args:
        plan: what to write.
        target: directory to create, or the file if the source is one.
        devices: `cpu`, or CUDA devices that take the next shard in turn.
        resume: finish what an earlier, interrupted run began.
        force: start an unfinished conversion over; replace a finished result of fp4kit, or a file.
        progress: called with (bytes done, bytes in all) of the source.

    Raises:
        OptionError: for an output that is not empty or is the input.
        FileFormatError: if there is nothing to resume.
        BackendUnavailableError: if a device cannot be used.
        OutputError: if the output cannot be written.
    """
    started = time.perf_counter()
    checkpoint = plan.source.checkpoint
    before = _identities(checkpoint)
    tally = Tally(progress, sum(work.tensor.spec.nbytes for work in plan.works))
    others = checkpoint.others.nbytes
    if not checkpoint.is_directory:
        output_suffix(target, (".safetensors",))
        output = check_output(checkpoint.stored_at, target, force=force, nbytes=plan.nbytes)
        if resume:
            raise OptionError(f"{target}: a single file is written in one go; leave --resume out")
        backend = make_backend(plan, devices[0])
        write_shard(plan, plan.shards[0], output, backend, tally)
        return make_report(plan, str(target), others, time.perf_counter() - started)
    given = checkpoint.stored_at
    mode = given.stat().st_mode if given is not None and given.is_dir() else 0o777
    permissions = stat.S_IMODE(mode) & 0o777
    state, folder = State(target, permissions), target
    if (resume or force) and state.replacing:  # a run was killed in between
        with state:
            state.complete_replacement()
    planned = planned_files(plan)
    replaced = check_target(given, target, state, planned, resume=resume, force=force)
    older: list[str] | None = None
    if checkpoint.in_memory and replaced:
        # What is there stays until all is written, as no later run could resume this one.
        if state.exists:  # it is whole: a run was killed as it began or ended
            with state:
                state.finish()
        folder, older = target / REPLACEMENT, replaced
        if folder.is_symlink():
            raise OptionError(f"{folder}: is a link, not fp4kit's; remove it")
        state = State(folder, permissions)
        replaced = check_target(given, folder, state, planned, resume=False, force=True)
    backends = [make_backend(plan, device) for device in devices]
    if not state.exists:  # so that nothing is left behind
        existing = target if target.is_dir() else Path(os.path.realpath(target)).parent
        check_space(existing, plan.nbytes + others)
    with state:
        wanted = fingerprint(checkpoint, plan.options)
        state.begin(wanted, planned, resume=resume, replaced=replaced)
        try:
            left = [shard for shard in plan.shards if state.done(shard.name) is None]
            missing = sum(spec.nbytes for shard in left for spec in shard.specs)
            check_space(folder, missing + others)
            write_shards(plan, state, backends, tally)
            _check_unchanged(checkpoint, before)
            write_documents(plan, folder)
            check_result(plan, folder)
            if older is not None:
                state.prepare_replacement(older)
        except BaseException:
            if checkpoint.in_memory:  # no later run can resume it
                state.abandon(planned)
            raise
        if older is None:
            state.finish()
        else:
            state.replace()
    return make_report(plan, str(target), others, time.perf_counter() - started)
