# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What llama.cpp would not compute with, or refuse, in a GGUF model in FP4."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fp4kit.io.ggml import BLOCK_LAYOUTS
from fp4kit.io.gguf_model import architecture_of
from fp4kit.io.gguf_rules import why_one_level
from fp4kit.io.read.gguf import GgufSource, scale_names
from fp4kit.io.storage import QuantizedEntry


def model_faults(source: GgufSource, entries: Iterable[QuantizedEntry]) -> Iterator[str]:
    """Second levels that are lost, and what the file says of itself that is not so.

    Args:
        source: the open model.
        entries: its weights in FP4.
    """
    architecture, forms = architecture_of(source), []
    for entry in entries:
        forms.append(entry.format)
        second = entry.names.second
        if second is None:
            continue
        known = scale_names(entry.name)[0]
        if second != known:
            yield f"{second}: llama.cpp knows it as {known} alone, and does not load the file"
        why = why_one_level(architecture, entry.name, source.stored)
        if why and entry.second is not None and (entry.second != 1).any():
            yield f"{second}: is not 1, and {why}: it computes without it"
    said = source.metadata.get("general.file_type", "")
    allowed = {str(BLOCK_LAYOUTS[form].file_type) for form in forms}
    others = {str(layout.file_type) for layout in BLOCK_LAYOUTS.values()} - allowed
    if said in others:
        yield f"general.file_type: is {said}, which stands for another format of its weights"
