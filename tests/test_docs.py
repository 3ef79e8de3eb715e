# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Every code block of README.md and docs/ runs, and prints what is shown."""

from __future__ import annotations

import re

import click
import pytest

import fp4kit
from documentation import (
    LANGUAGES,
    MARKS,
    PAGES,
    ROOT,
    Run,
    blocks_of,
    commands_of,
    make_stage,
    same,
)
from fp4kit.cli.main import cli

pytestmark = pytest.mark.skipif(not (ROOT / "docs").exists(), reason="needs the source checkout")
IDS = [path.name for path in PAGES]


def run_page(path, folder, without):
    """Runs a page's blocks, except those with one of the marks."""
    make_stage(folder)
    run = Run(path)
    for block in blocks_of(path):
        if not block.marks & without:
            run.block(block)


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_blocks_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_page(path, tmp_path, {"peers", "gpu", "not run"})


@pytest.mark.gpu
@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_blocks_for_a_gpu_run(path, tmp_path, monkeypatch, real_gpu):
    blocks = [block for block in blocks_of(path) if "gpu" in block.marks]
    if not blocks:
        pytest.skip("the page has no block that needs a GPU")
    monkeypatch.chdir(tmp_path)
    run_page(path, tmp_path, {"peers", "not run"})


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_blocks_are_of_known_kinds(path):
    for block in blocks_of(path):
        assert block.language in LANGUAGES, f"{path.name}:{block.line}"
        assert block.marks <= MARKS, f"{path.name}:{block.line}"
    # What is marked says what is meant, and stands before a block.
    text = path.read_text("utf-8")
    assert len(re.findall("<!-- test:", text)) == sum(
        bool(block.marks) for block in blocks_of(path)
    )
    assert not re.search(r"<!-- test: not run(?!: \w)", text)


def test_outputs_are_compared():
    assert same("a\nb\nc\n", "a\n...\nc\n")
    assert same("a\nc\n", "a\n...\nc\n")
    assert same("Wrote x in 0.7 s\n\n", "Wrote x in 1.9 s\n")
    assert not same("a\nb\nc\n", "a\n...\nd\n")
    assert not same("a\nb\n", "a\n")
    assert commands_of("$ x \\\n  -y\none\n$ z\n") == [("x    -y", "one\n"), ("z", "")]


def test_options_that_are_named_exist():
    """Options of the command line; those of other programs stand in code blocks only."""
    known = {"--help", "--version"}
    context = click.Context(cli)
    for name in cli.list_commands(context):
        known.update(*(parameter.opts for parameter in cli.get_command(context, name).params))
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = re.sub(r"^```.*?^```$", "", path.read_text("utf-8"), flags=re.M | re.S)
        for span in re.findall(r"`([^`\n]+)`", text):
            if "benchmarks/" not in span:
                assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", span)) <= known, (path.name, span)


def test_paths_that_are_named_exist():
    for path in PAGES:
        text = re.sub(r"^```.*?^```$", "", path.read_text("utf-8"), flags=re.M | re.S)
        for name in re.findall(r"`([a-z][\w/]*/[\w/]*(?:\.\w+)?)`", text):
            tops = (ROOT, ROOT / "fp4kit")
            first = name.split("/")[0]
            if any((top / first).is_dir() for top in tops):
                assert any((top / name).exists() for top in tops), f"{path.name}: {name}"


def test_the_api_page_lists_every_public_name():
    page = (ROOT / "docs" / "api.md").read_text("utf-8")
    listed = re.findall(r"^::: fp4kit\.(\w+)$", page, re.M)
    assert len(listed) == len(set(listed))
    assert {*listed, "ALL_FORMATS", "ALL_RECIPES", "__version__"} == set(fp4kit.__all__)


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text("utf-8").split()) <= 1000
