# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Trying again what a network or a server may have spoiled, with growing pauses."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from typing import TypeVar

from fp4kit.errors import Fp4kitError, shortened

Result = TypeVar("Result")
#: Times that something is tried.
ATTEMPTS = 7
#: Seconds before the second try; each further pause is twice as long, up to the longest.
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 20.0
#: What trying again does not change.
LASTING = (
    *(FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError),
    *(NotImplementedError, ImportError, TypeError, Fp4kitError),
)
#: The same by the names of classes of libraries that need not be there.
LASTING_NAMES = frozenset(
    (
        *("NoCredentialsError", "PartialCredentialsError", "ParamValidationError"),
        *("InvalidURL", "GatedRepoError", "RepositoryNotFoundError", "ProfileNotFound"),
    )
)
#: Answers of a server of the class 4xx that a later request may not get.
PASSING_STATUS = frozenset((408, 409, 425, 429))
#: What stands after a question mark in a URL may be a signature.
_QUERY = re.compile(r"\?[^\s'\")]+")

#: Told a line about the course of the work, and how many times something was tried again.
Listener = Callable[[str, int], None]
_listeners: list[Listener] = []


def on_retry(listener: Listener | None) -> None:
    """Has someone told whenever work is tried again; None ends that."""
    _listeners[:] = [] if listener is None else [listener]


def tell(message: str, retries: int = 0) -> None:
    """Says something about the course of the work to whoever asked for it."""
    for listener in _listeners:
        listener(message, retries)


class ShortReadError(OSError):
    """Fewer bytes came than were asked for: the connection ended in between."""


def passes(error: BaseException) -> bool:
    """Whether trying again may help."""
    if isinstance(error, ShortReadError):
        return True
    if isinstance(error, LASTING) or type(error).__name__ in LASTING_NAMES:
        return False
    status = getattr(error, "status", None)
    if isinstance(status, int) and 400 <= status < 500:
        return status in PASSING_STATUS
    return True


def reason_of(error: BaseException) -> str:
    """What went wrong, in one line without anything that may be secret."""
    text = " ".join(str(error).split()) or type(error).__name__
    return shortened(_QUERY.sub("?...", text), 300)


class Patience:
    """Tries again; one for each place that is read or written.

    Attributes:
        retries: how often something had to be tried again so far.
    """

    def __init__(self) -> None:
        self.retries = 0

    def with_retries(
        self, action: Callable[[], Result], failure: Callable[[str], Fp4kitError]
    ) -> Result:
        """The result of an action that may be repeated.

        Args:
            action: what is done.
            failure: the error that says, with a reason, that it cannot be done.

        Raises:
            Fp4kitError: what `failure` makes of the last reason.
        """
        pause = FIRST_PAUSE
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return action()
            except Exception as error:  # each library has its own
                if not passes(error):
                    if isinstance(error, Fp4kitError):
                        raise
                    raise failure(reason_of(error)) from None
                if attempt == ATTEMPTS:
                    said = f"{reason_of(error)} (tried {ATTEMPTS} times)"
                    raise failure(said) from None
            self.retries += 1
            # Many workers that were refused at once must not come back at once.
            time.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(2 * pause, LONGEST_PAUSE)
        raise AssertionError("the last attempt returns or raises")
