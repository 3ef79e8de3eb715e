# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The `fp4kit` command: the group, its lazily imported subcommands, and what errors look like."""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
from importlib import import_module
from typing import NoReturn

import click

from fp4kit import __version__
from fp4kit.errors import Fp4kitError

from . import interrupts
from .text import describe_os_error, example, one_line

#: Subcommands and their one-line help. It stands here so that `fp4kit --help` imports none of
#: them; a test compares it with each command's own help.
COMMANDS = {
    "quantize": "Quantize the tensors of a file, or a whole checkpoint.",
    "survey": "Compare formats on a model, and choose within a budget.",
    "calibrate": "Run a model on text, and keep what its layers were given.",
    "dequantize": "Turn a quantized file or model directory back into plain numbers.",
    "convert": "Store a quantized checkpoint in another layout, codes verbatim.",
    "verify": "Check a quantized checkpoint or file from any tool.",
    "finish": "Complete a result whose parts are all written.",
    "inspect": "List the tensors of a file or checkpoint, and how it is stored.",
    "compare": "Measure how far a file or checkpoint is from its original.",
    "bench": "Measure how fast every operation is on this machine.",
    "demo": "Write a small model-like file to try the other commands on.",
    "env": "Show versions, GPUs, and which backends can run here.",
}

#: Where the context of a command keeps how the program was called.
ARGUMENTS = "fp4kit.arguments"
INTERRUPTED = 128 + signal.SIGINT
#: Address space that the compiler of the kernels and the threads need, in bytes: with less they
#: end the process in their own way.
LEAST_MEMORY = 640 << 20
#: How Python says that there is no memory for a thread.
NO_THREAD = ("can't start new thread", "can't allocate lock")


class LazyGroup(click.Group):
    """A group whose subcommands are imported when they are called for.

    `fp4kit NAME` is the attribute `command` of the module `NAME` beside this one.
    """

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports a subcommand."""
        if cmd_name not in self.commands:
            return None
        command = import_module(f".{cmd_name}", __package__).command
        interrupts.install()
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the subcommands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, stub.help or "") for name, stub in self.commands.items()])

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order a newcomer meets them, not sorted."""
        return list(self.commands)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses, and prints `--help` and `--version`, which a full disk refuses too."""
        ctx.meta[ARGUMENTS] = list(args)  # which click takes apart
        try:
            return super().parse_args(ctx, args)
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise
            raise click.ClickException(describe_os_error(error)) from error

    def invoke(self, ctx: click.Context) -> object:
        """Runs a subcommand; expected failures become one line and exit code 1."""
        try:
            _check_memory()
            result = super().invoke(ctx)
            interrupts.check()
            return result
        except Fp4kitError as error:
            raise click.ClickException(one_line(str(error))) from error
        except OSError as error:
            if error.errno == errno.EPIPE:  # click leaves quietly: the reader had enough
                raise
            raise click.ClickException(describe_os_error(error)) from error
        except MemoryError as error:
            raise click.ClickException(_out_of_memory(str(error))) from error
        except RuntimeError as error:
            if str(error) not in NO_THREAD:
                raise
            raise click.ClickException(_out_of_memory(str(error))) from error
        except KeyboardInterrupt:
            click.echo("\nInterrupted", err=True)
            ctx.exit(INTERRUPTED)


@click.group(
    cls=LazyGroup,
    commands={name: click.Command(name, help=text) for name, text in COMMANDS.items()},
    epilog=example(
        "fp4kit demo",
        "fp4kit quantize demo.safetensors",
        "fp4kit dequantize demo-nvfp4.safetensors -o back.safetensors",
        "fp4kit compare demo.safetensors back.safetensors",
    ),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="fp4kit")
def cli() -> None:
    """Quantize arrays and model files to NVFP4, MXFP4 and MXFP8, and back."""


def main() -> NoReturn:
    """Runs the command; :mod:`fp4kit.cli.entry` calls it."""
    for number in range(3):
        # A stream that was closed would give its number to the next file, with all that is printed.
        if not _is_open(number):
            os.open(os.devnull, os.O_RDWR)
    for stream in (sys.stdout, sys.stderr):
        # A console that cannot show a character gets an escape, not a crash after the work.
        if stream is not None and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    cli(prog_name="fp4kit")
    raise AssertionError("click exits by itself")


def _check_memory() -> None:
    """Refuses a limit of the address space under which nothing can work."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < LEAST_MEMORY:
        raise MemoryError(
            f"the limit is {limit >> 20} MiB of address space, {LEAST_MEMORY >> 20} MiB are needed"
        )


def _out_of_memory(reason: str) -> str:
    """The message of a command that ran out of memory."""
    why = f": {reason}" if reason else ""
    return one_line(f"out of memory{why}; free some, or raise the limit (ulimit -v)")


def _is_open(number: int) -> bool:
    """Whether a file descriptor is open."""
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
