# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""A model whose conversion several workers share, and what one process makes of it."""

from __future__ import annotations

from dataclasses import replace as with_changes

import pytest

from fp4kit.checkpoint import operations
from fp4kit.checkpoint.options import CheckpointOptions
from fp4kit.checkpoint.read.directory import STATE_DIR
from fp4kit.fleet import tasks
from fp4kit.fleet.job import Job

SMALL = CheckpointOptions(max_shard_size=12_000)


@pytest.fixture
def no_open_source():
    """No source stays open, so that every test begins as a new process does."""
    yield
    tasks.close_idle()


@pytest.fixture
def fleet_model(checkpoints, tmp_path):
    """A model of three files, some fused weights of which lie in different ones."""
    tensors, config = checkpoints.moe(3)
    place = {name: number % 3 for number, name in enumerate(tensors)}
    others = list(checkpoints.OTHER_FILES)
    return checkpoints.save(
        tmp_path / "model", tensors, config, shards=3, others=others, assign=place
    )


@pytest.fixture
def fleet_wanted(checkpoints, fleet_model, tmp_path):
    """What one process makes of it: every file with its SHA-256."""
    operations.quantize_checkpoint(fleet_model, tmp_path / "alone", SMALL)
    found = checkpoints.digest(tmp_path / "alone")
    assert sum(name.endswith(".safetensors") for name in found) == 5
    return found


def job_for(model, target, **changes):
    return with_changes(Job("quantize", str(model), str(target), SMALL), **changes)


def notes(target):
    return sorted(path.name for path in (target / STATE_DIR).iterdir())
