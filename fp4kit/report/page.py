# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""One HTML file that needs no other: template, styles, scripts, the library that draws, the data.

Nothing of the data becomes markup: it is JSON in an element that is not run, and the scripts set
it as text. On top of that the page's policy lets the browser run these very scripts, by their
hashes, and fetch nothing.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from string import Template
from typing import Any

from fp4kit.errors import OptionError

#: The scripts of the page, in the order in which they run.
SCRIPTS = ("text.js", "data.js", "charts.js", "histograms.js", "survey.js", "table.js", "main.js")
#: What ships Vega, Vega-Lite and Vega-Embed.
LIBRARY = "vl_convert"


@dataclass(frozen=True)
class Library:
    """The library that draws.

    Attributes:
        script: all of it.
        versions: of its parts.
    """

    script: str
    versions: Mapping[str, str]


@cache
def load_library() -> Library:
    """The library that draws, from the package that ships it.

    Raises:
        OptionError: if it is not installed.
    """
    if find_spec(LIBRARY) is None:
        raise OptionError(
            "--html draws with Vega, which is not installed here: pip install 'fp4kit[report]'"
        )
    import vl_convert

    versions = {
        "Vega": vl_convert.get_vega_version(),
        "Vega-Lite": vl_convert.get_vegalite_versions()[-1],
    }
    bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", versions["Vega-Lite"])
    return Library(bundle, versions)


def page(data: Mapping[str, Any], library: Library) -> str:
    """The text of a page.

    Args:
        data: of :func:`fp4kit.report.model.page_data`.
        library: what draws.

    Returns:
        An HTML document in ASCII.
    """
    own = "\n".join(f"// {name}\n{_asset(name)}" for name in SCRIPTS)
    # In a function: what the library calls its parts is not for everyone to see.
    scripts = [
        _script_text(f"(() => {{\n{library.script}\n}})();"),
        _script_text(f'"use strict";\n(() => {{\n{own}\n}})();'),
    ]
    return Template(_asset("template.html")).substitute(
        title=_attribute(str(data["title"])),
        policy=_attribute(_policy(scripts)),
        style=_asset("report.css"),
        data=json_text(data),
        library=scripts[0],
        scripts=scripts[1],
    )


def json_text(data: Mapping[str, Any]) -> str:
    """JSON that no HTML parser takes for markup, in ASCII."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def _asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text("utf-8")


def _attribute(text: str) -> str:
    """Text for an element or an attribute; a control character is no character of HTML."""
    shown = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
    return html.escape(shown).encode("ascii", "xmlcharrefreplace").decode()


def _script_text(script: str) -> str:
    """A script in ASCII that does not end its element; in its strings the escapes say the same."""
    text = script.replace("</script", "<\\/script").replace("<!--", "<\\!--")
    return "".join(char if char.isascii() else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    units = char.encode("utf-16-be")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


def _policy(scripts: list[str]) -> str:
    """What a browser may do with the page: run these scripts, and nothing from elsewhere."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        for script in scripts
    )
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
