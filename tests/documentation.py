# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Code blocks of README.md and docs/: what they are, and how a page's are run one after another.

Python blocks of a page share their names. Output is compared where it is shown: in a `text` block
right after a Python block, or in comments after `print(...)`. Commands that begin with `fp4kit` are
run; their output is compared with the lines below them, as a terminal of 80 columns shows it. A
line of `...` stands for any lines. An HTML comment before a block says more:

    <!-- test: peers -->           needs the peers extra; run by `make peers`
    <!-- test: gpu -->             needs a GPU
    <!-- test: fails -->           every command exits with 1
    <!-- test: not run: reason --> is only looked at
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from click.testing import CliRunner

import checkpoints
import fp4kit
import gguf_models
from command_line import read_terminal
from fp4kit.cli.main import cli

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES = {"python", "console", "text", "json", "toml"}
MARKS = {"peers", "gpu", "fails", "not run"}
#: Commands that are shown and not run, because they install, serve or take long.
SHOWN = {"cat", "git", "make", "pip", "pytest", "python", "vllm"}
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[a-z]*)[^\n]*\n(?P<text>.*?)^ *```$", re.M | re.S
)
_MARK = re.compile(r"<!-- test: ([^>]*?) -->\s*$")
_PRINTED = re.compile(r"^print\(.*\)  # (.+)$", re.M)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        line: line of its first line of code.
        language: what the fence says.
        text: content.
        marks: what the comment before it says.
        shown: what a `text` block right after it shows, None without one.
    """

    line: int
    language: str
    text: str
    marks: frozenset[str]
    shown: str | None


def blocks_of(path: Path) -> list[Block]:
    """The blocks of a page, in order."""
    page = path.read_text("utf-8")
    matches = list(_FENCE.finditer(page))
    blocks = []
    for number, match in enumerate(matches):
        mark = _MARK.search(page, 0, match.start())
        names = frozenset(mark[1].split(":")[0].split(", ")) if mark else frozenset()
        after = matches[number + 1] if number + 1 < len(matches) else None
        shown = None
        if after and after["language"] == "text" and not page[match.end() : after.start()].strip():
            shown = after["text"]
        line = page.count("\n", 0, match.start("text")) + 1
        blocks.append(Block(line, match["language"], match["text"], names, shown))
    return blocks


def same(actual: str, expected: str) -> bool:
    """Whether an output is the one shown, where a line of `...` stands for any lines."""
    parts = [_plain(part) for part in re.split(r"(?m)^\.\.\.\n?", expected)]
    pattern = r"(?:.*\n)*?".join(re.escape(part) for part in parts)
    return re.fullmatch(pattern, _plain(actual)) is not None


def _plain(text: str) -> str:
    """Without colours, blanks at ends of lines, empty lines, times, and what a first run says."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.replace("\r\n", "\n"))
    text = re.sub(r"in \d+\.\d s\b", "in 0.0 s", text)
    lines = [line.rstrip() for line in text.splitlines()]
    return "".join(f"{line}\n" for line in lines if line and not line.startswith("Compiling"))


def make_stage(folder: Path) -> None:
    """The files that pages call `model.safetensors`, `Llama-3-8B`, `x.npy`, ...: small ones."""
    tensors, config = checkpoints.llama()
    checkpoints.save(folder / "Llama-3-8B", tensors, config)
    checkpoints.write_file(folder / "model.safetensors", tensors)
    tensors, config = checkpoints.llama(intermediate=128)
    checkpoints.save(folder / "Qwen3-8B", tensors, config | {"model_type": "qwen3"})
    with fp4kit.open(folder / "Qwen3-8B") as arrays:
        gguf_models.from_checkpoint(folder / "Qwen3-8B-BF16.gguf", arrays, "qwen3")
    np.save(folder / "x.npy", np.random.default_rng(0).standard_normal((8, 40)))


class Run:
    """The blocks of one page, run in the current directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.names: dict[str, object] = {"__name__": "__main__"}

    def block(self, block: Block) -> None:
        """Runs a block and compares what it shows."""
        if block.language == "python":
            self.python(block)
        elif block.language == "console":
            for command, shown in commands_of(block.text):
                self.command(command, shown, code=1 if "fails" in block.marks else 0)
        elif block.language == "json":
            json.loads(block.text)

    def python(self, block: Block) -> None:
        """Runs a Python block, as if it stood in a file of its own."""
        source = "\n" * (block.line - 1) + block.text
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(source, str(self.path), "exec"), self.names)
        where = f"{self.path.name}:{block.line}"
        if block.shown is not None:
            assert same(printed.getvalue(), block.shown), f"{where} printed\n{printed.getvalue()}"
        elif comments := _PRINTED.findall(block.text):
            lines = printed.getvalue().splitlines()
            assert lines == comments, f"{where} printed {lines}"

    def command(self, command: str, shown: str, code: int) -> None:
        """Runs a line of a console block, if it is one of fp4kit's."""
        words = shlex.split(command, comments=True)
        where = f"{self.path.name}: {command}"
        if words[0] == "make":
            makefile = (ROOT / "Makefile").read_text("utf-8")
            for target in words[1:]:
                assert re.search(rf"^[\w -]*\b{target}\b[\w -]*:", makefile, re.M), where
        elif words[0] == "python" and words[1:] and not words[1].startswith("-"):
            assert (ROOT / words[1]).is_file(), where
        if words[0] != "fp4kit":
            assert words[0] in SHOWN, where
            return
        returned, output = on_terminal(words[1:]) if shown else in_process(words[1:])
        assert returned == code, f"{where}\n{output}"
        assert not shown or same(output, shown), f"{where} printed\n{output}"


def commands_of(text: str) -> list[tuple[str, str]]:
    """The commands of a console block, each with the output that is shown below it."""
    found: list[tuple[str, str]] = []
    for line in text.replace("\\\n", " ").splitlines(keepends=True):
        if line.startswith("$ "):
            found.append((line[2:].strip(), ""))
        else:
            assert found, f"output without a command: {line!r}"
            command, shown = found[-1]
            found[-1] = (command, shown + line)
    return found


def in_process(arguments: list[str]) -> tuple[int, str]:
    """`fp4kit` where nobody looks at its output, without the start of a process."""
    result = CliRunner().invoke(cli, arguments)
    return result.exit_code, result.output


def on_terminal(arguments: list[str]) -> tuple[int, str]:
    """`fp4kit` on a terminal of 80 columns: exit code; what stdout shows, then stderr."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 80, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "fp4kit", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=child,
        stderr=subprocess.PIPE,
        env=os.environ | {"TERM": "dumb"},
    )
    os.close(child)
    output = read_terminal(parent).decode()
    _, errors = process.communicate(timeout=300)
    return process.returncode, output + errors.decode()
