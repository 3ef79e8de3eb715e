# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The tables of the commands: what is shown, in which order, and on which width."""

from __future__ import annotations

import json
import re
import time

import numpy as np
import pytest
import safetensors.numpy
from rich.cells import cell_len

from command_line import succeed, table_row
from fp4kit.cli import output
from fp4kit.cli.output import Column, cut_middle, print_table
from fp4kit.cli.tables import GLOSSARY

LONG = "model.layers.{}.self_attn.very_long_module_name.q_proj.weight"


@pytest.fixture
def many(tmp_path):
    """40 weights, number 17 the worst by far; 30 norms, 3 of integers, 2 of odd rows."""
    rng = np.random.default_rng(0)
    tensors = {}
    for number in range(40):
        x = rng.standard_normal((16, 32)).astype(np.float32)
        if number == 17:
            x = np.where(np.arange(32) % 16, 5, 6) * np.ones((16, 1), np.float32)  # 5 becomes 4
            x = x.astype(np.float32)
        tensors[LONG.format(number)] = x
    tensors |= {f"norm.{n}": np.ones(8, np.float32) for n in range(30)}
    tensors |= {f"steps.{n}": np.ones((2, 16), np.int64) for n in range(3)}
    tensors |= {f"odd.{n}": np.ones((2, 17 + n), np.float32) for n in range(2)}
    path = tmp_path / "many.safetensors"
    safetensors.numpy.save_file(tensors, path)
    return path


@pytest.fixture
def terminal(monkeypatch):
    """Has stdout taken for a terminal of some width."""

    def set_width(width):
        monkeypatch.setattr(output, "on_terminal", lambda stream: True)
        monkeypatch.setenv("COLUMNS", str(width))

    return set_width


# ------------------------------------------------------------------------------------------------
# What is shown
# ------------------------------------------------------------------------------------------------


def test_worst_first_and_total_last(many, tmp_path):
    text = succeed("quantize", many, "-o", tmp_path / "q.safetensors").stdout
    lines = text.rstrip().splitlines()
    assert lines[-1].startswith("total (40)")
    names = [line for line in lines if line.startswith("model.layers.")]
    assert len(names) == 10
    assert names[0].startswith(LONG.format(17))
    report = json.loads(
        succeed("quantize", many, "-o", tmp_path / "r.safetensors", "--json").stdout
    )
    rows = [row for row in report["tensors"] if row["action"] == "quantize"]
    rows.sort(key=lambda row: row["stats"]["sqnr"])
    assert [name.split()[0] for name in names] == [row["name"] for row in rows[:10]]
    assert len(lines) < 40
    assert "The 10 worst of 40 tensors; --all lists every one." in text


@pytest.mark.parametrize("every", [False, True])
def test_kept_tensors_are_grouped_by_reason(many, tmp_path, every):
    flags = ["--all"] if every else []
    text = succeed("quantize", many, "-o", tmp_path / "q.safetensors", *flags).stdout
    assert "Kept unchanged: 35 of 75 tensors" in text
    if every:
        assert sum(line.startswith("norm.") for line in text.splitlines()) == 30
        assert sum(line.startswith("model.layers.") for line in text.splitlines()) == 40
        assert table_row(text, "odd.1")[-1] == "last axis 18 is not a multiple of 16"
        return
    assert table_row(text, "norm.0, ...")[1] == "30"
    assert table_row(text, "norm.0, ...")[-1] == "1-D"
    assert table_row(text, "steps.0, ...")[1::2] == ["3", "int64 is not quantized"]
    assert table_row(text, "odd.0, ...")[1::2] == ["2", "last axis is not a multiple of 16"]


@pytest.mark.parametrize("command", ["dequantize", "compare", "dry run"])
def test_every_command_is_brief(many, tmp_path, command):
    target = tmp_path / "q.safetensors"
    succeed("quantize", many, "-o", target)
    args = {
        "dequantize": ("dequantize", target, "-o", tmp_path / "back.safetensors"),
        "compare": ("compare", many, target),
        "dry run": ("quantize", many, "--dry-run"),
    }[command]
    text = succeed(*args).stdout
    assert sum(line.startswith("model.layers.") for line in text.splitlines()) == 10
    assert text.rstrip().splitlines()[-1].startswith("total (40)")
    assert len(text.splitlines()) < 40
    whole = succeed(*args, *(["--force"] if command == "dequantize" else []), "--all").stdout
    assert all(LONG.format(number) in whole for number in range(40))


def test_a_large_checkpoint_prints_a_screen(checkpoints, tmp_path):
    source = checkpoints.save(tmp_path / "in", *checkpoints.llama(40))
    result = succeed("quantize", source, "-o", tmp_path / "out")
    assert result.output.count("\n") <= 40
    assert result.stdout.rstrip().splitlines()[-1].startswith("total (280)")


@pytest.mark.parametrize(
    ("flags", "normal"),
    [
        ((), "20.4 dB for nvfp4 "),
        (("--scale-search", "sweep"), "21.8 dB for nvfp4 (sweep)"),
        (("--format", "mxfp4"), "18.9 dB for mxfp4"),
        (("--format", "mxfp8"), "31.5 dB for mxfp8"),
    ],
)
def test_what_is_normal_is_said(many, tmp_path, flags, normal):
    """And is what normal values come out with."""
    text = succeed("quantize", many, "-o", tmp_path / "q.safetensors", *flags).stdout
    assert normal in text
    assert "at max code" in text
    assert "saturated" not in text
    x = np.random.default_rng(1).standard_normal((256, 256)).astype(np.float32)
    safetensors.numpy.save_file({"x": x}, tmp_path / "x.safetensors")
    report = succeed("quantize", tmp_path / "x.safetensors", *flags, "--json").stdout
    measured = json.loads(report)["total"]["stats"]["sqnr"]
    assert measured == pytest.approx(float(normal.split()[0]), abs=0.15)


@pytest.mark.parametrize("command", ["quantize", "compare"])
def test_columns_are_explained(command):
    text = " ".join(succeed(command, "--help").stdout.split())
    assert " ".join(GLOSSARY.replace("\b", "").split()) in text
    for column in ("SQNR", "RMS err %", "max error", "at max code %", "underflowed %", "total"):
        assert column in text


def test_ones_do_not_read_as_clipped(tmp_path):
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file({"x": np.ones((4, 32), np.float32)}, path)
    text = succeed("quantize", path).stdout
    assert table_row(text, "x ")[6] == "exact"
    assert "at max code are not clipped" in text


@pytest.mark.parametrize(
    ("flags", "bits", "ratio"),
    [
        ((), (0.5 * 512 + 32 + 4) * 8 / 512, None),
        (("--format", "mxfp4"), 4.25, "3.76"),
        (("--format", "mxfp8"), 8.25, "1.94"),
    ],
)
def test_inspect_ends_with_the_density(many, tmp_path, flags, bits, ratio):
    target = tmp_path / "q.safetensors"
    succeed("quantize", many, "-o", target, *flags)
    lines = succeed("inspect", target).stdout.rstrip().splitlines()
    assert [line.split(":")[0] for line in lines[-3:]] == [
        flags[-1] if flags else "nvfp4",
        "plain",
        "whole",
    ]
    assert f"40 tensors, {bits:.2f} bits per weight, ratio to 16-bit " in lines[-3]
    assert lines[-3].endswith(ratio or f"{16 / bits:.2f}")
    assert succeed("inspect", many).stdout.rstrip().splitlines()[-1].startswith("not quantized: 75")


# ------------------------------------------------------------------------------------------------
# Terminals
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 130, 200])
def test_no_line_is_broken(many, tmp_path, terminal, width):
    """Columns of least use go first; names are cut in the middle and take one line."""
    terminal(width)
    text = succeed("quantize", many, "-o", tmp_path / "q.safetensors").stdout
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    assert all(cell_len(line) <= max(width, 24) for line in lines), lines
    start = next(n for n, line in enumerate(lines) if line.startswith("total (")) - 12
    rows = lines[start + 1 : start + 11]
    assert len([row for row in rows if re.search(r"\d\.\d\d\b|\d", row)]) == 10
    heading = " ".join(lines[start - 2 : start + 1])
    shown = [word in heading for word in ("shape", "before", "dtype", "format", "after", "error")]
    assert shown == sorted(shown, reverse=True)
    assert ("code %" in heading) == (width >= 130)
    assert "SQNR" in heading
    if width >= 80:
        assert all(shown[:4])
    if 60 <= width < 130:
        assert all(row.split()[0].endswith("weight") for row in rows)
        assert all("\u2026" in row for row in rows)


@pytest.mark.parametrize("width", range(1, 30))
@pytest.mark.parametrize("name", ["model.layers.0.q_proj.weight", "\u6a21\u578b" * 9, "a" * 10_000])
@pytest.mark.parametrize("mark", ["\u2026", "~~~"])
def test_cutting_a_name(width, name, mark):
    cut = cut_middle(name, width, mark)
    assert cell_len(cut) <= width
    if cell_len(name) <= width:
        assert cut == name
    elif width > len(mark) + 4:
        head, _, tail = cut.partition(mark)
        assert name.startswith(head.rstrip())
        assert name.endswith(tail)
        assert tail


def test_names_that_are_cut_on_a_console_of_ascii(capsys, monkeypatch):
    monkeypatch.setattr(output, "on_terminal", lambda stream: True)
    monkeypatch.setenv("COLUMNS", "30")
    columns = [Column("tensor", number=False, name=True), Column("n")]
    print_table(columns, [["a" * 100, "1"]])
    (row,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("aa"))
    assert len(row.rstrip()) <= 30
    assert row.rstrip().endswith("1")


def test_kept_reasons_are_words(terminal, capsys):
    """Text is folded between words, and the name beside it keeps to one line."""
    terminal(50)
    columns = [Column("tensor", number=False, name=True), Column("reason", number=False)]
    print_table(columns, [["x" * 90, "sensitive layer of a diffusion model (final_layer)"]])
    lines = capsys.readouterr().out.splitlines()
    assert sum("x" in line.split(" ")[0] for line in lines) == 1
    assert all(len(line) <= 50 for line in lines)
    assert "diffusion" in " ".join(lines)


def test_many_rows_take_no_time(capsys):
    """A table for a pipe is as wide as it is, and no slower than the reading of its file."""
    columns = [Column("tensor", number=False, name=True), Column("n"), Column("why", number=False)]
    rows = [[f"model.layers.{n}.weight", str(n), "x" * (n % 7)] for n in range(20_000)]
    started = time.process_time()
    print_table(columns, rows, total=["total", "20000", ""])
    assert time.process_time() - started < 2
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 20_004
    assert lines[0].split() == ["tensor", "n", "why"]
    assert lines[1] == lines[-2]
    assert lines[2] == "model.layers.0.weight          0"
    assert lines[-4] == "model.layers.19998.weight  19998  xxxxxx"
    assert lines[-1] == "total                      20000"
