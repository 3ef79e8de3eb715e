# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The table of checkpoint layouts."""

from __future__ import annotations

from fp4kit.formats import one_of

from .base import FormatGroup, Layout, Summary, module_of
from .comfy import Comfy
from .compressed_tensors import CompressedTensors
from .deepseek import DeepSeek
from .modelopt import ModelOpt

ALL_LAYOUTS: dict[str, Layout] = {
    layout.name: layout for layout in (CompressedTensors(), ModelOpt(), Comfy(), DeepSeek())
}

__all__ = ["ALL_LAYOUTS", "FormatGroup", "Layout", "Summary", "get_layout", "module_of"]


def get_layout(name: str) -> Layout:
    """Looks a layout up by name.

    Raises:
        OptionError: if the name is unknown; the message lists the known ones.
    """
    return ALL_LAYOUTS[one_of("layout", name, ALL_LAYOUTS)]
