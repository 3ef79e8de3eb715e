# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Paths and URLs: which of the two a text is, and the file system of a URL."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

from fp4kit.errors import OptionError

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
#: Kinds of URLs, and the package that reads them.
READERS = {
    "s3": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "hf": "huggingface_hub",
    "http": "aiohttp",
    "https": "aiohttp",
}
#: Kinds that nothing can be written to.
READ_ONLY = ("http", "https")
EXTRA = "pip install 'fp4kit[fleet]'"


def is_url(text: str) -> bool:
    """Whether a text is a URL and no path."""
    return _URL.match(text) is not None


def protocol_of(url: str) -> str:
    """What kind of URL it is."""
    match = _URL.match(url)
    assert match is not None, f"{url} is no URL"
    return match[1].lower()


def check_url(url: str) -> str:
    """A URL without a slash at its end, refused if it may hold a secret or is of an unknown kind.

    Raises:
        OptionError: with what to do instead.
    """
    protocol = protocol_of(url)
    rest = url[url.index("://") + 3 :]
    if "@" in rest.partition("/")[0] or "?" in rest or "#" in rest:
        # Not repeated: it may be a password, or a signature.
        raise OptionError(
            f"{protocol}://...: a URL holds no user name, password or signature here, as command "
            "lines and reports are read by others; give credentials as the library of the store "
            "takes them (environment, configuration file, role of the machine)"
        )
    if protocol not in READERS:
        known = ", ".join(f"{name}://" for name in READERS)
        raise OptionError(f"{url}: {protocol}:// is not known; choose {known}, or a path")
    for package in ("fsspec", READERS[protocol]):
        if importlib.util.find_spec(package) is None:
            raise OptionError(f"{url}: needs the package {package}, which is missing: {EXTRA}")
    return url.rstrip("/")


def file_system(url: str) -> Any:
    """The file system of fsspec's that a checked URL lies in."""
    import fsspec

    # What it lists is what workers on other machines have just written.
    return fsspec.filesystem(protocol_of(url), use_listings_cache=False)
