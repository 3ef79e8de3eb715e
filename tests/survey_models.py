# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Models that are surveyed, and how a survey fails."""

from __future__ import annotations

import pytest

from command_line import invoke


@pytest.fixture
def moe_model(checkpoints, tmp_path):
    tensors, config = checkpoints.moe(2)
    return checkpoints.save(tmp_path / "in", tensors, config, shards=2)


@pytest.fixture
def dense_model(checkpoints, tmp_path):
    tensors, config = checkpoints.llama()
    return checkpoints.save(tmp_path / "in", tensors, config)


def fails(*args, code=1):
    """One line that says why, and no file."""
    result = invoke(*args)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    assert result.stderr.count("Error: ") == 1
    return result.stderr


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
