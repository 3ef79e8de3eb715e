# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Signals that end a command: at once while it starts, tidily once it has files to clean up.

Python runs a handler between two instructions, whatever they belong to: what a handler raises in
the middle of an import, or in a callback of the garbage collector, can be swallowed there, and the
command would go on to its end. So the handlers also note the signal, and whoever reports progress
or ends the command asks for it.
"""

import signal
from types import FrameType

_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)


class _Noted:
    """What has happened in this process.

    Attributes:
        prepared: whether this is the process of a command, whose signals are ours to handle.
        number: the signal that was received last, 0 for none.
    """

    prepared = False
    number = 0


def prepare() -> None:
    """Has signals end the process at once: nothing has been written, and nothing is to be said."""
    _Noted.prepared = True
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def install() -> None:
    """Has signals run every clean-up from now on; what the caller ignores (nohup) stays ignored."""
    if not _Noted.prepared:
        return
    for number in _SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _leave)


def check() -> None:
    """Ends the command if a signal has asked for it.

    Raises:
        KeyboardInterrupt: after SIGINT.
        SystemExit: after another, with the exit code that shells expect.
    """
    if _Noted.number == signal.SIGINT:
        raise KeyboardInterrupt
    if _Noted.number:
        raise SystemExit(128 + _Noted.number)


def _leave(number: int, _frame: FrameType | None) -> None:
    _Noted.number = number
    check()
