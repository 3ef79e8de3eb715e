# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Pages of `--html`, taken apart without a browser."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

from fp4kit.report import page as pages
from fp4kit.report.model import Run, page_data

#: Elements that are never closed.
VOID = {"meta", "link"}
#: Everything that a page may be made of before its scripts run.
ELEMENTS = {"html", "head", "meta", "title", "link", "style", "body", "a", "main", "noscript", "p"}
ELEMENTS |= {"div", "script"}


#: What makes markup or code of text, or loads something.
RISKY = ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "Function(")
RISKY += ("DOMParser", "createContextualFragment", "http:", "https:", "fetch(", "XMLHttpRequest")


class Page(HTMLParser):
    """The elements of a page; it must be well-formed."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.elements, self.texts = [], [], {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        names = [name for name, _ in attributes]
        assert len(names) == len(set(names))
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append((tag, len(self.elements) - 1))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if self.open:
            _, number = self.open[-1]
            self.texts[number] = self.texts.get(number, "") + data

    def of(self, tag):
        return [
            (attributes, self.texts.get(number, ""))
            for number, (name, attributes) in enumerate(self.elements)
            if name == tag
        ]

    @property
    def data(self):
        ((_, text),) = [one for one in self.of("script") if one[0].get("id") == "data"]
        return json.loads(text)


def read(path):
    return Page(Path(path).read_bytes().decode("ascii"))


def drawn(report, kind="quantize", **more):
    """The page of a report, as text."""
    library = pages.load_library()
    run = Run(kind, f"fp4kit {kind}", versions=library.versions, **more)
    return pages.page(page_data(report, run), library)


def check_safe(text):
    """Well-formed, nothing but the template's elements, nothing that would be fetched or run."""
    found = Page(text)
    assert {tag for tag, _ in found.elements} <= ELEMENTS
    assert text.isascii()
    assert "\x00" not in text
    data, *scripts = found.of("script")
    assert data[0] == {"type": "application/json", "id": "data"}
    assert [attributes for attributes, _ in scripts] == [{}, {}]
    for tag, attributes in found.elements:
        assert not {"src", "onload", "onerror", "style"} & attributes.keys()
        assert attributes.get("href", "#").startswith(("#", "data:,")), tag
    (policy,) = [
        attributes["content"]
        for attributes, _ in found.of("meta")
        if attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    hashes = re.findall(r"'sha256-([^']+)'", policy)
    assert hashes == [
        base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for _, script in scripts
    ]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy
    assert "script-src 'unsafe" not in policy
    return found
